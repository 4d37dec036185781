"""What `gpuwatch run` adds to a command: until it starts, and in all, against the bare command.

    python benchmarks/bench_run.py [rounds]

Bare and watched alternate, so that both see the same machine; the figures are medians of the
differences of pairs, with their quartiles. The start is the time until the command's own Python
begins with the script; what the import of torch takes longer with the hook is in "in all", and in
"CPU", which a busy machine disturbs least.
"""

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence

BUDGET_S = 0.3
OTHERS = "TraceML +4.8 s at the start and +3.4 s at the end (measured elsewhere)"
ROUNDS = 7

SHOW = "import time; print(time.time(), flush=True)"
JOBS = {
    "pass": f"{SHOW}; print(time.time())",
    "import torch": f"{SHOW}; import torch; print(time.time())",
}
WATCHED = [sys.executable, "-P", "-m", "gpuwatch", "run", "--"]


def once(argv: Sequence[str], environ: dict[str, str]) -> tuple[float, float, float, float]:
    """Return seconds: until the script begins, from its end to the process's, in all, of CPU."""
    began_s = time.time()
    job = subprocess.Popen(argv, env=environ, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert job.stdout is not None
    said = job.stdout.read()
    _, status, used = os.wait4(job.pid, 0)
    ended_s = time.time()
    job.stdout.close()
    job.returncode = os.waitstatus_to_exitcode(status)
    if job.returncode:
        raise SystemExit(f"{argv} ended with {job.returncode}")
    script_begins_s, script_ends_s = map(float, said.split())
    cpu_s = used.ru_utime + used.ru_stime
    return script_begins_s - began_s, ended_s - script_ends_s, ended_s - began_s, cpu_s


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else ROUNDS
    print(f"{'':14} {'':7} {'bare':>8} {'watched adds':>13} {'quartiles':>18} {'budget':>7}")
    with tempfile.TemporaryDirectory(prefix="gw-", dir="/tmp") as directory:
        environ = {**os.environ, "GPUWATCH_DIR": directory, "OMP_NUM_THREADS": "1"}
        for name, code in JOBS.items():
            python = [sys.executable, "-c", code]
            once([*WATCHED, *python], environ)  # the file cache, for both
            bare, watched = [], []
            for _ in range(rounds):
                bare.append(once(python, environ))
                watched.append(once([*WATCHED, *python], environ))
            for at, what in enumerate(("start", "exit", "in all", "CPU")):
                base_s = statistics.median(pair[at] for pair in bare)
                extra = [w[at] - b[at] for w, b in zip(watched, bare, strict=True)]
                low_s, _, high_s = statistics.quantiles(extra, n=4)
                print(
                    f"{name:14} {what:7} {base_s:6.3f} s {statistics.median(extra):+11.3f} s "
                    f"{low_s:+8.3f}..{high_s:+.3f} s {BUDGET_S:5.1f} s"
                )
    print(f"others: {OTHERS}")


if __name__ == "__main__":
    main()
