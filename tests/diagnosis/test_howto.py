"""The lines that hints name: there for every setting, and real arguments of the real libraries."""

import dataclasses
import inspect
import re

import pytest

from gpuwatch.diagnosis import Hint
from gpuwatch.diagnosis.howto import _LINES, PLACES, lines_of


def arguments(place: str, callee: str) -> set[str]:
    """The keyword arguments that lines of a place give to a callee."""
    found = set()
    for lines in _LINES.values():
        for match in re.finditer(rf"\b{callee}\((.*)\)", lines.get(place, "")):
            found |= set(re.findall(r"(\w+)=", match[1]))
    return found


def test_values_are_filled_in() -> None:
    assert lines_of(Hint("more workers", "num_workers", 2, 6)) == {
        "plain": "DataLoader(..., num_workers=6)",
        "transformers": "TrainingArguments(..., dataloader_num_workers=6)",
        "lightning": "DataLoader(..., num_workers=6)",
        "trainer": "--loader.num_workers 6",
    }
    persistent = lines_of(Hint("keep them", "persistent_workers", False, True))
    assert persistent["plain"] == "DataLoader(..., persistent_workers=True)"
    assert persistent["trainer"] == "--loader.persistent_workers true"
    assert lines_of(Hint("a wish", "num_workers")) == {}
    assert lines_of(Hint("a wish", "no such knob", 1, 2)) == {}


def test_places_are_known() -> None:
    assert {place for lines in _LINES.values() for place in lines} <= set(PLACES)


def test_a_loaders_arguments_are_torchs() -> None:
    from torch.utils.data import DataLoader

    known = set(inspect.signature(DataLoader.__init__).parameters)
    for place in ("plain", "lightning"):
        assert arguments(place, "DataLoader") <= known


def test_the_trainers_flags_are_its_keys() -> None:
    from trainer.sources import keys

    flags = {
        lines["trainer"].split()[0].removeprefix("--")
        for lines in _LINES.values()
        if "trainer" in lines
    }
    assert flags
    assert flags <= set(keys())


def test_arguments_of_transformers() -> None:
    training = pytest.importorskip("transformers.training_args")
    known = {field.name for field in dataclasses.fields(training.TrainingArguments)}
    named = arguments("transformers", "TrainingArguments")
    assert named
    assert named <= known


def test_arguments_of_lightning() -> None:
    from torch.nn.parallel import DistributedDataParallel

    lightning = pytest.importorskip("lightning.pytorch")
    strategies = pytest.importorskip("lightning.pytorch.strategies")
    callbacks = pytest.importorskip("lightning.pytorch.callbacks")
    for name, callee in (
        ("Trainer", lightning.Trainer),
        ("DDPStrategy", strategies.DDPStrategy),
        ("ModelCheckpoint", callbacks.ModelCheckpoint),
    ):
        named = arguments("lightning", name)
        known = set(inspect.signature(callee.__init__).parameters)
        if name == "Trainer":
            named -= arguments("lightning", "DDPStrategy")
        if name == "DDPStrategy":
            # It hands on what it does not know.
            known |= set(inspect.signature(DistributedDataParallel.__init__).parameters)
        assert named
        assert named <= known
