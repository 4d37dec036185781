"""The marks of a training loop, called on a clock that the test moves."""

from gpuwatch.probe.accounting import Accountant, RawSpan, RawStep, Totals

MS = 1_000_000


class Clock:
    def __init__(self) -> None:
        self.ns = 5_000_000_000

    def __call__(self) -> int:
        return self.ns

    def pass_ms(self, ms: float) -> None:
        self.ns += int(ms * MS)


class Loop:
    """Calls the marks as a training loop would; every call names how long it takes."""

    def __init__(self, **options: bool) -> None:
        self.clock = Clock()
        self.acc = Accountant(self.clock, **options)
        self._yielded: dict[str, int] = {}

    def fetch(self, ms: float, key: str = "train", samples: int | None = 8) -> None:
        first = self._yielded.get(key, 0) == 0
        self._yielded[key] = self._yielded.get(key, 0) + 1
        self.acc.fetch_begin(key, first)
        self.clock.pass_ms(ms)
        self.acc.fetch_end(samples)

    def exhaust(self, key: str = "train", ms: float = 0.1) -> None:
        self.acc.fetch_begin(key, False)
        self.clock.pass_ms(ms)
        self.acc.fetch_stop()
        self._yielded[key] = 0

    def fail_to_fetch(self, ms: float, key: str = "train") -> None:
        self.acc.fetch_begin(key, self._yielded.get(key, 0) == 0)
        self.clock.pass_ms(ms)
        self.acc.fetch_stop(failed=True)

    def leave(self, key: str = "train") -> None:
        """Break out of the loop over that loader: the next fetch is the first of a new iterator."""
        self._yielded[key] = 0

    def work(self, ms: float) -> None:
        self.clock.pass_ms(ms)

    def backward(self, ms: float, exposed_ms: float = 0.0, *, failed: bool = False) -> None:
        self.acc.backward_begin()
        self.clock.pass_ms(ms)
        if exposed_ms:
            self.acc.compute_end()
        self.clock.pass_ms(exposed_ms)
        self.acc.backward_end(failed)

    def optimizer(self, ms: float, key: int = 1, *, skipped: bool = False) -> None:
        self.acc.optimizer_begin(key)
        self.clock.pass_ms(ms)
        self.acc.optimizer_end(key, skipped=skipped)

    def comm(self, ms: float) -> None:
        self.acc.comm_begin()
        self.clock.pass_ms(ms)
        self.acc.comm_end()

    def iteration(self, data: float = 4, forward: float = 10, backward: float = 20) -> None:
        self.fetch(data)
        self.work(forward)
        self.backward(backward)
        self.optimizer(2)
        self.work(1)

    @property
    def totals(self) -> Totals:
        """The ledger's sums, as the telemetry thread keeps them."""
        totals = Totals()
        for item in self.acc.out:
            totals.add(item)
        return totals

    @property
    def steps(self) -> list[RawStep]:
        return [item for item in self.acc.out if isinstance(item, RawStep)]

    @property
    def spans(self) -> list[RawSpan]:
        return [item for item in self.acc.out if isinstance(item, RawSpan)]


def ms(step: RawStep) -> dict[str, float]:
    names = ("data_wait", "h2d", "forward", "backward", "comm", "optimizer", "other")
    return {n: v / MS for n, v in zip(names, step.phases_ns, strict=True) if v}
