"""Each kind on a trace of its own, with its look-alikes' signals at innocent values, and theirs."""

import random
from collections.abc import Mapping, Sequence
from typing import Any, get_args

import pytest
from builders import T0_S, Trace, node_frame
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from gpuwatch.diagnosis import Engine, Finding
from gpuwatch.diagnosis.engine import RULES, diagnose_run, picture_of
from gpuwatch.diagnosis.memory import rising
from gpuwatch.schema import Bye, Ddp, IoSample, Ledger, RankFrame, RankState, Reading, Span
from gpuwatch.store import Store
from trainer.config import Compression

HEALTHY = {"data_wait": 1.0, "forward": 30.0, "backward": 60.0, "optimizer": 5.0, "other": 2.0}
STARVED = {**HEALTHY, "data_wait": 102.0}


def found(trace: Trace) -> list[Finding]:
    store = Store(lambda: 100.0)
    store.apply(trace.node_frame, 100.0)
    view = store.view()
    return diagnose_run(picture_of(view, view.runs[0]))[0]


def first(trace: Trace) -> Finding:
    """The first finding at warning or above, and nothing else beside it at that level."""
    serious = [f for f in found(trace) if f.severity != "note"]
    assert serious, found(trace)
    assert len({f.kind for f in serious}) == 1, [(f.kind, f.cost_ms) for f in serious]
    return serious[0]


def reading(value: float, unit: str = "") -> Reading:
    return Reading(value, unit, "test")


def starving(**more: Any) -> Trace:
    options: dict[str, Any] = {
        "num_workers": 2, "queue_depth": 0.0, "worker_cpu": 10.0, "batch_ms": (398.0, 40.0, 20.0),
    }  # fmt: skip
    return Trace([STARVED] * 2, **{**options, **more})


# --- loading ------------------------------------------------------------------------------------

DISK = IoSample(
    "sda", "disk", readings={"busy_percent": reading(97.0, "%"), "read_latency": reading(40, "ms")}
)
NFS = IoSample(
    "server:/e", "dataset", "/data", "nfs4", {"read_latency": reading(60.0, "ms")}
)  # fmt: skip
QUICK_NFS = IoSample("server:/e", "dataset", "/data", "nfs4", {"read_latency": reading(2.0, "ms")})


@pytest.mark.parametrize(
    "signal",
    [
        {"worker_state": "D", "iowait": 35.0},
        {"worker_state": "D"},
        {"iowait": 60.0},
        {"io": [DISK]},
        {"io": [DISK, NFS]},
    ],
)
def test_storage_at_its_limit(signal: dict[str, Any]) -> None:
    finding = first(starving(**signal))
    assert finding.kind == "storage_slow"
    assert finding.ranks == (0, 1)
    assert finding.cost_ms == pytest.approx(101, abs=6)
    assert "num_workers" not in {hint.knob for hint in finding.hints}
    low_ms, high_ms = finding.hints[0].predicted_ms or (0.0, 0.0)
    assert 90 < low_ms < high_ms < 200


@pytest.mark.parametrize("signal", [{"io": [QUICK_NFS]}, {"iowait": 5.0}])
def test_storage_that_is_not_at_its_limit_wants_more_workers(signal: dict[str, Any]) -> None:
    assert first(starving(**signal)).kind == "loader_few_workers"


def test_decoding_that_fills_the_cores() -> None:
    trace = starving(
        batch_ms=(398.0, 390.0, 10.0), worker_cpu=98.0, cpu=100.0, cores=4, main_cpu=5.0,
        worker_state="R",
    )  # fmt: skip
    finding = first(trace)
    assert finding.kind == "cpu_decode_aug"
    assert any("too few workers: another one has no core" in text for text in finding.ruled_out)
    assert "num_workers" not in {hint.knob for hint in finding.hints}


def test_the_same_decoding_with_free_cores_wants_workers() -> None:
    trace = starving(batch_ms=(398.0, 390.0, 10.0), worker_cpu=98.0, cpu=25.0, cores=16)
    assert first(trace).kind == "loader_few_workers"


def test_many_threads_in_each_worker() -> None:
    finding = first(starving(worker_cpu=95.0, cpu=100.0, cores=4, main_cpu=5.0, threads=10.0,
                             batch_ms=(398.0, 380.0, 10.0)))  # fmt: skip
    assert finding.kind == "loader_oversub"
    assert finding.hints[0].knob == "worker_threads"
    assert all("->" not in h.change or h.new is None or h.old is None or h.new < h.old
               for h in finding.hints if h.knob == "num_workers")  # fmt: skip


def test_many_threads_that_starve_nobody_are_nothing() -> None:
    # A full machine whose step hardly waits for data: no claim that fewer threads would help.
    trace = Trace([HEALTHY] * 2, cpu=95.0, threads=40.0, worker_cpu=140.0, cores=8)
    assert [f for f in found(trace) if f.severity != "note"] == []


def test_collating_in_the_workers() -> None:
    finding = first(starving(batch_ms=(398.0, 390.0, 300.0), worker_cpu=97.0))
    assert finding.kind == "collate_ipc"
    # Without collating a batch costs 98 ms in one of two workers: the rest of the step decides.
    assert finding.cost_ms == pytest.approx(101, abs=6)


def test_a_training_process_that_is_busy_taking_batches_in() -> None:
    finding = first(starving(batch_ms=(40.0, 30.0, 5.0), worker_cpu=15.0, main_cpu=100.0))
    assert finding.kind == "collate_ipc"
    assert "num_workers" not in {hint.knob for hint in finding.hints}
    assert first(starving(batch_ms=None, worker_cpu=15.0, main_cpu=100.0)).kind == "collate_ipc"


# --- the host -----------------------------------------------------------------------------------

QUOTA = {
    "cpu_quota_cores": reading(4.0),
    "cpu_throttled_percent": reading(90.0, "%"),
    "cpu_throttled_ms_per_s": reading(6000.0, "ms/s"),
    "affinity_cores": reading(12.0),
}


@pytest.mark.parametrize("trace", [Trace([HEALTHY] * 2, limits=QUOTA), starving(limits=QUOTA)])
def test_a_quota_that_runs_out(trace: Trace) -> None:
    finding = first(trace)
    assert finding.kind == "cpu_quota"
    assert finding.ranks == (0, 1)
    # 4 cores granted, 6 held back, 12 allowed: the work would be done in 4 / 10 of the time.
    assert finding.share == pytest.approx(0.6, abs=0.02)
    assert finding.hints[0].old == 4.0
    assert finding.hints[0].new == 10.0


def test_a_quota_that_holds_nobody_back() -> None:
    calm = {**QUOTA, "cpu_throttled_percent": reading(3.0, "%")}
    assert found(Trace([HEALTHY] * 2, limits=calm)) == []


def test_one_allowed_core_that_is_full_beside_idle_ones() -> None:
    limits = {"affinity_cores": reading(1.0)}
    percents = (100.0, 2.0, 2.0, 2.0, 2.0, 2.0, 2.0, 2.0)
    trace = Trace(
        [STARVED], num_workers=8, queue_depth=0.0, worker_cpu=8.0, main_cpu=36.0, cores=8,
        cpu=14.0, limits=limits, core_percents=percents, more_hello={"cores": 1},
    )  # fmt: skip
    finding = first(trace)
    assert finding.kind == "cpu_affinity"
    assert "num_workers" not in {hint.knob for hint in finding.hints}
    assert (finding.hints[0].old, finding.hints[0].new) == (1, 8)


@pytest.mark.parametrize(
    "percents",
    [(100.0,) * 8, (30.0,) * 8, (100.0, 95.0, 90.0, 90.0, 90.0, 2.0, 2.0, 2.0)],
)
def test_no_affinity_where_all_are_full_or_others_fill_them(percents: tuple[float, ...]) -> None:
    trace = Trace(
        [HEALTHY], cores=8, core_percents=percents, limits={"affinity_cores": reading(2.0)},
        main_cpu=90.0, worker_cpu=10.0,
    )  # fmt: skip
    assert "cpu_affinity" not in {f.kind for f in found(trace)}


@pytest.mark.parametrize(
    ("kind", "signal"),
    [
        ("cpu_decode_aug", {"worker_cpu": 98.0, "worker_state": "R", "threads": 2.0}),
        ("loader_oversub", {"worker_cpu": 95.0, "threads": 10.0}),
    ],
)
def test_whose_workers_fill_the_cores_is_named_not_who_happens_to_wait(
    kind: str, signal: dict[str, Any]
) -> None:
    # The second rank waits for the first one in its collectives, and hardly for data.
    trace = Trace(
        [STARVED, {**HEALTHY, "data_wait": 4.0}],
        **{
            "num_workers": 2, "queue_depth": 0.0, "batch_ms": (398.0, 390.0, 10.0), "cpu": 100.0,
            "cores": 4, "main_cpu": 5.0, **signal,
        },
    )  # fmt: skip
    finding = next(f for f in found(trace) if f.kind == kind)
    assert finding.ranks == (0, 1)


@pytest.mark.parametrize(
    ("cpu", "main_cpu", "kind"),
    [(99.0, 98.0, "cpu_decode_aug"), (40.0, 35.0, "loader_few_workers")],
)
def test_without_workers_full_cores_are_what_workers_would_not_help(
    cpu: float, main_cpu: float, kind: str
) -> None:
    trace = Trace([STARVED] * 2, num_workers=0, cores=2, cpu=cpu, main_cpu=main_cpu)
    finding = first(trace)
    assert (finding.kind, finding.ranks) == (kind, (0, 1))


def test_one_slow_worker_is_named_and_not_their_number() -> None:
    # Two workers take turns: 400 ms from one and 20 ms from the other make steps of 200 ms.
    slow = starving(batch_ms=(20.0, 5.0, 1.0), slow_worker=20.0, queue_depth=0.6)
    finding = first(slow)
    assert finding.kind == "stall_prefetch_burst"
    assert (finding.severity, finding.ranks) == ("critical", (0, 1))
    assert "one loader worker of 2" in finding.summary
    assert "pid 2000" in finding.evidence[1].compared_with
    assert finding.cost_ms == pytest.approx(101, abs=6)
    assert "num_workers" not in {hint.knob for hint in finding.hints}


@pytest.mark.parametrize(
    "innocent",
    [
        # Slower than the others, but nobody waits for it: it is busy half of the time.
        {"batch_ms": (20.0, 5.0, 1.0), "slow_worker": 8.0},
        # All alike.
        {"batch_ms": (398.0, 40.0, 20.0), "slow_worker": 1.3},
    ],
)
def test_workers_that_are_uneven_and_not_the_limit(innocent: dict[str, Any]) -> None:
    assert "stall_prefetch_burst" not in {f.kind for f in found(starving(**innocent))}


# --- periods ------------------------------------------------------------------------------------


def spans(name: str, every: int, seconds: float, count: int = 4) -> list[Span]:
    return [
        Span(name, T0_S + n * every * 0.1, int(seconds * 1e9), (n + 1) * every)
        for n in range(count)
    ]


@pytest.mark.parametrize(
    ("name", "kind"), [("checkpoint", "stall_checkpoint"), ("eval", "stall_validation")]
)
def test_stalls_in_spans(name: str, kind: str) -> None:
    finding = first(Trace([HEALTHY] * 2, spans=spans(name, 20, 1.0)))
    assert finding.kind == kind
    # A second in twenty steps of 0.1 s.
    assert finding.cost_ms == pytest.approx(50, abs=1)
    assert finding.share == pytest.approx(1 / 3, abs=0.01)
    assert "every 20 steps" in finding.summary


def test_a_rare_checkpoint_is_none() -> None:
    # 40 s in three hours.
    trace = Trace([HEALTHY], spans=spans("checkpoint", 108_000, 40.0))
    assert found(trace) == []
    assert found(Trace([HEALTHY], spans=spans("checkpoint", 20, 1.0, count=1))) == []


def test_the_slow_step_after_a_checkpoint_is_its_cost_too() -> None:
    saves = spans("checkpoint", 30, 0.001, count=3)
    late = {31 - 1: 5000.0, 61 - 1: 5000.0}
    trace = Trace([HEALTHY], spans=saves, first_batch_ms=None, steps=66)
    frames = trace.frames
    records = list(frames[0].records)
    for index, more_ms in late.items():
        old = records[index]
        records[index] = _longer(old, more_ms)
    trace.frames = [_with_records(frames[0], records)]
    kinds = [f.kind for f in found(trace) if f.severity != "note"]
    assert kinds[:1] == ["stall_checkpoint"], [(f.kind, f.cost_ms) for f in found(trace)]


def _longer(step: Any, more_ms: float) -> Any:
    host = replace(step.host, forward=step.host.forward + int(more_ms * 1e6))
    return replace(step, step_ns=step.step_ns + int(more_ms * 1e6), host=host)


def _with_records(frame: Any, records: Sequence[Any]) -> Any:
    return replace(frame, records=tuple(records))


def epochs(persistent: bool, waits_ms: float = 1000.0) -> Trace:
    late = dict.fromkeys((20, 40, 60), waits_ms)
    return Trace([HEALTHY], first_batch_ms=late, persistent_workers=persistent)


def test_workers_that_start_anew_at_each_epoch() -> None:
    finding = first(epochs(persistent=False))
    assert finding.kind == "worker_restart"
    assert finding.cost_ms == pytest.approx(50, abs=2)
    assert (finding.hints[0].old, finding.hints[0].new) == (False, True)
    assert found(epochs(persistent=True)) == []
    assert found(epochs(persistent=False, waits_ms=40.0)) == []


def test_the_rank_that_is_ready_a_little_sooner_is_named_too() -> None:
    def kinds(first_ms: float, other_ms: float) -> dict[str, tuple[int, ...]]:
        late = dict.fromkeys((20, 40, 60), first_ms)
        trace = Trace([HEALTHY] * 2, first_batch_ms=late, persistent_workers=False)
        records = [
            _longer_wait(step, other_ms) if step.index in late else step
            for step in trace.frames[1].records
        ]
        trace.frames = [trace.frames[0], _with_records(trace.frames[1], records)]
        return {f.kind: f.ranks for f in found(trace)}

    assert kinds(120.0, 40.0)["worker_restart"] == (0, 1)
    assert kinds(120.0, 10.0)["worker_restart"] == (0,)
    assert "worker_restart" not in kinds(40.0, 40.0)


def test_batches_in_bursts_are_a_note_with_the_workers_period() -> None:
    waits = [400.0 if n % 8 == 0 else 1.0 for n in range(70)]
    trace = Trace([HEALTHY], num_workers=8, queue_depth=3.0)
    records = [
        _longer_wait(step, wait) for step, wait in zip(trace.frames[0].records, waits, strict=True)
    ]
    trace.frames = [_with_records(trace.frames[0], records)]
    (finding,) = found(trace)
    assert (finding.kind, finding.severity) == ("stall_prefetch_burst", "note")
    assert "one step in 8" in finding.summary
    # The same waits in another period are no burst.
    waits = [400.0 if n % 5 == 0 else 1.0 for n in range(70)]
    records = [_longer_wait(s, w) for s, w in zip(trace.frames[0].records, waits, strict=True)]
    trace.frames = [_with_records(trace.frames[0], records)]
    assert "stall_prefetch_burst" not in {f.kind for f in found(trace)}


def _longer_wait(step: Any, wait_ms: float) -> Any:
    wait_ns = int(wait_ms * 1e6)
    step_ns = step.step_ns - step.host.data_wait + wait_ns
    return replace(step, step_ns=step_ns, host=replace(step.host, data_wait=wait_ns))


def test_logging_in_every_step() -> None:
    finding = first(Trace([{**HEALTHY, "other": 40.0}] * 2))
    assert finding.kind == "stall_log_sync"
    assert finding.cost_ms == pytest.approx(40, abs=3)
    assert finding.ranks == (0, 1)
    assert found(Trace([{**HEALTHY, "other": 6.0}] * 2)) == []


# --- rotating lateness --------------------------------------------------------------------------


def jitter(ranks: int, late_ms: float, scatter: float = 0.02, seed: int = 1) -> Trace:
    """Another rank is late in each step; the others wait for it."""
    trace = Trace([HEALTHY] * ranks, scatter=scatter, seed=seed)
    rng = random.Random(seed)
    rows = [list(frame.records) for frame in trace.frames]
    for step in range(len(rows[0])):
        late = rng.randrange(ranks)
        for rank, row in enumerate(rows):
            phase = "forward" if rank == late else "comm"
            host = replace(
                row[step].host,
                **{phase: getattr(row[step].host, phase) + int(late_ms * 1e6)},
            )
            row[step] = replace(
                row[step], step_ns=row[step].step_ns + int(late_ms * 1e6), host=host
            )
    trace.frames = [
        _with_records(frame, row) for frame, row in zip(trace.frames, rows, strict=True)
    ]
    return trace


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_ranks_that_are_late_in_turn(ranks: int) -> None:
    finding = first(jitter(ranks, 40.0))
    assert finding.kind == "straggler"
    assert "take turns" in finding.summary
    assert "in forward" in finding.summary
    assert finding.cost_ms == pytest.approx(40, abs=8)


@pytest.mark.parametrize("ranks", [2, 3, 8])
@given(seed=st.integers(0, 10**6), scatter=st.floats(0.0, 0.3))
@settings(max_examples=25, deadline=None)
def test_scatter_alone_is_no_lateness_in_turn(ranks: int, seed: int, scatter: float) -> None:
    trace = Trace([HEALTHY] * ranks, scatter=scatter, seed=seed)
    assert [f for f in found(trace) if f.severity != "note"] == []


def test_several_slow_loaders_are_no_ranks_that_take_turns() -> None:
    # Eight ranks of 32 wait for data in every step; which of them is last is chance.
    slow = {**HEALTHY, "data_wait": 60.0}
    trace = Trace(
        [{**HEALTHY, "data_wait": 3.0}] * 24 + [slow] * 8, scatter=0.15, queue_depth=0.0,
        num_workers=4, worker_cpu=20.0, cores=64, cpu=20.0,
    )  # fmt: skip
    serious = [f for f in found(trace) if f.severity != "note"]
    assert [(f.kind, f.ranks) for f in serious] == [("loader_few_workers", tuple(range(24, 32)))]
    (hint,) = serious[0].hints
    assert hint.predicted_ms is not None
    # Twice the workers take most of the wait away, on the ranks that have it.
    assert hint.predicted_ms[0] < 125


# --- communication ------------------------------------------------------------------------------


def bound(ddp: Ddp | None, *, nodes: int = 2, **more: Any) -> Finding:
    """A job of 97 ms of its own and 60 ms of transfer a step, each rank on a node if on two."""
    trace = Trace([HEALTHY] * 2, transfer_ms=60.0, **more)
    store = Store(lambda: 100.0)
    for rank, frame in enumerate(trace.frames):
        assert frame.hello is not None
        told = replace(frame, hello=replace(frame.hello, ddp=ddp))
        node = f"node{rank % nodes}"
        store.apply(node_frame(rank + 1, [told], sensors=trace.sensors, node=node), 100.0)
    view = store.view()
    (finding,) = diagnose_run(picture_of(view, view.runs[0]))[0]
    return finding


def predicted(finding: Finding) -> dict[str, tuple[float, float]]:
    return {h.knob: h.predicted_ms for h in finding.hints if h.predicted_ms is not None}


def test_what_compression_and_accumulation_would_bring() -> None:
    many = Ddp(gradient_bytes=100 * 2**20, backend="nccl", bucket_bytes=(2**20,) * 10)
    finding = bound(many)
    step_ms = 60 / (finding.share or 1.0)
    gains = {k: (step_ms - v[1], step_ms - v[0]) for k, v in predicted(finding).items()}
    assert set(gains) == {"comm_hook", "gradient_accumulation"}
    # Half the bytes save up to half of the transfer; half the reductions save half of it.
    assert gains["comm_hook"] == pytest.approx((18, 30), abs=2)
    assert gains["gradient_accumulation"] == pytest.approx((21, 30), abs=2)
    # On the CPUs of one machine converting gradients takes what it saves.
    assert "comm_hook" not in predicted(bound(many, nodes=1))
    # The trainer's knob takes it, in its words.
    for backend in ("nccl", "gloo"):
        hints = {h.knob: h for h in bound(replace(many, backend=backend)).hints}
        assert hints["comm_hook"].old == "none"
        assert hints["comm_hook"].new in get_args(Compression)


@pytest.mark.parametrize(
    ("ours", "megabytes", "severity"),
    [
        # The ranks' own moving of data fills the cores: that is the communication.
        (96.0, 48, "critical"),
        # Others do: the ranks may wait for a core in their collectives.
        (30.0, 48, "note"),
        # Little data: whoever fills them.
        (96.0, 0.1, "note"),
    ],
)
def test_full_cores_and_who_fills_them(ours: float, megabytes: float, severity: str) -> None:
    ddp = Ddp(gradient_bytes=int(megabytes * 2**20), backend="gloo")
    finding = bound(ddp, nodes=1, cores=2, cpu=97.0, main_cpu=ours, num_workers=0)
    assert (finding.kind, finding.severity) == ("comm_bound", severity)


def test_what_overlap_would_bring_where_there_is_none() -> None:
    by_hand = predicted(bound(None))
    step_ms = 158.0
    # At most the backward of 60 ms can hide it.
    assert by_hand["overlap"] == pytest.approx((step_ms - 60, step_ms - 15), abs=4)
    one = Ddp(
        gradient_bytes=8 * 2**20, backend="nccl", bucket_bytes=(8 * 2**20,), bucket_cap_mb=25.0
    )
    in_one = bound(one)
    hint = next(h for h in in_one.hints if h.knob == "bucket_cap_mb")
    assert (hint.old, hint.new) == (25, 2)
    assert hint.predicted_ms == pytest.approx((step_ms - 45, step_ms - 11), abs=4)
    # FSDP overlaps by its own means.
    sharded = bound(None, more_hello={"parallel": ("fsdp2",)})
    assert "overlap" not in predicted(sharded)


# --- memory -------------------------------------------------------------------------------------


def growing(steps: int, slope: float, noise: Sequence[float] = (0.0,)) -> list[tuple[int, int]]:
    return [
        (n, int(10**9 + slope * n + noise[n % len(noise)]))
        for n in range(0, steps, max(1, steps // 100))
    ]


@given(
    slope=st.floats(0.5e6, 8e6),
    seed=st.lists(st.floats(0, 2e7), min_size=5, max_size=40),
    steps=st.integers(400, 4000),
)
@settings(max_examples=50, deadline=None)
def test_a_real_slope_rises_through_noise(slope: float, seed: list[float], steps: int) -> None:
    assert rising(tuple(growing(steps, slope, seed))) is not None


@given(seed=st.lists(st.floats(0, 5e7), min_size=3, max_size=97), steps=st.integers(100, 4000))
@settings(max_examples=100, deadline=None)
def test_noise_alone_does_not(seed: list[float], steps: int) -> None:
    rng = random.Random(sum(seed))
    points = [(n, 10**9 + int(rng.choice(seed))) for n in range(steps)][-128:]
    assert rising(tuple(points)) is None


def test_a_pool_that_fills_up_flattens_out() -> None:
    full = [(n, int(10**9 + 10**8 * min(1.0, n / 100))) for n in range(0, 1000, 10)]
    assert rising(tuple(full)) is None


def test_a_leak_is_named_with_its_slope_and_device() -> None:
    memory = [10**9 + n * 3 * 2**20 for n in range(200)]
    on_cpu = first(Trace([HEALTHY], memory_bytes=memory, steps=200))
    assert (on_cpu.kind, on_cpu.cost_ms) == ("cpu_leak", 0.0)
    assert "3.00 MiB a step" in on_cpu.summary
    on_device = first(
        Trace([HEALTHY], memory_bytes=memory, steps=200, more_hello={"device": "cuda:0"})
    )
    assert (on_device.kind, on_device.confidence) == ("gpu_leak", "high")


def test_a_heap_that_settles_in_the_first_minute_is_no_leak_yet() -> None:
    trace = Trace([HEALTHY], memory_bytes=[10**9 + n * 2**19 for n in range(200)], steps=200)

    def kinds(wall_s: float) -> set[str]:
        trace.frames = [replace(f, ledger=Ledger(wall_ns=int(wall_s * 1e9))) for f in trace.frames]
        return {f.kind for f in found(trace)}

    assert "cpu_leak" not in kinds(20.0)  # 80 MiB by now
    assert "cpu_leak" in kinds(90.0)


# --- hang ---------------------------------------------------------------------------------------


def standing(phases: Sequence[tuple[str, str, int]], age_s: float = 60.0) -> Trace:
    """Ranks that stand: (status, phase, steps) of each, the same time ago."""
    trace = Trace([HEALTHY] * len(phases))
    trace.frames = [
        replace(
            frame,
            state=RankState(status=status, phase=phase, phase_age_ns=int(age_s * 1e9), step=steps),
        )
        for frame, (status, phase, steps) in zip(trace.frames, phases, strict=True)
    ]
    return trace


def hang_of(trace: Trace) -> Finding | None:
    return next((f for f in found(trace) if f.kind == "hang"), None)


@pytest.mark.parametrize(
    ("phases", "ranks", "says"),
    [
        # One rank stands in its forward, the others wait for it in a collective.
        ([("training", "forward", 70), ("training", "comm", 70)], (0,), "stands in forward"),
        ([("training", "backward", 70), ("training", "data_wait", 70)], (1,), "in data_wait"),
        # One is a step behind the others: its collective is missing.
        ([("training", "comm", 72), ("training", "comm", 71)], (1,), "stands at step 71"),
        ([("training", "comm", 70), ("training", "comm", 70)], (0, 1), "stands in comm"),
    ],
)
def test_a_hang_names_whom_the_others_wait_for(
    phases: Sequence[tuple[str, str, int]], ranks: tuple[int, ...], says: str
) -> None:
    finding = hang_of(standing(phases))
    assert finding is not None
    assert (finding.severity, finding.ranks) == ("critical", ranks)
    assert says in finding.summary
    assert finding.cost_ms == pytest.approx(60_000, rel=0.01)


def test_who_leaves_is_the_cause_only_of_what_comes_after() -> None:
    engine = Engine(open_after=1)
    trace = standing([("training", "forward", 70), ("training", "comm", 70)], age_s=0.1)
    silent = [replace(f, seq=2, records=(), snapshot=False, hello=None) for f in trace.frames]
    bye = replace(silent[1], bye=Bye("interrupted", "KeyboardInterrupt"))
    now_s = 100.0

    def hang(store: Store) -> Finding:
        view = store.view()
        (diagnosis,) = engine(view)
        return next(f for f in diagnosis.findings if f.kind == "hang")

    # One leaves, and the other stands since.
    store = Store(lambda: now_s)
    store.apply(trace.node_frame, now_s)
    store.apply(node_frame(2, [bye]), now_s)
    now_s = 160.0
    store.apply(node_frame(3, [standing_for(silent[0], 60.0)]), now_s)
    assert (hang(store).ranks, "is gone" in hang(store).summary) == ((1,), True)

    # A person ends a job that stands already, and who waited is the first to go.
    engine = Engine(open_after=1)
    store = Store(lambda: now_s)
    store.apply(trace.node_frame, now_s)
    store.apply(node_frame(2, [standing_for(frame, 55.0) for frame in silent]), now_s)
    before = hang(store)
    assert before.ranks == (0,)
    store.apply(node_frame(3, [replace(bye, seq=3)]), now_s)
    now_s = 162.0
    assert hang(store) == before


def standing_for(frame: RankFrame, seconds: float) -> RankFrame:
    return replace(frame, state=replace(frame.state, phase_age_ns=int(seconds * 1e9)))


@pytest.mark.parametrize("status", ["eval", "checkpoint", "compile", "starting"])
def test_what_takes_long_by_nature_is_no_hang(status: str) -> None:
    phases = [("training", "comm", 70), (status, "", 70)]
    assert hang_of(standing(phases)) is None


@pytest.mark.parametrize(("phase", "age_s"), [("comm", 5.0), ("data_wait", 40.0)])
def test_a_moment_is_no_hang(phase: str, age_s: float) -> None:
    assert hang_of(standing([("training", phase, 70)] * 2, age_s)) is None
    assert hang_of(standing([("training", phase, 70)] * 2, 100.0)) is not None


# --- look-alikes --------------------------------------------------------------------------------

TRACES: Mapping[str, Any] = {
    "loader_few_workers": starving,
    "storage_slow": lambda: starving(worker_state="D", iowait=35.0),
    "cpu_decode_aug": lambda: starving(
        batch_ms=(398.0, 390.0, 10.0), worker_cpu=98.0, cpu=100.0, cores=4, main_cpu=5.0,
        worker_state="R",
    ),
    "loader_oversub": lambda: starving(
        worker_cpu=95.0, cpu=100.0, cores=4, main_cpu=5.0, threads=10.0,
        batch_ms=(398.0, 380.0, 10.0),
    ),
    "collate_ipc": lambda: starving(batch_ms=(398.0, 390.0, 300.0), worker_cpu=97.0),
    "worker_restart": lambda: epochs(persistent=False),
    "stall_checkpoint": lambda: Trace([HEALTHY] * 2, spans=spans("checkpoint", 20, 1.0)),
    "stall_validation": lambda: Trace([HEALTHY] * 2, spans=spans("eval", 20, 1.0)),
    "stall_log_sync": lambda: Trace([{**HEALTHY, "other": 40.0}] * 2),
    "comm_bound": lambda: Trace([HEALTHY] * 3, transfer_ms=60.0),
    "straggler": lambda: Trace([HEALTHY, {**HEALTHY, "backward": 95.0}, HEALTHY]),
    "cpu_quota": lambda: Trace([HEALTHY] * 2, limits=QUOTA),
}  # fmt: skip


@pytest.mark.parametrize("kind", TRACES)
def test_a_trace_of_one_kind_gives_no_finding_of_another(kind: str) -> None:
    serious = {f.kind for f in found(TRACES[kind]()) if f.severity != "note"}
    assert serious == {kind}


@pytest.mark.parametrize("kind", TRACES)
def test_every_finding_is_whole(kind: str) -> None:
    for finding in found(TRACES[kind]()):
        assert finding.kind in RULES
        assert finding.ranks == tuple(sorted(set(finding.ranks)))
        assert finding.ranks
        assert finding.nodes
        assert finding.summary
        assert finding.evidence
        assert finding.confidence in {"low", "medium", "high"}
        for hint in finding.hints:
            assert hint.change
            if hint.predicted_ms is not None:
                low_ms, high_ms = hint.predicted_ms
                assert 0.0 <= low_ms <= high_ms
