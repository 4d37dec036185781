"""Which of a step's two clocks decides. Sums take times of one clock only."""

from gpuwatch.schema import PHASES, PhasesNs, StepRecord

__all__ = ["deciding", "deciding_step_ns", "is_on_device"]


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
    phases = deciding(record)
    return sum(getattr(phases, name) or 0 for name in PHASES)
