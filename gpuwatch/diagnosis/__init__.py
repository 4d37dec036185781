"""Rules: why is this step not faster, what does each cause cost, and what would change it."""

from gpuwatch.diagnosis.engine import RULES, Engine
from gpuwatch.diagnosis.types import Abstain, Evidence, Finding, Hint, RunDiagnosis, RunPicture

__all__ = [
    "RULES",
    "Abstain",
    "Engine",
    "Evidence",
    "Finding",
    "Hint",
    "RunDiagnosis",
    "RunPicture",
]
