"""What the trainer raises on purpose: one tree; each message is one sentence for a person."""

__all__ = ["ConfigError", "DataError", "MissingPackageError", "TrainerError", "TrainingError"]


class TrainerError(Exception):
    """Base of everything raised on purpose; the command line prints it without a traceback.

    A DataLoader worker's exception is rebuilt in the training process with the worker's whole
    traceback as its message; only the sentence it ended with is kept.
    """

    exit_code = 1

    def __init__(self, sentence: str) -> None:
        if sentence.startswith("Caught ") and "Original Traceback" in sentence:
            _, _, last = sentence.rpartition(f"{type(self).__name__}: ")
            sentence = last.strip()
        super().__init__(sentence)


class ConfigError(TrainerError):
    """A key, a value or a combination of values that cannot be used."""

    exit_code = 2


class DataError(TrainerError):
    """Data that is missing or cannot be read."""


class MissingPackageError(TrainerError):
    """An optional package is needed for what was asked."""


class TrainingError(TrainerError):
    """Training cannot go on (the loss is no longer a number, a rank has no device)."""
