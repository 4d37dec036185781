"""However a training ends, it ends as it would have without us, and the monitor says what it can.

Each manner runs twice, bare and watched; exit code and output must be the same, but for frames of
ours inside a traceback that passes through a mark.
"""

import contextlib
import os
import re
import subprocess
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import support

from gpuwatch.commands.session import LiveSession
from gpuwatch.store import View

# All manners are run before the first test: two times eighteen processes.
pytestmark = [pytest.mark.process, pytest.mark.timeout(300)]

SCRIPT = str(Path(__file__).parent / "exits.py")


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


def run(
    zygote: support.Zygote,
    rundir: Path,
    folder: Path,
    manner: str,
    script: str = SCRIPT,
    **env: str,
) -> Outcome:
    """Run the script to its end; what it prints goes to files in a folder of its own."""
    scratch = Path(tempfile.mkdtemp(dir=folder))
    out, err = scratch / "out", scratch / "err"
    code = zygote.start([script, manner], support.environment(rundir, **env), out, err).wait()
    return code, support.text_of(out), support.text_of(err)


def words(stderr: str) -> list[str]:
    """What was said, without the frames of a traceback that are ours."""
    stderr = re.sub(r'  File "[^"]*/gpuwatch/[^"]*", line.*\n(    .*\n)*', "", stderr)
    return [re.sub(r"0x[0-9a-f]+|pid\(?s?\)? \d+|\d{4,}", "#", s) for s in stderr.splitlines()]


@pytest.fixture(scope="module")
def outcomes(
    zygote: support.Zygote, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[dict[str, Outcome], dict[str, Outcome], View]]:
    """Every manner, bare and watched, and the picture that one monitor has at the end."""
    folder = tmp_path_factory.mktemp("exits")
    with (
        support.run_directory() as rundir,
        contextlib.closing(LiveSession(rundir)) as session,
        ThreadPoolExecutor(4) as pool,
    ):
        manners = [manner for manner, _, _ in ENDS]

        def all_of(**env: str) -> dict[str, Outcome]:
            ended = pool.map(lambda manner: run(zygote, rundir, folder, manner, **env), manners)
            return dict(zip(manners, ended, strict=True))

        # Four at once: those that are watched sleep for most of their time.
        watched, bare = all_of(WATCH="1"), all_of()

        def unfinished() -> list[str]:
            seen = {r.name: r.state for r in session.view().runs}
            return [m for m in manners if seen.get(m) != "ended"]

        support.wait_until(lambda: not unfinished(), 30, f"an end of {unfinished()}")
        yield bare, watched, session.view()


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


UNUSABLE = ["/proc/nowhere", "open", "long"]
UNUSABLE += ["read-only"] if os.geteuid() != 0 else []  # nothing is read-only for root


@pytest.mark.parametrize("directory", UNUSABLE)
def test_a_run_directory_that_cannot_be_used_costs_one_line(
    zygote: support.Zygote, rundir: Path, tmp_path: Path, directory: str
) -> None:
    if directory in {"open", "read-only"}:
        rundir.chmod(0o777 if directory == "open" else 0o500)
    named = Path(directory) if directory[0] == "/" else rundir
    if directory == "long":
        named = rundir / ("x" * 90)
    code, out, err = run(zygote, named, tmp_path, "workers", WATCH="1")
    assert (code, out) == (0, "steps 8\n")
    (line,) = err.splitlines()
    assert line.startswith("gpuwatch: no telemetry: ")


def test_a_full_disk_costs_one_line(rundir: Path) -> None:
    # A zygote's children write to files, and that is what cannot be done here.
    done = subprocess.run(
        [support.PYTHON, "-B", SCRIPT, "full"],
        env=support.environment(rundir, WATCH="1"),
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "steps 8\n")
    (line,) = done.stderr.splitlines()
    assert line.startswith("gpuwatch: no telemetry: ")
    assert "File too large" in line


LACKING = {
    "import torch.optim.optimizer as o; del o.register_optimizer_step_pre_hook": "lacks something",
    "import torch.utils.data.dataloader as d; del d._BaseDataLoaderIter": "lacks something",
    "from torch.nn.parallel import DistributedDataParallel as D; del D._sync_buffers": (
        "has no _sync_buffers to mark"
    ),
}


@pytest.mark.parametrize(("lacking", "words"), LACKING.items())
def test_a_torch_that_is_not_as_expected_costs_one_line(
    zygote: support.Zygote, rundir: Path, tmp_path: Path, lacking: str, words: str
) -> None:
    script = tmp_path / "script.py"
    watch = "import gpuwatch; gpuwatch.watch(); gpuwatch.watch(); print('trained')"
    script.write_text(f"{lacking}\n{watch}\n")
    code, out, err = run(zygote, rundir, tmp_path, "", str(script))
    assert (code, out) == (0, "trained\n"), err
    (line,) = err.splitlines()
    assert line.startswith("gpuwatch: ")
    assert words in line


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
