"""Which of a step's two clocks decides, and how far a node's clock is off.

Sums take times of one clock only. Steps are aligned by their index and ages count from arrival, so
a node's wall clock matters for the place on the time axis alone.
"""

from operator import attrgetter

from msgspec.structs import astuple

from gpuwatch.schema import PHASES, PhasesNs, StepRecord

__all__ = ["NodeClock", "Times", "deciding", "deciding_step_ns", "is_on_device", "times_of"]

Times = tuple[bool, tuple[int | None, ...], int]
"""Of a step: whether the device's clock decides, the phases by the one that does, and the step."""

_phases_of = attrgetter(*PHASES)


def is_on_device(record: StepRecord) -> bool:
    """Whether the device's clock decides, which it does where the device was timed."""
    return record.clock == "device" and record.device is not None


def deciding(record: StepRecord) -> PhasesNs:
    """Return the phases by the clock that decides."""
    if record.clock == "device" and record.device is not None:
        return record.device
    return record.host


def deciding_step_ns(record: StepRecord) -> int:
    """Return the step by the clock that decides.

    On the device's that is the sum of its phases, from the moment the device had done what lay
    before the step to the same moment of the next one.
    """
    if not is_on_device(record):
        return record.step_ns
    return sum([ns or 0 for ns in _phases_of(record.device)])


def times_of(record: StepRecord) -> Times:
    """Return what `is_on_device`, `deciding` and `deciding_step_ns` say, in ns."""
    device = record.device
    if device is None or record.clock != "device":
        return False, astuple(record.host), record.step_ns
    phases = astuple(device)
    return True, phases, sum(phases) if None not in phases else sum(filter(None, phases))


STEP_S = 2.0
"""A clock that is off by less is right: networks delay, and the axis is in seconds."""

_DRIFT_S = 0.001
"""A frame: the way may have become longer for good."""


class NodeClock:
    """How far the wall clock of a node is ahead of the observer's, by its frames.

    The frame with the least delay says most: the greatest of (sent - received).
    """

    def __init__(self) -> None:
        self._ahead_s = 0.0
        self._last: tuple[int, float, float] | None = None

    def take(
        self, seq: int, sent_s: float, received_s: float, wall_s: float, merged: int = 0
    ) -> float:
        """Take a frame; returns by how much the node's clock was set since the one before it.

        `received_s` is monotonic, `merged` how many frames before it are in it. A frame that was
        held up is no step: its clock never goes back, and what comes after it in a burst is not
        ahead of it by more than the burst is long.
        """
        last, self._last = self._last, (seq, sent_s, received_s)
        off_s = sent_s - wall_s
        if last is None:
            self._ahead_s = off_s
            return 0.0
        step_s = (sent_s - last[1]) - (received_s - last[2])
        if seq - merged == last[0] + 1 and (sent_s < last[1] - STEP_S or step_s > STEP_S):
            self._ahead_s = off_s
            return step_s
        self._ahead_s = max(off_s, self._ahead_s - _DRIFT_S * (merged + 1))
        return 0.0

    @property
    def ahead_s(self) -> int:
        """Whole seconds that the clock is ahead, negative behind; 0 where it is about right."""
        return round(self._ahead_s) if abs(self._ahead_s) > STEP_S else 0
