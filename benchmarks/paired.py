"""A training loop and paired rounds of it, for whatever may be switched on and off around it.

Needs torch and nothing of gpuwatch, so that another tool's environment can run the same loop.

The machine is expected to be noisy. Rounds are short and interleaved, so that both sides see the
same machine; a round is the mean of its steps; three rounds make a pair: off, on and off again, in
rotating order, so that drift cancels. The figure is the median over the pairs of `on` less the mean
of both `off`; the null is the median of `off again` less `off`, which is what the method makes of
no difference at all. The 95 % interval of a median comes from its order statistics.
"""

import dataclasses
import itertools
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

OFF, ON, AGAIN = "off", "on", "again"
Toggle = Callable[[bool], None]


@dataclasses.dataclass(frozen=True)
class Case:
    """A model and how it is trained. `modules` counts the leaves, `rounds` the pairs."""

    title: str
    modules: int = 4
    ranks: int = 1
    compiled: bool = False
    rounds: int = 100
    settle: int = 50
    """Steps after every switch: exchanged code is slower until Python has specialized it again."""
    steps: int = 100


CASES = {
    "one": Case("one process"),
    "modules": Case("400 modules", modules=400, rounds=60),
    "compile": Case("torch.compile", compiled=True, rounds=60),
    # A step costs ten times as much here: two ranks, two cores, and they wait for each other.
    "ddp": Case("two ranks, DDP", ranks=2, rounds=90, settle=30, steps=80),
}


class Items(Dataset[torch.Tensor]):
    """Items that cost next to nothing and never end."""

    def __len__(self) -> int:
        return 10**9

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.zeros(8)


class Loop:
    """A tiny model, its optimizer and its loader; `step` is one iteration, bare.

    A switch that changes what the loop itself has to say gives it another `step`.
    """

    def __init__(self, case: Case) -> None:
        torch.set_num_threads(1)
        # Modules that do nothing, so that only the cost of calling them grows.
        more = [torch.nn.Identity() for _ in range(case.modules - 4)]
        net: torch.nn.Module = torch.nn.Sequential(
            torch.nn.Linear(8, 32),
            torch.nn.BatchNorm1d(32),
            torch.nn.ReLU(),
            *more,
            torch.nn.Linear(32, 1),
        )
        if case.ranks > 1:
            net = DistributedDataParallel(net)
        if case.compiled:
            # Compiles forward and backward, as the default backend does, and needs no compiler.
            net = torch.compile(net, backend="aot_eager")  # type: ignore[assignment]
        self.net = net
        self.optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
        self.loader = DataLoader(Items(), batch_size=4)
        self.batches: Iterator[torch.Tensor] = iter(self.loader)
        self.step: Callable[[], None] = self.bare_step

    def bare_step(self) -> None:
        batch = next(self.batches)
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.net(batch).mean()
        loss.backward()
        self.optimizer.step()


@dataclasses.dataclass
class Round:
    """What the steps of one round took in the training thread, µs each, in order."""

    cpu_us: list[float]
    wall_us: list[float]
    others_s: float
    """CPU of all other threads of the process during the round."""


def train(loop: Loop, steps: int) -> Round:
    """Train so many steps and say what each took."""
    cpu_ns, wall_ns = [0] * (steps + 1), [0] * (steps + 1)
    cpu_clock, wall_clock, step = time.thread_time_ns, time.perf_counter_ns, loop.step
    process_ns = time.process_time_ns()
    cpu_ns[0], wall_ns[0] = cpu_clock(), wall_clock()
    for at in range(1, steps + 1):
        step()
        cpu_ns[at], wall_ns[at] = cpu_clock(), wall_clock()
    process_ns = time.process_time_ns() - process_ns
    return Round(
        [(end - begin) / 1e3 for begin, end in itertools.pairwise(cpu_ns)],
        [(end - begin) / 1e3 for begin, end in itertools.pairwise(wall_ns)],
        max(0, process_ns - (cpu_ns[-1] - cpu_ns[0])) / 1e9,
    )


def alternate(
    loop: Loop, case: Case, toggle: Toggle, pause_s: float = 0.0
) -> dict[str, list[Round]]:
    """Train the rounds. `toggle` switches on or off; every round begins with a switch of both."""
    kinds = (OFF, ON, AGAIN)
    rounds: dict[str, list[Round]] = {kind: [] for kind in kinds}
    for turn in range(case.rounds):
        for at in range(len(kinds)):
            kind = kinds[(turn + at) % len(kinds)]
            toggle(kind != ON)
            toggle(kind == ON)
            time.sleep(pause_s)
            train(loop, case.settle)
            rounds[kind].append(train(loop, case.steps))
    return rounds


# --- figures -----------------------------------------------------------------------------------


def quietest(values: Sequence[float]) -> float:
    """Mean of the tenth of the steps that were disturbed least; blind to what happens rarely."""
    return statistics.fmean(sorted(values)[: max(1, len(values) // 10)])


MEASURES: dict[str, Callable[[Round], float]] = {
    "cpu": lambda x: statistics.fmean(x.cpu_us),
    "quiet": lambda x: quietest(x.cpu_us),
    "wall": lambda x: statistics.fmean(x.wall_us),
}


def spread(values: Sequence[float]) -> dict[str, float]:
    """Return median, quartiles, and the 95 % interval of the median."""
    ordered = sorted(values)
    count = len(ordered)
    outside = max(0, int(count / 2 - 0.98 * count**0.5))  # binomial, by its normal approximation
    low, median, high = statistics.quantiles(ordered, n=4)
    return {
        "median": median,
        "low": low,
        "high": high,
        "from": ordered[outside],
        "to": ordered[count - 1 - outside],
    }


def figures(ranks: Sequence[dict[str, list[Round]]]) -> dict[str, dict[str, Any]]:
    """Return what switching on costs, by measure; of several ranks the mean of each round."""
    found = {}
    for name, measure in MEASURES.items():
        off, on, again = (
            [statistics.fmean(map(measure, same)) for same in zip(*(r[kind] for r in ranks))]  # noqa: B905
            for kind in (OFF, ON, AGAIN)
        )
        trios = list(zip(off, on, again, strict=True))
        found[name] = {
            "bare_us": statistics.median(off + again),
            "extra_us": spread([w - (a + b) / 2 for a, w, b in trios]),
            "null_us": spread([b - a for a, _, b in trios]),
        }
    return found


def others_share(rounds: Sequence[Round]) -> float:
    """Share of a core that the other threads of the process took during these rounds."""
    return sum(x.others_s for x in rounds) / (sum(sum(x.wall_us) for x in rounds) / 1e6)


def compilations() -> int:
    """How many frames torch.compile has looked at so far in this process."""
    from torch._dynamo.utils import counters

    return int(counters["frames"]["total"])


def run_case(
    case: Case, prepare: Callable[[Loop], Toggle], pause_s: float = 0.0
) -> dict[str, Any] | None:
    """Run the rounds in this process, a rank of a launcher or alone; rank 0 returns the figures.

    `prepare` gets a loop that has trained a little, and returns what switches on and off.
    `pause_s` is slept before every round, for who cannot keep up with thousands of steps a second.
    """
    distributed = "RANK" in os.environ and case.ranks > 1
    if distributed:
        dist.init_process_group("gloo")
    try:
        loop = Loop(case)
        train(loop, 50)
        toggle = prepare(loop)
        for on in (True, False, True):
            toggle(on)
            train(loop, case.settle)
        compiled = compilations() if case.compiled else 0
        rounds = alternate(loop, case, toggle, pause_s)
        compiled = compilations() - compiled if case.compiled else 0
        ranks: list[Any] = [rounds]
        if distributed:
            ranks = [None] * case.ranks
            dist.all_gather_object(ranks, rounds)
            if dist.get_rank():
                return None
        return {
            "torch": str(torch.__version__),
            "pairs": case.rounds,
            "figures": figures(ranks),
            "others_share": others_share(rounds[ON]),
            "compilations": compiled,
        }
    finally:
        if distributed:
            dist.destroy_process_group()
