"""`gpuwatch demo`: a real training with a real fault, watched."""

import contextlib
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import IO, Any

import click

__all__ = ["demo"]

_RANKS = 2
_START_S = 60.0
_END_S = 6.0
_HEADLESS_S = 20.0

_TRAIN = [
    "-m",
    "trainer",
    "train",
    "--train.steps=1000000",
    "--train.threads=1",
    "--train.device=cpu",
    "--train.eval_interval_epochs=0",
    "--loader.batch_size=8",
]

# A loader that is too slow by configuration: one worker a rank, and items that wait like a remote
# read. The wait costs no CPU, so more workers help on any machine.
_SLOW_LOADER = [*_TRAIN, "--loader.num_workers=1", "--faults.item_latency_ms=25"]

_SCENARIOS = {"slow-loader": _SLOW_LOADER}

FAULTS = (
    "slow_dataset", "cpu_decode", "slow_worker", "slow_storage", "cold_epoch", "burst",
    "slow_collate", "slow_data", "slow_forward", "slow_backward", "slow_optimizer", "jitter",
    "comm_heavy", "all_reduce", "sync_every_step", "ckpt_every", "eval_every", "retain_graph",
    "grow_list", "hang", "oversub", "affinity1", "respawn_workers",
)  # fmt: skip
"""What the trainer can be made slow by (`trainer train --fault`), each a scenario too."""

_WITH_FAULT = [*_TRAIN, "--data.synthetic_images=2048", "--loader.num_workers=2", "--fault"]

_NO_TRAINER = (
    "the demo trains with the package gpuwatch-trainer, which is not installed here; "
    "in a clone type: pip install -e . -e './trainer[vision]'"
)


@click.command()
@click.argument("scenario", default="slow-loader")
@click.option("--headless", is_flag=True, help="No screen: print one JSON document at the end.")
@click.option(
    "--seconds",
    type=click.FloatRange(1.0),
    help="End so long after the first step (default: 20 headless, else when you quit).",
)
@click.option(
    "--simulate-gpus",
    type=click.IntRange(1, 256),
    metavar="N",
    help="Show N GPUs that are not there, marked SIMULATED, under the ranks.",
)
@click.pass_context
def demo(
    ctx: click.Context,
    scenario: str,
    headless: bool,
    seconds: float | None,
    simulate_gpus: int | None,
) -> None:
    """Train two ranks with a loader that is too slow, and watch them.

    SCENARIO is slow-loader, a fault of the trainer such as slow_backward@1 or cpu_decode:30
    (NAME[:strength][@rank]), or the path of a script that calls gpuwatch.watch(). The training is
    ended with the demo.
    """
    from gpuwatch.commands.monitor import can_draw

    command = _command(scenario)
    why_not = can_draw()
    if not headless and why_not:
        click.echo(f"gpuwatch: {why_not}, so the demo runs without a screen", err=True)
        headless = True
    if headless and seconds is None:
        seconds = _HEADLESS_S
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _leave)
    try:
        ctx.exit(_run(command, headless=headless, seconds=seconds, gpus=simulate_gpus or 0))
    except KeyboardInterrupt:
        ctx.exit(130)


def _leave(number: int, _frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


def _command(scenario: str) -> list[str]:
    """Return what torchrun is given.

    Raises:
        click.UsageError: no such scenario, or its package is not installed.
    """
    fault = re.split("[:@]", scenario)[0].replace("-", "_")
    if scenario in _SCENARIOS or fault in FAULTS:
        if importlib.util.find_spec("trainer") is None or importlib.util.find_spec("torch") is None:
            raise click.UsageError(_NO_TRAINER)
        return _SCENARIOS.get(scenario) or [*_WITH_FAULT, scenario.replace("-", "_")]
    if Path(scenario).is_file():
        if importlib.util.find_spec("torch") is None:
            raise click.UsageError("the demo trains with PyTorch, which is not installed here")
        return [scenario]
    known = ", ".join([*_SCENARIOS, *FAULTS])
    raise click.UsageError(f"no scenario {scenario!r}; there are {known}, or the path of a script")


def _run(command: Sequence[str], *, headless: bool, seconds: float | None, gpus: int) -> int:
    from gpuwatch.commands.session import LiveSession

    run = f"demo-{uuid.uuid4().hex[:6]}"
    with tempfile.TemporaryFile() as log, _training(command, run, log) as process:
        what = (
            "with a loader that is too slow; SIMULATED: 25 ms of remote-read latency an item"
            if command is _SLOW_LOADER
            else f"with a fault, SIMULATED: {command[-1]}"
            if command[-2:-1] == ["--fault"]
            else f"of {command[0]}"
        )
        click.echo(f"training {_RANKS} ranks as run {run}, {what}", err=True)
        session = LiveSession()
        try:
            if not _wait_for_steps(session, run, process):
                click.echo(_why_not_started(process, log), err=True)
                return 3
            shown: Any = session
            if gpus:
                from gpuwatch.commands.simulate import SimulatedSession

                shown = SimulatedSession(session, run, gpus)
                click.echo(f"SIMULATED: {gpus} GPUs; nothing about them is measured", err=True)
            if headless:
                return _headless(shown, run, process, seconds or _HEADLESS_S)
            return _screen(shown, run, seconds)
        finally:
            _end(process, session, run)
            session.close()


@contextlib.contextmanager
def _training(
    command: Sequence[str], run: str, log: IO[bytes]
) -> Iterator[subprocess.Popen[bytes]]:
    """Start the training in a session of its own, and leave nothing of it behind."""
    environment = {
        **os.environ,
        "GPUWATCH_RUN_ID": run,
        "GPUWATCH_ALLOW_CONTROL": "1",  # it is nobody's but the one's who looks at it
        "OMP_NUM_THREADS": "1",
        "PYTHONUNBUFFERED": "1",
    }
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            f"--nproc-per-node={_RANKS}",
            *command,
        ],
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        env=environment,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


def _wait_for_steps(session: Any, run: str, process: subprocess.Popen[bytes]) -> bool:
    """Wait until every rank has taken a step; False if the training ended or took too long."""
    deadline_s = time.monotonic() + _START_S
    while time.monotonic() < deadline_s and process.poll() is None:
        found = session.view().run(run)
        ranks = found.ranks if found is not None else ()
        if len(ranks) == _RANKS and all(rank.steps > 0 for rank in ranks):
            return True
        time.sleep(0.1)
    return False


def _why_not_started(process: subprocess.Popen[bytes], log: IO[bytes]) -> str:
    log.seek(0)
    tail = log.read().decode("utf-8", "replace").strip().splitlines()[-12:]
    state = (
        f"the training took no step in {_START_S:.0f} s"
        if process.poll() is None
        else f"the training ended with status {process.returncode} before its first step"
    )
    return "\n".join([f"gpuwatch: {state}; its last words:", *tail])


def _headless(session: Any, run: str, process: subprocess.Popen[bytes], seconds: float) -> int:
    from gpuwatch.commands.shapes import diagnosis_document, status_document
    from gpuwatch.diagnosis import Engine

    engine = Engine(ask=session.send)
    until_s = time.monotonic() + seconds
    while time.monotonic() < until_s and process.poll() is None:
        time.sleep(max(0.0, min(1.0, until_s - time.monotonic())))
        engine(session.view())
    view = session.view()
    found = view.run(run)
    assert found is not None
    diagnosis = engine.evaluate(view, found)
    judged = diagnosis_document(found, diagnosis)
    document = {
        **status_document(replace(view, runs=(found,))),
        "findings": judged["findings"],
        "abstained": judged["abstained"],
    }
    click.echo(json.dumps(document, allow_nan=False))
    for finding in diagnosis.findings:
        click.echo(f"{finding.severity}: {finding.summary}", err=True)
        for hint in finding.hints:
            click.echo(f"  try {hint.change}", err=True)
    return 0


def _screen(session: Any, run: str, seconds: float | None) -> int:
    from gpuwatch.commands.monitor import watch_screen

    return watch_screen(hz=4.0, run=run, session=session, seconds=seconds)


def _end(process: subprocess.Popen[bytes], session: Any, run: str) -> None:
    """End the training, kill what does not end, and let the node process go if it is ours."""
    found = session.view().run(run)
    ranks = (
        [(r.pid, r.hello.pid_started_s) for r in found.ranks if r.hello is not None]
        if found is not None
        else []
    )
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=_END_S)
    if process.poll() is None:
        process.kill()
        process.wait()
    _kill_ranks(ranks)
    if session.started_agent:
        deadline_s = time.monotonic() + 2.0
        while time.monotonic() < deadline_s:
            found = session.view().run(run)
            if found is None or found.state == "ended":
                break
            time.sleep(0.05)
        session.retire_agent()
        while time.monotonic() < deadline_s and session.agent_lives():
            time.sleep(0.05)


def _kill_ranks(ranks: Sequence[tuple[int | None, float]]) -> None:
    """Kill ranks that outlived torchrun: each by its pid and start time, so nobody else's."""
    import psutil

    for pid, started_s in ranks:
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(pid)
            if abs(process.create_time() - started_s) < 1.0:
                process.kill()
