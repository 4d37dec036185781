"""What `gpuwatch run` adds to a command: until its script begins and after it has ended.

    python benchmarks/bench_run.py [--rounds N] [--no-traceml] [--json]

Bare and watched alternate, so that both see the same machine; the figures are medians of the
differences of pairs, with their quartiles. `start` is the time until the script's first line, which
is before its imports; what the import of torch takes longer with the hook is in `in all`, and in
`CPU`, which a busy machine disturbs least. TraceML runs the same script from an environment of its
own (`peer.py`), beside that environment's bare Python; a few pairs only, for each takes seconds.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from peer import VERSION, NoPeerError, peer_command, peer_python

BUDGET_S = {"start": 0.3}
ROUNDS = 9
PEER_ROUNDS = 3
TIMEOUT_S = 120

# The times go to a file: who runs a script may keep its output.
SCRIPT = """\
import os, time
begins_s = time.time()
{body}
with open(os.environ["BENCH_TIMES"], "w") as file:
    print(begins_s, time.time(), file=file)
"""
JOBS = {"no imports": "pass", "import torch": "import torch"}
WATCHED = [sys.executable, "-P", "-m", "gpuwatch", "run", "--"]
MEASURES = ("start", "exit", "in all", "CPU")
Taken = tuple[float, ...]


def once(argv: Sequence[str], directory: Path) -> Taken:
    """Return seconds: until the script begins, from its end to the process's, in all, of CPU."""
    times = directory / "times"
    times.unlink(missing_ok=True)
    environ = {
        **os.environ,
        "GPUWATCH_DIR": str(directory),
        "OMP_NUM_THREADS": "1",
        "BENCH_TIMES": str(times),
    }
    quiet = subprocess.DEVNULL
    began_s = time.time()
    job = subprocess.Popen(argv, env=environ, stdin=quiet, stdout=quiet, stderr=quiet)
    _, status, used = os.wait4(job.pid, 0)
    ended_s = time.time()
    job.returncode = os.waitstatus_to_exitcode(status)
    if job.returncode or not times.exists():
        raise SystemExit(f"{argv[0]} ended with {job.returncode}, running {argv[1:]}")
    script_begins_s, script_ends_s = map(float, times.read_text().split())
    cpu_s = used.ru_utime + used.ru_stime
    return script_begins_s - began_s, ended_s - script_ends_s, ended_s - began_s, cpu_s


def pairs(
    bare: Callable[[], Sequence[str]],
    watched: Callable[[], Sequence[str]],
    rounds: int,
    directory: Path,
) -> dict[str, dict[str, float]]:
    """Return by measure: bare, extra, and the quartiles of extra, in s."""
    for command in (bare, watched):
        once(command(), directory)  # the file cache, for both
    taken: list[tuple[Taken, Taken]] = []
    for turn in range(rounds):
        if turn % 2:
            last = once(watched(), directory)
            taken.append((once(bare(), directory), last))
        else:
            first = once(bare(), directory)
            taken.append((first, once(watched(), directory)))
    found = {}
    for at, measure in enumerate(MEASURES):
        extra = [with_it[at] - without[at] for without, with_it in taken]
        low_s, _, high_s = statistics.quantiles(extra, n=4) if rounds > 1 else extra * 3
        found[measure] = {
            "bare_s": statistics.median(without[at] for without, _ in taken),
            "extra_s": statistics.median(extra),
            "low_s": low_s,
            "high_s": high_s,
        }
    return found


def print_rows(title: str, found: dict[str, dict[str, float]], judge: bool) -> None:
    for measure, row in found.items():
        line = (
            f"{title:24} {measure:7} {row['bare_s']:6.3f} s {row['extra_s']:+9.3f} s "
            f"{row['low_s']:+8.3f}..{row['high_s']:+.3f} s"
        )
        budget_s = BUDGET_S.get(measure)
        if judge and budget_s is not None:
            word = "pass" if row["extra_s"] <= budget_s else "over"
            unsure = "?" if row["low_s"] <= budget_s < row["high_s"] else ""
            line += f"  <= {budget_s} s {word}{unsure}"
        print(line)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--no-traceml", action="store_true", help="leave the comparison out")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    options = parser.parse_args()
    if options.rounds < 1:
        parser.error("--rounds must be at least 1")
    ours, theirs, why_not = {}, {}, "left out, as asked" if options.no_traceml else ""
    with tempfile.TemporaryDirectory(prefix="gw-", dir="/tmp") as name:
        directory = Path(name)
        for job, body in JOBS.items():
            script = directory / f"{job.replace(' ', '_')}.py"
            script.write_text(SCRIPT.format(body=body))
            python = [sys.executable, str(script)]
            ours[job] = pairs(
                lambda python=python: python,  # type: ignore[misc]
                lambda python=python: [*WATCHED, *python],  # type: ignore[misc]
                options.rounds,
                directory,
            )
        if not why_not:
            try:
                peer = [str(peer_python()), str(script)]
                theirs[job] = pairs(
                    lambda: peer,
                    lambda: peer_command(script, directory / "logs"),
                    min(PEER_ROUNDS, options.rounds),
                    directory,
                )
            except NoPeerError as exc:
                why_not = str(exc)
    if options.json:
        print(json.dumps({"gpuwatch": ours, "traceml": theirs, "no_traceml": why_not}))
        return
    print(f"{'':24} {'':7} {'bare':>8} {'it adds':>11} {'quartiles':>19}  budget")
    for job, found in ours.items():
        print_rows(f"gpuwatch, {job}", found, judge=True)
    for job, found in theirs.items():
        print_rows(f"TraceML, {job}", found, judge=False)
    print(f"TraceML {VERSION}: {why_not or 'the same script, in the same minutes'}")


if __name__ == "__main__":
    main()
