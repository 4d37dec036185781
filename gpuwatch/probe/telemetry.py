"""The telemetry thread of one rank: owns the sockets, the past and the hello.

Ten times a second it turns what the training thread left in the accountant's deque into one
frame. It answers requests for a snapshot (the last 600 records), takes commands (of which those
for stacks and memory are answered also while the training thread hangs), and says goodbye at exit.
"""

import contextlib
import os
import sys
import threading
import time
import traceback
import uuid
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import zmq

from gpuwatch.errors import FrameError, GpuwatchError
from gpuwatch.frames import decode_command, encode
from gpuwatch.probe.accounting import RawSpan, RawStep, Totals
from gpuwatch.probe.claims import Claim, claim
from gpuwatch.probe.commands import Commands, only
from gpuwatch.probe.config import build_hello
from gpuwatch.probe.events import Recorder, Replay
from gpuwatch.probe.identity import Identity, has_group, identify
from gpuwatch.probe.knobs import Knobs, Live, loader_knobs
from gpuwatch.probe.memory import MOVING_NS, memory_document
from gpuwatch.probe.pace import CommandError, Pace
from gpuwatch.probe.patches import Marks
from gpuwatch.probe.profile import Profiles
from gpuwatch.probe.text import TEXT, wire_text
from gpuwatch.probe.twin import DeviceStep, Join, Scalar
from gpuwatch.schema import (
    WIRE_VERSION,
    Bye,
    Command,
    Hello,
    Ledger,
    PhasesNs,
    RankFrame,
    RankState,
    Reply,
    Span,
    StepRecord,
)
from gpuwatch.wire.publish import RankSockets, run_directory

__all__ = ["Telemetry"]

FLUSH_S = 0.1
KEPT_RECORDS = 600
KEPT_SPANS = 64
_RECORDS_A_FRAME = 1024
_ANNOUNCE_CHECK_S = 10.0
_JOINS = 10
_NO_OPTIMIZER = "no optimizer step is seen: it is compiled into the step, or is none of torch's"
_NO_BACKWARD = "no backward is seen: the step is compiled as a whole, or does without autograd"
_SHOWN = ("loss", "learning_rate", "grad_norm", "loss_scale")


class Telemetry:
    """Runs beside the training; `start` it once, `stop` it at exit.

    Args:
        recorder: whose marks are turned into records and sent.
        marks: what was seen of loaders, DDP and device.
        name: the run's name for people.
        control: whether commands that change something are allowed.
        notices: what the user has been told; a monitor shows it too.
        warn: says one line to the user.
    """

    def __init__(
        self,
        recorder: Recorder,
        marks: Marks,
        *,
        name: str,
        control: bool,
        notices: list[str],
        warn: Callable[[str], None],
    ) -> None:
        self._recorder = recorder
        self._replay = Replay(recorder, warn)
        self._accountant = self._replay.accountant
        self._marks = marks
        self._name = name
        self._control = control
        self._notices = notices
        self._warn = warn
        self._started_ns = recorder.clock()
        self._started_s = time.time()
        self._wall_offset_ns = time.time_ns() - recorder.clock()
        self._pid = os.getpid()
        self._stop = False
        self._bye: Bye | None = None
        self._thread: threading.Thread | None = None
        self._wake_r, self._wake_w = os.pipe()
        os.set_blocking(self._wake_r, False)
        os.set_blocking(self._wake_w, False)
        self._totals = Totals()
        self._told: Identity = identify()
        self._identity = self._told
        self._claim: Claim | None = None
        self._grouped = has_group()
        self._former: tuple[Identity, str] | None = None
        self._incarnation = uuid.uuid4().hex[:12]
        self._seq = 0
        self._join = Join()
        self._device_dropped = 0
        self._records: deque[StepRecord] = deque(maxlen=KEPT_RECORDS)
        self._unsent: deque[StepRecord] = deque()
        self._unsent_spans: list[Span] = []
        self._spans: deque[Span] = deque(maxlen=KEPT_SPANS)
        self._loader = ""  # that the last step was fed from
        self.knobs = Knobs(self._changed, self._loader_knobs)
        self._profiles = Profiles(marks.desk, self._who)
        self._commands = Commands(
            marks.desk,
            at_once={
                "stack": self._stack,
                "memory": self._memory,
                "fetch": self._profiles.fetch,
            },
            later={
                "profile": lambda c: self._profiles.begin(c, self._pace(), self._step_s()),
                "set": lambda c: self.knobs.set(c, self._pace(), self._identity.world_size),
            },
            control=control,
            step_s=self._step_s,
        )
        self._config_version = -1
        self._hello: Hello | None = None
        self._statm = _open_statm()
        self._latest: dict[str, float] = {}  # of what steps carry, by name
        self._tokens: tuple[int | None, str] = None, ""  # of the last step with some; its loader
        self.loss: Any = None
        self.epoch: float | None = None
        self.total_steps: int | None = None
        self.dataset_path = ""

    def tell(self, notice: str) -> None:
        """Show a sentence of the training's own beside the rank; the last 16 are kept."""
        notice = wire_text(notice, 500)
        if notice not in self._notices[-16:]:
            self._notices.append(notice)
            del self._notices[:-16]

    def start(self) -> None:
        """Start the thread."""
        self._thread = threading.Thread(target=self._run, name="gpuwatch-telemetry", daemon=True)
        self._thread.start()

    def recall(self) -> None:
        """End a profile that another thread than the calling one runs; waits a second at most."""
        self._profiles.recall()

    def stop(self, bye: Bye, timeout_s: float = 1.0) -> None:
        """Say goodbye and end the thread; waits at most `timeout_s`.

        Time in which a profile that is being read holds the GIL does not count: the thread could
        not say goodbye in it.
        """
        if os.getpid() != self._pid or self._thread is None:
            return
        self._bye = bye
        self._stop = True
        with contextlib.suppress(OSError):
            os.write(self._wake_w, b"x")
        for _ in range(_JOINS):
            self._thread.join(timeout_s / _JOINS)
            if not self._thread.is_alive():
                break

    # --- the thread ----------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._serve()
        except (OSError, zmq.ZMQError, GpuwatchError) as exc:
            self._warn(f"no telemetry: {exc}")
        except Exception as exc:
            self._warn(f"no telemetry after an error of its own ({type(exc).__name__}: {exc})")

    def _open(self) -> RankSockets:
        directory = run_directory()
        self._identity, self._claim = claim(directory, self._told)
        sockets = RankSockets(
            directory,
            version=WIRE_VERSION,
            run=self._identity.run,
            rank=self._identity.rank,
            incarnation=self._incarnation,
        )
        sockets.wake_on(self._wake_r)
        return sockets

    def _serve(self) -> None:
        sockets = self._open()
        try:
            next_flush_s = time.monotonic()
            next_check_s = next_flush_s + _ANNOUNCE_CHECK_S
            while not self._stop:
                now_s = time.monotonic()
                if now_s >= next_flush_s:
                    next_flush_s = max(next_flush_s + FLUSH_S, now_s + FLUSH_S / 2)
                    changed = self._moved()
                    if not changed and now_s >= next_check_s:
                        next_check_s = now_s + _ANNOUNCE_CHECK_S
                        changed = not sockets.announced
                    if changed:
                        sockets = self._reopen(sockets)
                    sockets.publish(self._frame())
                for who, payload in sockets.wait(_ms_until(next_flush_s)):
                    self._answer(sockets, who, payload)
            while self._more():
                sockets.publish(self._frame())
            sockets.publish(self._frame(bye=self._last_words()))
            self._profiles.close()
            # A subscriber that has just connected is still shaking hands: let the frame out.
            time.sleep(0.02)
        finally:
            sockets.close()
            if self._claim is not None and self._bye is not None:
                self._claim.end(well=self._bye.reason in {"finished", "detached"})

    def _last_words(self) -> Bye | None:
        """Return the goodbye, with the phase in which an exception was raised if it can be told."""
        bye = self._bye
        if bye is None or bye.reason != "exception" or bye.phase:
            return bye
        return Bye(bye.reason, bye.detail, bye.stack, wire_text(self._accountant.finished_in))

    def _reopen(self, sockets: RankSockets) -> RankSockets:
        """Announce this rank again: under another name, or because its files were removed."""
        if self._former is not None:
            identity, incarnation = self._former
            self._former = None
            sockets.publish(self._farewell(identity, incarnation))
            time.sleep(0.02)
        sockets.close()
        return self._open()

    def _farewell(self, identity: Identity, incarnation: str) -> bytes:
        return encode(
            RankFrame(
                version=WIRE_VERSION,
                run=identity.run,
                rank=identity.rank,
                incarnation=incarnation,
                seq=self._former_seq + 1,
                sent_s=time.time(),
                dropped=0,
                bye=Bye("moved"),
            )
        )

    def _moved(self) -> bool:
        """Look again at who we are: a process group may have been made after `watch()`."""
        if self._grouped or not has_group():
            return False
        # Once and for all: a group that is destroyed later does not make this another run.
        self._grouped = True
        identity = identify()
        if identity == self._told:
            return False
        self._former = self._identity, self._incarnation
        self._told = self._identity = identity
        if self._claim is not None:
            self._claim.withdraw()
            self._claim = None
        self._incarnation = uuid.uuid4().hex[:12]
        self._former_seq = self._seq
        self._seq = 0
        self._recorder.distributed = identity.world_size > 1
        self._hello = None
        self._config_version = -1
        return True

    # --- frames --------------------------------------------------------------------------------

    def _frame(self, *, bye: Bye | None = None) -> bytes:
        self._collect()
        records = [self._unsent.popleft() for _ in range(min(len(self._unsent), _RECORDS_A_FRAME))]
        spans, self._unsent_spans = self._unsent_spans, []
        self._seq += 1
        self._commands.collect()
        replies, logged = self._commands.fresh()
        hello = self._fresh_hello()
        return encode(
            RankFrame(
                version=WIRE_VERSION,
                run=self._identity.run,
                rank=self._identity.rank,
                incarnation=self._incarnation,
                seq=self._seq,
                sent_s=time.time(),
                dropped=self._accountant.dropped,
                records=tuple(records),
                spans=tuple(spans),
                state=self._state(bye),
                ledger=self._ledger(),
                hello=hello,
                replies=replies,
                bye=bye,
                workers=self._marks.workers.fresh(),
                commands=logged,
            )
        )

    def _past(self, reply: Reply | None) -> bytes:
        """Return a frame outside the stream: a reply, or a snapshot if there is none."""
        self._collect()
        snapshot = reply is None
        if snapshot:
            self._fresh_hello()
        return encode(
            RankFrame(
                version=WIRE_VERSION,
                run=self._identity.run,
                rank=self._identity.rank,
                incarnation=self._incarnation,
                seq=self._seq,
                sent_s=time.time(),
                dropped=self._accountant.dropped,
                records=tuple(self._records) if snapshot else (),
                spans=tuple(self._spans) if snapshot else (),
                state=self._state(None),
                ledger=self._ledger(),
                hello=self._hello if snapshot else None,
                replies=() if reply is None else (reply,),
                snapshot=snapshot,
                workers=self._marks.workers.past() if snapshot else (),
                commands=self._commands.past() if snapshot else (),
            )
        )

    def _fresh_hello(self) -> Hello | None:
        """Return the hello if it must be sent: at first, and when the configuration changed."""
        version = self._marks.config_version
        if version == self._config_version:
            return None
        self._config_version = version
        self._hello = build_hello(
            self._identity,
            self._marks,
            name=self._name,
            started_s=self._started_s,
            dataset_path=self.dataset_path,
            control=self._control,
            knobs=self.knobs.told(),
        )
        return self._hello

    def _more(self) -> bool:
        """Whether more records wait than one frame takes."""
        self._collect()
        return len(self._unsent) > _RECORDS_A_FRAME or self._commands.pending

    def _collect(self) -> None:
        """Take what the training thread has left: into the ledger, the past, the next frame."""
        replay, join = self._replay, self._join
        replay.catch_up()
        out = self._accountant.out
        now_ns = self._recorder.clock()
        while out:
            item = out.popleft()
            if isinstance(item, RawSpan):
                self._totals.add(item)
                start_s = self._wall_s(item.start_ns)
                span = Span(wire_text(item.name), start_s, item.duration_ns, item.step)
                self._spans.append(span)
                self._unsent_spans.append(span)
            else:
                join.add(item, now_ns)
        while replay.device_steps:
            join.find(replay.device_steps.popleft())
        leaving = list(join.leaving(now_ns, last=self._stop or not replay.on_device))
        memory_bytes = self._memory_bytes() if leaving else None
        for n, (raw, on_device) in enumerate(leaving, 1):
            record = self._record(raw, on_device, memory_bytes if n == len(leaving) else None)
            self._records.append(record)
            self._unsent.append(record)

    def _record(
        self, raw: RawStep, on_device: DeviceStep | None, memory_bytes: int | None
    ) -> StepRecord:
        notes = raw.notes or {}
        phases_ns = on_device.phases_ns if on_device is not None else None
        device = None
        if on_device is not None and phases_ns is not None:
            device = self._phases(raw, phases_ns)
            # The ledger counts by the clock that decides.
            self._totals.add(raw._replace(step_ns=sum(phases_ns), phases_ns=phases_ns))
        else:
            self._totals.add(raw)
            self._device_dropped += self._marks.device_clock is not None
        record = StepRecord(
            index=raw.step_index,
            started_s=self._wall_s(raw.start_ns),
            step_ns=raw.step_ns,
            host=self._phases(raw, raw.phases_ns),
            device=device,
            clock="host" if device is None else "device",
            batches=max(raw.batches, 1),
            samples=raw.samples,
            tokens=raw.tokens,
            loss=_number(notes.get("loss")),
            memory_bytes=memory_bytes,
            queue_depth=raw.queue_depth,
            queue_capacity=raw.queue_capacity,
            tags=raw.tags,
            loader=raw.loader,
            grad_norm=_number(notes.get("grad_norm")),
            learning_rate=_number(notes.get("learning_rate")),
            loss_scale=_number(notes.get("loss_scale")),
            padding_share=_number(notes.get("padding_share")),
            gc_ns=notes.get("gc_ns"),
            device_stall_ns=on_device.stall_ns if on_device is not None else None,
        )
        for name in _SHOWN:
            value = getattr(record, name)
            if value is not None:
                self._latest[name] = value
        if raw.loader != self._loader:
            self._loader = raw.loader
            self._changed()
        if record.tokens:
            self._tokens = record.tokens, record.loader
        return record

    def _phases(self, raw: RawStep, phases_ns: list[int]) -> PhasesNs:
        """Return the phases of a step: what cannot be told apart is in `other`, and null."""
        data_wait, h2d, forward, backward, comm, optimizer, other = phases_ns
        known: dict[str, int | None] = {
            "data_wait": data_wait if raw.fetched or data_wait else None,
            "h2d": h2d if self._accountant.h2d_marked else None,
            "forward": forward,
            "backward": backward,
            "comm": comm if self._identity.world_size > 1 or comm else None,
            "optimizer": optimizer,
        }
        for phase in self._unseen(raw.fetched):
            known[phase] = known[phase] or None  # the user may have marked it
        for phase in tuple(self._marks.na):
            other += known.get(phase) or 0
            known[phase] = None
        return PhasesNs(**known, other=other)

    def _unseen(self, fetched: bool) -> dict[str, str]:
        """Return the phases that the marks have never seen begin, and why that may be."""
        accountant = self._accountant
        na: dict[str, str] = {}
        if accountant.unseen or (accountant.manual and not accountant.stepped):
            na["optimizer"] = _NO_OPTIMIZER
            if accountant.unseen and not fetched:
                na["forward"] = _NO_OPTIMIZER
        if accountant.manual and not accountant.went_back:
            na["forward"] = na["backward"] = _NO_BACKWARD
        return na

    def _wall_s(self, ns: int) -> float:
        return (ns + self._wall_offset_ns) / 1e9

    def _state(self, bye: Bye | None) -> RankState:
        status, phase, age_ns = self._replay.now()
        na: dict[str, str] = {}
        if self._identity.world_size == 1:
            na["comm"] = "one process"
        if not self._accountant.h2d_marked:
            na["h2d"] = "copies are not marked: gpuwatch.phase('h2d')"
            if self._marks.device_clock is not None:
                na["h2d"] = "forward includes them: copies are not marked, gpuwatch.phase('h2d')"
        last = self._records[-1] if self._records else None
        if last is not None and last.host.data_wait is None:
            na["data_wait"] = "no DataLoader fetch was seen"
        unseen = self._unseen(last is None or last.host.data_wait is not None)
        na |= {p: why for p, why in unseen.items() if last and getattr(last.host, p) is None}
        na.update(self._marks.na.copy())
        signals = self._marks.signals
        flops, flops_source = signals.flops(*self._tokens)
        on_device = self._marks.device_clock
        memory = on_device.memory if on_device is not None else None
        return RankState(
            status="ended" if bye is not None else status,
            phase=wire_text(phase),
            phase_age_ns=age_ns,
            step=self._accountant.index,
            phases_na=na,
            loss=self._latest.get("loss") if self.loss is None else _number(self.loss),
            epoch=self.epoch,
            total_steps=self.total_steps,
            notices=tuple(wire_text(notice, TEXT) for notice in self._notices[-16:]),
            learning_rate=self._latest.get("learning_rate"),
            grad_norm=self._latest.get("grad_norm"),
            loss_scale=self._latest.get("loss_scale"),
            recompiles=signals.recompiles(),
            gc_pauses=signals.gc_pauses,
            gc_pause_ns=signals.gc_pause_ns,
            flops_per_step=flops,
            flops_source=wire_text(flops_source),
            device_dropped=self._device_dropped,
            memory_peak_bytes=None if memory is None else memory.peak,
            memory_reserved_bytes=None if memory is None else memory.reserved,
            memory_retries=None if memory is None else memory.retries,
        )

    def _ledger(self) -> Ledger:
        sums = {name: getattr(self._totals, name) for name in Totals.__slots__}
        wall_ns = max(0, self._recorder.clock() - self._started_ns)
        known_ns = sum(value for name, value in sums.items() if name.endswith("_ns"))
        return Ledger(**sums, lost_ns=max(0, wall_ns - known_ns), wall_ns=wall_ns)

    def _memory_bytes(self) -> int | None:
        """Allocated device memory, or the resident set of the process on CPU."""
        if self._marks.device.startswith("cuda"):
            # Read by the training thread: asking waits for the allocator's lock with the GIL held,
            # and whoever holds that lock may be waiting for a device that hangs.
            on_device = self._marks.device_clock
            memory = on_device.memory if on_device is not None else None
            return None if memory is None else memory.allocated
        if self._statm < 0:
            return None
        try:
            fields = os.pread(self._statm, 128, 0).split()
            return int(fields[1]) * os.sysconf("SC_PAGE_SIZE")
        except (OSError, IndexError, ValueError):
            return None

    # --- requests ------------------------------------------------------------------------------

    def _answer(self, sockets: RankSockets, who: bytes, payload: bytes) -> None:
        try:
            command = decode_command(payload)
        except FrameError as exc:
            sockets.reply(who, self._past(Reply("", "error", wire_text(exc, TEXT))))
            return
        if command.verb == "snapshot":
            sockets.reply(who, self._past(None))
            return
        self._commands.collect()
        sockets.reply(who, self._past(self._commands.answer(command)))

    def _changed(self) -> None:
        """The hello has to be told anew. Called in any thread."""
        self._marks.config_version += 1

    def _who(self) -> tuple[str, int, int]:
        identity = self._identity
        return identity.run, identity.rank, identity.world_size

    def _pace(self) -> Pace:
        self._collect()
        return self._replay.pace(self._marks.desk.fetches)

    def _step_s(self) -> float:
        """How long the last step took, in seconds; 0 before there is one."""
        return self._records[-1].step_ns / 1e9 if self._records else 0.0

    def _loader_knobs(self) -> Sequence[Live]:
        loader = self._marks.loaders.get(self._loader)
        batches = None if loader is None else loader.length
        return loader_knobs(
            self._marks.origins.get(self._loader),
            batches,
            on_device=self._loader in self._marks.device_batches,
        )

    def _stack(self, command: Command) -> tuple[str, str]:
        only(command)
        return self._waits_in_ddp(), wire_text(_stacks(), 200_000)

    def _waits_in_ddp(self) -> str:
        """Name the all-reduce that DDP's reducer waits for in C++, where no stack does; else ''."""
        frame = sys._current_frames().get(threading.main_thread().ident or 0)
        ddp = self._marks.ddp
        if ddp is None or frame is None or frame.f_code.co_name != "_engine_run_backward":
            return ""
        if self._replay.now()[1] != "comm":
            return ""
        backend = f" over {ddp.backend}" if ddp.backend else ""
        return f"waits in DistributedDataParallel's all-reduce of the gradients{backend}"

    def _memory(self, command: Command) -> tuple[str, str]:
        want = only(command, "tensors").get("tensors", False)
        if not isinstance(want, bool):
            raise CommandError("tensors must be true or false")
        device = self._marks.device_clock
        index = self._marks.device.partition(":")[2] if device is not None else ""
        return "", memory_document(
            moving=self._replay.now()[2] < MOVING_NS,
            index=int(index) if index.isdecimal() else None,
            last=None if device is None else device.memory,
            want_tensors=want,
        )


def _number(value: Any) -> float | None:
    """Return a number, read out of a tensor if it is one on the CPU; None if there is none."""
    if isinstance(value, Scalar):
        return value.value
    if value is None or isinstance(value, float | int):
        return value
    if not getattr(value, "is_cpu", True):
        return None  # reading it would wait for the device
    try:
        return float(value)
    except Exception:
        return None


def _ms_until(moment_s: float) -> int:
    return max(0, int((moment_s - time.monotonic()) * 1000) + 1)


def _open_statm() -> int:
    try:
        return os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return -1


def _stacks() -> str:
    """Return the stacks of all threads of this process, innermost call last."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    parts = []
    for ident, frame in sys._current_frames().items():
        parts.append(f"Thread {names.get(ident, ident)}:\n{''.join(traceback.format_stack(frame))}")
    return "\n".join(parts)
