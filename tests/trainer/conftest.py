"""Fixtures of the trainer's tests: a tiny image set, made once, and no real cache."""

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def jpegs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """64 JPEGs of 4 classes, 48 px square."""
    from trainer.data import make_jpegs

    return make_jpegs(images=64, classes=4, px=48, cache=tmp_path_factory.mktemp("jpegs"))


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import os

    for name in list(os.environ):
        if name.startswith("TRAINER_") or name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
