"""How often the diagnosis is right: public reports as traces, live faults, and healthy runs.

    python benchmarks/score.py                # everything, about 15 minutes
    python benchmarks/score.py --only cases   # the traces alone, half a minute

Live runs are the real trainer on two ranks with a fault on purpose (`trainer train --fault`), seen
through the node process as a monitor sees them. A run counts as found if the first finding at
warning or above is an expected kind with the right ranks. On a machine that other work keeps busy
contention hides some causes, and findings that it could explain are notes: the load is printed.
"""

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

LIVE_S = 14.0
HEALTHY_STEPS = 300


@dataclass(frozen=True)
class Live:
    """One live run: its fault, the kinds that name it, and the ranks to be named."""

    fault: str
    kinds: tuple[str, ...]
    ranks: tuple[int, ...] | None = None
    seconds: float = LIVE_S
    more: tuple[str, ...] = ()


LIVE = (
    Live("slow_dataset", ("loader_few_workers",), (0, 1)),
    Live("cpu_decode", ("cpu_decode_aug",), (0, 1)),
    Live("slow_storage", ("storage_slow",), (0, 1)),
    Live("slow_collate", ("collate_ipc",), (0, 1)),
    Live("oversub", ("loader_oversub", "cpu_decode_aug"), (0, 1)),
    Live("slow_worker", ("loader_few_workers", "stall_prefetch_burst")),
    Live("burst", ("loader_few_workers", "stall_prefetch_burst")),
    Live("cold_epoch", ("loader_few_workers", "cold_first_epoch")),
    Live("slow_data@1", ("straggler", "loader_few_workers"), (1,)),
    Live("slow_forward@1", ("straggler",), (1,)),
    Live("slow_backward@1", ("straggler",), (1,)),
    Live("slow_optimizer@1", ("straggler",), (1,)),
    Live("slow_forward@0", ("straggler",), (0,)),
    Live("jitter", ("straggler",), (0, 1)),
    Live("comm_heavy", ("comm_bound",), (0, 1)),
    Live("all_reduce", ("comm_bound",), (0, 1)),
    Live("sync_every_step", ("stall_log_sync",), (0, 1)),
    Live("ckpt_every", ("stall_checkpoint",)),
    Live("eval_every", ("stall_validation",)),
    Live("retain_graph", ("cpu_leak", "gpu_leak"), (0, 1), 20.0),
    Live("grow_list", ("cpu_leak", "gpu_leak"), (0, 1), 20.0),
    Live("respawn_workers", ("worker_restart",), (0, 1)),
    Live("affinity1", ("cpu_affinity",), (0, 1)),
    Live("hang@1", ("hang",), (1,), 28.0),
)

HEALTHY = (
    (1, ()), (2, ()), (1, ("--data.image_px=48",)), (2, ("--data.image_px=48",)),
    (1, ("--loader.batch_size=32",)), (2, ("--loader.batch_size=32",)),
    (1, ("--train.accumulate=2",)), (2, ("--train.accumulate=2",)),
    (1, ("--data.image_px=32",)), (2, ("--data.image_px=32",)),
)  # fmt: skip


@dataclass(frozen=True)
class Seen:
    """What was said of a live run: the first serious kind, its ranks, when, and all the others."""

    kind: str
    ranks: tuple[int, ...]
    seconds: float
    steps: int
    others: tuple[str, ...]
    steps_done: int


def watch(
    fault: str, ranks: int, seconds: float, more: tuple[str, ...] = (), steps: int = 0
) -> Seen:
    """Run the trainer and evaluate once a second, as a monitor does."""
    from gpuwatch.commands.session import LiveSession
    from gpuwatch.diagnosis import Engine

    run = f"score-{uuid.uuid4().hex[:6]}"
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone",
        f"--nproc-per-node={ranks}", "-m", "trainer", "train", f"--train.steps={steps or 10**6}",
        "--train.threads=1", "--train.device=cpu", "--train.eval_interval_epochs=0",
        "--loader.batch_size=8", "--loader.num_workers=2", "--data.synthetic_images=2048",
        "--train.log_interval_steps=1000000", *more,
    ]  # fmt: skip
    if fault:
        command += ["--fault", fault]
    environment = {**os.environ, "GPUWATCH_RUN_ID": run, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        command,
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    session, engine = LiveSession(), Engine()
    first: tuple[str, tuple[int, ...], float, int] | None = None
    kinds: set[str] = set()
    done = 0
    try:
        started_s: float | None = None
        end_s = time.monotonic() + 60.0
        while time.monotonic() < end_s and process.poll() is None:
            time.sleep(1.0)
            view = session.view()
            found = view.run(run)
            if found is None or len(found.ranks) < ranks:
                continue
            done = found.steps
            if started_s is None and all(rank.steps > 1 for rank in found.ranks):
                started_s = time.monotonic()
                end_s = started_s + seconds
            serious = [
                f
                for f in engine.evaluate(view, found).findings
                if f.severity != "note" and f.state == "open"
            ]
            kinds |= {f.kind for f in serious}
            if serious and first is None and started_s is not None:
                top = serious[0]
                first = (top.kind, top.ranks, time.monotonic() - started_s, found.steps)
    finally:
        _end(process)
        session.close()
    if first is None:
        return Seen("", (), 0.0, 0, (), done)
    kind, who, after_s, after_steps = first
    return Seen(kind, who, after_s, after_steps, tuple(sorted(kinds - {kind})), done)


def _end(process: "subprocess.Popen[bytes]") -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def score_cases() -> tuple[int, int]:
    """Judge the traces; returns how many are right, of how many."""
    from scoreboard.cases import CASES, NOT_TESTABLE

    from gpuwatch.commands.recorded import judged

    right = 0
    print(f"{'case':8} {'expected':34} {'said first':22} {'verdict'}")
    with tempfile.TemporaryDirectory() as folder:
        for name, case in CASES.items():
            _, found, _ = judged(str(case.job.write(Path(folder) / f"{name}.jsonl")))
            (diagnosis,) = found.values()
            serious = [f for f in diagnosis.findings if f.state == "open" and f.severity != "note"]
            said = serious[0].kind if serious else ""
            fine = (said in case.expect) if case.expect else not said
            if fine and case.ranks is not None:
                fine = serious[0].ranks == case.ranks
            verdict = "right" if fine else "missed" if not said else "wrong"
            right += fine
            print(f"{name:8} {', '.join(case.expect) or 'nothing':34} {said or '-':22} {verdict}")
    for name, why in NOT_TESTABLE.items():
        print(f"{name:8} not testable: {why}")
    print(f"cases: {right} of {len(CASES)} right\n")
    return right, len(CASES)


def score_live(only: str = "") -> tuple[int, int]:
    """Run the live faults."""
    right = count = 0
    print(f"{'fault':18} {'said first':22} {'ranks':8} {'after':>16}  verdict   (load)")
    for live in LIVE:
        if only and only not in live.fault:
            continue
        seen = watch(live.fault, 2, live.seconds, live.more)
        count += 1
        fine = seen.kind in live.kinds and (live.ranks is None or seen.ranks == live.ranks)
        right += fine
        verdict = "right" if fine else "missed" if not seen.kind else "wrong"
        when = f"{seen.steps} steps, {seen.seconds:.0f} s" if seen.kind else "-"
        named = ",".join(map(str, seen.ranks)) or "-"
        others = f"  then {', '.join(seen.others)}" if seen.others else ""
        print(
            f"{live.fault:18} {seen.kind or '-':22} {named:8} {when:>16}  {verdict:8} "
            f"({os.getloadavg()[0]:.1f}){others}",
            flush=True,
        )
    print(f"live faults: {right} of {count} right\n")
    return right, count


def score_healthy() -> tuple[int, int]:
    """Run healthy trainings; none may have a finding."""
    right = 0
    print(f"{'ranks':>5} {'what':28} {'steps':>6}  false alarms")
    for ranks, more in HEALTHY:
        seen = watch("", ranks, 40.0, more, HEALTHY_STEPS)
        fine = not seen.kind
        right += fine
        said = ", ".join([seen.kind, *seen.others]) if seen.kind else "none"
        print(
            f"{ranks:>5} {' '.join(more) or 'as it is':28} {seen.steps_done:>6}  {said}", flush=True
        )
    print(f"healthy: {right} of {len(HEALTHY)} without a finding\n")
    return right, len(HEALTHY)


def main() -> int:
    """Print the scoreboard; the exit code is 1 if a case of the traces is not right."""
    parser = argparse.ArgumentParser(description="How often the diagnosis is right.")
    parser.add_argument("--only", choices=["cases", "live", "healthy"])
    parser.add_argument("--fault", default="", help="only live faults whose name holds this")
    arguments = parser.parse_args()
    scores: dict[str, tuple[int, int]] = {}
    if arguments.only in {None, "cases"} and not arguments.fault:
        scores["cases"] = score_cases()
    with tempfile.TemporaryDirectory(prefix="gw-", dir="/tmp") as directory:
        os.environ["GPUWATCH_DIR"] = directory
        if arguments.only in {None, "live"} or arguments.fault:
            scores["live"] = score_live(arguments.fault)
        if arguments.only in {None, "healthy"} and not arguments.fault:
            scores["healthy"] = score_healthy()
        _retire()
    for name, (right, count) in scores.items():
        print(f"{name}: {right}/{count}")
    right, count = scores.get("cases", (0, 0))
    return int(right < count)


def _retire() -> None:
    from gpuwatch.commands.session import LiveSession

    session: Any = LiveSession()
    session.retire_agent()
    session.close()


if __name__ == "__main__":
    sys.exit(main())
