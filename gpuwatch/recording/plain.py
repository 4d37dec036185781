"""A trace as a person or a script writes it, made into the frames that a run would have sent.

A line says what happened, and to which rank; everything that the wire needs besides (frames,
sequence numbers, heartbeats, ledgers, states) follows from the lines. docs/trace-format.md is the
description for the writer of a trace.
"""

import difflib
from collections.abc import Iterator, Mapping
from typing import Annotated, Any

import msgspec

from gpuwatch.recording.sender import LATEST_S, MOST, Event, Key, Sender, Source
from gpuwatch.recording.shape import FieldError, read_fields, read_struct, shown
from gpuwatch.schema import (
    PHASES,
    RANK_STATUSES,
    TAGS,
    Bye,
    GpuSample,
    Hello,
    HostSample,
    Ledger,
    Name,
    PhasesNs,
    ProcessSample,
    Rank,
    RankAge,
    RankState,
    Span,
    StepRecord,
    Text,
    WallSeconds,
    WorkerCost,
)

__all__ = ["PlainTrace"]

TICK_S = 0.5
"""Between two frames of a node; a rank is silent after 3 s without one."""

_SPARSER = 8.0
"""Where the lines pause, a frame comes only after another 1/8 of the pause: a day is 100 frames."""

_COPIES = 100_000
_NODE = "node0"
_RUN = "trace"

_OF_RANK = ("step", "span", "state", "ledger", "hello", "worker", "bye", "age")
_OF_NODE = ("host", "gpu", "process")
_TYPES = ("trace", *_OF_RANK, *_OF_NODE)
_ABOUT = ("type", "run", "rank", "node", "at_s")
"""What every line of a rank may have."""


class _Head(msgspec.Struct, array_like=True):
    """The first line: what holds for the whole trace. `start_s` is when it begins."""

    version: int = 1
    framed: bool = False
    run: Name = _RUN
    world_size: Annotated[int, msgspec.Meta(ge=1, le=2**20)] | None = None
    node: Name = _NODE
    start_s: WallSeconds = 0.0
    simulated: bool = False


class _About(msgspec.Struct, array_like=True):
    """Whose line it is. `at_s` are seconds since any moment: only differences count."""

    rank: Rank
    run: Name
    node: Name | None = None
    at_s: WallSeconds | None = None
    incarnation: Name | None = None


class _AboutNode(msgspec.Struct, array_like=True):
    """Of which node a line is."""

    run: Name
    node: Name
    rank: Rank | None = None
    at_s: WallSeconds | None = None
    gpus_reason: Text | None = None


def _article(word: str) -> str:
    return f"an {word}" if word == "age" else f"a {word}"


class PlainTrace:
    """Takes the lines of a plain trace, and then gives the frames that they stand for."""

    def __init__(self) -> None:
        self._run = _RUN
        self._default_node = _NODE
        self._world_size: int | None = None
        self._start_s: float | None = None
        self._simulated = False
        self._now_s = 0.0
        self._timed = False  # whether any line has said when it is
        self._untimed = 0  # lines before that
        self._lines = 0
        self._events: list[Event] = []
        self._sources: dict[Key, Source] = {}

    # --- lines ---------------------------------------------------------------------------------

    def add(self, number: int, found: dict[str, Any]) -> None:
        """Take the object of line `number`.

        Raises:
            FieldError: a mistake in it.
        """
        word = found.get("type")
        if not isinstance(word, str) or word not in _TYPES:
            raise FieldError(_no_type(found, word))
        if word == "trace":
            self._head(found)
        elif word in _OF_NODE:
            self._of_node(word, found)
        else:
            self._of_rank(number, word, found)
        self._lines += 1

    def _head(self, found: dict[str, Any]) -> None:
        if self._lines:
            raise FieldError('a "trace" line stands first, and once')
        told = read_struct(_Head, found, "a trace", more=("type",))
        self._run = told.run
        self._default_node = told.node
        self._world_size = told.world_size
        self._simulated = told.simulated
        if "start_s" in found:
            self._start_s = self._now_s = told.start_s
            self._timed = True

    def _of_rank(self, number: int, word: str, found: dict[str, Any]) -> None:
        what = _article(word)
        names = (*_ABOUT[1:], "incarnation") if word == "hello" else _ABOUT[1:]
        about = read_struct(
            _About,
            {name: found[name] for name in names if name in found},
            what,
            defaults={"run": self._run},
        )
        key = (about.run, about.rank)
        source = self._sources.get(key)
        if source is None:
            pid = about.rank + 1
            source = self._sources[key] = Source(number, self._default_node, pid=pid)
        if about.node is not None:
            source.node = about.node
        at_s = about.at_s
        payload: Any
        if word == "step":
            at_s, payload, copies = self._step(source, found, what, at_s)
            for _ in range(1, copies):
                self._keep(at_s, word, payload, key, source)
                at_s, payload = self._following(source, payload)
        elif word == "span":
            at_s, payload = self._span(source, found, what, at_s)
        else:
            at_s = self._now_s if at_s is None else at_s
            source.incarnation = about.incarnation or source.incarnation
            payload = self._other(word, found, what, key, source)
        self._timed = self._timed or about.at_s is not None or word in {"step", "span"}
        if source.begin_s is None and self._timed:
            source.begin_s = at_s
        self._now_s = at_s
        self._keep(at_s, word, payload, key, source)

    def _step(
        self, source: Source, found: dict[str, Any], what: str, at_s: float | None
    ) -> tuple[float, StepRecord, int]:
        values = read_fields(StepRecord, found, what, more=(*_ABOUT, "repeat"))
        copies = found.get("repeat", 1)
        if isinstance(copies, bool) or not isinstance(copies, int) or not 1 <= copies <= _COPIES:
            raise FieldError(
                f'"repeat" of a step must be a whole number from 1 to {_COPIES:,}, '
                f"not {shown(copies)}"
            )
        if copies > 1 and at_s is not None:
            raise FieldError(
                'a step with "repeat" has no "at_s"; "started_s" is when the first begins'
            )
        phases = values.setdefault("host", PhasesNs())
        known_ns = sum(getattr(phases, name) or 0 for name in PHASES)
        step_ns = values.get("step_ns")
        if step_ns is None:
            if "phases_ms" not in found:
                raise FieldError('a step needs "phases_ms" or "step_ms"')
            values["step_ns"] = step_ns = known_ns
        elif known_ns > step_ns:
            raise FieldError(
                f'"phases_ms" of a step add up to {known_ns / 1e6:g} ms, which is more than its '
                f'"step_ms" of {step_ns / 1e6:g}; without "step_ms" the step is their sum'
            )
        elif known_ns and phases.other is None:
            values["host"] = msgspec.structs.replace(phases, other=step_ns - known_ns)
        for tag in values.get("tags", ()):
            _one_of("tags", what, tag, TAGS)
        if "started_s" not in values:
            if at_s is not None:
                values["started_s"] = max(0.0, at_s - step_ns / 1e9)
            else:
                values["started_s"] = self._free_s(source)
        values.setdefault("index", source.next_index)
        values.setdefault("loader", source.loader)
        record = StepRecord(**values)
        source.begin_s = _earliest(source.begin_s, record.started_s)
        return self._made(source, record), record, copies

    @staticmethod
    def _made(source: Source, record: StepRecord) -> float:
        """Note a step as the rank's last one, and return when it ended."""
        source.next_index = min(MOST, record.index + 1)
        source.free_s = min(LATEST_S, record.started_s + record.step_ns / 1e9)
        return source.free_s

    def _following(self, source: Source, record: StepRecord) -> tuple[float, StepRecord]:
        """Return the same step once more, right after the last one, and when it ends."""
        record = msgspec.structs.replace(
            record, index=source.next_index, started_s=self._free_s(source)
        )
        return self._made(source, record), record

    def _span(
        self, source: Source, found: dict[str, Any], what: str, at_s: float | None
    ) -> tuple[float, Span]:
        values = read_fields(Span, found, what, more=_ABOUT)
        for name in ("name", "duration_ns"):
            if name not in values:
                raise FieldError(f'{what} needs "{name.replace("_ns", "_ms")}"')
        duration_s = values["duration_ns"] / 1e9
        if "started_s" not in values:
            values["started_s"] = (
                self._free_s(source) if at_s is None else max(0.0, at_s - duration_s)
            )
        values.setdefault("step", source.next_index)
        span = Span(**values)
        source.begin_s = _earliest(source.begin_s, span.started_s)
        source.free_s = min(LATEST_S, span.started_s + duration_s)
        return source.free_s, span

    def _free_s(self, source: Source) -> float:
        if source.free_s is not None:
            return source.free_s
        return source.begin_s if source.begin_s is not None else self._start_s or 0.0

    def _other(self, word: str, found: dict[str, Any], what: str, key: Key, source: Source) -> Any:
        if word == "hello":
            more = (*_ABOUT, "incarnation")
            defaults = {
                "host": source.node,
                "pid": source.pid,
                "pid_started_s": 0.0,
                "world_size": self._world_size or 0,
            }
            hello = read_struct(Hello, found, what, more=more, defaults=defaults)
            source.pid = hello.pid
            source.loader = hello.loaders[0].key if len(hello.loaders) == 1 else ""
            source.hello = True
            return hello
        if word == "state":
            changes = read_fields(RankState, found, what, more=_ABOUT)
            if "status" in changes:
                _one_of("status", what, changes["status"], RANK_STATUSES)
            if changes.get("phase"):
                _one_of("phase", what, changes["phase"], (*PHASES, "user"))
            for phase in changes.get("phases_na", ()):
                _one_of("phases_na", what, phase, PHASES)
            return changes
        if word == "ledger":
            return read_struct(Ledger, found, what, more=_ABOUT)
        if word == "worker":
            defaults = {"loader": source.loader} if source.loader else {}
            return read_struct(WorkerCost, found, what, more=_ABOUT, defaults=defaults)
        if word == "bye":
            return read_struct(Bye, found, what, more=_ABOUT, defaults={"reason": "finished"})
        defaults = {"run": key[0], "rank": key[1], "incarnation": source.incarnation}
        return read_struct(RankAge, found, what, more=_ABOUT, defaults={**defaults, "age_s": 0.0})

    def _of_node(self, word: str, found: dict[str, Any]) -> None:
        what = _article(word)
        names = ("node", "at_s", "run", "rank", *(("gpus_reason",) if word == "host" else ()))
        told = read_struct(
            _AboutNode,
            {name: found[name] for name in names if name in found},
            what,
            defaults={"node": self._default_node, "run": self._run},
        )
        at_s = self._now_s if told.at_s is None else told.at_s
        node = told.node
        payload: Any
        if word == "host":
            payload = read_struct(HostSample, found, what, more=(*_ABOUT, "gpus_reason"))
            if told.gpus_reason is not None:
                payload = (payload, told.gpus_reason)
        elif word == "gpu":
            named = f"{node}/{found.get('index')}"
            payload = read_struct(GpuSample, found, what, more=_ABOUT, defaults={"uuid": named})
        else:
            defaults: dict[str, Any] = {"role": "worker"}
            if told.rank is not None:
                source = self._sources.get((told.run, told.rank))
                if source is not None and "node" not in found:
                    node = source.node
                pid = told.rank + 1 if source is None else source.pid
                defaults["rank_pid"] = pid
                if found.get("pid", pid) == pid:
                    defaults |= {"pid": pid, "role": "rank"}
            elif "rank_pid" not in found:
                raise FieldError('a process needs "rank" or "rank_pid"')
            payload = read_struct(ProcessSample, found, what, more=_ABOUT, defaults=defaults)
        self._now_s = at_s
        self._timed = self._timed or told.at_s is not None
        if not self._timed:
            self._untimed += 1
        self._events.append(Event(at_s, len(self._events), word, payload, node=node))

    def _keep(self, at_s: float, word: str, payload: Any, key: Key, source: Source) -> None:
        order = len(self._events)
        if not self._timed:
            self._untimed += 1
        self._events.append(Event(at_s, order, word, payload, key, source.node, source.incarnation))

    # --- frames --------------------------------------------------------------------------------

    def frames(self) -> Iterator[bytes]:
        """Yield the frames of the node processes, in the order of time.

        Raises:
            FieldError: the lines contradict one another; the sentence names the line.
        """
        if not self._events:
            raise FieldError('no line of a trace; each is an object like {"type": "step", ...}')
        sizes = self._world_sizes()
        begins = [s.begin_s for s in self._sources.values() if s.begin_s is not None]
        timed = self._events[self._untimed :]
        if self._untimed and timed:
            # What stands before the first time of all is of the beginning, whenever that was.
            first_s = min([*begins, *(event.at_s for event in timed)])
            for event in self._events[: self._untimed]:
                event.at_s = first_s
        self._events.sort(key=lambda event: (event.at_s, event.order))
        start_s = min([*begins, self._events[0].at_s])
        if self._start_s is not None:
            start_s = min(start_s, self._start_s)
        sender = Sender(self._sources, sizes, start_s, simulated=self._simulated)
        end_s = self._events[-1].at_s
        tick_s = heard_s = start_s
        at = 0
        while True:
            while at < len(self._events) and self._events[at].at_s <= tick_s:
                sender.take(self._events[at])
                heard_s = tick_s
                at += 1
            yield from sender.tick(tick_s)
            if at == len(self._events):
                return
            pause_s = max(TICK_S, (tick_s - heard_s) / _SPARSER)
            tick_s = min(tick_s + pause_s, end_s)

    def _world_sizes(self) -> dict[str, int]:
        """Return the world size of each run: the one that was said, or the ranks that there are."""
        sizes: dict[str, int] = {}
        for run, rank in self._sources:
            sizes[run] = max(sizes.get(run, 0), rank + 1)
        if self._world_size is not None:
            sizes = dict.fromkeys(sizes, self._world_size)
        for event in self._events:
            if event.word == "hello" and event.payload.world_size and event.key is not None:
                sizes[event.key[0]] = event.payload.world_size
        for (run, rank), source in self._sources.items():
            if rank >= sizes[run]:
                raise FieldError(
                    f'line {source.first_line}: "rank" {rank} in a world of {sizes[run]}: '
                    "ranks count from 0"
                )
        return sizes


def _earliest(before: float | None, now: float) -> float:
    return now if before is None else min(before, now)


def _one_of(name: str, what: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        words = ", ".join(f'"{word}"' for word in known)
        raise FieldError(f'"{name}" of {what} must be one of {words}, not {shown(value)}')


def _no_type(found: Mapping[str, Any], word: Any) -> str:
    if "type" not in found:
        return f'a line needs "type": one of {", ".join(_TYPES)}'
    near = difflib.get_close_matches(word, _TYPES, 1) if isinstance(word, str) else []
    if near:
        return f'there is no type {shown(word)}; did you mean "{near[0]}"?'
    return f"there is no type {shown(word)}; there are {', '.join(_TYPES)}"
