"""A training whose every phase sleeps a known time, run by the tests alone or under torchrun.

It also keeps its own time: at every change of phase it looks at its clock, around the fetch, around
the call of a DDP module until its forward begins, around backward, from the last node of backward
to its return, around the optimizer. So the truth holds the real work too, whatever the machine.

Arguments: how it is watched (`run`: not at all by itself, `step`: by `watch()` and `step()`), and
the scenarios, in the order in which they run. Writes one JSON line for each scenario into the file
named in DONE with ".<rank>" at its end, then waits for DONE so that its past can be asked for.
"""

import faulthandler
import functools
import json
import os
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

faulthandler.dump_traceback_later(110, exit=True)

STEPS = 10
LATE_MS = 30.0
SLOW_MS = 25.0
BASE_MS = {"data_wait": 9.0, "forward": 11.0, "backward": 14.0, "optimizer": 7.0, "other": 5.0}


class Truth:
    """Seconds of each phase, step by step."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []
        self._seconds: dict[str, float] = {}
        self._phase = "other"
        self._since_s = time.perf_counter()
        self._stepped = False

    def enter(self, phase: str) -> str:
        """From now on time belongs to that phase; returns the one before. A fetch after an
        optimizer begins a step.
        """
        now_s = time.perf_counter()
        seconds = self._seconds
        seconds[self._phase] = seconds.get(self._phase, 0.0) + now_s - self._since_s
        if phase == "data_wait" and self._stepped:
            self.end_step()
        self._stepped = self._stepped or phase == "optimizer"
        before, self._phase, self._since_s = self._phase, phase, now_s
        return before

    def end_step(self) -> None:
        self.steps.append({name: s * 1e3 for name, s in self._seconds.items()})
        self._seconds.clear()
        self._stepped = False


truth = Truth()
ms: dict[str, float] = {}
"""What each phase sleeps in this scenario and on this rank."""


def nap(phase: str) -> None:
    time.sleep(ms[phase] / 1e3)


# --- what sleeps -------------------------------------------------------------------------------


class Slow(torch.autograd.Function):
    """The last node of the forward, and so the first of the backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        nap("forward")
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        truth.enter("backward")
        nap("backward")
        return grads[0]


class Last(torch.autograd.Function):
    """The first node of the forward: when its backward has run, nothing is left to compute."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        if dist.is_initialized():
            truth.enter("comm")
        return grads[0]


class Net(torch.nn.Module):
    def __init__(self, norm: bool = False) -> None:
        super().__init__()
        layers: list[torch.nn.Module] = [torch.nn.Linear(16, 16)]
        if norm:
            layers.append(torch.nn.BatchNorm1d(16))
        self.layers = torch.nn.Sequential(*layers, torch.nn.Linear(16, 1))
        self.norm = norm

    def forward(self, x: torch.Tensor) -> Any:
        if self.norm and dist.is_initialized():
            truth.enter("forward")  # DDP has broadcast its buffers
        hidden = self.layers(Last.apply(x.requires_grad_()))  # type: ignore[no-untyped-call]
        out: torch.Tensor = Slow.apply(hidden)  # type: ignore[no-untyped-call]
        return {"loss": out.mean()}


class Items(Dataset[torch.Tensor]):
    """In a framework's loop nobody else sees when it fetches: then the `stamps` are its own."""

    def __init__(self, batches: int, *, stamps: bool = False) -> None:
        self.batches = batches
        self.stamps = stamps

    def __len__(self) -> int:
        return 4 * self.batches

    def __getitems__(self, indices: list[int]) -> list[torch.Tensor]:
        if self.stamps:
            truth.enter("data_wait")
        nap("data_wait")
        return [torch.ones(16)] * len(indices)

    def collate(self, items: list[torch.Tensor]) -> Any:
        batch = torch.stack(items)
        if self.stamps:
            truth.enter("forward")
            return {"x": batch}
        return batch


class SlowSGD(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        found = None if closure is None else closure()
        truth.enter("optimizer")
        nap("optimizer")
        super().step()
        truth.enter("other")
        return found


def slow_hook(
    _: Any,
    bucket: dist.GradBucket,  # type: ignore[name-defined]
) -> torch.futures.Future[torch.Tensor]:
    """An all-reduce that takes longer, while the training thread has nothing left to do."""
    work = dist.all_reduce(bucket.buffer(), async_op=True)
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future()

    def finish() -> None:
        work.wait()
        time.sleep(SLOW_MS / 1e3)
        done.set_result(bucket.buffer())

    threading.Thread(target=finish).start()
    return done


# --- loops -------------------------------------------------------------------------------------


def plain(word: str, norm: bool, step: Callable[[], None] | None) -> None:
    window = 2 if word == "accumulate" else 1
    net: torch.nn.Module = Net(norm)
    if dist.is_initialized():
        net = DistributedDataParallel(net)
        if word == "slow":
            net.register_comm_hook(None, slow_hook)
    optimizer = SlowSGD(net.parameters(), lr=0.01)
    items = Items(STEPS * window)
    batches = iter(DataLoader(items, batch_size=4, collate_fn=items.collate))
    for n in range(STEPS * window):
        truth.enter("data_wait")
        batch = next(batches)
        truth.enter("comm" if norm and dist.is_initialized() else "forward")
        loss = net(batch)["loss"] / window
        truth.enter("backward")
        loss.backward()
        truth.enter("other")
        if n % window == window - 1:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            nap("other")
            if step is not None:
                step()
                truth.enter("other")
                truth.end_step()
    truth.enter("data_wait")
    assert next(batches, None) is None


def accelerate_loop(window: int) -> None:
    from accelerate import Accelerator

    import gpuwatch.integrations.accelerate

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=window)
    gpuwatch.integrations.accelerate.watch(accelerator)
    ranks = accelerator.num_processes
    items = Items(STEPS * window * ranks, stamps=True)
    loader = DataLoader(items, batch_size=4, collate_fn=items.collate)
    net = Net()
    net, optimizer, loader = accelerator.prepare(net, SlowSGD(net.parameters(), lr=0.01), loader)
    for batch in loader:
        with accelerator.accumulate(net):
            loss = net(batch["x"])["loss"]
            truth.enter("backward")
            accelerator.backward(loss)
            truth.enter("other")
            optimizer.step()
            optimizer.zero_grad()
            if accelerator.sync_gradients:
                nap("other")


def transformers_loop(window: int) -> None:
    from transformers import Trainer, TrainingArguments

    from gpuwatch.integrations.transformers import GpuwatchCallback

    class Timed(Trainer):  # type: ignore[misc]
        def training_step(self, *args: Any, **kwargs: Any) -> Any:
            truth.enter("forward")  # a window is fetched as a whole
            found = super().training_step(*args, **kwargs)
            truth.enter("other")
            return found

    class Naps(GpuwatchCallback):
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            nap("other")

    ranks = dist.get_world_size() if dist.is_initialized() else 1
    items = Items(STEPS * window * ranks, stamps=True)
    net = Net()
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=4,
            gradient_accumulation_steps=window,
            num_train_epochs=1,
            save_strategy="no",
            logging_strategy="no",
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
            remove_unused_columns=False,
        )
        Timed(
            model=net,
            args=arguments,
            train_dataset=items,
            data_collator=items.collate,
            optimizers=(SlowSGD(net.parameters(), lr=0.01), None),
            callbacks=[Naps()],
        ).train()


def timed(collective: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(collective)
    def call(*args: Any, **kwargs: Any) -> Any:
        before = truth.enter("comm")
        found = collective(*args, **kwargs)
        truth.enter(before)
        return found

    return call


def lightning_loop(window: int) -> None:
    import lightning

    from gpuwatch.integrations.lightning import GpuwatchCallback

    class Module(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.net = Net()

        def training_step(self, batch: Any, index: int) -> Any:
            return self.net(batch["x"])["loss"]

        def on_before_backward(self, loss: Any) -> None:
            truth.enter("backward")

        def on_after_backward(self) -> None:
            truth.enter("other")

        def on_train_batch_end(self, outputs: Any, batch: Any, index: int) -> None:
            if index % window == window - 1:
                nap("other")

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return SlowSGD(self.parameters(), lr=0.01)

    # Before every batch the ranks tell each other that none of them is to stop.
    dist.broadcast = timed(dist.broadcast)
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    items = Items(STEPS * window * ranks, stamps=True)
    with tempfile.TemporaryDirectory() as folder:
        lightning.Trainer(
            max_epochs=1,
            accelerator="cpu",
            devices=ranks,
            strategy="ddp" if ranks > 1 else "auto",
            accumulate_grad_batches=window,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=folder,
            callbacks=[GpuwatchCallback()],
        ).fit(Module(), DataLoader(items, batch_size=4, collate_fn=items.collate))


FRAMEWORKS = {
    "accelerate": accelerate_loop,
    "transformers": transformers_loop,
    "lightning": lightning_loop,
}


def main(door: str, scenarios: list[str]) -> None:
    torch.set_num_threads(1)
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    step: Callable[[], None] | None = None
    if door == "step":
        import gpuwatch

        gpuwatch.watch(name="ground-truth")
        step = gpuwatch.step
    rank = dist.get_rank() if dist.is_initialized() else 0
    first = 0
    for name in scenarios:
        word, _, more = name.partition(" ")
        torch.manual_seed(0)
        ms.clear()
        ms.update(BASE_MS)
        if word == "late" and rank == 1:
            ms[more.split()[0]] += LATE_MS
        truth.__init__()  # type: ignore[misc]
        if word in FRAMEWORKS:
            warnings.simplefilter("ignore")
            FRAMEWORKS[word](2 if more == "accumulate" else 1)
            truth.enter("data_wait")
        else:
            plain(word, more.endswith("norm"), step)
        last = first + STEPS
        row = {"scenario": name, "rank": rank, "first": first, "last": last, "ms": truth.steps}
        with Path(f"{os.environ['DONE']}.{rank}").open("a") as file:
            file.write(json.dumps(row) + "\n")
        first = last
    done = Path(os.environ["DONE"])
    while not done.exists():
        time.sleep(0.05)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
    sys.exit(0)
