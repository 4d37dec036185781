"""How often the diagnosis is right: public reports as traces, live faults, healthy runs, a peer.

    python benchmarks/score.py                # everything, about 20 minutes
    python benchmarks/score.py --only cases   # the traces alone, half a minute
    python benchmarks/score.py --only peers   # beside TraceML, about 5 minutes

Live runs are the real trainer on two ranks with a fault on purpose (`trainer train --fault`), seen
through the node process as a monitor sees them. A fault is found if the first finding at warning or
above is an expected kind with the right ranks, wrong if it is another one, missed if there is none;
every kind at warning or above that is not expected is a false alarm. Seconds count from when all
ranks have passed their first step. On a machine that other work keeps busy contention hides some
causes, and findings that it could explain are notes: the load is printed.

Beside TraceML: one plain script (`traceml_faults.py`), once under `gpuwatch run` and once under
`traceml run` in its own environment. Both are judged by the same rules. Right: the cause and its
ranks are named (for a fault on all ranks, no rank needs to be). Half: only one of the two. Wrong:
neither, or nothing. A healthy run is right where nothing is said, or that it computes. Ours is
judged by the first finding at warning or above; TraceML by its last live verdict or by its summary
at the end, whichever is better.
"""

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
sys.path.insert(0, str(Path(__file__).resolve().parent))

from peer import VERSION, NoPeerError, Verdict, live_verdicts, peer_command, summary_verdict

SCRIPT = Path(__file__).resolve().parent / "traceml_faults.py"
LIVE_S = 14.0
HEALTHY_S = 40.0
HEALTHY_STEPS = 300
START_S = 60.0
TICK_S = 1.0
EARLY_TICK_S = 0.5
WINDOW_STEPS = 60
"""As often as a monitor evaluates, and while the window of steps fills up."""

POLL_S = 0.1
ALL = (0, 1)


@dataclass(frozen=True)
class Live:
    """One live run: its fault, the kinds that name it, the ranks to be named, and how many run."""

    fault: str
    kinds: tuple[str, ...]
    ranks: tuple[int, ...] | None = None
    seconds: float = LIVE_S
    more: tuple[str, ...] = ()
    world: int = 2

    @property
    def name(self) -> str:
        """As the table calls it."""
        return self.fault if self.world == len(ALL) else f"{self.fault}, {self.world} ranks"


LIVE = (
    Live("slow_dataset", ("loader_few_workers",), ALL),
    Live("cpu_decode", ("cpu_decode_aug",), ALL),
    Live("slow_storage", ("storage_slow",), ALL),
    Live("slow_collate", ("collate_ipc",), ALL),
    Live("oversub", ("loader_oversub", "cpu_decode_aug"), ALL),
    Live("slow_worker", ("loader_few_workers", "stall_prefetch_burst")),
    Live("burst", ("loader_few_workers", "stall_prefetch_burst")),
    Live("cold_epoch", ("loader_few_workers", "cold_first_epoch")),
    Live("slow_data@1", ("straggler", "loader_few_workers"), (1,)),
    Live("slow_forward@1", ("straggler",), (1,)),
    Live("slow_backward@1", ("straggler",), (1,)),
    Live("slow_optimizer@1", ("straggler",), (1,)),
    Live("slow_forward@0", ("straggler",), (0,)),
    Live("jitter", ("straggler",), ALL),
    Live("comm_heavy", ("comm_bound",), ALL),
    Live("all_reduce", ("comm_bound",), ALL),
    Live("sync_every_step", ("stall_log_sync",), ALL),
    Live("ckpt_every", ("stall_checkpoint",)),
    Live("eval_every", ("stall_validation",)),
    Live("retain_graph", ("cpu_leak", "gpu_leak"), ALL, 20.0),
    Live("grow_list", ("cpu_leak", "gpu_leak"), ALL, 20.0),
    Live("respawn_workers", ("worker_restart",), ALL),
    Live("affinity1", ("cpu_affinity",), ALL),
    Live("slow_dataset", ("loader_few_workers",), (0, 1, 2), world=3),
    Live("slow_data@2", ("straggler", "loader_few_workers"), (2,), world=3),
    Live("slow_backward@0", ("straggler",), (0,), world=3),
    Live("jitter", ("straggler",), (0, 1, 2), world=3),
    Live("hang@1", ("hang",), (1,), 28.0),
)

HEALTHY = (
    (1, ()), (2, ()), (1, ("--data.image_px=48",)), (2, ("--data.image_px=48",)),
    (1, ("--loader.batch_size=32",)), (2, ("--loader.batch_size=32",)),
    (1, ("--train.accumulate=2",)), (2, ("--train.accumulate=2",)),
    (1, ("--data.image_px=32",)), (2, ("--data.image_px=32",)),
)  # fmt: skip


@dataclass(frozen=True)
class Planted:
    """A fault of the script that both tools judge: the cause to be named, and its ranks.

    The cause is input, forward, backward or communication; none where nothing is wrong.
    """

    fault: str
    cause: str
    ranks: tuple[int, ...] = ALL
    batchnorm: bool = False

    @property
    def name(self) -> str:
        """As the table calls it."""
        return f"{self.fault}{', BatchNorm' if self.batchnorm else ''}"


PLANTED = (
    Planted("slow_dataset", "input"),
    Planted("slow_data@1", "input", (1,)),
    Planted("slow_forward@1", "forward", (1,)),
    Planted("slow_backward@1", "backward", (1,)),
    Planted("slow_data@1", "input", (1,), batchnorm=True),
    Planted("slow_forward@1", "forward", (1,), batchnorm=True),
    Planted("slow_backward@1", "backward", (1,), batchnorm=True),
    Planted("all_reduce", "communication"),
    Planted("ddp", "communication"),
    Planted("healthy", ""),
)

COMPUTES = "compute"
"""A state, not a cause: what is said of a step that computes all the time."""

OUR_CAUSES = {"loader_few_workers": "input", "comm_bound": "communication", "data_wait": "input"}
"""By kind, or by the phase of a straggler; anything else is a cause of its own."""

THEIR_CAUSES = {
    "INPUT-BOUND": "input",
    "INPUT STRAGGLER": "input",
    "COMPUTE STRAGGLER": "forward",
    "COMPUTE-BOUND": COMPUTES,
    "BALANCED": "", "WARMUP": "", "NO DATA": "", "INCOMPLETE DATA": "",
    "INSUFFICIENT STEP-TIME DATA": "", "NO CLEAR PERFORMANCE BOTTLENECK": "",
}  # fmt: skip
"""By status. A compute straggler is told by its forward; no status means communication."""

GRADES = ("wrong", "half", "right")
"""From worst to best."""


# --- watching a run ------------------------------------------------------------------------------


class Said(NamedTuple):
    """A finding at warning or above; `phase` is that of a straggler, empty for other kinds."""

    kind: str
    phase: str
    ranks: tuple[int, ...]


class Tick(NamedTuple):
    """One evaluation: seconds since all ranks passed step 1, steps done, findings by their cost.

    `notes` are the kinds that were said as notes: no finding, but maybe why there is none.
    """

    seconds: float
    steps: int
    said: tuple[Said, ...]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Outcome:
    """What a run's evaluations come to, against what was to be said."""

    verdict: str
    first: Tick | None
    right: Tick | None
    """The first evaluation that names something, and the first that names the right thing first."""
    false_alarms: tuple[str, ...]


def outcome(
    ticks: Sequence[Tick], kinds: tuple[str, ...], ranks: tuple[int, ...] | None
) -> Outcome:
    """Judge the evaluations of a run; without kinds nothing may be said."""

    def is_right(said: Said) -> bool:
        return said.kind in kinds and (ranks is None or said.ranks == ranks)

    first = next((tick for tick in ticks if tick.said), None)
    right = next((tick for tick in ticks if tick.said and is_right(tick.said[0])), None)
    if first is None:
        verdict = "missed" if kinds else "found"
    else:
        verdict = "found" if first is right else "wrong"
    others = {said.kind for tick in ticks for said in tick.said} - set(kinds)
    return Outcome(verdict, first, right, tuple(sorted(others)))


def trainer_command(ranks: int, *more: str, steps: int = 0, workers: int = 2) -> list[str]:
    """Return the command line of the real trainer as every live run starts it."""
    return [
        sys.executable, "-m", "torch.distributed.run", "--standalone",
        f"--nproc-per-node={ranks}", "-m", "trainer", "train", f"--train.steps={steps or 10**6}",
        "--train.threads=1", "--train.device=cpu", "--train.eval_interval_epochs=0",
        "--loader.batch_size=8", f"--loader.num_workers={workers}", "--data.synthetic_images=2048",
        "--train.log_interval_steps=1000000", *more,
    ]  # fmt: skip


def pictures(
    command: Sequence[str], ranks: int, seconds: float, folder: Path | None = None
) -> Iterator[tuple[float, Any, Any]]:
    """Run a training and yield (s since all ranks passed step 1, view, run) once a second.

    It ends after so many seconds, or when the training does. A script that writes when its ranks
    pass step 1 does so into `folder`; others are looked at ten times a second.
    """
    from gpuwatch.commands.session import LiveSession

    run = f"score-{uuid.uuid4().hex[:6]}"
    process = subprocess.Popen(
        command,
        env={**os.environ, "GPUWATCH_RUN_ID": run, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    session = LiveSession()
    try:
        started_s: float | None = None
        next_s = end_s = time.time() + START_S
        while time.time() < end_s and process.poll() is None:
            time.sleep(POLL_S)
            view = session.view()
            found = view.run(run)
            if found is None or len(found.ranks) < ranks:
                continue
            if started_s is None:
                if folder is not None:
                    started_s = all_passed_s(folder, ranks)
                elif all(rank.steps > 1 for rank in found.ranks):
                    started_s = time.time()
                if started_s is None:
                    continue
                next_s, end_s = time.time(), started_s + seconds
            if time.time() >= next_s:
                next_s += TICK_S
                yield time.time() - started_s, view, found
    finally:
        _end(process)
        session.close()


def all_passed_s(folder: Path, ranks: int) -> float | None:
    """Return the wall clock at which the last rank of the script passed step 1, None if not yet."""
    try:
        return max(float((folder / f"first.{rank}").read_text()) for rank in range(ranks))
    except FileNotFoundError:
        return None


def evaluations(seen: Iterator[tuple[float, Any, Any]]) -> Iterator[Tick]:
    """Evaluate each picture of a run, as a monitor does."""
    from gpuwatch.diagnosis import Engine

    engine = Engine()
    for seconds, view, run in seen:
        found = [f for f in engine.evaluate(view, run).findings if f.state == "open"]
        said = tuple(
            Said(f.kind, f.hints[0].knob if f.kind == "straggler" and f.hints else "", f.ranks)
            for f in found
            if f.severity != "note"
        )
        notes = tuple(f.kind for f in found if f.severity == "note")
        yield Tick(seconds, run.steps, said, notes)


def _end(process: "subprocess.Popen[bytes]") -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


# --- the boards ----------------------------------------------------------------------------------


@dataclass
class Board:
    """The sums of one table."""

    right: int = 0
    count: int = 0
    missed: int = 0
    wrong: int = 0
    false_alarms: int = 0

    def add(self, verdict: str, false_alarms: Sequence[str]) -> None:
        self.count += 1
        self.right += verdict == "found"
        self.missed += verdict == "missed"
        self.wrong += verdict == "wrong"
        self.false_alarms += len(false_alarms)

    def __str__(self) -> str:
        return (
            f"{self.right} of {self.count} found, {self.missed} missed, {self.wrong} wrong, "
            f"{self.false_alarms} false alarms"
        )


def noted(ticks: Sequence[Tick]) -> str:
    """Return what was said as a note, in words; empty if nothing was."""
    kinds = sorted({kind for tick in ticks for kind in tick.notes})
    return f"as a note: {', '.join(kinds)}" if kinds else ""


def when(seconds: float, steps: int | None = None) -> str:
    """Return how long it took, in words."""
    return f"{seconds:.1f} s" if steps is None else f"{steps} steps, {seconds:.1f} s"


def ranks_text(ranks: Sequence[int]) -> str:
    return ",".join(map(str, ranks)) or "-"


def score_cases() -> Board:
    """Judge the traces: what is open at their end, and when that opened by their own clock."""
    from scoreboard.cases import CASES, NOT_TESTABLE

    from gpuwatch.commands.recorded import judged

    board = Board()
    print(f"{'case':8} {'expected':34} {'said first':22} {'right after':>19}  verdict")
    with tempfile.TemporaryDirectory() as folder:
        for name, case in CASES.items():
            _, found, _ = judged(str(case.job.write(Path(folder) / f"{name}.jsonl")))
            (diagnosis,) = found.values()
            serious = [f for f in diagnosis.findings if f.state == "open" and f.severity != "note"]
            said = tuple(Said(f.kind, "", f.ranks) for f in serious)
            began_s = first_step_s(case.job.lines())
            seen = [Tick(f.opened_s - began_s, f.opened_step, said) for f in serious[:1]]
            judged_as = outcome(seen, case.expect, case.ranks)
            board.add(judged_as.verdict, judged_as.false_alarms)
            right = judged_as.right
            print(
                f"{name:8} {', '.join(case.expect) or 'nothing':34} "
                f"{said[0].kind if said else '-':22} "
                f"{when(right.seconds, right.steps) if right else '-':>19}  {judged_as.verdict}"
                f"{_alarms(judged_as)}"
            )
    for name, why in NOT_TESTABLE.items():
        print(f"{name:8} not testable: {why}")
    print(f"cases: {board}\n")
    return board


def first_step_s(lines: Iterator[Mapping[str, Any]]) -> float:
    """Return the wall clock at which all ranks of a trace have made their first step."""
    ends_s: dict[int, float] = {}
    for line in lines:
        if line["type"] == "step" and line["rank"] not in ends_s:
            ends_s[line["rank"]] = line["started_s"] + sum(line["phases_ms"].values()) / 1e3
    return max(ends_s.values())


def _alarms(judged_as: Outcome) -> str:
    alarms = ", ".join(judged_as.false_alarms)
    return f"  false alarm: {alarms}" if alarms else ""


def score_live(only: str = "") -> Board:
    """Run the live faults."""
    board = Board()
    print(
        f"{'fault':25} {'said first':22} {'ranks':8} {'after':>19} {'right after':>19}  "
        "verdict   (load)"
    )
    for live in LIVE:
        if only and only not in live.fault:
            continue
        command = trainer_command(live.world, *live.more, "--fault", live.fault)
        ticks = list(evaluations(pictures(command, live.world, live.seconds)))
        judged_as = outcome(ticks, live.kinds, live.ranks)
        board.add(judged_as.verdict, judged_as.false_alarms)
        first, right = judged_as.first, judged_as.right
        top = first.said[0] if first else Said("", "", ())
        print(
            f"{live.name:25} {top.kind or '-':22} {ranks_text(top.ranks):8} "
            f"{when(first.seconds, first.steps) if first else '-':>19} "
            f"{when(right.seconds, right.steps) if right else '-':>19}  "
            f"{judged_as.verdict if ticks else 'not run':8}  ({os.getloadavg()[0]:.1f})"
            f"{_alarms(judged_as)}{f'  {noted(ticks)}'.rstrip() if first is None else ''}",
            flush=True,
        )
    print(f"live faults: {board}\n")
    return board


def score_healthy() -> Board:
    """Run healthy trainings; none may have a finding."""
    board = Board()
    print(f"{'ranks':>5} {'what':28} {'steps':>6}  false alarms")
    for ranks, more in HEALTHY:
        command = trainer_command(ranks, *more, steps=HEALTHY_STEPS)
        ticks = list(evaluations(pictures(command, ranks, HEALTHY_S)))
        judged_as = outcome(ticks, (), None)
        # A training that never ran has not been silent.
        board.add(judged_as.verdict if ticks else "missed", judged_as.false_alarms)
        said = ", ".join(judged_as.false_alarms) or ("none" if ticks else "it did not run")
        steps = ticks[-1].steps if ticks else 0
        print(f"{ranks:>5} {' '.join(more) or 'as it is':28} {steps:>6}  {said}", flush=True)
    print(
        f"healthy: {board.right} of {board.count} without a finding, "
        f"{board.false_alarms} false alarms\n"
    )
    return board


# --- beside TraceML ------------------------------------------------------------------------------


def grade(cause: str, ranks: tuple[int, ...], planted: Planted) -> str:
    """Judge a cause and the ranks that are named with it (none: no rank is)."""
    if not planted.cause:
        return "right" if cause in {"", COMPUTES} else "wrong"
    same_cause = cause == planted.cause
    on_one = planted.ranks != ALL
    same_ranks = ranks == planted.ranks or (not ranks and not on_one)
    if same_cause and same_ranks:
        return "right"
    # All ranks are no finding of whom to look at.
    return "half" if same_cause or (same_ranks and on_one) else "wrong"


def our_cause(said: Said) -> str:
    """Return what a finding of ours names as the cause."""
    named = said.phase or said.kind
    return OUR_CAUSES.get(named, named)


def their_cause(verdict: Verdict) -> str:
    """Return what a verdict of TraceML names as the cause; a new word is a cause of its own."""
    return THEIR_CAUSES.get(verdict.status, verdict.status)


def their_grade(verdict: Verdict, planted: Planted) -> str:
    return grade(their_cause(verdict), () if verdict.rank is None else (verdict.rank,), planted)


class Row(NamedTuple):
    """What one tool said of one fault: in words, when, and how that is judged."""

    said: str
    after: str
    grade: str


def our_row(ticks: Sequence[Tick], planted: Planted) -> Row:
    """Judge our first finding at warning or above."""
    if not ticks:
        return Row("it did not run", "-", "wrong")
    first = next((tick for tick in ticks if tick.said), None)
    if first is None:
        return Row(noted(ticks) or "-", "-", grade("", (), planted))
    top = first.said[0]
    words = f"{top.kind}{f' in {top.phase}' if top.phase else ''}, ranks {ranks_text(top.ranks)}"
    more = sorted({s.kind for tick in ticks for s in tick.said} - {top.kind})
    return Row(
        words + (f"; then {', '.join(more)}" if more else ""),
        when(first.seconds, first.steps),
        grade(our_cause(top), top.ranks, planted),
    )


def their_row(
    live: Sequence[Verdict], summary: Verdict | None, began_s: float, planted: Planted
) -> Row:
    """Judge TraceML's last live verdict or its summary, whichever is better.

    The time is that of its first live verdict that is as good; a verdict that says nothing yet, as
    its warm-up does, is none.
    """
    live = [v for v in live if their_cause(v) or v.status == "BALANCED"]
    last = [*live[-1:], *([summary] if summary is not None else [])]
    if not last:
        return Row("-", "-", grade("", (), planted))
    best = max((their_grade(v, planted) for v in last), key=GRADES.index)
    since = next((v for v in live if their_grade(v, planted) == best), None)
    words = [_words(verdict) for verdict in live]
    if summary is not None and (not live or _words(summary) != words[-1]):
        words.append(f"at the end {_words(summary)}")
    after = when(max(0.0, since.at_s - began_s)) if since is not None else "at the end"
    return Row(", then ".join(words), after, best)


def _words(verdict: Verdict) -> str:
    return verdict.status + (f" rank {verdict.rank}" if verdict.rank is not None else "")


def run_ours(planted: Planted, seconds: float) -> Row:
    """Run the script under `gpuwatch run`."""
    with tempfile.TemporaryDirectory(prefix="gw-", dir="/tmp") as name:
        folder = Path(name)
        command = [
            sys.executable, "-P", "-m", "gpuwatch", "run", "--",
            sys.executable, "-m", "torch.distributed.run", "--standalone",
            f"--nproc-per-node={len(ALL)}", str(SCRIPT),
            *_script_arguments(planted, folder, seconds),
        ]  # fmt: skip
        return our_row(list(evaluations(pictures(command, len(ALL), seconds, folder))), planted)


def run_theirs(planted: Planted, seconds: float) -> Row:
    """Run the same script under `traceml run`.

    Raises:
        NoPeerError: there is no TraceML, or it did not run the script.
    """
    with tempfile.TemporaryDirectory(prefix="gw-", dir="/tmp") as name:
        folder = Path(name)
        arguments = [*_script_arguments(planted, folder, seconds), "--traceml"]
        command = peer_command(SCRIPT, folder / "logs", *arguments, ranks=len(ALL), live=True)
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("GPUWATCH", "PYTHON"))}
        environ = {**kept, "OMP_NUM_THREADS": "1"}
        said = live_verdicts(command, environ, folder, seconds + 2 * START_S)
        began_s = all_passed_s(folder, len(ALL))
        if began_s is None:
            raise NoPeerError("the script made no step under TraceML")
        return their_row(said, summary_verdict(folder / "logs"), began_s, planted)


def _script_arguments(planted: Planted, folder: Path, seconds: float) -> list[str]:
    more = ["--batchnorm"] if planted.batchnorm else []
    return [planted.fault, str(folder), f"--seconds={seconds}", *more]


def score_peers(only: str = "", seconds: float = LIVE_S) -> Mapping[str, Sequence[str]]:
    """Run the same faults under both tools; returns the grades of each, by its name."""
    grades: dict[str, list[str]] = {"gpuwatch": [], f"TraceML {VERSION}": []}
    runs: dict[str, Callable[[Planted, float], Row]] = dict(
        zip(grades, (run_ours, run_theirs), strict=True)
    )
    for planted in PLANTED:
        if only and only not in planted.fault:
            continue
        where = "all ranks" if planted.ranks == ALL else f"rank {ranks_text(planted.ranks)}"
        what = f"{planted.cause} on {where}" if planted.cause else "that nothing is wrong"
        print(f"{planted.name}: right is {what}   (load {os.getloadavg()[0]:.1f})")
        for tool, run in list(runs.items()):
            try:
                row = run(planted, seconds)
            except NoPeerError as exc:
                print(f"  {tool}: {exc}; going on without it", flush=True)
                del runs[tool]
                continue
            grades[tool].append(row.grade)
            print(f"  {tool:14} {row.grade:6} {row.after:>18}  {row.said}", flush=True)
    for tool, given in grades.items():
        print(f"{tool}: {graded(given)}")
    print()
    return grades


def graded(grades: Sequence[str]) -> str:
    """Return how many of each, in words."""
    counts = ", ".join(f"{grades.count(word)} {word}" for word in reversed(GRADES))
    return f"{counts} of {len(grades)}" if grades else "not run"


def main() -> int:
    """Print the scoreboard; the exit code is 1 if a case of the traces is not right."""
    parser = argparse.ArgumentParser(description="How often the diagnosis is right.")
    parser.add_argument("--only", choices=["cases", "live", "healthy", "peers"])
    parser.add_argument(
        "--fault", default="", help="only faults whose name holds this; without --only, live ones"
    )
    options = parser.parse_args()
    # Trainings have sessions of their own: leave none behind.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    only = options.only or ("live" if options.fault else None)
    boards: dict[str, str] = {}
    failed = 0
    if only in {None, "cases"}:
        cases = score_cases()
        boards["cases"], failed = str(cases), int(cases.right < cases.count)
    with run_directory():
        if only in {None, "live"}:
            boards["live faults"] = str(score_live(options.fault))
        if only in {None, "healthy"}:
            boards["healthy"] = str(score_healthy())
        if only in {None, "peers"}:
            for tool, given in score_peers(options.fault).items():
                boards[f"the same faults, {tool}"] = graded(given)
    for name, sums in boards.items():
        print(f"{name}: {sums}")
    return failed


@contextlib.contextmanager
def run_directory() -> Iterator[None]:
    """A run directory of its own for all runs; its node process ends with it."""
    with tempfile.TemporaryDirectory(prefix="gw-", dir="/tmp") as directory:
        os.environ["GPUWATCH_DIR"] = directory
        try:
            yield
        finally:
            _retire()


def _retire() -> None:
    from gpuwatch.commands.session import LiveSession

    session: Any = LiveSession()
    session.retire_agent()
    session.close()


if __name__ == "__main__":
    sys.exit(main())
