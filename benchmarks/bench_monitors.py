"""What attached monitors cost the training thread: none, one and four of them, and the baseline.

    python benchmarks/bench_monitors.py               # about three minutes
    python benchmarks/bench_monitors.py --rounds 5    # a quick look

One rank makes 200 steps a second that compute nothing, so that what is added to them stands out,
and the CPU time of its training thread is read (the rest of the process is not in it). Monitors
are processes of their own with a live session each; with none of them there is no node process
either. The baseline is what a training does that sends its own telemetry: one PUB socket, a message
of 300 bytes at the end of each step from the training thread, and each monitor a subscriber of it.

Rounds are interleaved, their order rotates. The figure is the median over the rounds of what a
step costs with monitors, less what it costs without in the same round; `none again` is what the
method makes of no difference. It is given for the mean of all steps, which counts what happens ten
times a second, and for the median step, which a busy machine disturbs less.
"""

import argparse
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from paired import spread

BUDGET_US = 5.0
PAUSE_S = 0.004
STEPS = 200
SETTLE = 40
MOST = 4
CONDITIONS = {"none": 0, "none again": 0, "1 monitor": 1, "4 monitors": 4}
MESSAGE = bytes(300)


# --- a monitor ---------------------------------------------------------------------------------


def monitor() -> None:
    """Attach, subscribe and leave as the lines of stdin say; answer each with a line."""
    import zmq

    from gpuwatch.commands.session import LiveSession

    with contextlib.ExitStack() as stack:
        for line in sys.stdin:
            words = line.split()
            stack.close()
            if words[0] == "attach":
                session = LiveSession(Path(words[1]))
                stack.callback(session.close)
                ends_s = time.monotonic() + 20
                while time.monotonic() < ends_s and not session.view().runs:
                    time.sleep(0.02)
            elif words[0] == "subscribe":
                context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
                stack.callback(context.destroy, linger=0)
                one = context.socket(zmq.SUB)
                one.subscribe(b"")
                one.connect(words[1])
                while one.poll(1):
                    one.recv()
                stack.enter_context(draining(one))
            print("done", flush=True)


@contextlib.contextmanager
def draining(one: "zmq.Socket[bytes]") -> Iterator[None]:  # type: ignore[name-defined]  # noqa: F821
    """Read what comes, as a monitor does: gathered for 50 ms."""
    import threading

    import zmq

    stop = threading.Event()

    def drain() -> None:
        while not stop.is_set():
            time.sleep(0.05)
            with contextlib.suppress(zmq.Again):
                while True:
                    one.recv(zmq.NOBLOCK)

    thread = threading.Thread(target=drain)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


class Monitors:
    """Four processes that watch or do not."""

    def __init__(self) -> None:
        self._processes = [
            subprocess.Popen(
                [sys.executable, __file__, "--part", "monitor"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for _ in range(MOST)
        ]

    def say(self, count: int, words: str) -> None:
        """Let so many do it, and all others leave; returns when they have."""
        for at, process in enumerate(self._processes):
            assert process.stdin is not None
            process.stdin.write(f"{words if at < count else 'leave'}\n")
            process.stdin.flush()
        for process in self._processes:
            assert process.stdout is not None
            if process.stdout.readline() != "done\n":
                raise SystemExit("a monitor has ended")

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.communicate()


# --- the training ------------------------------------------------------------------------------


Step = Callable[[], None]


def train(step: Step) -> dict[str, float]:
    """Make some steps at their pace; returns what one costs this thread in CPU time, µs."""
    clock, costs_ns = time.thread_time_ns, []
    for at in range(SETTLE + STEPS):
        began_ns = clock()
        step()
        time.sleep(PAUSE_S)
        if at >= SETTLE:
            costs_ns.append(clock() - began_ns)
    return {"mean": statistics.fmean(costs_ns) / 1e3, "median": statistics.median(costs_ns) / 1e3}


def end_agent(directory: Path) -> None:
    from gpuwatch.wire.collect import agent_presence

    found = agent_presence(directory)
    if found is None:
        return
    with contextlib.suppress(ProcessLookupError):
        os.kill(found.pid, signal.SIGTERM)
    ends_s = time.monotonic() + 10
    while agent_presence(directory) is not None and time.monotonic() < ends_s:
        time.sleep(0.02)


def rounds_of(
    step: Step, monitors: Monitors, words: str, directory: Path, count: int
) -> dict[str, list[dict[str, float]]]:
    """Return what a step costs in each condition, a value a round."""
    names = list(CONDITIONS)
    found: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    for turn in range(count):
        for at in range(len(names)):
            name = names[(turn + at) % len(names)]
            monitors.say(CONDITIONS[name], words)
            if not CONDITIONS[name]:
                end_agent(directory)
            found[name].append(train(step))
    monitors.say(0, "leave")
    return found


@contextlib.contextmanager
def direct(address: str) -> Iterator[Step]:
    """A step that sends a message itself."""
    import zmq

    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    sender = context.socket(zmq.PUB)
    sender.bind(address)

    def step() -> None:
        sender.send(MESSAGE, zmq.NOBLOCK)

    try:
        yield step
    finally:
        context.destroy(linger=0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.part == "monitor":
        monitor()
        return
    with tempfile.TemporaryDirectory(prefix="gw-", dir="/tmp") as folder:
        directory = Path(folder)
        os.environ["GPUWATCH_DIR"] = folder
        monitors = Monitors()
        try:
            address = f"ipc://{folder}/direct"
            with direct(address) as step:
                base = rounds_of(step, monitors, f"subscribe {address}", directory, options.rounds)
            import gpuwatch

            gpuwatch.watch(name="bench")
            words = f"attach {folder}"
            ours = rounds_of(gpuwatch.step, monitors, words, directory, options.rounds)
            gpuwatch.unwatch()
        finally:
            monitors.close()
            end_agent(directory)
    found = {"gpuwatch": figures(ours), "a send in each step": figures(base)}
    if options.json:
        print(json.dumps(found))
        return
    for title, rows in found.items():
        bare = rows["none"]
        print(
            f"{title}: {bare['mean']['step_us']:.0f} us of CPU a step without a monitor, "
            f"{bare['median']['step_us']:.0f} us the median one"
        )
        for name in list(CONDITIONS)[1:]:
            words = [
                f"{row['median']:+6.1f} us ({row['low']:+.1f}..{row['high']:+.1f})"
                for row in rows[name].values()
            ]
            budget = f"   (budget {BUDGET_US:+.0f})" if title == "gpuwatch" else ""
            print(f"  {name:10} mean {words[0]:26} median step {words[1]}{budget}")


def figures(found: dict[str, list[dict[str, float]]]) -> dict[str, dict[str, dict[str, float]]]:
    """Return what each condition adds to a step, over the rounds, and what a step costs."""
    rows: dict[str, dict[str, dict[str, float]]] = {}
    for name, values in found.items():
        rows[name] = {}
        for which in ("mean", "median"):
            extra = [a[which] - b[which] for a, b in zip(values, found["none"], strict=True)]
            step_us = statistics.median(value[which] for value in values)
            rows[name][which] = {"step_us": step_us, **spread(extra)}
    return rows


if __name__ == "__main__":
    main()
