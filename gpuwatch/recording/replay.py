"""A recording as a source of views: at any of its times, at any speed."""

import bisect
import contextlib
import pickle
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import replace

from gpuwatch.errors import FrameError, TargetError
from gpuwatch.frames import decode_node_frame, decode_rank_frame
from gpuwatch.recording.read import Recording
from gpuwatch.store import Event, Store, View

__all__ = ["SPEEDS", "Player", "ReplaySession", "step_s"]

_STEP_S = 0.05
"""Between two looks of a playing session at what is due."""

_CHUNK_FRAMES = 64
"""Fed between two looks at whether it is still wanted."""

SPEEDS = (0.1, 1000.0)
"""Least and greatest speed."""


class _Store(Store):
    """A Store whose time is that of the recording: also in the event log."""

    def __init__(self, clock: Callable[[], float], started_s: float) -> None:
        super().__init__(clock)
        self._replay_clock = clock
        self._started_s = started_s

    def _event(self, text: str, severity: str = "note", run: str = "") -> None:
        super()._event(text, severity, run)
        made = self._events.pop()
        at_s = self._started_s + self._replay_clock()
        self._events.append(Event(at_s, made.text, made.severity, made.run))

    def saved(self) -> bytes:
        """Return everything that is known, for `restore`. Bytes of our own, from no file."""
        kept = {name: value for name, value in vars(self).items() if name not in _NOT_SAVED}
        return zlib.compress(pickle.dumps(kept, pickle.HIGHEST_PROTOCOL), 1)

    def restore(self, saved: bytes) -> None:
        """Know what was known when it was saved."""
        vars(self).update(pickle.loads(zlib.decompress(saved)))


_NOT_SAVED = frozenset({"_lock", "_clock", "_replay_clock"})

_KEPT_BYTES = 64 * 2**20
_KEYFRAMES = 128
"""Of a recording: at most so many, in at most `_KEPT_BYTES`; every other one goes beyond that."""

_KEYFRAME_S = 20.0


class _Keyframes:
    """Pictures on the way, so that going back need not begin at the beginning."""

    def __init__(self, duration_s: float) -> None:
        self.every_s = max(_KEYFRAME_S, duration_s / _KEYFRAMES)
        self._times_s: list[float] = []
        self._saved: list[tuple[int, bytes]] = []
        self._bytes = 0

    def wants(self, position_s: float) -> bool:
        """Whether none is near before the position."""
        at = bisect.bisect_right(self._times_s, position_s)
        return not at or position_s - self._times_s[at - 1] >= self.every_s

    def keep(self, player: "Player") -> None:
        """Keep the player's moment."""
        at = bisect.bisect_right(self._times_s, player.position_s)
        saved = player.saved()
        self._times_s.insert(at, player.position_s)
        self._saved.insert(at, saved)
        self._bytes += len(saved[1])
        if self._bytes > _KEPT_BYTES:
            self.every_s *= 2
            self._times_s, self._saved = self._times_s[::2], self._saved[::2]
            self._bytes = sum(len(data) for _, data in self._saved)

    def before(self, position_s: float) -> tuple[float, tuple[int, bytes]] | None:
        """Return (its position, what was saved) of the last one up to the position."""
        at = bisect.bisect_right(self._times_s, position_s)
        return None if not at else (self._times_s[at - 1], self._saved[at - 1])


class Player:
    """Feeds the frames of a recording into a Store, forward only, each at its own time.

    It begins with what was sent at the very first moment. `position_s` counts from the first
    frame. Not thread-safe.
    """

    def __init__(self, recording: Recording) -> None:
        self._recording = recording
        self._next = 0
        self.position_s = 0.0
        self.store = _Store(lambda: self.position_s, recording.started_s)
        self.store.set_link("replay", recording.problem)
        self.advance(0.0)

    def saved(self) -> tuple[int, bytes]:
        """Return this moment, for `restore`."""
        return self._next, self.store.saved()

    def restore(self, position_s: float, saved: tuple[int, bytes]) -> None:
        """Go to a moment that was saved."""
        self._next, data = saved
        self.position_s = position_s
        self.store.restore(data)

    @property
    def at_end(self) -> bool:
        """Whether every frame has been fed."""
        return self._next >= len(self._recording)

    def advance(self, until_s: float, wanted: Callable[[], bool] = lambda: True) -> None:
        """Feed what was sent until then, as long as it is `wanted`; time stands there then.

        Raises:
            TargetError: the file is not what it was when it was opened.
        """
        recording = self._recording
        fed = 0
        while not self.at_end:
            sent_s = recording.time_s(self._next)
            if sent_s > until_s:
                break
            self.position_s = max(self.position_s, sent_s)
            self.store.apply(recording.frame(self._next), sent_s)
            self._next += 1
            fed += 1
            if fed % _CHUNK_FRAMES == 0 and not wanted():
                return
        self.position_s = max(self.position_s, min(until_s, recording.duration_s))

    def view(self) -> View:
        """Return the picture at `position_s`."""
        return replace(self.store.view(), at_s=self._recording.started_s + self.position_s)

    def ticks(
        self, every_s: float, until_s: float | None = None, most: int = 600
    ) -> Iterator[View]:
        """Yield the picture every so many seconds from here until then (the end), and there.

        A pause without frames longer than `most` ticks is cut short.
        """
        recording = self._recording
        end_s = recording.duration_s if until_s is None else until_s
        due_s = self.position_s + every_s
        while due_s < end_s:
            self.advance(due_s)
            yield self.view()
            due_s += every_s
            if not self.at_end:
                due_s = max(due_s, recording.time_s(self._next) - most * every_s)
        self.advance(end_s)
        yield self.view()


def step_s(recording: Recording, step: int) -> float | None:
    """Return when a rank is first known to have made step `step`, None if none has.

    In s since the first frame; reads as far as that.
    """
    for sent_s, data in recording.frames():
        for raw in decode_node_frame(data).frames:
            with contextlib.suppress(FrameError):
                frame = decode_rank_frame(raw)
                if frame.state.step > step or any(r.index >= step for r in frame.records):
                    return sent_s
    return None


class ReplaySession:
    """A `Session` that plays a recording, and can be paused, sped up and moved.

    Positions are in seconds since the first frame. The frames are fed in a thread of its own; a
    picture of another time takes its place when it is complete.

    Args:
        recording: the recording; the session closes it.
        speed: seconds of the recording a second.
        position_s: where to begin.
        paused: whether time stands at the beginning.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        recording: Recording,
        *,
        speed: float = 1.0,
        position_s: float = 0.0,
        paused: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._recording = recording
        self._clock = clock
        self._lock = threading.Lock()
        self._speed = _between(speed, SPEEDS)
        self._paused = paused
        self._anchor_s = _between(position_s, (0.0, recording.duration_s))
        self._version = 1
        self._seeks = 0
        self._error = ""
        self._wake = threading.Event()
        self._closed = False
        self._keyframes = _Keyframes(recording.duration_s)
        self._player = Player(recording)
        self._advance(self._player, self._anchor_s, lambda: True)
        self._view = self._player.view()
        self._anchored_at_s = clock()
        self._thread = threading.Thread(target=self._play, name="gpuwatch-replay", daemon=True)
        self._thread.start()

    # --- time ----------------------------------------------------------------------------------

    @property
    def duration(self) -> float:
        """Seconds from the first frame to the last."""
        return self._recording.duration_s

    @property
    def position(self) -> float:
        """Seconds from the first frame to the moment that is played."""
        with self._lock:
            return self._position()

    def _position(self) -> float:
        if self._paused:
            return self._anchor_s
        passed_s = (self._clock() - self._anchored_at_s) * self._speed
        return _between(self._anchor_s + passed_s, (0.0, self._recording.duration_s))

    def _anchor(self, position_s: float) -> None:
        self._anchor_s = _between(position_s, (0.0, self._recording.duration_s))
        self._anchored_at_s = self._clock()
        self._version += 1

    def seek(self, position: float) -> None:
        """Go to a position in seconds; one outside the recording means its beginning or end."""
        with self._lock:
            self._anchor(position)
            self._seeks += 1
        self._wake.set()

    @property
    def seeks(self) -> int:
        """How often the position was set: what was concluded before may not hold after."""
        return self._seeks

    @property
    def paused(self) -> bool:
        """Whether time stands; may be set."""
        return self._paused

    @paused.setter
    def paused(self, value: bool) -> None:
        with self._lock:
            self._anchor(self._position())
            self._paused = value
        self._wake.set()

    @property
    def speed(self) -> float:
        """Seconds of the recording a second; may be set, from 0.1 to 1000."""
        return self._speed

    @speed.setter
    def speed(self, value: float) -> None:
        with self._lock:
            self._anchor(self._position())
            self._speed = _between(value, SPEEDS)
        self._wake.set()

    # --- the Session ---------------------------------------------------------------------------

    @property
    def version(self) -> int:
        """Rises with every change."""
        return self._version

    def view(self) -> View:
        """Return the picture of the moment that is played."""
        return self._view

    def send(
        self,
        verb: str,
        run: str,
        rank: int | None = None,
        args: dict[str, str | int | float | bool] | None = None,
    ) -> str:
        """Refuse: nothing behind a recording could answer.

        Raises:
            TargetError: always.
        """
        raise TargetError(f"this is a recording: nobody answers {verb}")

    def close(self) -> None:
        """Let go of the file; returns within 0.5 s."""
        self._closed = True
        self._wake.set()
        self._thread.join(0.4)
        if not self._thread.is_alive():
            self._recording.close()

    # --- the thread ----------------------------------------------------------------------------

    def _play(self) -> None:
        while not self._closed:
            self._wake.clear()
            try:
                self._catch_up()
            except Exception as exc:
                # The file was cut or closed: the last picture stays, and says so.
                self._show(replace(self._view, message=str(exc) or type(exc).__name__))
                return
            idle = self._paused or self._player.position_s >= self._recording.duration_s
            self._wake.wait(None if idle else _STEP_S)

    def _catch_up(self) -> None:
        """Bring the picture to the position, anew where that lies before it."""
        seeks, position_s = self._seeks, self.position
        player = self._player
        if position_s == player.position_s:
            return
        near = self._keyframes.before(position_s)
        if position_s < player.position_s or (near is not None and near[0] > player.position_s):
            player = Player(self._recording)
            if near is not None:
                player.restore(*near)
        self._advance(player, position_s, lambda: not self._closed and self._seeks == seeks)
        if player is not self._player and self._seeks != seeks:
            return  # half a picture of a time that nobody wants any more
        self._player = player
        self._show(player.view())

    def _advance(self, player: Player, until_s: float, wanted: Callable[[], bool]) -> None:
        """Feed until then, keeping moments on the way."""
        while wanted() and player.position_s < until_s:
            player.advance(min(until_s, player.position_s + self._keyframes.every_s), wanted)
            if wanted() and self._keyframes.wants(player.position_s):
                self._keyframes.keep(player)

    def _show(self, view: View) -> None:
        with self._lock:
            self._version += 1
            self._view = replace(view, version=self._version)


def _between(value: float, bounds: tuple[float, float]) -> float:
    return min(max(value, bounds[0]), bounds[1])
