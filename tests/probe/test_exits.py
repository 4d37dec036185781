"""However a training ends, it ends as it would have without us, and the monitor says what it can.

Each manner runs twice, bare and watched; exit code and output must be the same, but for frames of
ours inside a traceback that passes through a mark.
"""

import json
import os
import re
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import support

from gpuwatch.commands.session import LiveSession
from gpuwatch.store import View

# All manners are run before the first test: forty processes.
pytestmark = pytest.mark.timeout(300)

SCRIPT = str(Path(__file__).parent / "exits.py")
ZYGOTE = str(Path(__file__).parent / "zygote.py")


ENDS = [
    ("plainly", "ended", "finished"),
    ("workers", "ended", "finished"),
    ("raises", "ended", "exception: RuntimeError: on purpose"),
    ("backward raises", "ended", "exception: ValueError: in backward"),
    ("worker raises", "ended", "exception: ValueError: Caught ValueError"),
    ("exit 3", "ended", "finished"),
    ("exit words", "ended", "finished"),
    ("_exit 5", "gone", "without a goodbye"),
    ("SIGTERM", "gone", "without a goodbye"),
    ("SIGKILL", "gone", "without a goodbye"),
    ("SIGINT", "ended", "interrupted: KeyboardInterrupt"),
    ("atexit raises", "ended", "finished"),
    ("fork", "ended", "finished"),
    ("unwatch", "ended", "detached"),
    ("forward raises", "ended", "exception: RuntimeError: "),
    ("closure raises", "ended", "exception: ValueError: in a closure"),
    ("step hook raises", "ended", "exception: ValueError: in a hook"),
    ("thread", "ended", "finished"),
]

STEPS = {"fork": 6, **{f"{who} raises": 5 for who in ("worker", "backward", "forward", "closure")}}
STEPS |= {"step hook raises": 5}


Outcome = tuple[int, str, str]


class Zygote:
    """Runs the script by manner in forks of a process that has imported torch."""

    def __init__(self, rundir: Path, scratch: Path) -> None:
        self._scratch = scratch
        self._process = subprocess.Popen(
            [support.PYTHON, ZYGOTE],
            env=support.environment(rundir),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, manner: str, *, script: str = SCRIPT, **env: str) -> Outcome:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        out, err = self._scratch / "out", self._scratch / "err"
        task = {"argv": [script, manner], "env": env, "out": str(out), "err": str(err)}
        self._process.stdin.write(json.dumps(task) + "\n")
        self._process.stdin.flush()
        code = int(self._process.stdout.readline())
        return code, support.text_of(out), support.text_of(err)

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


def words(stderr: str) -> list[str]:
    """What was said, without the frames of a traceback that are ours."""
    stderr = re.sub(r'  File "[^"]*/gpuwatch/[^"]*", line.*\n(    .*\n)*', "", stderr)
    return [re.sub(r"0x[0-9a-f]+|pid\(?s?\)? \d+|\d{4,}", "#", s) for s in stderr.splitlines()]


@pytest.fixture(scope="module")
def outcomes(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[dict[str, Outcome], dict[str, Outcome], View]]:
    """Every manner, bare and watched, and the picture that one monitor has at the end."""
    with support.run_directory() as rundir:
        zygotes = [Zygote(rundir, tmp_path_factory.mktemp("exits")) for _ in range(2)]
        session = LiveSession(rundir)
        try:
            manners = [manner for manner, _, _ in ENDS]

            def all_of(zygote: Zygote, **env: str) -> dict[str, Outcome]:
                return {manner: zygote.run(manner, **env) for manner in manners}

            with ThreadPoolExecutor(2) as pool:
                one = pool.submit(all_of, zygotes[0])
                other = pool.submit(all_of, zygotes[1], WATCH="1")
            bare, watched = one.result(), other.result()

            def unfinished() -> list[str]:
                seen = {r.name: r.state for r in session.view().runs}
                return [m for m in manners if seen.get(m) != "ended"]

            support.wait_until(lambda: not unfinished(), 8, f"an end of {unfinished()}")
            yield bare, watched, session.view()
        finally:
            for zygote in zygotes:
                zygote.close()
            session.close()


@pytest.mark.parametrize(("manner", "state", "reason"), ENDS)
def test_an_end(
    outcomes: tuple[dict[str, Outcome], dict[str, Outcome], View],
    manner: str,
    state: str,
    reason: str,
) -> None:
    bare, watched, view = outcomes
    assert watched[manner][0] == bare[manner][0]
    assert watched[manner][1] == bare[manner][1]
    assert words(watched[manner][2]) == words(bare[manner][2])
    (seen,) = [r for r in view.runs if r.name == manner]
    (rank,) = seen.ranks
    assert rank.state == state
    assert reason in rank.state_reason
    # Without a goodbye nobody closes the last step. A forked child trains unwatched: the steps
    # are the parent's alone.
    assert rank.steps == STEPS.get(manner, 7 if state == "gone" else 8)
    assert rank.lost == 0


UNUSABLE = ["/proc/nowhere", "open", "long", "full"]
UNUSABLE += ["read-only"] if os.geteuid() != 0 else []  # nothing is read-only for root


def train_in(directory: str) -> subprocess.CompletedProcess[str]:
    """Train a few steps where the run directory is one that cannot be used."""
    with support.run_directory() as rundir:
        if directory in {"open", "read-only"}:
            rundir.chmod(0o777 if directory == "open" else 0o500)
        named = directory if directory[0] == "/" else str(rundir)
        if directory == "long":
            named = str(rundir / ("x" * 90))
        return subprocess.run(
            [support.PYTHON, SCRIPT, "full" if directory == "full" else "workers"],
            env=support.environment(rundir, WATCH="1", GPUWATCH_DIR=named),
            capture_output=True,
            text=True,
            timeout=90,
            check=False,
        )


def test_a_run_directory_that_cannot_be_used_costs_one_line() -> None:
    with ThreadPoolExecutor(2) as pool:
        ended = dict(zip(UNUSABLE, pool.map(train_in, UNUSABLE), strict=True))
    for directory, done in ended.items():
        assert (done.returncode, done.stdout) == (0, "steps 8\n"), directory
        (line,) = done.stderr.splitlines()
        assert line.startswith("gpuwatch: no telemetry: "), directory
        assert directory != "full" or "File too large" in line


LACKING = {
    "import torch.optim.optimizer as o; del o.register_optimizer_step_pre_hook": "lacks something",
    "import torch.utils.data.dataloader as d; del d._BaseDataLoaderIter": "lacks something",
    "from torch.nn.parallel import DistributedDataParallel as D; del D._sync_buffers": (
        "has no _sync_buffers to mark"
    ),
}


def test_a_torch_that_is_not_as_expected_costs_one_line(rundir: Path, tmp_path: Path) -> None:
    zygote = Zygote(rundir, tmp_path)
    script = tmp_path / "script.py"
    watch = "import gpuwatch; gpuwatch.watch(); gpuwatch.watch(); print('trained')"
    try:
        for lacking, words in LACKING.items():
            script.write_text(f"{lacking}\n{watch}\n")
            code, out, err = zygote.run("", script=str(script))
            assert (code, out) == (0, "trained\n"), err
            (line,) = err.splitlines()
            assert line.startswith("gpuwatch: ")
            assert words in line
    finally:
        zygote.close()


def test_without_torch_there_is_one_line(rundir: Path) -> None:
    code = "import sys; sys.modules['torch'] = None; import gpuwatch; gpuwatch.watch()"
    done = subprocess.run(
        [support.PYTHON, "-c", f"{code}; gpuwatch.watch(); print('trained')"],
        env=support.environment(rundir),
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout == "trained\n"
    assert done.stderr == "gpuwatch: not watching: torch is not installed in this environment\n"
