"""What is the same for every way to a node on another machine, whether a pipe or a TCP connection.

A far side is not trusted: what it sends is bounded in rate and in memory, what is no telemetry
ends its connection and nothing else.
"""

import random
import time
from collections.abc import Callable

from gpuwatch.errors import FrameError, WireVersionError
from gpuwatch.frames import decode_node_frame, printable
from gpuwatch.schema import NodeFrame
from gpuwatch.wire.collect.complaints import PipeTarget, TcpTarget
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
    "Way",
]

FIRST_S = 1.0
LONGEST_S = 30.0
SETTLED_S = 10.0
"""A connection that held so long has worked: the next wait is short again."""
QUIET_S = 10.0
"""An open way says something each second."""
STALE_S = 3.0
"""After this without a frame its ranks count as silent."""

BURST_BYTES = 64 * 2**20
RATE_BYTES = 4 * 2**20
"""A second. A node of eight ranks sends 30 kB a second, and 1.5 MB of their past at first."""
FRAME_BYTES = 4096
"""What a frame costs at the least: a flood of small ones is bounded too."""

_BAD_FRAMES = 8
_NODES = 64

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


class Way:
    """One target, and what came from it. All but the properties: the thread of its link.

    `state` is connecting, live or lost, `trouble` a sentence without its subject, empty while all
    is well, `nodes` the names of the nodes that have spoken through it, `had_past` whether the
    present connection has brought all that the far side knew, `attached` how many connections have
    worked, `heard_s` when a frame of a node process came last.
    """

    target: PipeTarget | TcpTarget

    def __init__(self, on_frame: OnFrame, on_state: OnState) -> None:
        self.state = "connecting"
        self.trouble = ""
        self.nodes: tuple[str, ...] = ()
        self.node = ""
        self.had_past = False
        self.heard_s = 0.0
        self.attached = 0
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
        if self._brings_past(frame):
            self.had_past = True

    def _take_bad(self, why: FrameError) -> None:
        self._bad += 1
        if self._bad >= _BAD_FRAMES:
            raise FrameError(f"it sends what is no telemetry ({why})") from None

    def _brings_past(self, frame: NodeFrame) -> bool:
        """Whether all that the far side knew has come with the frame or before it."""
        return any(reply.status == "done" for reply in frame.replies)
