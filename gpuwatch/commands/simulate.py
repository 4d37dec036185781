"""A session whose nodes have simulated GPUs: what `gpuwatch demo --simulate-gpus N` shows.

The devices are put into the pictures here, in the process of the demo: the node process, which
serves every monitor of this machine, never hears of them.
"""

from dataclasses import replace
from typing import TYPE_CHECKING

from msgspec.structs import replace as replace_struct

from gpuwatch.sensors.simulated import SimulatedGpus, simulated_uuid
from gpuwatch.store.views import RankView, RunView, View

if TYPE_CHECKING:
    from gpuwatch.commands.session import LiveSession

__all__ = ["SimulatedSession"]


class SimulatedSession:
    """Passes a live session on, with `count` simulated devices under the ranks of one run.

    The ranks compute on the CPU; the devices are as busy as the ranks are when they do not wait
    for data. Run and devices are marked as simulated.
    """

    def __init__(self, inner: "LiveSession", run: str, count: int) -> None:
        self._inner = inner
        self._run = run
        self._count = count
        self._ranks: tuple[RankView, ...] = ()
        self._gpus = SimulatedGpus(count, self._load, self._pid)

    @property
    def version(self) -> int:
        """Rises with every change."""
        return self._inner.version

    def view(self) -> View:
        """Return the present picture, with the devices in it."""
        view = self._inner.view()
        run = view.run(self._run)
        if run is None:
            return view
        self._ranks = run.ranks
        gpus = self._gpus.sample().gpus
        runs = tuple(self._marked(r) if r.run == self._run else r for r in view.runs)
        nodes = tuple(
            replace(node, gpus=gpus, gpus_reason="") if node.node in run.nodes else node
            for node in view.nodes
        )
        return replace(view, runs=runs, nodes=nodes)

    def send(
        self,
        verb: str,
        run: str,
        rank: int | None = None,
        args: dict[str, str | int | float | bool] | None = None,
    ) -> str:
        """Queue a command and return its id."""
        return self._inner.send(verb, run, rank, args)

    def close(self) -> None:
        """Let go of everything; returns within 0.5 s."""
        self._inner.close()

    def _marked(self, run: RunView) -> RunView:
        return replace(
            run, simulated=True, ranks=tuple(self._on_device(rank) for rank in run.ranks)
        )

    def _on_device(self, rank: RankView) -> RankView:
        if rank.hello is None or rank.rank >= self._count:
            return rank
        hello = replace_struct(rank.hello, device_uuid=simulated_uuid(rank.rank))
        return replace(rank, hello=hello, simulated=True)

    def _rank(self, index: int) -> RankView | None:
        return next((rank for rank in self._ranks if rank.rank == index), None)

    def _load(self, index: int) -> float | None:
        rank = self._rank(index)
        if rank is None or rank.state in {"gone", "ended"}:
            return None
        return 1.0 - (rank.data_wait_ratio or 0.0)

    def _pid(self, index: int) -> int | None:
        rank = self._rank(index)
        return None if rank is None else rank.pid
