"""The hook that gradients travel through: what it makes of them, and that it can be changed."""

import json
import uuid
from pathlib import Path
from typing import Any, get_args

import pytest
import support
import torch
import torch.distributed as dist
import zmq
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from gpuwatch.diagnosis import Hint
from gpuwatch.diagnosis.howto import lines_of
from gpuwatch.frames import decode_rank_frame, encode
from gpuwatch.schema import WIRE_VERSION, Command, RankFrame
from trainer.config import Compression, DistConfig
from trainer.distributed.hooks import NONE, CommHook, comm_hook
from trainer.errors import ConfigError
from trainer.sources import load

pytestmark = pytest.mark.usefixtures("one_thread")

FP16, BF16 = "fp16_compress_hook", "bf16_compress_hook"
KINDS = (NONE, FP16, BF16)


class Done(dist._Work):
    def __init__(self, tensors: list[torch.Tensor]) -> None:
        super().__init__()
        self._future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()
        self._future.set_result(tensors)

    def wait(self, _timeout: Any = None) -> bool:
        return True

    def get_future(self) -> Any:
        return self._future


class Alone(dist.ProcessGroup):
    """One rank of several whose others add nothing: what is left is what was sent."""

    def __init__(self, ranks: int, name: str = "alone") -> None:
        super().__init__(0, ranks)
        self._ranks, self._name = ranks, name
        self.sent: list[torch.dtype] = []

    def size(self) -> int:
        return self._ranks

    def name(self) -> str:
        return self._name

    def getBackendName(self) -> str:  # noqa: N802
        return self._name

    def allreduce(self, tensors: list[torch.Tensor], _options: Any = None) -> Done:
        self.sent.append(tensors[0].dtype)
        return Done(tensors)

    def allgather(
        self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], _options: Any = None
    ) -> Done:
        for each, mine in zip(outputs, inputs, strict=True):
            for one in each:
                one.copy_(mine)
        return Done([])

    def broadcast(self, tensors: list[torch.Tensor], _options: Any = None) -> Done:
        return Done(tensors)


def replica(group: Alone, dtype: torch.dtype = torch.float32) -> DistributedDataParallel:
    """A replica with several buckets."""
    torch.manual_seed(1)
    stack = [torch.nn.Linear(48, 48) for _ in range(4)]
    return DistributedDataParallel(
        torch.nn.Sequential(*stack).to(dtype),
        process_group=group,
        bucket_cap_mb=0.01,
        gradient_as_bucket_view=True,
    )


def gradients(net: DistributedDataParallel) -> list[torch.Tensor]:
    """What two steps leave; the buckets have been rebuilt after the first."""
    torch.manual_seed(2)
    dtype = next(net.parameters()).dtype
    for _ in range(2):
        net.zero_grad()
        # As large as no loss is: the smallest gradients of it are above what fp16 can hold.
        (1000 * net(torch.randn(8, 48, dtype=dtype))).square().mean().backward()
    return [p.grad.clone() for p in net.parameters() if p.grad is not None]


def hooked(group: Alone, kind: str = NONE, dtype: torch.dtype = torch.float32) -> Any:
    net = replica(group, dtype)
    hook = comm_hook(net, DistConfig(), live=True)
    assert hook is not None
    hook.use(kind)
    return net


@pytest.mark.parametrize("ranks", [2, 3, 7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_none_is_ddps_own_mean_bit_for_bit(ranks: int, dtype: torch.dtype) -> None:
    own, ours = Alone(ranks), Alone(ranks)
    plain = gradients(replica(own, dtype))
    assert len(own.sent) > 2
    for mine, theirs in zip(gradients(hooked(ours, NONE, dtype)), plain, strict=True):
        assert torch.equal(mine, theirs)
    assert ours.sent == own.sent == [dtype] * len(own.sent)


@pytest.mark.parametrize(("kind", "dtype"), [(FP16, torch.float16), (BF16, torch.bfloat16)])
def test_compressed_ones_are_off_by_two_roundings(kind: str, dtype: torch.dtype) -> None:
    group = Alone(3)
    plain = gradients(replica(Alone(3)))
    limits = torch.finfo(dtype)
    # Half an eps where the format is taken on, and half where it is divided by the ranks; numbers
    # below the least normal one have so many digits less.
    for mine, exact in zip(gradients(hooked(group, kind)), plain, strict=True):
        assert mine.dtype == torch.float32
        torch.testing.assert_close(
            mine, exact, rtol=1.01 * limits.eps, atol=limits.tiny * limits.eps
        )
        assert not torch.equal(mine, exact)
    assert set(group.sent) == {dtype}


def test_it_follows_its_kind_from_one_backward_to_the_next() -> None:
    group = Alone(3)
    net = hooked(group)
    ((hook, _),) = net._comm_hooks
    sent = []
    for kind in (NONE, BF16, NONE, FP16, NONE):
        hook.use(kind)
        group.sent.clear()
        found = gradients(net)
        sent.append(set(group.sent))
        assert hook.__name__ == ("" if kind == NONE else kind)
    assert sent == [
        {torch.float32}, {torch.bfloat16}, {torch.float32}, {torch.float16}, {torch.float32},
    ]  # fmt: skip
    # Nothing of the others stays.
    for mine, theirs in zip(found, gradients(replica(Alone(3))), strict=True):
        assert torch.equal(mine, theirs)
    with pytest.raises(ValueError, match="comm_hook must be one of none, fp16_compress_hook, bf16"):
        hook.use("powerSGD_hook")
    assert hook.kind == NONE


def test_nothing_is_registered_unless_it_is_asked_for() -> None:
    net = replica(Alone(2))
    assert comm_hook(net, DistConfig(), live=False) is None
    alone = replica(Alone(1))
    assert comm_hook(alone, DistConfig(comm_hook=BF16), live=True) is None
    assert net._comm_hooks == alone._comm_hooks == []
    assert comm_hook(torch.nn.Linear(2, 2), DistConfig(comm_hook=BF16), live=True) is None
    hook = comm_hook(net, DistConfig(comm_hook=BF16), live=False)
    assert isinstance(hook, CommHook)
    assert (hook.kind, hook.__name__, hook.kinds) == (BF16, BF16, KINDS)
    assert net._comm_hooks == [(hook, None)]


def test_an_old_nccl_has_no_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 9, 6))
    net = replica(Alone(2, "nccl"))
    with pytest.raises(ConfigError, match=r"comm_hook=bf16_compress_hook needs NCCL 2\.10"):
        comm_hook(net, DistConfig(comm_hook=BF16), live=False)
    assert net._comm_hooks == []
    hook = comm_hook(net, DistConfig(comm_hook=FP16), live=True)
    assert hook is not None
    assert hook.kinds == (NONE, FP16)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 10, 3))
    hook = comm_hook(replica(Alone(2, "nccl")), DistConfig(), live=True)
    assert hook is not None
    assert hook.kinds == KINDS


def test_the_words_are_torchs_and_those_of_hints() -> None:
    assert get_args(Compression) == (FP16, BF16)
    for kind in get_args(Compression):
        assert callable(getattr(default_hooks, kind))
        line = lines_of(Hint("compress", "comm_hook", NONE, kind))["trainer"]
        assert load(line.split(), environ={}).dist.comm_hook == kind
    assert load(["--dist.comm_hook", "none"], environ={}).dist.comm_hook is None


# --- two ranks, and a monitor -------------------------------------------------------------------

TIMEOUT_S = 60.0
SMALL = (
    "--data.image_px=16 --model.width=4 --train.threads=1 --loader.num_workers=0 "
    "--loader.batch_size=4 --data.eval_fraction=0 --train.eval_interval_epochs=0 "
    "--train.steps=1000000 --train.manifest=false --faults.forward_ms=10"
)


def told(frame: RankFrame) -> tuple[str, str]:
    """The knob as it stands, and what DDP is seen to do."""
    assert frame.hello is not None
    assert frame.hello.ddp is not None
    (value,) = (knob.value for knob in frame.hello.knobs if knob.name == "comm_hook")
    return str(value), frame.hello.ddp.comm_hook


def set_on_both(rundir: Path, value: str) -> list[str]:
    """Set the knob on both ranks; returns how each says that it ended."""
    ident = uuid.uuid4().hex
    args = {"knob": "comm_hook", "value": value}
    command = encode(Command(WIRE_VERSION, ident, "set", rank=None, args=args, ttl_s=TIMEOUT_S))
    presences = support.rank_presences(rundir)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        asked = []
        # To both before either is waited for: they agree on a step.
        for presence in presences:
            request = context.socket(zmq.DEALER)
            request.connect(presence.control)
            request.send(command)
            asked.append(request)
        for request in asked:
            assert request.poll(TIMEOUT_S * 1000)
            (reply,) = decode_rank_frame(request.recv()).replies
            assert reply.status == "accepted", reply
    finally:
        context.destroy(linger=0)

    def ends() -> list[str]:
        return [
            logged.message
            for frame in support.snapshots(rundir)
            for logged in frame.commands
            if logged.id == ident and logged.status == "done"
        ]

    support.wait_until(lambda: len(ends()) == 2, TIMEOUT_S, "both ranks have done it")
    return ends()


@pytest.mark.distributed
def test_two_ranks_change_it_on_the_same_step(
    jpegs: Path, zygote: support.Zygote, rundir: Path, tmp_path: Path
) -> None:
    out, enough = tmp_path / "out", tmp_path / "enough"
    script = str(Path(__file__).with_name("hook_run.py"))
    argv = [script, str(jpegs), str(enough), *SMALL.split(), "--train.allow_control=true"]
    firsts = []
    with support.Ranks(zygote, argv, support.environment(rundir), out) as ranks:

        def at_least(step: int) -> bool:
            assert ranks.poll() is None, support.text_of(out)
            frames = support.snapshots(rundir)
            return len(frames) == 2 and all(frame.state.step >= step for frame in frames)

        support.wait_until(lambda: at_least(5), TIMEOUT_S, "both ranks step")
        assert [told(frame) for frame in support.snapshots(rundir)] == [(NONE, "")] * 2
        for old, new in ((NONE, BF16), (BF16, NONE)):
            words, other = set_on_both(rundir, new)
            assert words == other
            change, _, rest = words.partition(" from step ")
            assert change == f"comm_hook {old} -> {new}"
            firsts.append(first := int(rest.split()[0]))
            support.wait_until(lambda at=first: at_least(at + 6), TIMEOUT_S, "steps with it")
            frames = support.snapshots(rundir)
            assert [told(frame) for frame in frames] == [(new, "" if new == NONE else new)] * 2
            # What ranks wait for is seen as ever.
            for frame in frames:
                steps = [record for record in frame.records if record.index >= first]
                assert len(steps) >= 5
                assert all(record.host.comm for record in steps)
        enough.touch()
        assert ranks.wait(TIMEOUT_S) == 0, support.text_of(out)
    rows = [json.loads(s) for s in support.text_of(out).splitlines() if s[:1] == "{"]
    assert sorted(row["rank"] for row in rows) == [0, 1]
    for row in rows:
        assert row["coarse"] == list(range(*firsts))
        assert len(row["equal"]) == row["steps"] // 8
        assert all(row["equal"])
        assert row["as_without"]
