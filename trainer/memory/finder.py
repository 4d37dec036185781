"""The search for the largest batch that fits in memory, and the processes that try one.

`search` is pure: it asks a function. `Trials` is the function of the real command: each trial is
a process of its own, for running out of memory leaves a process in a state that says nothing
about the next batch. The finder itself needs no torch and takes no memory on a GPU.
"""

import contextlib
import json
import math
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.errors import TrainingError
from trainer.memory.curve import Fit, Point, fit_line
from trainer.memory.host import available_bytes

if TYPE_CHECKING:
    from trainer.config import Config

__all__ = ["Search", "Trial", "Trials", "search"]

# How much of what fits is recommended: data, fragmentation and other processes vary.
_RECOMMENDED_SHARE = 0.9
# Points that a fit needs before it decides which batch is tried next.
_TRUSTED_POINTS = 3
# Trials near the edge that the fit may place; after that plain bisection, which is bounded.
_GUIDED_MOST = 4
# How much farther than the largest that fitted the fit may jump: a line through small batches is
# mostly noise, and a trial far beyond the edge takes long to fail.
_JUMP_MOST = 8
# Left to the machine beside the trial: its other processes must not be swapped out for it.
_RESERVE_SHARE = 0.05
_RESERVE_BYTES = 256 * 2**20
# SIGKILL of the kernel, as Popen and as a shell report it.
_KILLED = (-9, 137)
_TERM_GRACE_S = 3.0
_LAUNCHER = ("RANK", "WORLD_SIZE", "GROUP_", "ROLE_", "LOCAL_", "MASTER_", "TORCHELASTIC_")
_RANK_KILLED = re.compile(r"exitcode\s*:\s*-9\b")
# Below Python nobody can catch it.
_ABORTED = "std::bad_alloc"


@dataclass(frozen=True, slots=True)
class Trial:
    """What became of one batch size."""

    batch_size: int
    ok: bool
    """False: memory ran out."""
    peak_bytes: int | None
    """Of the rank that needed most; None where memory ran out."""
    seconds: float
    limit_bytes: int | None = None
    """What the peak is to be compared with; None where it is not known."""
    guarded: bool = False
    """Beyond the limit the machine itself would run short: what the line predicts to lie there
    counts as too large and is not tried.
    """


@dataclass(frozen=True, slots=True)
class Search:
    """The answer. `largest` has been tried and fitted; 0: nothing fits."""

    largest: int
    too_large: int | None
    """The smallest known not to fit; None: the highest allowed was reached."""
    trials: tuple[Trial, ...]
    fit: Fit | None
    limit_bytes: int | None

    @property
    def edge(self) -> int | None:
        """Where the fit predicts the largest batch; None without fit or limit."""
        if self.fit is None or self.limit_bytes is None:
            return None
        return self.fit.edge(self.limit_bytes)

    @property
    def recommended(self) -> int:
        """0.9 of the largest, a multiple of 8 from 16 on; 0 if nothing fits."""
        batch_size = math.floor(_RECOMMENDED_SHARE * self.largest)
        if batch_size >= 16:
            batch_size -= batch_size % 8
        return max(batch_size, min(self.largest, 1))

    @property
    def points(self) -> list[Point]:
        """For the curve."""
        return [Point(t.batch_size, t.ok, t.peak_bytes) for t in self.trials]


def search(
    trial: Callable[[int], Trial],
    *,
    start: int,
    limit: int,
    tolerance: float = 0.05,
) -> Search:
    """Find the largest batch size up to `limit` for which `trial` says ok.

    Doubles from `start` until one does not fit, then halves the bracket until it is at most
    `tolerance` of its upper end (or 1) wide. From three that fitted on, the line through their
    peaks says where the edge is, and the next trials go there. Whatever the peaks, at most about
    |log2(T / start)| + log2(8 / tolerance) + 6 trials are made where T is the largest that fits.

    Args:
        trial: tries one batch size; what it raises ends the search.
        start: the first batch size.
        limit: the largest that is tried.
        tolerance: share of the upper end that the bracket may be wide.
    """
    low, high = 0, limit + 1
    proven = False  # whether `high` is more than the bound of the search
    guided = 0
    trials: list[Trial] = []
    fit: Fit | None = None
    limit_bytes: int | None = None
    candidate = min(max(1, start), limit)
    while True:
        result = trial(candidate)
        trials.append(result)
        if result.limit_bytes is not None:
            limit_bytes = result.limit_bytes
        if result.ok:
            low = max(low, candidate)
        else:
            high, proven = min(high, candidate), True
        points = [Point(t.batch_size, t.ok, t.peak_bytes) for t in trials]
        fit = fit_line(points)
        edge = fit.edge(limit_bytes) if fit is not None and limit_bytes is not None else None
        trusted = sum(point.ok for point in points) >= _TRUSTED_POINTS
        cap = high - 1
        if result.guarded and edge is not None and edge < cap:
            # A line through two points only warns; through three it closes the bracket.
            cap = max(edge, low)
            if trusted or cap == low:
                high, proven = cap + 1, True
        width = max(1, math.floor(tolerance * high)) if proven else 1
        if high - low <= width:
            break
        if trusted and edge is not None and guided < _GUIDED_MOST:
            below = low + max(1, math.floor(tolerance * low))
            # Close to an end of the bracket it is better to try what would close the bracket.
            candidate = min(max(min(edge, high - width), below), _JUMP_MOST * low)
            # A jump as far as doubling would go costs nothing.
            guided += proven or candidate < 2 * low
        elif proven:
            candidate = (low + high) // 2
        else:
            candidate = 2 * low
        candidate = min(max(candidate, low + 1), cap, high - 1)
    return Search(low, high if proven else None, tuple(trials), fit, limit_bytes)


class Trials:
    """Tries batch sizes, each in a fresh process (or `nproc` under torchrun).

    Args:
        config: what is trained; workers and telemetry are left out in a trial.
        nproc: ranks of each trial.
        limit_mb: MiB that a rank may take, None: what there is. On a CPU beyond what the process
            has after it is built and has done one step, on a GPU in all.
        timeout_s: a trial that takes longer ends the search.
    """

    def __init__(
        self,
        config: "Config",
        *,
        nproc: int = 1,
        limit_mb: float | None = None,
        timeout_s: float = 600.0,
    ) -> None:
        self._config = config
        self._nproc = nproc
        self._limit_mb = limit_mb
        self._timeout_s = timeout_s

    def __call__(self, batch_size: int) -> Trial:
        """Try one. Raises `TrainingError` if it fails for another reason than memory."""
        with tempfile.TemporaryDirectory(prefix="trainer-trial-") as name:
            folder = Path(name)
            (folder / "config.json").write_text(self._config.model_dump_json())
            begin_s = time.monotonic()
            code, error = self._run(self._command(folder, batch_size), folder)
            seconds = time.monotonic() - begin_s
            reports = [_read(folder / f"rank-{rank}.json") for rank in range(self._nproc)]
        return _verdict(batch_size, code, error, reports, seconds)

    def _command(self, folder: Path, batch_size: int) -> list[str]:
        command = [sys.executable]
        if self._nproc > 1:
            command += ["-m", "torch.distributed.run", "--standalone"]
            command += ["--nproc-per-node", str(self._nproc)]
        else:
            command += ["-u"]
        command += ["-m", "trainer.memory.trial", "--folder", str(folder)]
        command += ["--batch-size", str(batch_size), "--timeout-s", str(self._timeout_s)]
        if self._limit_mb is not None:
            return [*command, "--limit-mb", str(self._limit_mb)]
        available = available_bytes()
        if available is not None:
            usable = available - max(_RESERVE_BYTES, int(available * _RESERVE_SHARE))
            command += ["--available-bytes", str(max(0, usable) // self._nproc)]
        return command

    def _run(self, command: list[str], folder: Path) -> tuple[int, str]:
        """(exit code, what was written to stderr); nothing of the trial outlives this."""
        errors = folder / "stderr"
        with errors.open("wb") as stream:
            process = subprocess.Popen(
                command,
                env=self._environment(),
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=stream,
                # Ctrl-C is for this process, which then ends the trial itself.
                start_new_session=True,
            )
            try:
                code = process.wait(self._timeout_s)
            except subprocess.TimeoutExpired:
                raise TrainingError(
                    f"the trial took more than {self._timeout_s:g} s: raise --timeout-s"
                ) from None
            finally:
                _end(process)
        return code, errors.read_text(errors="replace")

    def _environment(self) -> dict[str, str]:
        # Under an outer torchrun the trial must not believe that it is one of its ranks.
        kept = {k: v for k, v in os.environ.items() if not k.startswith(_LAUNCHER)}
        # A trial is no run to be watched, though this process may be.
        kept = {k: v for k, v in kept.items() if not k.startswith("GPUWATCH_")}
        if self._limit_mb is not None:
            # Each thread reserves address space, which the limit would count.
            kept["OMP_NUM_THREADS"] = kept["MKL_NUM_THREADS"] = "1"
        return kept


def _end(process: subprocess.Popen[bytes]) -> None:
    """End what still runs: torchrun first politely, for its ranks are in groups of their own."""
    if process.poll() is not None:
        return
    import psutil

    family = psutil.Process(process.pid).children(recursive=True)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
    try:
        process.wait(_TERM_GRACE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    for member in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            member.kill()


def _read(path: Path) -> dict[str, Any] | None:
    try:
        report = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return report if isinstance(report, dict) else None


def _verdict(
    batch_size: int,
    code: int,
    error: str,
    reports: list[dict[str, Any] | None],
    seconds: float,
) -> Trial:
    """Put the ranks' reports together. A rank without one was killed, or ended with another."""
    known = [report for report in reports if report is not None]
    limits = [r["limit_bytes"] for r in known if r.get("limit_bytes") is not None]
    limit_bytes = min(limits, default=None)
    guarded = any(report.get("guarded") for report in known)
    killed = code in _KILLED or _RANK_KILLED.search(error) is not None
    killed = killed or (code != 0 and _ABORTED in error)
    if any(report["outcome"] == "out of memory" for report in known) or killed:
        return Trial(batch_size, False, None, seconds, limit_bytes, guarded)
    failed = next((report for report in known if report["outcome"] == "failed"), None)
    if failed is not None:
        raise TrainingError(f"the trial with batch size {batch_size} failed: {failed['reason']}")
    if code != 0 or len(known) < len(reports):
        lines = [line for line in error.splitlines() if line.strip()]
        last = lines[-1].strip() if lines else "it wrote nothing"
        raise TrainingError(f"the trial with batch size {batch_size} ended with {code}: {last}")
    peaks = [report["peak_bytes"] for report in known if report["peak_bytes"] is not None]
    return Trial(batch_size, True, max(peaks, default=None), seconds, limit_bytes, guarded)
