"""The frames of a recording as JSON lines: docs/trace-format.md.

Two forms with the same lines. A *framed* trace is what `gpuwatch record --jsonl` writes: lines
`node_frame`, `rank_frame` and `sensor_frame` say where the frames of the wire began, so that the
very frames come back. A *plain* trace has none of these: it is what a person or a script writes,
and `gpuwatch.recording.plain` makes frames of it.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import msgspec

from gpuwatch.errors import FrameError, TargetError
from gpuwatch.frames import decode_node_frame, decode_rank_frame, decode_sensor_frame, encode
from gpuwatch.recording.plain import PlainTrace
from gpuwatch.recording.shape import FieldError, parse, read_struct, shown, written
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
    Reply,
    SensorFrame,
    Span,
    StepRecord,
    WorkerCost,
)

__all__ = ["TRACE_VERSION", "JsonLines", "read_lines"]

TRACE_VERSION = 1
"""Of the lines; fields are only ever added to it."""

LINE_BYTES = 64 * 2**20
"""Longest line, as the longest frame."""

_OPENING = {"node_frame", "rank_frame", "sensor_frame"}
_IN_NODE = ("frames", "ages", "sensors", "replies", "version")
_IN_RANK = (
    *("records", "spans", "state", "ledger", "hello"),
    *("replies", "bye", "workers", "version"),
)
_IN_SENSORS = ("host", "gpus", "processes", "version")


# --- writing -----------------------------------------------------------------------------------


class JsonLines:
    """The encoder of a framed trace, for `Recorder`. `refused` counts frames it could not read."""

    def __init__(self) -> None:
        self._encoder = msgspec.json.Encoder()
        self.refused = 0

    def head(self) -> bytes:
        """Return the first line."""
        return self._line("trace", {"version": TRACE_VERSION, "framed": True})

    def encode(self, frame: bytes) -> bytes:
        """Return the lines of one frame of a node process.

        Raises:
            FrameError: the bytes are no such frame.
        """
        return b"".join(self._lines(decode_node_frame(frame)))

    def _lines(self, frame: NodeFrame) -> Iterator[bytes]:
        yield self._line("node_frame", written(frame, _IN_NODE))
        for age in frame.ages:
            yield self._line("age", written(age))
        for reply in frame.replies:
            yield self._line("reply", written(reply))
        for raw in frame.frames:
            try:
                rank_frame = decode_rank_frame(raw)
            except FrameError:
                self.refused += 1
                continue
            yield from self._rank(rank_frame)
        if frame.sensors is not None:
            try:
                sensors = decode_sensor_frame(frame.sensors)
            except FrameError:
                self.refused += 1
                return
            yield from self._sensors(sensors)

    def _rank(self, frame: RankFrame) -> Iterator[bytes]:
        yield self._line("rank_frame", written(frame, _IN_RANK))
        rank = {"rank": frame.rank}
        if frame.hello is not None:
            yield self._line("hello", written(frame.hello), rank)
        if frame.state != RankState():
            yield self._line("state", written(frame.state), rank)
        if frame.ledger != Ledger():
            yield self._line("ledger", written(frame.ledger), rank)
        for word, items in (
            ("step", frame.records),
            ("span", frame.spans),
            ("worker", frame.workers),
            ("reply", frame.replies),
        ):
            for item in items:
                yield self._line(word, written(item), rank)
        if frame.bye is not None:
            yield self._line("bye", written(frame.bye), rank)

    def _sensors(self, frame: SensorFrame) -> Iterator[bytes]:
        yield self._line("sensor_frame", written(frame, _IN_SENSORS))
        if frame.host != HostSample():
            yield self._line("host", written(frame.host))
        for gpu in frame.gpus:
            yield self._line("gpu", written(gpu))
        for process in frame.processes:
            yield self._line("process", written(process))

    def _line(
        self, word: str, fields: Mapping[str, Any], more: Mapping[str, Any] | None = None
    ) -> bytes:
        return self._encoder.encode({"type": word, **(more or {}), **fields}) + b"\n"


# --- reading -----------------------------------------------------------------------------------


def read_lines(lines: Iterable[bytes]) -> tuple[list[bytes], str]:
    """Return the frames that a trace stands for, and one sentence on what could not be read.

    A mistake in a plain trace is an error, for its writer to mend. A framed trace was written by a
    program: what is damaged in it, or cut off at its end, is left out and counted.

    Args:
        lines: the lines of the file, each with its end.

    Raises:
        TargetError: a mistake in a plain trace, or a trace of a newer version; the sentence names
            line and field.
    """
    framed: _Framed | None = None
    plain = PlainTrace()
    first = True
    for number, line in enumerate(lines, start=1):
        try:
            found = _object(line)
            if found is None:
                continue
            word = found.get("type")
            if first:
                first = False
                if word == "trace":
                    _check_version(found)
                if word == "node_frame" or found.get("framed") is True:
                    framed = _Framed()
                    if word == "trace":
                        continue
            if framed is None:
                plain.add(number, found)
            else:
                framed.add(found)
        except FieldError as exc:
            if framed is None:
                raise TargetError(f"line {number}: {exc}") from None
            framed.problem(number, line, str(exc))
    if framed is not None:
        return framed.frames(), framed.sentence()
    try:
        return list(plain.frames()), ""
    except FieldError as exc:
        raise TargetError(str(exc)) from None


def _object(line: bytes) -> dict[str, Any] | None:
    """Return what a line holds, None for an empty one and for a comment."""
    if len(line) > LINE_BYTES:
        raise FieldError(f"a line of over {LINE_BYTES:,} bytes")
    try:
        text = line.decode("utf-8-sig").strip()
    except UnicodeError:
        raise FieldError("no UTF-8 text") from None
    return parse(text) if text and not text.startswith("#") else None


def _check_version(found: Mapping[str, Any]) -> None:
    version = found.get("version", TRACE_VERSION)
    if not isinstance(version, int) or isinstance(version, bool) or version < 1:
        raise FieldError(f'"version" of a trace must be {TRACE_VERSION}, not {shown(version)}')
    if version > TRACE_VERSION:
        raise TargetError(
            f"the trace has version {version}, this gpuwatch reads {TRACE_VERSION}; "
            "a newer gpuwatch-monitor can read it"
        )


class _Framed:
    """Puts the frames of a framed trace together again."""

    def __init__(self) -> None:
        self._done: list[bytes] = []
        self._node: dict[str, Any] | None = None
        self._rank: dict[str, Any] | None = None
        self._sensors: dict[str, Any] | None = None
        self._skipping = ""
        self._first_problem = ""
        self._problems = 0

    def add(self, found: dict[str, Any]) -> None:
        """Take the next line.

        Raises:
            FieldError: it makes no sense; what belongs to it is left out.
        """
        word = found.pop("type", None)
        if word in _OPENING:
            self._open(word, found)
            return
        if self._skipping:
            return
        if self._node is None:
            raise FieldError(f"{shown(word)} stands before the first node_frame")
        self._take(word, found)

    def _open(self, word: str, found: dict[str, Any]) -> None:
        if word != "node_frame" and self._node is None:
            return  # its node_frame is lost, and was counted
        before: FieldError | None = None
        try:
            if word == "node_frame":
                self._close_node()
            else:
                self._close_part()
        except FieldError as exc:
            before = exc  # of the frame that ends here; the one that begins is good
        self._skipping = word  # unless it can be read
        if word == "node_frame":
            self._node = _opened(NodeFrame, found, "a node_frame", ("frames", "ages", "replies"))
        elif word == "rank_frame":
            parts = ("records", "spans", "workers", "replies")
            self._rank = _opened(RankFrame, found, "a rank_frame", parts)
        else:
            self._sensors = _opened(SensorFrame, found, "a sensor_frame", ("gpus", "processes"))
        self._skipping = ""
        if before is not None:
            raise before

    def _take(self, word: Any, found: dict[str, Any]) -> None:
        node, rank, sensors = self._node, self._rank, self._sensors
        assert node is not None
        if sensors is not None and word == "host":
            sensors["host"] = _read(HostSample, found, "a host")
        elif sensors is not None and word == "gpu":
            sensors["gpus"].append(_read(GpuSample, found, "a gpu"))
        elif sensors is not None and word == "process":
            sensors["processes"].append(_read(ProcessSample, found, "a process"))
        elif word == "age":
            node["ages"].append(_read(RankAge, found, "an age"))
        elif word == "reply":
            (node if rank is None else rank)["replies"].append(_read(Reply, found, "a reply"))
        elif rank is not None and word in _PARTS:
            name, cls = _PARTS[word]
            rank[name].append(_read(cls, found, f"a {word}"))
        elif rank is not None and word in _ONCE:
            rank[word] = _read(_ONCE[word], found, f"a {word}")
        else:
            raise FieldError(f"{shown(word)} does not belong there")

    def _close_part(self) -> None:
        node = self._node
        rank, self._rank = self._rank, None
        sensors, self._sensors = self._sensors, None
        if node is None:
            return
        if rank is not None:
            data = encode(RankFrame(**_tuples(rank)))
            try:
                decode_rank_frame(data)
            except FrameError as exc:
                raise FieldError(str(exc)) from None
            node["frames"].append(msgspec.Raw(data))
        if sensors is not None:
            node["sensors"] = msgspec.Raw(encode(SensorFrame(**_tuples(sensors))))

    def _close_node(self) -> None:
        try:
            self._close_part()
        finally:
            node, self._node = self._node, None
            if node is not None:
                self._done.append(encode(NodeFrame(**_tuples(node))))

    def problem(self, number: int, line: bytes, words: str) -> None:
        """Note a line that cannot be read."""
        cut = "" if line.endswith(b"\n") else ", where it is cut off"
        if not self._problems:
            self._first_problem = f"line {number}{cut}: {words}"
        self._problems += 1

    def frames(self) -> list[bytes]:
        """Return the frames; the trace is over."""
        try:
            self._close_node()
        except FieldError as exc:
            self.problem(0, b"\n", str(exc))
        return self._done

    def sentence(self) -> str:
        """Return what could not be read, empty if all could."""
        if self._problems < 2:
            return self._first_problem
        more = self._problems - 1
        return f"{self._first_problem}; {more:,} more line{'s' if more > 1 else ''} cannot be read"


_PARTS: Mapping[str, tuple[str, type[msgspec.Struct]]] = {
    "step": ("records", StepRecord),
    "span": ("spans", Span),
    "worker": ("workers", WorkerCost),
}
_ONCE: Mapping[str, type[msgspec.Struct]] = {
    "hello": Hello,
    "state": RankState,
    "ledger": Ledger,
    "bye": Bye,
}


def _read(cls: type[msgspec.Struct], found: dict[str, Any], what: str) -> msgspec.Struct:
    return read_struct(cls, found, what, strict=False)


def _opened(
    cls: type[msgspec.Struct], found: dict[str, Any], what: str, parts: Iterable[str]
) -> dict[str, Any]:
    """Return the fields of a frame, with empty lists for its parts."""
    frame = read_struct(cls, found, what, defaults={"version": WIRE_VERSION}, strict=False)
    return {**msgspec.structs.asdict(frame), **{name: [] for name in parts}}


def _tuples(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {k: tuple(v) if isinstance(v, list) else v for k, v in fields.items()}
