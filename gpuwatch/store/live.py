"""The Store: frames in, views out. One lock, no sockets, no screen."""

import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from itertools import compress, pairwise
from math import inf
from operator import itemgetter

import msgspec

from gpuwatch.errors import FrameError
from gpuwatch.frames import (
    Columns,
    Heartbeat,
    Ordinary,
    decode_all_steps,
    decode_columns,
    decode_costs,
    decode_heartbeat,
    decode_node_frame,
    decode_ordinary,
    decode_rank_frame,
    decode_sensor_frame,
    decode_steps,
    decode_told,
    printable,
)
from gpuwatch.schema import (
    Bye,
    Hello,
    Ledger,
    Loader,
    Logged,
    NodeFrame,
    ProcessSample,
    RankAge,
    RankFrame,
    RankState,
    Reply,
    SensorFrame,
    StepRecord,
)
from gpuwatch.store.arrival import EMPTY, Convoy
from gpuwatch.store.batches import Totals, WorkerTotals, are_costs
from gpuwatch.store.clocks import NodeClock, times_of
from gpuwatch.store.history import History, Means, MeansPicture
from gpuwatch.store.lean import lean_frame
from gpuwatch.store.members import Doubts, Member, leavers
from gpuwatch.store.packed import PACK_ABOVE, collect_seldom
from gpuwatch.store.rows import INDEX, TAGS, Flat, decode_flats, record_of, times_of_flats
from gpuwatch.store.shared import Shared
from gpuwatch.store.shared import clean as _clean
from gpuwatch.store.views import Event, NodeView, RankView, RunView, View, bare_uuid, framed, sketch
from gpuwatch.store.windows import (
    NOT_STEADY,
    WINDOW_STEPS,
    Timeline,
    TimelinePicture,
    Window,
    is_steady,
    seconds_of,
)

__all__ = ["SILENT_S", "Store"]

SILENT_S = 3.0
"""Thirty missed flushes: amber, never a proof of death."""

_NODE_QUIET_S = 1.5
_NODE_QUIET_MERGED_S = 2.4
"""Of a node that sends about once a second, as who watches many has asked. Less than `SILENT_S` by
half a second, after which a node says how old its ranks are: when it falls silent itself, no more
is known of them."""
_KEPT_RUNS = 32
_FORGET_S = 60.0
_KEPT_RANKS = 20_000
_KEPT_EVENTS = 500
_KEPT_REPLIES = 16
_KEPT_COMMANDS = 64
_MOST_WAITING = 32
_MOST_WAITING_BYTES = 8192
"""Of one rank: frames whose steps and worker totals are kept as bytes until somebody looks."""
_SETTLED_RANKS = 2048
_SETTLE_S = 0.9
_LOOKED_S = 15.0
"""A node of a run of no more ranks is settled about once a second as its frames are taken, if a
picture was asked for lately. Of larger ones it costs less to settle many frames at a time."""
_TOGETHER = 4
"""From so many ranks on that change at once they share an event."""
_SPAN_EVERY_S = 2.0
"""A span that is entered more often than this is logged this often."""

_PROCESS_STATES = {
    "T": "stopped by a signal",
    "t": "stopped by a debugger",
    "D": "blocked in the kernel",
    "Z": "a zombie",
    "R": "its process runs, its telemetry thread does not: is the GIL held?",
    "S": "its process sleeps, and its telemetry thread with it: is the GIL held?",
}


_Found = RankFrame | tuple[Heartbeat | Ordinary, msgspec.Raw]
"""What a frame of a rank is: decoded, or its head and the whole of it."""

_NO_MEANS = Means().picture()
_NO_STATE = RankState()
_NO_LEDGER = Ledger()

_index_of = itemgetter(INDEX)
_tags_of = itemgetter(TAGS)

_set = msgspec.structs.force_setattr
"""For states that were just decoded: nobody else has them yet, and what is set is equal."""


def _one_by_one(
    raws: Sequence[msgspec.Raw], *, packed: bool
) -> tuple[list[_Found], FrameError | None]:
    """Return the frames of ranks, and what was wrong with the last that is none."""
    found: list[_Found] = []
    problem: FrameError | None = None
    decode = decode_ordinary if packed else decode_heartbeat
    for raw in raws:
        head = decode(memoryview(raw))
        if head is not None:
            found.append((head, raw))
            continue
        try:
            found.append(decode_rank_frame(bytes(raw)))
        except FrameError as exc:
            problem = exc
    return found, problem


def _clean_reply(reply: Reply) -> Reply:
    """Return an answer fit for a terminal; its data keeps its lines, as stacks have them."""
    lines = [printable(line) for line in reply.data.expandtabs(4).splitlines()]
    cleaned: Reply = _clean(reply)
    return msgspec.structs.replace(cleaned, data="\n".join(lines))


def _clean_bye(bye: Bye) -> Bye:
    """Return last words fit for a terminal; the stack keeps its lines."""
    cleaned: Bye = _clean(bye)
    lines = [printable(line) for line in bye.stack.splitlines()]
    return msgspec.structs.replace(cleaned, stack="\n".join(lines))


class _Later:
    """What the picture of a rank makes when it is asked for; nothing in it changes."""

    __slots__ = (
        *("_ahead_s", "_loader", "_loaders", "_means", "_process", "_timeline", "_totals"),
        *("_workers",),
    )

    def __init__(
        self,
        totals: Totals,
        loader: str,
        loaders: tuple[Loader, ...],
        timeline: TimelinePicture,
        ahead_s: int,
        means: MeansPicture,
        process: ProcessSample | None,
        workers: tuple[ProcessSample, ...],
    ) -> None:
        self._totals, self._loader, self._loaders = totals, loader, loaders
        self._timeline, self._ahead_s = timeline, ahead_s
        self._means, self._process, self._workers = means, process, workers

    def made(self, name: str) -> Mapping[str, object]:
        """Return a field by name, and those that are made with it."""
        if name == "timeline":
            return {name: seconds_of(self._timeline, self._ahead_s)}
        if name == "process_means":
            process = self._process
            return {name: None if process is None else self._means.process(process.pid)}
        if name == "worker_means":
            found = [self._means.process(worker.pid) for worker in self._workers]
            return {name: tuple([means for means in found if means is not None])}
        cost, by_worker = self._totals.per_batch(self._loader)
        return {
            "batch_wall_ms": None if cost is None else cost.wall_ms,
            "batch_cpu_ms": None if cost is None else cost.cpu_ms,
            "collate_ms": None if cost is None else cost.collate_ms,
            "batch_na": self._why_no_batch_cost() if cost is None else "",
            "worker_batches": by_worker,
        }

    def _why_no_batch_cost(self) -> str:
        key = self._loader
        if not key:
            return "no DataLoader fetch was seen in a steady step"
        if any(loader.key == key and not loader.num_workers for loader in self._loaders):
            return "num_workers=0: the data wait is the batch cost"
        if self._totals.knows(key):
            return "too few batches a worker yet"
        return "the workers of this loader do not time themselves"


class _Rank:
    """The mutable picture of one rank.

    Of a `packed` one ordinary frames are noted as bytes; `settle` makes the picture of them.
    """

    __slots__ = (
        "_ledger",
        "_state",
        "_waiting_bytes",
        "_waiting_costs",
        "_waiting_steps",
        "age",
        "asks",
        "bye",
        "commands",
        "convoy",
        "dropped",
        "ended_s",
        "former",
        "gap_index",
        "heard_s",
        "hello",
        "history",
        "incarnation",
        "last",
        "last_index",
        "ledger",
        "lost",
        "node",
        "open_gap",
        "packed",
        "rank",
        "replies",
        "restarts",
        "run",
        "sent_s",
        "seq",
        "simulated",
        "state",
        "timeline",
        "window",
        "worker_totals",
    )

    def __init__(
        self, run: str, rank: int, node: str, incarnation: str, *, packed: bool = False
    ) -> None:
        self.packed = packed
        self.convoy: Convoy[_Rank] | None = None
        self.run = run
        self.rank = rank
        self.node = node
        self.incarnation = incarnation
        self.former: set[str] | frozenset[str] = frozenset()
        self.restarts = 0
        self.hello: Hello | None = None
        self.simulated = False
        self.dropped = 0
        self.lost = 0
        self._clear()

    def _clear(self) -> None:
        self.seq: int | None = None
        self.sent_s = 0.0
        self.open_gap = 0
        self.gap_index = -1
        self.asks = False
        self.last_index = -1
        self.last: StepRecord | None = None
        self.window = Window(packed=self.packed)
        self.timeline = Timeline()
        self.worker_totals = WorkerTotals()
        self.history = History(packed=self.packed)
        self.state = _NO_STATE
        self.ledger = _NO_LEDGER
        self._state: msgspec.Raw | None = None
        self._ledger: msgspec.Raw | None = None
        self._waiting_steps: list[bytes] = []
        self._waiting_costs: list[tuple[float, bytes]] = []
        self._waiting_bytes = 0
        self.bye: Bye | None = None
        self.ended_s = 0.0
        self.heard_s = 0.0
        self.age: RankAge | None = None
        self.replies: tuple[Reply, ...] = ()
        self.commands: tuple[Logged, ...] = ()

    @property
    def over(self) -> bool:
        """Whether its process has said goodbye or is known to be dead."""
        return self.bye is not None or (self.age is not None and self.age.pid_alive is False)

    def pack(self) -> None:
        """Hold steps and spans as bytes from now on: there are many ranks."""
        self.packed = True
        self.window.pack()
        self.history.pack()

    def restart(self, incarnation: str) -> None:
        self.former |= {self.incarnation}
        self.incarnation = incarnation
        self.restarts += 1
        self._clear()

    # --- frames --------------------------------------------------------------------------------

    def take(self, frame: RankFrame, received_s: float) -> bool:
        """Take a frame; returns whether frames are missing that a snapshot could bring back.

        What waits has been settled.
        """
        self.heard_s = received_s
        self.sent_s = max(self.sent_s, frame.sent_s)
        self.age = None
        self.simulated = frame.simulated
        self.dropped = frame.dropped
        if frame.hello is not None:
            self.hello = _clean(frame.hello)
        if frame.replies:
            replies = (*self.replies, *map(_clean_reply, frame.replies))
            self.replies = replies[-_KEPT_REPLIES:]
        if frame.commands:
            known = {(logged.id, logged.status) for logged in self.commands}
            new = (c for c in _clean(frame.commands) if (c.id, c.status) not in known)
            merged = sorted((*self.commands, *new), key=lambda logged: logged.at_s)
            self.commands = tuple(merged[-_KEPT_COMMANDS:])
        if frame.bye is not None:
            self.bye = _clean_bye(frame.bye)
            self.ended_s = frame.sent_s
        if frame.workers:
            self.worker_totals.add(frame.sent_s, frame.workers)
        if frame.snapshot:
            self._take_snapshot(frame)
            return False
        if self.seq is not None and frame.seq <= self.seq:
            return False
        gap = 0 if self.seq is None else max(0, frame.seq - frame.merged - self.seq - 1)
        if gap:
            if not self.open_gap:
                self.gap_index = self.last_index
            self.open_gap += gap
        self.seq = frame.seq
        self._tell(frame.state, frame.ledger)
        self._append(frame.records)
        if frame.spans:
            self.history.add_spans(_clean(frame.spans))
        return gap > 0 or self._asked()

    def _asked(self) -> bool:
        """Whether what was damaged has not been asked for again yet."""
        asks, self.asks = self.asks, False
        return asks

    def beat(self, frame: Heartbeat | Ordinary, received_s: float) -> bool:
        """Note a frame if it is the next one; else it is to be taken as any frame is."""
        seq = self.seq
        if seq is None or not frame.seq - frame.merged <= seq + 1 <= frame.seq:
            return False
        if frame.incarnation != self.incarnation:
            return False
        self.be_at(
            received_s,
            seq=frame.seq,
            sent_s=frame.sent_s,
            dropped=frame.dropped,
            simulated=frame.simulated,
            state=frame.state,
            ledger=frame.ledger,
        )
        return True

    def be_at(
        self,
        received_s: float,
        seq: int,
        sent_s: float,
        dropped: int,
        simulated: bool,
        state: msgspec.Raw,
        ledger: msgspec.Raw,
    ) -> None:
        """Note what of a frame the next one replaces."""
        self.heard_s = received_s
        self.sent_s = max(self.sent_s, sent_s)
        self.age = None
        self.simulated = simulated
        self.dropped = dropped
        self.seq = seq
        self._state, self._ledger = state, ledger

    def note(self, frame: Ordinary, received_s: float) -> bool:
        """Note a frame if it is the next one; its steps wait for `settle`."""
        if not self.beat(frame, received_s):
            return False
        # As bytes of their own: raw ones keep the whole frame of the node alive.
        records, workers = bytes(frame.records), bytes(frame.workers)
        if records != EMPTY:
            self._waiting_steps.append(records)
            self._waiting_bytes += len(records)
        if workers != EMPTY:
            self._waiting_costs.append((frame.sent_s, workers))
            self._waiting_bytes += len(workers)
        return True

    def wait(self, steps: Sequence[bytes], costs: Sequence[tuple[float, bytes]]) -> None:
        """Note steps and worker totals, as bytes; of totals also when they were sent."""
        self._waiting_steps += steps
        self._waiting_costs += costs
        self._waiting_bytes += sum(map(len, steps)) + sum([len(cost) for _, cost in costs])

    @property
    def overfull(self) -> bool:
        """Whether so much waits that it must be settled now."""
        most = max(len(self._waiting_steps), len(self._waiting_costs))
        return most > _MOST_WAITING or self._waiting_bytes > _MOST_WAITING_BYTES

    def settle(self) -> list[FrameError]:
        """Make steps, worker totals, state and totals those of what was noted.

        Returns what was wrong with it: what is damaged changes nothing, but for steps, which are
        then missing and asked for again.
        """
        problems: list[FrameError] = []
        if self._waiting_bytes:
            self._settle_waiting(problems)
        if self._state is not None and self._ledger is not None:
            state, ledger = self._state, self._ledger
            self._state = self._ledger = None
            try:
                self._tell(*decode_told(state, ledger))
            except FrameError as exc:
                problems.append(exc)
        return problems

    def _settle_waiting(self, problems: list[FrameError]) -> None:
        parts, costs = self._waiting_steps, self._waiting_costs
        self._waiting_steps, self._waiting_costs, self._waiting_bytes = [], [], 0
        if parts:
            self._settle_steps(parts, problems)
        if costs and not are_costs([workers for _, workers in costs]):
            costs = self._without_damage(costs, problems)
        if costs:
            self.worker_totals.extend(costs)

    def _without_damage(
        self, costs: Sequence[tuple[float, bytes]], problems: list[FrameError]
    ) -> list[tuple[float, bytes]]:
        """Return the worker totals that can be decoded."""
        found: list[tuple[float, bytes]] = []
        for sent_s, workers in costs:
            try:
                decode_costs(workers)
            except FrameError as exc:
                problems.append(exc)
            else:
                found.append((sent_s, workers))
        return found

    def _settle_steps(self, parts: Sequence[bytes], problems: list[FrameError]) -> None:
        try:
            flats = decode_flats(parts)
        except FrameError:  # damaged, or not as this version writes them
            pass
        else:
            self._append_flats(flats)
            return
        try:
            self._append(decode_all_steps(parts))
        except FrameError:
            self._settle_parts(parts, problems)

    def _settle_parts(self, parts: Sequence[bytes], problems: list[FrameError]) -> None:
        """Take the steps of frames one by one: those of some are damaged."""
        for records in parts:
            try:
                self._append(decode_steps(records))
            except FrameError as exc:
                problems.append(exc)
                if not self.open_gap:
                    self.gap_index = self.last_index
                self.open_gap += 1
                self.asks = True

    def _tell(self, state: RankState, ledger: Ledger) -> None:
        self._state = self._ledger = None
        known = self.state
        if (
            state.phases_na == known.phases_na
            and state.notices == known.notices
            and state.flops_source == known.flops_source
        ):
            # What equals a clean text is clean, and the known one is shared already.
            _set(state, "phases_na", known.phases_na)
            _set(state, "notices", known.notices)
            _set(state, "flops_source", known.flops_source)
            _set(state, "status", _clean(state.status))
            _set(state, "phase", _clean(state.phase))
            self.state = state
        else:
            self.state = _clean(state)
        self.ledger = ledger

    def _append(self, records: Sequence[StepRecord]) -> None:
        """Take steps, those that are known already left out."""
        last_index = self.last_index
        new: Sequence[StepRecord] = records
        if [record.index for record in records] != [
            *range(last_index + 1, last_index + 1 + len(records))
        ]:
            new = []
            for record in records:
                if record.index > last_index:
                    last_index = record.index
                    new.append(record)
        if not new:
            return
        self.history.add_steps(new)
        self._count(new, len(new))

    def _count(self, records: Sequence[StepRecord], most: int) -> None:
        """Take new steps into seconds and window, at most so many of the newest into the latter."""
        self.last_index = records[-1].index
        self.last = records[-1]
        times = [times_of(record) for record in records]
        self.timeline.extend(records, times)
        if any(record.tags for record in records):
            steady = [is_steady(record) for record in records]
            records, times = list(compress(records, steady)), list(compress(times, steady))
        self.window.extend(records[-most:], times[-most:])

    def _append_flats(self, flats: Sequence[Flat]) -> None:
        """Take steps as tuples, those that are known already left out."""
        last_index = self.last_index
        begin = last_index + 1
        if list(map(_index_of, flats)) != [*range(begin, begin + len(flats))]:
            known, flats = flats, []
            for flat in known:
                if flat[INDEX] > last_index:
                    last_index = flat[INDEX]
                    flats.append(flat)
        if flats:
            self.history.add_flats(flats)
            self._count_flats(flats)

    def _count_flats(self, flats: Sequence[Flat]) -> None:
        """Take new steps into seconds and window."""
        self.last_index = flats[-1][INDEX]
        self.last = record_of(flats[-1])
        steps_ns, waits_ns = times_of_flats(flats)
        self.timeline.extend_flats(flats, steps_ns, waits_ns)
        if self.window.extend_next(flats, steps_ns):
            return
        if any(map(_tags_of, flats)):
            flats = [flat for flat in flats if not NOT_STEADY.intersection(flat[TAGS])]
        self.window.extend_flats(flats)

    def _take_snapshot(self, frame: RankFrame) -> None:
        records = frame.records
        self.history.add_spans(_clean(frame.spans))
        self.history.add_steps(r for r in records if r.index > self.last_index)
        if self.seq is None or frame.seq >= self.seq:
            self.seq = frame.seq
            self._tell(frame.state, frame.ledger)
        if self.open_gap:
            # What was lost is in the rank's own memory if that reaches back to before the gap.
            if records and records[0].index > self.gap_index + 1:
                self.lost += self.open_gap
            self.open_gap = 0
            self.asks = False
        merged = {r.index: r for r in self.window.records}
        if not records or all(r.index in merged or not is_steady(r) for r in records):
            return
        if self.last is None and all(one.index < two.index for one, two in pairwise(records)):
            self._count(records, WINDOW_STEPS)  # nothing to merge with
            return
        for record in records:
            if is_steady(record):
                merged[record.index] = record
        steady = [merged[i] for i in sorted(merged)]
        self.window.replace(steady[-WINDOW_STEPS:])
        newest = records[-1]
        self.timeline.rebuild(
            [*records, *(r for r in self.window.records if r.index > newest.index)]
        )
        if newest.index > self.last_index:
            self.last_index = newest.index
            self.last = newest

    # --- the view ------------------------------------------------------------------------------

    def view(
        self,
        now_s: float,
        node_live: bool,
        process: ProcessSample | None,
        workers: tuple[ProcessSample, ...],
        means: MeansPicture,
        ahead_s: int = 0,
    ) -> RankView:
        window, told, last, hello = self.window, self.state, self.last, self.hello
        age_s = max(0.0, now_s - self.heard_s)
        view = sketch()
        view.run, view.rank, view.node = self.run, self.rank, self.node
        view.incarnation, view.restarts = self.incarnation, self.restarts
        view.state, view.state_reason = self._condition(age_s, node_live)
        view.age_s = age_s
        view.phase, view.phase_age_s = told.phase, told.phase_age_ns / 1e9 + age_s
        view.step_p50_ms, view.step_p95_ms = window.percentiles_ms()
        view.last = last
        if last is None:
            view.steps = told.step
            view.clock = window.clock or "host"
            view.queue_capacity = None
        else:
            view.steps = max(told.step, self.last_index + 1)
            view.clock = window.clock or last.clock
            view.queue_capacity = window.queue_capacity
        view.window = window.records
        view.phases_ms = phases_ms = window.phases_ms
        view.step_ms = window.step_ms
        # The step without exposed communication; None where that is n/a among ranks.
        alone = hello is not None and hello.world_size == 1
        view.own_ms = window.own_ms if alone or phases_ms["comm"] is not None else None
        view.phases_na = told.phases_na
        view.data_wait_ratio = window.data_wait_ratio
        view.samples_per_s = window.samples_per_s
        view.queue_depth = window.queue_depth
        view.device_stall_ms = window.device_stall_ms
        view.device_dropped = told.device_dropped
        view.told, view.ledger, view.past = told, self.ledger, self.history.past()
        view.loss, view.epoch, view.total_steps = told.loss, told.epoch, told.total_steps
        view.notices = told.notices
        view.lost, view.dropped = self.lost + self.open_gap, self.dropped
        view.hello, view.process, view.workers = hello, process, workers
        view.replies, view.commands, view.simulated = self.replies, self.commands, self.simulated
        view.bye, view.ahead_s = self.bye, ahead_s
        # One that died without a word was heard within a tenth of a second of its end.
        view.ended_s = self._ended_s(ahead_s) if self.over else None
        loaders = () if hello is None else hello.loaders
        view._later = _Later(
            self.worker_totals.picture, window.loader, loaders, self.timeline.picture, ahead_s,
            means, process, workers,
        )  # fmt: skip
        return framed(view)

    def _ended_s(self, ahead_s: int) -> float | None:
        ended_s = self.ended_s or self.sent_s
        return ended_s - ahead_s if ended_s else None

    def _condition(self, age_s: float, node_live: bool) -> tuple[str, str]:
        bye = self.bye
        if bye is not None:
            return "ended", f"{bye.reason}: {bye.detail}" if bye.detail else bye.reason
        age = self.age
        if age is not None and age.pid_alive is False:
            return "gone", printable(age.gone_reason) or "its process has ended without a goodbye"
        if node_live and age_s > SILENT_S:
            letter = age.process_state if age is not None else ""
            return "silent", _PROCESS_STATES.get(letter, "no word from it")
        return self.state.status, ""


class _Node:
    """The mutable picture of one node."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.incarnation = ""
        self.seq = 0
        self.lost = 0
        self.heard_s = 0.0
        self.quiet_s = _NODE_QUIET_S
        self.agent_pid = 0
        self.sensors: SensorFrame | None = None
        self._tick: bytes | None = None  # the newest, of which no picture is made yet
        self.sensors_heard_s = 0.0
        self.sensors_reason = ""
        self.notices: tuple[str, ...] = ()
        self.by_pid: dict[int, ProcessSample] = {}
        self.by_rank_pid: dict[int, tuple[ProcessSample, ...]] = {}
        self.means = Means()
        self.uuids: frozenset[str] = frozenset()
        self.bare_uuids: dict[str, str] = {}
        self.clock = NodeClock()
        self.convoy: Convoy[_Rank] | None = None
        self.settled_s = 0.0

    def take_sensors(self, frame: SensorFrame, received_s: float) -> None:
        self.sensors_heard_s = received_s
        self.means.add(frame, received_s)
        self._tick = None
        self._show(frame)

    def note_sensors(self, frame: SensorFrame, data: bytes, received_s: float) -> None:
        """Take a tick, of which a picture is made from its bytes when somebody looks."""
        self.sensors_heard_s = received_s
        self.means.add(frame, received_s)
        self._tick = data

    def catch_up(self) -> None:
        """Bring its picture and those of its ranks up to date."""
        if self.convoy is not None:
            self.convoy.catch_up()
        data, self._tick = self._tick, None
        if data is not None:
            self._show(lean_frame(decode_sensor_frame(data)))

    def _show(self, frame: SensorFrame) -> None:
        self.sensors = frame
        self.uuids = frozenset([gpu.uuid for gpu in frame.gpus])
        self.bare_uuids = {bare_uuid(gpu.uuid): gpu.uuid for gpu in frame.gpus}
        self.by_pid = {p.pid: p for p in frame.processes if p.role == "rank"}
        workers: dict[int, list[ProcessSample]] = {}
        for process in frame.processes:
            if process.role == "worker":
                workers.setdefault(process.rank_pid, []).append(process)
        self.by_rank_pid = {pid: tuple(found) for pid, found in workers.items()}

    def renamed(self, hello: Hello) -> Hello:
        """Return a hello with the sensors' own name for its device: what the screens join by."""
        named = self.bare_uuids.get(bare_uuid(hello.device_uuid))
        if named is None or named == hello.device_uuid:
            return hello
        renamed: Hello = msgspec.structs.replace(hello, device_uuid=named)
        return renamed

    def view(self, now_s: float) -> NodeView:
        sensors = self.sensors
        return NodeView(
            node=self.name,
            age_s=max(0.0, now_s - self.heard_s),
            agent_pid=self.agent_pid,
            lost=self.lost,
            host=None if sensors is None else sensors.host,
            gpus=() if sensors is None else sensors.gpus,
            gpus_reason=(
                printable(sensors.gpus_reason) if sensors is not None else "no sensor reading yet"
            ),
            sensors_age_s=None if sensors is None else max(0.0, now_s - self.sensors_heard_s),
            sensors_reason=self.sensors_reason,
            notices=self.notices,
            host_means=self.means.host(),
        )


class Store:
    """Everything that is known, from the frames of any number of nodes.

    `apply` is called by one receiving thread, `view` by any other. Ages count from the arrival of
    a frame by the clock given, so the senders' clocks do not matter.

    Args:
        clock: monotonic seconds.
        wall: seconds since the epoch; on the time axis a live node whose own clock differs from it
            is put where it belongs.
        pack_above: of more ranks than this steps and spans are kept as bytes, and frames are read
            when a view is asked for.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
        *,
        pack_above: int = PACK_ABOVE,
    ) -> None:
        self._clock = clock
        self._wall = wall
        self._pack_above = pack_above
        self._lock = threading.Lock()
        self._looked_s = -inf
        self._ranks: dict[tuple[str, int], _Rank] = {}
        self._nodes: dict[str, _Node] = {}
        self._raw_runs: OrderedDict[str, str] = OrderedDict()
        self._events: deque[Event] = deque(maxlen=_KEPT_EVENTS)
        self._said: dict[tuple[str, int], str] = {}
        self._changes: dict[tuple[str, str, str], list[int]] = {}
        self._spans_told: dict[tuple[str, str], tuple[int, float]] = {}
        self._packed = False
        self._shared = Shared()
        self._version = 0
        self._refused = 0
        self._refusal = ""
        self._worlds: dict[str, int] = {}
        self._uneven: set[str] = set()
        self._doubts = Doubts()
        self._link = "connecting"
        self._message = ""
        self._replies: deque[Reply] = deque(maxlen=_KEPT_REPLIES)

    @property
    def version(self) -> int:
        """Rises with every change."""
        return self._version

    # --- frames in -----------------------------------------------------------------------------

    def apply(self, data: bytes | NodeFrame, received_s: float) -> list[tuple[str, int]]:
        """Take one node frame, as bytes or as `decode_node_frame` has returned it.

        A frame that cannot be read is counted and its reason kept; nothing else is lost by it.
        State and totals of a heartbeat are read when a view is asked for, those of the last one;
        where there are many ranks the steps of ordinary frames too, and of the ticks of a sampler
        no picture is made until then, but for means.

        Returns:
            (run, rank) of each rank whose frames are missing and may be asked for again, with
            the run id as its owner spells it.
        """
        try:
            node_frame = data if isinstance(data, NodeFrame) else decode_node_frame(data)
        except FrameError as exc:
            with self._lock:
                self._refuse(exc)
            return []
        frames: list[_Found] = []
        sensors: SensorFrame | None = None
        tick: bytes | None = None
        problem: FrameError | None = None
        heads = decode_columns(node_frame.frames) if self._packed else None
        if heads is None:
            frames, problem = _one_by_one(node_frame.frames, packed=self._packed)
        if node_frame.sensors is not None:
            try:
                tick = bytes(node_frame.sensors)
                sensors = decode_sensor_frame(tick)
                if not self._packed or self._ahead(received_s):
                    sensors, tick = lean_frame(sensors), None
            except FrameError as exc:
                problem = exc
        with self._lock:
            if problem is not None:
                self._refuse(problem)
            return self._apply(node_frame, heads, frames, sensors, tick, received_s)

    def _refuse(self, exc: FrameError) -> None:
        self._refused += 1
        self._refusal = printable(str(exc))
        self._version += 1

    def _apply(
        self,
        node_frame: NodeFrame,
        heads: Columns | None,
        frames: Sequence[_Found],
        sensors: SensorFrame | None,
        tick: bytes | None,
        received_s: float,
    ) -> list[tuple[str, int]]:
        """Take what was decoded: the heads, if all frames are ordinary ones, else each frame.

        `tick` are the bytes of sensors that are not lean yet.
        """
        name = printable(node_frame.node)
        node = self._nodes.get(name)
        if node is None:
            node = self._nodes[name] = _Node(name)
        step_s = node.clock.take(
            node_frame.seq, node_frame.sent_s, received_s, self._wall(), node_frame.merged
        )
        if step_s and self._link != "replay":
            for moved in self._ranks.values():
                if moved.node == name:
                    self._settle(moved)
                    moved.timeline.move(round(step_s))
        if node.incarnation == node_frame.incarnation:
            node.lost += max(0, node_frame.seq - node_frame.merged - node.seq - 1)
        node.incarnation = node_frame.incarnation
        node.seq = node_frame.seq
        node.heard_s = received_s
        if node_frame.merged:
            node.quiet_s = _NODE_QUIET_MERGED_S
        node.agent_pid = node_frame.agent_pid
        node.sensors_reason = printable(node_frame.sensors_reason)
        node.notices = _clean(node_frame.notices)
        if sensors is not None:
            if tick is not None:
                node.note_sensors(sensors, tick, received_s)
            else:
                node.take_sensors(sensors, received_s)
        self._replies.extend(map(_clean_reply, node_frame.replies))
        missing: list[tuple[str, int]] = []
        if heads is None:
            self._take_frames(name, frames, received_s, missing)
        elif node.convoy is None or not node.convoy.take(heads, received_s):
            frames, _ = _one_by_one(node_frame.frames, packed=True)
            noted = self._take_frames(name, frames, received_s, missing)
            self._gather(node, noted, heads)
        elif node.convoy.full:
            for moved in node.convoy.ranks:
                self._settle(moved)
        for age in node_frame.ages:
            self._take_age(age, received_s)
        if self._packed and self._ahead(received_s):
            self._settle_ahead(node, received_s)
        self._version += 1
        return missing

    def _ahead(self, received_s: float) -> bool:
        """Whether somebody looks anyhow, so that who takes the frames settles them, not who draws:
        that one is not held up by all nodes at once.
        """
        return len(self._ranks) <= _SETTLED_RANKS and received_s - self._looked_s < _LOOKED_S

    def _settle_ahead(self, node: _Node, received_s: float) -> None:
        if node.convoy is None or received_s - node.settled_s < _SETTLE_S:
            return
        node.settled_s = received_s
        node.catch_up()
        for rank in node.convoy.ranks:
            self._settle(rank)

    def _take_frames(
        self,
        node: str,
        frames: Sequence[_Found],
        received_s: float,
        missing: list[tuple[str, int]],
    ) -> list[_Rank]:
        """Take frames of ranks one by one; returns the ranks of those that were simply the next."""
        noted = []
        for found in frames:
            if isinstance(found, RankFrame):
                frame = found
            else:
                head, raw = found
                known = self._ranks.get((printable(head.run), head.rank))
                if known is not None:
                    self._dissolve(known)
                if known is not None and self._noted(known, head, received_s):
                    noted.append(known)
                    known.node = node
                    if known.asks and known._asked():
                        missing.append((head.run, head.rank))
                    continue
                try:
                    frame = decode_rank_frame(bytes(raw))
                except FrameError as exc:
                    self._refuse(exc)
                    continue
            rank = self._rank(frame, node)
            if rank is None:
                continue
            self._settle(rank)
            if rank.take(frame, received_s):
                missing.append((frame.run, frame.rank))
            if rank.hello is not None and frame.hello is not None:
                rank.hello = self._shared.parts(rank.hello)
                world = self._worlds.setdefault(rank.run, rank.hello.world_size)
                if world != rank.hello.world_size:
                    self._worlds[rank.run] = rank.hello.world_size
                    self._uneven.add(rank.run)
            if frame.spans and not frame.snapshot:
                self._note_spans(rank, frame, received_s)
            if frame.commands and not frame.snapshot:
                self._note_commands(rank, frame.commands)
        return noted

    def _gather(self, node: _Node, ranks: Sequence[_Rank], heads: Columns) -> None:
        """Let ranks of a node go on together, if each frame of it was simply the next one."""
        if node.convoy is not None:
            node.convoy.disband()
            node.convoy = None
        if len({id(rank) for rank in ranks}) == len(heads.seq):
            node.convoy = Convoy(ranks, heads)

    def _dissolve(self, rank: _Rank) -> None:
        """Bring a rank up to date, and those beside it; each of their next frames is looked at."""
        if rank.convoy is not None:
            rank.convoy.disband()

    def _noted(self, rank: _Rank, head: Heartbeat | Ordinary, received_s: float) -> bool:
        """Note a frame of a rank if it is simply the next one."""
        if isinstance(head, Heartbeat):
            return rank.beat(head, received_s)
        if not rank.packed or not rank.note(head, received_s):
            return False
        if rank.overfull:
            self._settle(rank)
        return True

    def _catch_up(self) -> None:
        """Bring every rank and node up to date."""
        for node in self._nodes.values():
            node.catch_up()

    def _settle(self, rank: _Rank) -> None:
        if rank.convoy is not None:
            rank.convoy.catch_up()
        for problem in rank.settle():
            self._refuse(problem)
        if rank.asks:
            self._dissolve(rank)

    def _rank(self, frame: RankFrame, node: str) -> _Rank | None:
        run = printable(frame.run)
        key = (run, frame.rank)
        rank = self._ranks.get(key)
        if rank is not None:
            self._dissolve(rank)
        if frame.bye is not None and frame.bye.reason == "moved":
            # It has joined a process group since, and goes on under another run or rank.
            if rank is not None and rank.incarnation == frame.incarnation:
                del self._ranks[key]
            return None
        if rank is None:
            if len(self._ranks) >= _KEPT_RANKS:
                return None
            packed = len(self._ranks) >= self._pack_above
            rank = _Rank(run, frame.rank, node, frame.incarnation, packed=packed)
            self._ranks[key] = rank
            if packed and not self._packed:
                self._packed = True
                collect_seldom()
                for other in self._ranks.values():
                    other.pack()
            self._raw_runs[run] = frame.run
            self._forget_old_runs()
        elif frame.incarnation != rank.incarnation:
            if frame.incarnation in rank.former or frame.sent_s < rank.sent_s:
                # A late frame, or the remembered past, of a process that has been replaced.
                if not frame.snapshot and node != rank.node:
                    nodes = (node, rank.node)
                    self._doubts.note_double(run, frame.rank, nodes, self._clock())
                if frame.incarnation not in rank.former:
                    rank.former |= {frame.incarnation}
                    rank.restarts += 1
                return None
            rank.restart(frame.incarnation)
            self._event(f"rank {frame.rank} restarted", "warning", run)
        rank.node = node
        return rank

    def _forget_old_runs(self) -> None:
        if len(self._raw_runs) <= _KEPT_RUNS:
            return
        now_s = self._clock()
        self._catch_up()
        ranks: dict[str, list[_Rank]] = {run: [] for run in self._raw_runs}
        for (run, _), rank in self._ranks.items():
            ranks.setdefault(run, []).append(rank)

        def rests(run: str) -> tuple[bool, float]:
            heard_s = max((r.heard_s for r in ranks[run]), default=0.0)
            return all(r.over for r in ranks[run]) or now_s - heard_s > _FORGET_S, -heard_s

        # What has ended goes first, the one that was heard last of all longest ago.
        old = max(list(self._raw_runs)[:-1], key=rests)
        if not rests(old)[0] and len(self._raw_runs) <= 4 * _KEPT_RUNS:
            return  # all of them live: so many runs there are
        del self._raw_runs[old]
        for key in [key for key in self._ranks if key[0] == old]:
            self._dissolve(self._ranks.pop(key))

    def _take_age(self, age: RankAge, received_s: float) -> None:
        rank = self._ranks.get((printable(age.run), age.rank))
        if rank is None or rank.incarnation != age.incarnation:
            return
        if rank.convoy is not None:
            rank.convoy.catch_up()
        rank.age = age
        # The node process heard it last `age_s` before this frame; trust the older of the two.
        if rank.heard_s == 0.0:
            rank.heard_s = received_s - age.age_s
        rank.heard_s = min(rank.heard_s, received_s - age.age_s)

    def set_link(self, link: str, message: str = "") -> None:
        """Say how the way to the data is: connecting, live, lost or replay, and a sentence."""
        with self._lock:
            if (link, message) != (self._link, self._message):
                if link == "lost" and message:
                    self._event(message, "warning")
                self._link = link
                self._message = message
                self._version += 1

    def raw_run(self, run: str) -> str:
        """Return a run id as its owner spells it, for a command."""
        return self._raw_runs.get(run, run)

    def nodes_of(self, run: str, rank: int | None = None) -> set[str]:
        """Return the names of the nodes that a run, or a rank of it, was last heard from."""
        with self._lock:
            if rank is not None:
                found = self._ranks.get((run, rank))
                return {found.node} if found is not None else set()
            return {known.node for known in self._ranks.values() if known.run == run}

    def replies(self) -> tuple[Reply, ...]:
        """Return what node processes answered themselves."""
        with self._lock:
            return tuple(self._replies)

    def _event(self, text: str, severity: str = "note", run: str = "") -> None:
        self._events.append(Event(time.time(), printable(text), severity, run))

    # --- views out -----------------------------------------------------------------------------

    def view(self) -> View:
        """Return the present picture."""
        now_s = self._clock()
        with self._lock:
            self._looked_s = now_s
            self._catch_up()
            doubts = self._members(now_s)
            by_run: dict[str, list[RankView]] = {}
            windows: dict[str, list[Window]] = {}
            for (run, _), rank in sorted(self._ranks.items(), key=lambda item: item[0][1]):
                by_run.setdefault(run, []).append(self._rank_view(rank, now_s))
                windows.setdefault(run, []).append(rank.window)
            self._tell_changes()
            ahead_s = {name: self._ahead_s(node) for name, node in self._nodes.items()}
            runs = [
                _run_view(run, tuple(ranks), windows[run], ahead_s) for run, ranks in by_run.items()
            ]
            runs.sort(key=lambda r: r.started_s, reverse=True)
            notices = [n for node in self._nodes.values() for n in node.notices]
            notices += doubts
            if self._refused:
                notices.append(f"{self._refused} frames refused; the last: {self._refusal}")
            return View(
                version=self._version,
                at_s=time.time(),
                runs=tuple(runs),
                nodes=tuple(node.view(now_s) for node in self._nodes.values()),
                events=tuple(self._events),
                link=self._link,
                message=self._message,
                refused=self._refused,
                lost=sum(r.lost + r.open_gap for r in self._ranks.values()),
                notices=tuple(notices),
            )

    def _ahead_s(self, node: _Node) -> int:
        """Return how far the clock of a node is ahead of the observer's, in s.

        A recording is by its own clocks; only of what arrives now is the delay small.
        """
        return 0 if self._link == "replay" else node.clock.ahead_s

    def _members(self, now_s: float) -> list[str]:
        """Let go of ranks that a smaller restart has left out; returns what there is to doubt."""
        uneven: dict[str, list[_Rank]] = {run: [] for run in self._uneven}
        if uneven:
            for (run, _), rank in self._ranks.items():
                if run in uneven:
                    uneven[run].append(rank)
        for run, ranks in uneven.items():
            gone = leavers(ranks, now_s)
            for left in gone:
                self._dissolve(self._ranks.pop((run, left.rank)))
                self._said.pop((run, left.rank), None)
            if gone:
                ranks[:] = [rank for rank in ranks if rank not in gone]
                world = max(r.hello.world_size for r in ranks if r.hello is not None)
                who = f"rank {gone[0].rank}" if len(gone) == 1 else f"{len(gone)} ranks"
                self._event(f"{who} left out: {world} of them go on", "warning", run)
            sizes = {rank.hello.world_size for rank in ranks if rank.hello is not None}
            if len(sizes) < 2:
                self._uneven.discard(run)
        told: dict[str, list[Member]] = {run: [*ranks] for run, ranks in uneven.items()}
        return self._doubts.sentences(told.items(), now_s)

    def _rank_view(self, rank: _Rank, now_s: float) -> RankView:
        node = self._nodes.get(rank.node)
        hello = rank.hello
        process: ProcessSample | None = None
        workers: tuple[ProcessSample, ...] = ()
        node_live, means, ahead_s = False, _NO_MEANS, 0
        if node is not None:
            node_live = now_s - node.heard_s < node.quiet_s
            means, ahead_s = node.means.picture(), self._ahead_s(node)
            if hello is not None:
                process = node.by_pid.get(hello.pid)
                workers = node.by_rank_pid.get(hello.pid, ())
                if hello.device_uuid and hello.device_uuid not in node.uuids:
                    rank.hello = node.renamed(hello)
        self._settle(rank)
        view = rank.view(now_s, node_live, process, workers, means, ahead_s)
        if self._said.get((view.run, view.rank)) != view.state:
            self._note_change(view)
        return view

    def _note_change(self, view: RankView) -> None:
        key = (view.run, view.rank)
        before = self._said.get(key)
        self._said[key] = view.state
        reason = f" ({view.state_reason})" if view.state_reason else ""
        if before is None:
            what = (view.run, f" on {view.node}: {view.state}{reason}", "note")
        elif view.state in {"silent", "gone", "ended", "hung"} or before in {"silent", "hung"}:
            bad = view.state in {"silent", "gone", "hung"} or "exception" in view.state_reason
            severity = ("critical" if view.state == "gone" else "warning") if bad else "note"
            what = (view.run, f" {view.state}{reason}", severity)
        else:
            return
        self._changes.setdefault(what, []).append(view.rank)

    def _tell_changes(self) -> None:
        """Log what changed; what happened to many ranks at once is one event."""
        changes, self._changes = self._changes, {}
        for (run, text, severity), unsorted in changes.items():
            ranks = sorted(unsorted)
            if len(ranks) < _TOGETHER:
                for rank in ranks:
                    self._event(f"rank {rank}{text}", severity, run)
            else:
                whole = ranks[-1] - ranks[0] == len(ranks) - 1
                named = f"ranks {ranks[0]}-{ranks[-1]}" if whole else f"{len(ranks)} ranks"
                self._event(f"{named}{text}", severity, run)

    def _note_commands(self, rank: _Rank, commands: tuple[Logged, ...]) -> None:
        """Log what became of commands; of many ranks alike it is one event."""
        for logged in commands:
            if logged.status == "error":
                what = f"{logged.verb} {logged.args}".strip() + f": error: {logged.message}"
            else:
                words = logged.message or logged.args
                what = f"{logged.verb} {words}".strip() + f": {logged.status}"
            severity = "warning" if logged.status == "error" else "note"
            key = (rank.run, printable(f": {what}"), severity)
            self._changes.setdefault(key, []).append(rank.rank)

    def _note_spans(self, rank: _Rank, frame: RankFrame, received_s: float) -> None:
        """Log eval, checkpoints and the user's spans: once for all ranks, seldom where many."""
        for span in frame.spans:
            key = (rank.run, span.name)
            step, told_s = self._spans_told.get(key, (-1, -_SPAN_EVERY_S))
            if span.step <= step or received_s - told_s < _SPAN_EVERY_S:
                continue
            if len(self._spans_told) >= _KEPT_EVENTS:
                self._spans_told.clear()
            self._spans_told[key] = (span.step, received_s)
            seconds = span.duration_ns / 1e9
            text = f"{span.name} {seconds:.1f} s (rank {rank.rank}), kept out of step statistics"
            self._event(text, run=rank.run)


def _run_view(
    run: str,
    ranks: tuple[RankView, ...],
    windows: Sequence[Window],
    ahead_s: Mapping[str, int],
) -> RunView:
    hellos = [r.hello for r in ranks if r.hello is not None]
    steps_ms = [r.step_ms for r in ranks if r.step_ms is not None]
    rates = [r.samples_per_s for r in ranks if r.samples_per_s is not None]
    if all(r.state in {"ended", "gone"} for r in ranks):
        state = "ended"
    elif all(r.steps == 0 for r in ranks):
        state = "starting"
    else:
        state = "running"
    return RunView(
        run=run,
        name=next((h.run_name for h in hellos if h.run_name), "") or run,
        state=state,
        world_size=max([h.world_size for h in hellos], default=len(ranks)),
        ranks=ranks,
        nodes=tuple(sorted({r.node for r in ranks})),
        steps=max(r.steps for r in ranks),
        window=_shared_steps(windows),
        step_ms=sum(steps_ms) / len(steps_ms) if steps_ms else None,
        samples_per_s=sum(rates) if rates else None,
        loss=next((r.loss for r in ranks if r.loss is not None), None),
        epoch=next((r.epoch for r in ranks if r.epoch is not None), None),
        total_steps=next((r.total_steps for r in ranks if r.total_steps is not None), None),
        started_s=min(
            [r.hello.started_s - ahead_s.get(r.node, 0) for r in ranks if r.hello is not None],
            default=0.0,
        ),
        age_s=min(r.age_s for r in ranks),
        lost=sum(r.lost for r in ranks),
        dropped=sum(r.dropped for r in ranks),
        simulated=any(r.simulated for r in ranks),
    )


def _shared_steps(windows: Sequence[Window]) -> int:
    """How many steady steps all ranks have in their windows."""
    if not all(windows):
        return 0
    low = max([window.first_index for window in windows])
    high = min([window.last_index for window in windows])
    if low > high:
        return 0
    return min([window.count_between(low, high) for window in windows])
