"""One rank of the two-rank test: trains through the public seams and checks what only a rank can.

Started from test_distributed.py; prints one JSON object from rank 0.
"""

import faulthandler
import json
import sys

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from trainer.distributed import checksum, sync_buffers
from trainer.report import Reporter
from trainer.run import open_trainer
from trainer.sources import load


def main() -> None:
    faulthandler.dump_traceback_later(50, exit=True)
    path, *more = sys.argv[1:]
    config = load(["--data.path", path, *more])
    reduced = 0

    # DDP insists on these very annotations.
    def count(_state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:  # type: ignore[name-defined]
        nonlocal reduced
        reduced += 1
        return allreduce_hook(dist.distributed_c10d._get_default_group(), bucket)

    with open_trainer(config, reporter=Reporter(enabled=False)) as trainer:
        assert isinstance(trainer.replica, DistributedDataParallel)
        trainer.replica.register_comm_hook(None, count)
        losses = []
        update = trainer.update

        def recorded() -> None:
            update()
            sums = [""] * dist.get_world_size()
            parameters = torch.nn.Module()
            for index, parameter in enumerate(trainer.model.parameters()):
                parameters.register_parameter(str(index), parameter)
            dist.all_gather_object(sums, checksum(parameters))
            equal.append(len(set(sums)) == 1)

        equal: list[bool] = []
        trainer.update = recorded  # type: ignore[method-assign]
        for epoch in range(3):
            trainer.train_epoch(epoch)
            losses.append(trainer.evaluate(epoch + 1).loss)  # type: ignore[union-attr]
        dist.barrier()
        trainer.loaders.set_epoch(0)
        seen = sorted(iter(trainer.loaders.sampler))
        both: list[list[int]] = [[], []]
        dist.all_gather_object(both, seen)
        sync_buffers(trainer.model)
        sums = ["", ""]
        dist.all_gather_object(sums, checksum(trainer.model))
        if trainer.placement.rank == 0:
            report = {
                "world": trainer.placement.world_size,
                "losses": losses,
                "equal_after_each_step": equal,
                "equal_at_the_end": sums[0] == sums[1],
                "steps": trainer.step,
                "batches": len(trainer.loaders.train),
                "reduced": reduced,
                "shards_overlap": len(set(both[0]) & set(both[1])),
                "images": len(trainer.loaders.images),
            }
            print(json.dumps(report), flush=True)


if __name__ == "__main__":
    main()
