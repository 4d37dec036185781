"""What ranks and nodes would have sent: the lines of a plain trace, tick for tick, as frames."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from gpuwatch.frames import encode
from gpuwatch.schema import (
    WIRE_VERSION,
    Bye,
    GpuSample,
    Hello,
    HostSample,
    Ledger,
    NodeFrame,
    ProcessSample,
    RankAge,
    RankFrame,
    RankState,
    SensorFrame,
    Span,
    StepRecord,
    WorkerCost,
)
from gpuwatch.store.clocks import deciding, deciding_step_ns

__all__ = ["INCARNATION", "LATEST_S", "MOST", "Event", "Key", "Sender", "Source"]

INCARNATION = "trace"
"""Of ranks and nodes that name none."""

LATEST_S = 4.2e9
_LONGEST_NS = 10**17
_OLDEST_S = 1e9
MOST = 2**53
"""The ends of the wire's ranges, for what follows from the lines by adding up."""

_FRAME_RECORDS = 1024
_SAMPLE_S = 1.0

Key = tuple[str, int]
"""A run and a rank."""


@dataclass(slots=True)
class Source:
    """What the lines of one rank have said so far, while they are read."""

    first_line: int
    node: str
    begin_s: float | None = None
    free_s: float | None = None
    """When its last step or span ended: where the next one begins."""
    next_index: int = 0
    loader: str = ""
    pid: int = 0
    incarnation: str = INCARNATION
    hello: bool = False


@dataclass(slots=True)
class Event:
    """One line: `payload` is a Struct, or the changed fields of a state."""

    at_s: float
    order: int
    word: str
    payload: Any
    key: Key | None = None
    node: str = ""
    incarnation: str = ""


@dataclass(slots=True)
class _Rank:
    """One rank as it sends: what the next frame holds."""

    begin_s: float
    incarnation: str = ""
    seq: int = 0
    state: RankState = field(default_factory=RankState)
    phase_since_s: float = 0.0
    ledger: Ledger = field(default_factory=Ledger)
    ledger_given: bool = False
    records: list[StepRecord] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    workers: list[tuple[float, WorkerCost]] = field(default_factory=list)
    hello: Hello | None = None
    bye: Bye | None = None
    over: bool = False
    silent: RankAge | None = None
    silent_since_s: float = 0.0


@dataclass(slots=True)
class _Node:
    """One node: its latest readings, which hold until a line says otherwise."""

    seq: int = 0
    ticks: int = 0
    host: HostSample = field(default_factory=HostSample)
    gpus: dict[int, GpuSample] = field(default_factory=dict)
    processes: dict[int, ProcessSample] = field(default_factory=dict)
    gpus_reason: str = "the trace has no GPU"
    told: bool = False
    told_s: float = 0.0


class Sender:
    """Sends, tick for tick, what ranks and nodes would have sent.

    Args:
        sources: what the lines say of each rank.
        sizes: the world size of each run.
        start_s: when the trace begins.
        simulated: whether every frame carries that mark.
    """

    def __init__(
        self,
        sources: Mapping[Key, Source],
        sizes: Mapping[str, int],
        start_s: float,
        *,
        simulated: bool,
    ) -> None:
        self._ranks = {
            key: _Rank(start_s if source.begin_s is None else source.begin_s)
            for key, source in sources.items()
        }
        self._sources = sources
        self._sizes = sizes
        self._simulated = simulated
        self._nodes: dict[str, _Node] = {}
        self._node_of: dict[Key, str] = {}
        self._by_node: dict[str, list[Key]] = {}
        for key, source in sources.items():
            self._move(key, source.node)
            if not source.hello:
                self._ranks[key].hello = self._default_hello(key, source)

    def _default_hello(self, key: Key, source: Source) -> Hello:
        begin_s = source.begin_s or 0.0
        return Hello(source.node, source.pid, 0.0, self._sizes[key[0]], started_s=begin_s)

    def _move(self, key: Key, node: str) -> None:
        before = self._node_of.get(key)
        if before == node:
            return
        if before is not None:
            self._by_node[before].remove(key)
        self._node_of[key] = node
        self._by_node.setdefault(node, []).append(key)
        self._nodes.setdefault(node, _Node())

    def take(self, event: Event) -> None:
        """Take the next line in the order of time."""
        if event.key is None:
            self._take_sensor(event)
            return
        rank = self._ranks[event.key]
        self._move(event.key, event.node)
        if event.incarnation != rank.incarnation:
            if rank.incarnation:  # its hello, which this is, says that it has restarted
                self._ranks[event.key] = rank = _Rank(event.at_s)
            rank.incarnation = event.incarnation
        if event.word == "age":
            rank.silent, rank.silent_since_s = event.payload, event.at_s
            return
        rank.silent = None
        payload = event.payload
        match event.word:
            case "step":
                self._step(rank, payload, event.at_s)
            case "span":
                rank.spans.append(payload)
                if payload.name in {"eval", "checkpoint"}:
                    name = f"{payload.name}_ns"
                    _add(rank, **{name: payload.duration_ns})
            case "state":
                rank.state = msgspec.structs.replace(rank.state, **payload)
                if "phase" in payload or "phase_age_ns" in payload:
                    rank.phase_since_s = event.at_s - rank.state.phase_age_ns / 1e9
            case "ledger":
                rank.ledger, rank.ledger_given = payload, True
            case "worker":
                rank.workers.append((event.at_s, payload))
            case "bye":
                rank.bye = payload
                rank.state = msgspec.structs.replace(rank.state, status="ended")
            case _:
                self._hello(event.key, rank, payload)

    def _hello(self, key: Key, rank: _Rank, hello: Hello) -> None:
        size = hello.world_size or self._sizes[key[0]]
        started_s = hello.started_s or rank.begin_s
        rank.hello = msgspec.structs.replace(hello, world_size=size, started_s=started_s)
        if size == 1 and "comm" not in rank.state.phases_na:
            na = {**rank.state.phases_na, "comm": "one process"}
            rank.state = msgspec.structs.replace(rank.state, phases_na=na)

    def _step(self, rank: _Rank, record: StepRecord, at_s: float) -> None:
        rank.records.append(record)
        changes: dict[str, Any] = {
            "step": min(MOST, record.index + 1),
            "status": "training",
            "phase": "",
        }
        for name in ("loss", "learning_rate", "grad_norm", "loss_scale"):
            if getattr(record, name) is not None:
                changes[name] = getattr(record, name)
        rank.state = msgspec.structs.replace(rank.state, phase_age_ns=0, **changes)
        rank.phase_since_s = at_s
        phases = deciding(record)
        wait_ns, comm_ns = phases.data_wait or 0, phases.comm or 0
        _add(
            rank,
            steps=1,
            samples=record.samples or 0,
            skipped=int("skipped" in record.tags),
            training_ns=max(0, deciding_step_ns(record) - wait_ns - comm_ns),
            data_wait_ns=wait_ns,
            comm_ns=comm_ns,
        )

    def _take_sensor(self, event: Event) -> None:
        node = self._nodes.setdefault(event.node, _Node())
        payload = event.payload
        if event.word == "host":
            if isinstance(payload, tuple):
                payload, node.gpus_reason = payload
            node.host = payload
        elif event.word == "gpu":
            node.gpus[payload.index] = payload
        else:
            node.processes[payload.pid] = payload
        node.told, node.told_s = True, -_SAMPLE_S

    def tick(self, at_s: float) -> Iterator[bytes]:
        """Yield a frame of every node that is heard."""
        for name, node in self._nodes.items():
            frames: list[msgspec.Raw] = []
            ages: list[RankAge] = []
            for key in self._by_node.get(name, ()):
                rank = self._ranks[key]
                if rank.silent is not None:
                    since_s = at_s - rank.silent_since_s
                    age_s = min(_OLDEST_S, rank.silent.age_s + since_s)
                    ages.append(msgspec.structs.replace(rank.silent, age_s=age_s))
                elif not rank.over and rank.begin_s <= at_s:
                    frames += (msgspec.Raw(encode(f)) for f in self._sent(key, rank, at_s))
            sensors = None
            if node.told and at_s - node.told_s >= _SAMPLE_S:
                # Said again every second, as a sampler would: means are made of several.
                node.told_s = at_s
                node.ticks += 1
                sensors = msgspec.Raw(encode(_sensors(node, at_s)))
            node.seq += 1
            yield encode(
                NodeFrame(
                    version=WIRE_VERSION,
                    node=name,
                    incarnation=INCARNATION,
                    seq=node.seq,
                    sent_s=at_s,
                    frames=tuple(frames),
                    ages=tuple(ages),
                    sensors=sensors,
                    sensors_reason="" if node.ticks else "the trace has no reading of this node",
                )
            )

    def _sent(self, key: Key, rank: _Rank, at_s: float) -> Iterator[RankFrame]:
        age_ns = max(0, int((at_s - rank.phase_since_s) * 1e9)) if rank.state.phase else 0
        state = msgspec.structs.replace(rank.state, phase_age_ns=min(_LONGEST_NS, age_ns))
        if not rank.ledger_given:
            wall_ns = max(0, int((at_s - rank.begin_s) * 1e9))
            named_ns = sum(getattr(rank.ledger, name) for name in _NAMED)
            wall_ns = min(_LONGEST_NS, max(wall_ns, named_ns))
            rank.ledger = msgspec.structs.replace(
                rank.ledger, wall_ns=wall_ns, lost_ns=max(0, wall_ns - named_ns)
            )
        records, spans, workers = rank.records, rank.spans, rank.workers
        rank.records, rank.spans, rank.workers = [], [], []
        hello, rank.hello = rank.hello, None
        while True:
            rank.seq += 1
            more = max(len(records), len(spans), len(workers)) > _FRAME_RECORDS
            yield RankFrame(
                version=WIRE_VERSION,
                run=key[0],
                rank=key[1],
                incarnation=rank.incarnation or INCARNATION,
                seq=rank.seq,
                sent_s=at_s,
                dropped=0,
                records=tuple(records[:_FRAME_RECORDS]),
                spans=tuple(spans[:_FRAME_RECORDS]),
                state=state,
                ledger=rank.ledger,
                hello=hello,
                bye=None if more else rank.bye,
                simulated=self._simulated,
                workers=tuple(
                    msgspec.structs.replace(cost, age_s=min(_OLDEST_S, cost.age_s + at_s - told_s))
                    for told_s, cost in workers[:_FRAME_RECORDS]
                ),
            )
            if not more:
                break
            records, spans, workers = (
                records[_FRAME_RECORDS:],
                spans[_FRAME_RECORDS:],
                workers[_FRAME_RECORDS:],
            )
            hello = None
        rank.over = rank.bye is not None


_NAMED = ("training_ns", "data_wait_ns", "comm_ns", "eval_ns", "checkpoint_ns")


def _add(rank: _Rank, **totals: int) -> None:
    if not rank.ledger_given:
        sums = {
            name: min(
                _LONGEST_NS if name.endswith("_ns") else MOST, getattr(rank.ledger, name) + value
            )
            for name, value in totals.items()
        }
        rank.ledger = msgspec.structs.replace(rank.ledger, **sums)


def _sensors(node: _Node, at_s: float) -> SensorFrame:
    return SensorFrame(
        version=WIRE_VERSION,
        seq=node.ticks,
        sent_s=at_s,
        host=node.host,
        gpus=tuple(node.gpus[index] for index in sorted(node.gpus)),
        gpus_reason="" if node.gpus else node.gpus_reason,
        processes=tuple(node.processes.values()),
    )
