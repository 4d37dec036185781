"""What is the same for every way to a node on another machine, whether a pipe or a TCP connection.

A far side is not trusted: what it sends is bounded in rate and in memory, what is no telemetry
ends its connection and nothing else.
"""

import itertools
import random
import time
from collections.abc import Callable, Hashable
from heapq import heappop, heappush
from typing import Generic, TypeVar

from gpuwatch.errors import FrameError, WireVersionError
from gpuwatch.frames import decode_node_frame, printable
from gpuwatch.schema import NodeFrame
from gpuwatch.wire.collect.complaints import Complaint, PipeTarget, TcpTarget
from gpuwatch.wire.collect.pipe import PIPE

__all__ = [
    "BURST_BYTES",
    "FRAME_BYTES",
    "QUIET_S",
    "RATE_BYTES",
    "SETTLED_S",
    "STALE_S",
    "Backoff",
    "OnFrame",
    "OnState",
    "Turns",
    "Way",
]

FIRST_S = 1.0
LONGEST_S = 30.0
SETTLED_S = 10.0
"""A connection that held so long has worked: the next wait is short again."""
QUIET_S = 10.0
"""An open way says something each second, or every other one where it is asked for few frames."""
STALE_S = 3.0
"""After this without a frame its ranks count as silent."""

BURST_BYTES = 64 * 2**20
RATE_BYTES = 4 * 2**20
"""A second. A node of eight ranks sends 30 kB a second, and 1.5 MB of their past at first."""
FRAME_BYTES = 4096
"""What a frame costs at the least: a flood of small ones is bounded too."""

AT_ONCE = 32
"""So many nodes send their past at a time: ten minutes of eight ranks are 0.5 MB, which take the
monitor some 40 ms. A node answers within two or three of its frames."""
PATIENCE_S = 5.0
LONGEST_PATIENCE_S = 60.0

_BAD_FRAMES = 8
_NODES = 64

_Who = TypeVar("_Who", bound=Hashable)

OnFrame = Callable[["Way", bytes, NodeFrame, float], None]
OnState = Callable[["Way"], None]


class Backoff:
    """Waits that double from 0.5 s to 30 s, with jitter so that many do not come back at once."""

    def __init__(self, rng: random.Random | None = None) -> None:
        self._rng = rng or random.Random()
        self._failures = 0

    def delay_s(self, *, soon: bool = True) -> float:
        """Return the next wait; where trying soon does not help it is the longest at once."""
        longest_s = LONGEST_S if not soon else min(LONGEST_S, FIRST_S * 2.0**self._failures)
        self._failures = min(self._failures + 1, 16)
        return self._rng.uniform(longest_s / 2, longest_s)

    def reset(self) -> None:
        """Begin anew: it has worked."""
        self._failures = 0


class Turns(Generic[_Who]):
    """Whose turn it is to ask for the past: a few at a time, and who gets no answer ever less.

    A monitor that is behind gets its answers late. If it asked again soon and everybody at once,
    each node would send its past once more, and it would never catch up. Times are monotonic.
    """

    def __init__(self, rng: random.Random | None = None) -> None:
        self._rng = rng or random.Random()
        self._pauses_s: dict[_Who, float] = {}
        self._from_s: dict[_Who, float] = {}
        self._queue: list[tuple[float, int, _Who]] = []
        self._order = itertools.count()
        self._asked: dict[_Who, float] = {}  # until when nobody else has its place

    def __len__(self) -> int:
        return len(self._pauses_s)

    def want(self, who: _Who, now_s: float) -> None:
        """Queue who has no past yet."""
        self._pauses_s[who] = PATIENCE_S
        self._wait(who, now_s)

    def _wait(self, who: _Who, from_s: float) -> None:
        self._from_s[who] = from_s
        heappush(self._queue, (from_s, next(self._order), who))

    def done(self, who: _Who) -> None:
        """Forget who has its past, or cannot ask any more."""
        for known in (self._pauses_s, self._from_s, self._asked):
            known.pop(who, None)

    def due(self, now_s: float) -> list[_Who]:
        """Return who is to ask now; it is not returned again before its pause is over."""
        for who, until_s in list(self._asked.items()):
            if now_s >= until_s:
                del self._asked[who]
        found = []
        while self._queue and self._queue[0][0] <= now_s and len(self._asked) < AT_ONCE:
            from_s, _, who = heappop(self._queue)
            if self._from_s.get(who) != from_s:
                continue  # it was done meanwhile
            pause_s = self._pauses_s[who]
            self._pauses_s[who] = min(LONGEST_PATIENCE_S, 2 * pause_s)
            self._asked[who] = now_s + PATIENCE_S
            self._wait(who, now_s + self._rng.uniform(pause_s, 1.5 * pause_s))
            found.append(who)
        return found


class Way:
    """One target, and what came from it. All but the properties: the thread of its link.

    `state` is connecting, live or lost, `trouble` a sentence without its subject, empty while all
    is well, `nodes` the names of the nodes that have spoken through it, `had_past` whether the
    present connection has brought all that the far side knew, `attached` how many connections have
    worked, `heard_s` when a frame of a node process came last.
    """

    target: PipeTarget | TcpTarget

    def __init__(
        self, on_frame: OnFrame, on_state: OnState, start_s: float, rng: random.Random | None = None
    ) -> None:
        self.state = "connecting"
        self.trouble = ""
        self.nodes: tuple[str, ...] = ()
        self.node = ""
        self.had_past = False
        self.heard_s = 0.0
        self.attached = 0
        self.look_s = start_s  # when it is to be looked at next
        self._start_s = start_s  # when the next try begins
        self._backoff = Backoff(rng)
        self._on_frame = on_frame
        self._on_state = on_state
        self._live_s = 0.0
        self._bad = 0

    @property
    def fresh(self) -> bool:
        """Whether frames of the node process come through now."""
        return self.state == "live" and time.monotonic() - self.heard_s < STALE_S

    def _begin(self) -> None:
        """Forget what belonged to the last connection."""
        self.had_past = False
        self.node = ""
        self._live_s = 0.0
        self._bad = 0

    def _say(self, state: str, trouble: str = "") -> None:
        if (state, trouble) != (self.state, self.trouble):
            self.state, self.trouble = state, trouble
            self._on_state(self)

    def end(self) -> None:
        """Let go of the connection and of all that waits in it."""
        raise NotImplementedError

    def _fail(self, complaint: Complaint) -> None:
        """End the connection, say why, and come back later."""
        self.end()
        self._start_s = time.monotonic() + self._backoff.delay_s(soon=complaint.soon)
        self._say("lost", complaint.text)

    def _take_frame(self, data: bytes, received_s: float) -> None:
        """Take one frame.

        Raises:
            FrameError: so many in a row were no telemetry that the connection is to end.
        """
        try:
            frame = decode_node_frame(data)
            if self.node and frame.node != self.node:
                raise FrameError(f"frames of {printable(frame.node)!r} and {self.node!r} in one")
        except WireVersionError:
            raise
        except FrameError as exc:
            self._take_bad(exc)
            return
        self._bad = 0
        if not self.node:
            name = printable(frame.node)
            if name not in self.nodes:
                if len(self.nodes) >= _NODES:
                    raise FrameError(f"it has called itself {_NODES} names")
                self.nodes = (*self.nodes, name)
            self.node = frame.node
        if not self._live_s:
            self._live_s = received_s
            self.attached += 1
        if frame.incarnation == PIPE:
            trouble = printable(frame.notices[0]) if frame.notices else ""
            self._say("live", trouble)
            return
        self.heard_s = received_s
        self._say("live")
        self._on_frame(self, data, frame, received_s)
        if not self.had_past and self._brings_past(frame):
            self.had_past = True

    def _take_bad(self, why: FrameError) -> None:
        self._bad += 1
        if self._bad >= _BAD_FRAMES:
            raise FrameError(f"it sends what is no telemetry ({why})") from None

    def _brings_past(self, frame: NodeFrame) -> bool:
        """Whether all that the far side knew has come with the frame or before it."""
        return any(reply.status == "done" for reply in frame.replies)
