"""Runs with steps in their windows, and what a comparison or a check makes of them."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import msgspec

from gpuwatch.errors import TargetError
from gpuwatch.schema import Versions
from gpuwatch.store.compare import Driver, compare_sides
from gpuwatch.store.track import Side, side_of
from gpuwatch.store.views import RunView
from gpuwatch.tui.sides import Chosen, Compared, Source
from tests.tui import fakes

GPU = "NVIDIA H100 80GB HBM3"
DRIVER = Driver("570.86.15", "")


def stepping(
    wait_ms: float = 91.2,
    *,
    workers: int = 4,
    first: int = 1000,
    number: int = 64,
    world: int = 2,
    run: str = "r1",
    hello: Mapping[str, Any] | None = None,
    **more: Any,
) -> RunView:
    """A run whose ranks have steps in their windows; rank 0 waits for data, the others for it.

    `hello` are fields of every hello, `more` fields of the run.
    """
    ranks = []
    for place in range(world):
        mine = wait_ms if place == 0 else 31.0
        phases = {**fakes.PHASES_MS, "data_wait": mine, "comm": 14.0 + max(0.0, wait_ms - mine)}
        window = fakes.records(phases, first=first, number=number)
        rank = fakes.rank_view(
            place, run=run, phases=phases, workers=workers, world=world, window=window
        )
        assert rank.hello is not None
        told = {
            "device_name": GPU,
            "script": "train.py --workers 4",
            "versions": Versions("0.1.0", "3.11.7", "2.13.0", "12.6", "2.21.5"),
            **(hello or {}),
        }
        ranks.append(
            replace(
                rank,
                steps=first + number,
                last=window[-1] if window else None,
                hello=msgspec.structs.replace(rank.hello, **told),
            )
        )
    return fakes.run_view(ranks, run=run, **more)


def chosen(run: RunView, name: str, kind: str = "live") -> Chosen:
    side = Side(name, kind, run, side_of(run).steps)
    return Chosen(Source(kind, name, name, f"{name}.gpuwatch", run.simulated), side)


def compared(before: RunView, after: RunView) -> Compared:
    """A saved run A against a live run B."""
    one, other = chosen(before, "0416-1802", "saved"), chosen(after, "0417")
    assert one.side is not None
    assert other.side is not None
    return Compared(one, other, compare_sides(one.side, other.side, (DRIVER, DRIVER)))


class FakeShelf:
    """Recordings that are runs made up here; a path that is none of them cannot be read."""

    def __init__(self, runs: Mapping[str, RunView], given: tuple[str, ...] = ()) -> None:
        self.given = given
        self._runs = dict(runs)

    def paths(self) -> tuple[str, ...]:
        return (*self.given, *(path for path in self._runs if path not in self.given))

    def load(self, path: str) -> Side:
        if path not in self._runs:
            raise TargetError(f"there is no file {path}")
        run = self._runs[path]
        return Side(path.partition(".")[0], "saved", run, side_of(run).steps)

    def driver(self, path: str) -> Driver:
        assert path in self._runs
        return DRIVER
