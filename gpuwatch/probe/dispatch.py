"""Accelerate's loader of which the first rank fetches for all (`dispatch_batches=True`).

On the first rank it fetches from a DataLoader and broadcasts; on the others no DataLoader is asked
at all. So its own fetch is marked, on every rank: what the others wait for in it is the broadcast,
and that is communication (`gpuwatch.probe.comm` marks it), no data wait.

It hands out a batch when it has fetched the next one. The tensors of a batch are broadcast just
before that fetch, so their broadcast is in the step before.
"""

import weakref
from threading import get_ident
from time import perf_counter_ns
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from gpuwatch.probe.describe import queue_depth
from gpuwatch.probe.events import FETCH_BEGIN, FETCH_END, FETCH_STOP, Recorder
from gpuwatch.probe.swap import RAISED, Calls

if TYPE_CHECKING:
    from gpuwatch.probe.patches import Marks

__all__ = ["MODULE", "Dispatch", "shared_samples"]

MODULE = "accelerate.data_loader"
_NESTING = 3


def shared_samples(structure: Any, ranks: int, nesting: int = _NESTING) -> int | None:
    """Return each rank's share of the samples of a batch, None if there is no tensor near.

    `structure` is the batch with something that has a `shape` in the place of every tensor. A last
    batch that cannot be shared evenly is filled up with samples of the first one.
    """
    shape = getattr(structure, "shape", None)
    if shape is not None:
        return -(-int(shape[0]) // ranks) if len(shape) else None
    if nesting and isinstance(structure, dict | list | tuple):
        values = structure.values() if isinstance(structure, dict) else structure
        for value in values:
            return shared_samples(value, ranks, nesting - 1)
    return None


class Dispatch:
    """Installs its marks through `marks`, as soon as the script has imported Accelerate."""

    def __init__(self, marks: "Marks", recorder: Recorder) -> None:
        self._marks = marks
        self._recorder = recorder
        self._on = False
        self.fetching = False  # the DataLoader asked meanwhile is asked on behalf of all ranks
        self.iterator: weakref.ref[Any] | None = None  # of the DataLoader
        # The loaders that are in the middle of a pass, and their keys.
        self._keys: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()

    def install(self, module: Any) -> None:
        """Put the marks on the module, unless it is not complete yet or an unknown version."""
        loader: Any = getattr(module, "DataLoaderDispatcher", None)
        if self._on or not hasattr(loader, "_fetch_batches") or not hasattr(loader, "begin"):
            return
        self._on = True
        self._marks.mark(loader, "_fetch_batches", self._fetch())
        owner = next(cls for cls in loader.__mro__ if "begin" in vars(cls))
        self._marks.mark(owner, "begin", self._pass())

    def _pass(self) -> Calls:
        keys = self._keys

        def pass_begins(loader: Any) -> None:
            keys.pop(loader, None)

        def pass_has_begun(_: None, value: Any) -> Any:
            return value

        return pass_begins, pass_has_begun

    def _fetch(self) -> Calls:
        marks = self._marks

        def fetch_begins(loader: Any) -> Any:
            if get_ident() != marks.thread and not marks.sign():
                return None
            try:
                self._begin(loader)
            except Exception:
                marks.fail()
                return None
            self.fetching = True
            return loader

        def fetch_ends(loader: Any, value: Any) -> Any:
            if loader is not None:
                self.fetching = False
                try:
                    self._end(loader, value)
                except Exception:
                    marks.fail()
            return value

        return fetch_begins, fetch_ends

    def _begin(self, loader: Any) -> None:
        key = self._keys.get(loader)
        first = key is None
        if key is None:
            base = loader.base_dataloader
            key = self._keys[loader] = self._marks.see_loader(
                # What an iterator of it would look like; on the first rank there is a real one.
                SimpleNamespace(
                    _dataset=base.dataset,
                    _index_sampler=base._index_sampler,
                    _num_workers=base.num_workers,
                    _prefetch_factor=base.prefetch_factor,
                    _pin_memory=base.pin_memory,
                    _persistent_workers=base.persistent_workers,
                    _drop_last=base.drop_last,
                    _collate_fn=base.collate_fn,
                )
            )
        now_ns = perf_counter_ns()
        iterator = None if self.iterator is None else self.iterator()
        if iterator is None or not self._marks.may_be_dear(now_ns):
            self._recorder.push((FETCH_BEGIN, now_ns, key, first))
        else:
            self._recorder.push((FETCH_BEGIN, now_ns, key, first, *queue_depth(iterator)))

    def _end(self, loader: Any, value: Any) -> None:
        push, now_ns = self._recorder.push, perf_counter_ns()
        if value is RAISED:
            push((FETCH_STOP, now_ns, True))
            return
        structure, _ = value[1]
        if structure is None:
            push((FETCH_STOP, now_ns))
            return
        push((FETCH_END, now_ns, shared_samples(structure, loader.state.num_processes)))
        if loader._stop_iteration:
            # The rest of an epoch: nobody will ask for more.
            push((FETCH_BEGIN, now_ns, self._keys[loader], False))
            push((FETCH_STOP, now_ns))
