"""What watching costs the training thread, per step, beside TraceML in the same loop.

    python benchmarks/bench_probe.py                  # all, five minutes on two quiet cores
    python benchmarks/bench_probe.py --no-traceml     # ours alone
    python benchmarks/bench_probe.py --json           # for programs

Every signal of this version is on, the telemetry thread runs, and no monitor is attached. How the
pairs are made and what the figures mean is said in `paired.py`; how TraceML is run, in
`traceml_loop.py`: in an environment of its own, made once and kept (`peer.py`).
"""

import argparse
import contextlib
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from paired import CASES, Case, Loop, Toggle, run_case
from peer import VERSION, NoPeerError, peer_command, peer_python

HERE = Path(__file__).parent
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
CASE_TIMEOUT_S = 900
BUDGET_US = {"one": 15.0, "ddp": 40.0}
BUDGET_MODULE_US = 0.0
NONE_US = 0.05  # less than this counts as none: a larger model also leaves the marks colder caches
MEASURES = {
    "cpu": "CPU",
    "quiet": "CPU, quietest tenth",
    "wall": "wall",
}
QUICK = (3, 2, 5)  # rounds, settle, steps: a smoke test, not a measurement
Spread = dict[str, float]


# --- one case, in a process of its own ---------------------------------------------------------


def prepare(loop: Loop) -> Toggle:
    import gpuwatch
    from gpuwatch import probe

    gpuwatch.watch(name="bench")
    watching = probe._probe
    if watching is None:
        raise SystemExit("gpuwatch does not watch this process; it has said why")

    def toggle(on: bool) -> None:
        watching.marks.remove()
        if on:
            watching.marks.install()

    return toggle


def child(name: str, out: Path, sizes: list[int]) -> None:
    """Run a case in this process, and leave its figures in a file."""
    result = run_case(sized(CASES[name], sizes), prepare)
    if result is None:
        return
    from gpuwatch import probe

    watching = probe._probe
    assert watching is not None
    result["dropped"] = watching.telemetry._accountant.dropped
    out.write_text(json.dumps(result))


def sized(case: Case, sizes: list[int]) -> Case:
    if not sizes:
        return case
    rounds, settle, steps = sizes
    return dataclasses.replace(case, rounds=rounds, settle=settle, steps=steps)


# --- all cases ---------------------------------------------------------------------------------


@contextlib.contextmanager
def scratch() -> Iterator[Path]:
    """A folder with a short name, for sockets lie in it."""
    with tempfile.TemporaryDirectory(prefix="gw-", dir="/tmp") as directory:
        yield Path(directory)


def run_ours(name: str, sizes: list[int]) -> dict[str, Any]:
    ranks = CASES[name].ranks
    launcher = [*TORCHRUN, f"--nproc-per-node={ranks}"] if ranks > 1 else [sys.executable]
    with scratch() as directory:
        out = directory / "figures.json"
        argv = [*launcher, __file__, "--child", name, str(out), *map(str, sizes)]
        return run_and_read(argv, out, {"GPUWATCH_DIR": str(directory)})[0]


def run_theirs(name: str, sizes: list[int]) -> dict[str, Any] | str:
    """Return the figures, or a sentence that says why they are not there."""
    script, ranks = HERE / "traceml_loop.py", CASES[name].ranks
    with scratch() as directory:
        out = directory / "figures.json"
        arguments = [name, str(out), *map(str, sizes)]
        argv = peer_command(script, directory / "logs", *arguments, ranks=ranks)
        result, said = run_and_read(argv, out, {})
    if "queue full" in said.lower():
        return f"no figures of {CASES[name].title!r}: it did not keep up and dropped steps"
    return result


def run_and_read(argv: list[str], out: Path, environ: dict[str, str]) -> tuple[dict[str, Any], str]:
    """Run a command that leaves its figures in a file; return them and what it has said."""
    done = subprocess.run(
        argv,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environ},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        timeout=CASE_TIMEOUT_S,
        check=False,
    )
    if done.returncode or not out.exists():
        raise SystemExit(f"{argv[0]} ended with {done.returncode}:\n{done.stdout[-2000:]}")
    result: dict[str, Any] = json.loads(out.read_text())
    return result, done.stdout


def per_module(results: dict[str, dict[str, Any]]) -> Spread:
    """What one more module costs, µs a call: 400 modules less 4, by how many there are more."""
    few, many = (results[name]["figures"]["cpu"]["extra_us"] for name in ("one", "modules"))
    more = CASES["modules"].modules - CASES["one"].modules
    figure = (many["median"] - few["median"]) / more
    # Two independent medians: the half widths of their intervals add as squares.
    half = sum(((x["to"] - x["from"]) / 2) ** 2 for x in (few, many)) ** 0.5 / more
    return {"median": figure, "from": figure - half, "to": figure + half}


def verdict(found: Spread, budget: float) -> str:
    """`pass` or `over`; with `?` where the interval of the figure holds the budget."""
    word = "pass" if found["median"] <= budget else "over"
    return word if budget < found["from"] or found["to"] <= budget else f"{word}?"


# --- output ------------------------------------------------------------------------------------


def between(found: Spread, low: str, high: str, digits: int = 1) -> str:
    return f"{found[low]:+.{digits}f}..{found[high]:+.{digits}f}"


def print_table(ours: dict[str, dict[str, Any]], theirs: dict[str, dict[str, Any]]) -> None:
    print(
        f"{'us a step, training thread':26} {'bare':>6} {'gpuwatch':>9} {'95 %':>15} "
        f"{'quartiles':>15} {'null':>6} {'quartiles':>14} {'budget':>7} {'':6} "
        f"{'TraceML':>8} {'quartiles':>16}"
    )
    for name, result in ours.items():
        print(f"{CASES[name].title}, {result['pairs']} pairs")
        for measure, title in MEASURES.items():
            row = result["figures"][measure]
            extra, null = row["extra_us"], row["null_us"]
            budget = BUDGET_US.get(name) if measure == "cpu" else None
            judged = f"{'':7} {'':6}"
            if budget is not None:
                judged = f"{f'<= {budget:.0f}':>7} {verdict(extra, budget):6}"
            line = (
                f"  {title:24} {row['bare_us']:6.0f} {extra['median']:+9.1f} "
                f"{between(extra, 'from', 'to'):>15} {between(extra, 'low', 'high'):>15} "
                f"{null['median']:+6.1f} {between(null, 'low', 'high'):>14} {judged}"
            )
            if name in theirs:
                peer = theirs[name]["figures"][measure]["extra_us"]
                line += f" {peer['median']:+8.1f} {between(peer, 'low', 'high'):>16}"
            print(line.rstrip())


def print_rest(ours: dict[str, dict[str, Any]], theirs: dict[str, dict[str, Any]]) -> None:
    found = per_module(ours)
    line = (
        f"a module call: {found['median']:+.3f} us (95 %: {between(found, 'from', 'to', 3)}); "
        f"budget {BUDGET_MODULE_US:.0f}, {verdict(found, NONE_US)} (below {NONE_US} is none)"
    )
    if {"one", "modules"} <= theirs.keys():
        peer = per_module(theirs)
        line += f"; TraceML {peer['median']:+.3f} us ({between(peer, 'from', 'to', 3)})"
    print(line)
    compiled = f"compilations in the rounds of torch.compile: {ours['compile']['compilations']}"
    if "compile" in theirs:
        compiled += f"; TraceML {theirs['compile']['compilations']}"
    print(compiled)
    bare_us = ours["one"]["figures"]["wall"]["bare_us"]
    print(
        f"telemetry thread: {ours['one']['others_share']:.1%} of a core at "
        f"{1e6 / bare_us:,.0f} steps a second; {ours['one']['dropped']} steps dropped"
    )


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    parser.add_argument("--no-traceml", action="store_true", help="leave the comparison out")
    parser.add_argument("--quick", action="store_true", help="few rounds: does it run at all?")
    parser.add_argument("--case", action="append", choices=list(CASES), help="this case only")
    return parser.parse_args(argv)


def main() -> None:
    options = parse(sys.argv[1:])
    names = options.case or list(CASES)
    sizes = list(QUICK) if options.quick else []
    why_not = "left out, as asked" if options.no_traceml else ""
    if not why_not:
        try:
            peer_python()
        except NoPeerError as exc:
            why_not = str(exc)
    peer = not why_not

    def both(name: str) -> tuple[dict[str, Any], dict[str, Any] | str]:
        return run_ours(name, sizes), run_theirs(name, sizes) if peer else ""

    # One after the other; all at once only where nothing is measured.
    with ThreadPoolExecutor(len(names) if options.quick else 1) as pool:
        results = dict(zip(names, pool.map(both, names), strict=True))
    ours = {name: found for name, (found, _) in results.items()}
    theirs = {name: found for name, (_, found) in results.items() if isinstance(found, dict)}
    lacking = [found for _, found in results.values() if isinstance(found, str) and found]
    if options.json:
        said = why_not or "; ".join(lacking)
        print(json.dumps({"gpuwatch": ours, "traceml": theirs, "no_traceml": said}))
        return
    print_table(ours, theirs)
    if {"one", "modules", "compile"} <= ours.keys():
        print_rest(ours, theirs)
    print("95 %: interval of the median; null: bare against bare; pass? and over?: not resolved;")
    print("quietest tenth: of the steps of each round, which hides what happens rarely")
    for line in lacking or [why_not or "the same loop, in the same minutes"]:
        print(f"TraceML {VERSION}: {line}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        case_name, out_path, *case_sizes = sys.argv[2:]
        child(case_name, Path(out_path), [int(size) for size in case_sizes])
    else:
        main()
