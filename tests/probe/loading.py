"""Loaders of every kind whose datasets know what their batches cost, run by the tests.

Each scenario prints one JSON line: what the dataset and the collate function measured of
themselves, and what else can be seen from outside. Then it waits for the file named in DONE.
"""

import contextlib
import faulthandler
import gc
import json
import os
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

faulthandler.dump_traceback_later(100, exit=True)

if __name__ == "__mp_main__" and os.environ.get("WITHOUT_GPUWATCH"):
    sys.modules["gpuwatch"] = None  # type: ignore[assignment]  # a worker that cannot import it

SLEEP_S = 0.020
CPU_S = 0.006
COLLATE_S = 0.012
BATCHES = 8


def burn(cpu_s: float) -> None:
    end_s = time.thread_time() + cpu_s
    while time.thread_time() < end_s:
        pass


def item(sleep_s: float, cpu_s: float) -> torch.Tensor:
    """An item that costs this much; what it holds are the wall and CPU seconds it took."""
    wall_s, used_s = time.perf_counter(), time.process_time()
    time.sleep(sleep_s)
    # In a thread of its own, as a decoder with a pool would.
    thread = threading.Thread(target=burn, args=(cpu_s,))
    thread.start()
    thread.join()
    return torch.tensor(
        [time.perf_counter() - wall_s, time.process_time() - used_s], dtype=torch.float64
    )


def slow_collate(items: list[torch.Tensor]) -> torch.Tensor:
    """(wall, CPU, collating) of the batch."""
    began_s = time.perf_counter()
    wall_s, used_s = torch.stack(items).sum(0).tolist()
    time.sleep(COLLATE_S)
    collate_s = time.perf_counter() - began_s
    return torch.tensor([wall_s + collate_s, used_s, collate_s], dtype=torch.float64)


def broken_collate(items: list[torch.Tensor]) -> torch.Tensor:
    raise OSError(5, "a broken collate_fn")


class Items(Dataset[torch.Tensor]):
    def __init__(self, sleep_s: float = SLEEP_S, cpu_s: float = CPU_S) -> None:
        self.cost = (sleep_s, cpu_s)
        self.mark = 0

    def __len__(self) -> int:
        return 2 * BATCHES

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == -1:
            raise ValueError("a broken item")
        return item(*self.cost)


class Stream(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        info = get_worker_info()
        assert info is not None
        for _ in range(2 * BATCHES // info.num_workers):
            yield item(SLEEP_S, CPU_S)


class Fresh(Items):
    """Says in its items which worker's `worker_init_fn` has been there."""

    def __getitem__(self, index: int) -> torch.Tensor:
        info = get_worker_info()
        assert info is not None
        assert info.dataset is self
        return torch.tensor([info.id, self.mark])


class Inner(Items):
    """A loader within the dataset: its batches are no batches of the worker."""

    def __getitem__(self, index: int) -> torch.Tensor:
        wall_s, used_s = time.perf_counter(), time.process_time()
        (inner,) = DataLoader(range(2), batch_size=2)
        assert inner.tolist() == [0, 1]
        more = [time.perf_counter() - wall_s, time.process_time() - used_s]
        return super().__getitem__(index) + torch.tensor(more, dtype=torch.float64)


def leave_mark(worker_id: int) -> None:
    info = get_worker_info()
    assert info is not None
    assert info.id == worker_id
    info.dataset.mark = 40 + worker_id  # type: ignore[attr-defined]


def failing_init(worker_id: int) -> None:
    raise KeyError("a broken worker_init_fn")


class Uncopied:
    """A `worker_init_fn` with state of its own."""

    def __init__(self) -> None:
        self.number = 0

    def __call__(self, worker_id: int) -> None:
        leave_mark(worker_id + self.number)


def say(name: str, **values: Any) -> None:
    print(json.dumps({"scenario": name, **values}), flush=True)


def total(loader: "DataLoader[torch.Tensor]", epochs: int, keep: bool) -> dict[str, Any]:
    sums = torch.zeros(3, dtype=torch.float64)
    batches = 0
    for _ in range(epochs):
        iterator = iter(loader)
        if keep:
            KEPT.append(iterator)
        for batch in iterator:
            sums += batch
            batches += 1
        del iterator
    wall_s, cpu_s, collate_s = sums.tolist()
    return {"batches": batches, "wall_s": wall_s, "cpu_s": cpu_s, "collate_s": collate_s}


def timed(
    name: str, dataset: Any, epochs: int = 1, *, keep: bool = True, warn: bool = False, **more: Any
) -> None:
    loader = DataLoader(dataset, **{"batch_size": 2, "collate_fn": slow_collate, **more})
    before = dict(vars(loader))
    with warnings.catch_warnings():
        if warn:  # pinning where there is no device
            warnings.simplefilter("ignore")
        found = total(loader, epochs, keep)
    after = vars(loader)
    same = all(after.get(k) is value for k, value in before.items() if k != "_iterator")
    say(name, **found, unchanged=same and set(after) == set(before))
    KEPT.append(dataset)


KEPT: list[Any] = []


def failure(dataset: Any, method: str, init_fn: Any = None, **more: Any) -> str:
    """What a loader raises, as the user sees it."""
    loader = DataLoader(
        dataset, num_workers=1, multiprocessing_context=method, worker_init_fn=init_fn, **more
    )
    try:
        list(loader)
    except Exception as exc:
        return f"{type(exc).__name__}: {exc}"
    return ""


def init(method: str, init_fn: Any) -> dict[str, Any]:
    """What `worker_init_fn` did, and what is left of an iterator that nobody holds."""
    loader = DataLoader(
        Fresh(), batch_size=2, num_workers=1, worker_init_fn=init_fn, multiprocessing_context=method
    )
    gc.disable()
    iterator: Any = iter(loader)
    untouched = iterator._worker_init_fn is init_fn and loader.worker_init_fn is init_fn
    rows = [row for batch in iterator for row in batch.tolist()]
    alive = weakref.ref(iterator)
    del iterator
    freed = alive() is None
    gc.enable()
    return {"rows": rows, "untouched": untouched, "freed": freed}


def main(scenarios: list[str]) -> None:
    torch.set_num_threads(1)
    if not os.environ.get("UNWATCHED"):
        import gpuwatch

        gpuwatch.watch(name="loading")
    functions = {"function": leave_mark, "object": Uncopied(), "none": None}
    for name in scenarios:
        if name in {"fork", "spawn", "forkserver"}:
            timed(name, Items(), num_workers=1, multiprocessing_context=name)
        elif name == "two workers, pinned":
            timed(name, Items(), num_workers=2, pin_memory=True, warn=True)
        elif name == "busy":
            timed(name, Items(0.0, 0.03), num_workers=1)
        elif name == "stream":
            timed(name, Stream(), num_workers=2)
        elif name == "persistent":
            timed(name, Items(), 2, num_workers=1, persistent_workers=True)
        elif name == "new workers":
            timed(name, Items(), 2, num_workers=1, keep=False)
        elif name == "loader within":
            timed(name, Inner(), num_workers=1)
        elif name == "no workers":
            timed(name, Items(), num_workers=0)
        elif name.startswith("init"):
            _, method, kind = name.split()
            say(name, **init(method, functions[kind]))
        elif name.startswith("error"):
            _, method, kind = name.split()
            if kind == "item":
                say(name, text=failure(Items(0, 0), method, sampler=[0, 0, -1, 0]))
            elif kind == "init":
                say(name, text=failure(Items(0, 0), method, failing_init))
            elif kind == "collate":
                say(name, text=failure(Items(0, 0), method, collate_fn=broken_collate))
            else:
                say(name, text=failure(Items(0, 0), method, lambda worker_id: None))
    say("all")
    done = Path(os.environ["DONE"])
    while not done.exists():
        time.sleep(0.05)


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main(json.loads(sys.argv[1]))
