"""Rules: why is this step not faster, what does each cause cost, and what would change it."""

from gpuwatch.diagnosis.types import Abstain, Evidence, Finding, Hint, RunPicture

__all__ = ["Abstain", "Evidence", "Finding", "Hint", "RunPicture"]
