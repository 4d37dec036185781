"""Fixtures for every test."""

import faulthandler
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import support
from hypothesis import settings

# The same examples each time, however busy the machine: a run says something of the change, not of
# its luck. HYPOTHESIS_PROFILE=explore draws others.
settings.register_profile("steady", derandomize=True, deadline=None)
settings.register_profile("explore", deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "steady"))


def pytest_configure() -> None:
    """A shell starts what is to run in the background with SIGINT ignored, and children inherit
    that: tests that interrupt one would wait for ever.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    # Manifests of the trainings that tests start are nobody's.
    os.environ["XDG_STATE_HOME"] = tempfile.mkdtemp(prefix="gpuwatch-state-")


def pytest_unconfigure() -> None:
    """Leave nothing behind."""
    shutil.rmtree(os.environ["XDG_STATE_HOME"], ignore_errors=True)


@pytest.fixture
def rundir(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A run directory of the test's own, also in the environment of this process."""
    with support.run_directory() as path:
        monkeypatch.setenv("GPUWATCH_DIR", str(path))
        yield path


@pytest.fixture(autouse=True)
def _stacks_on_hang(request: pytest.FixtureRequest) -> Iterator[None]:
    """Dump the stacks of a distributed test that hangs, before the timeout ends it."""
    if request.node.get_closest_marker("distributed") is None:
        yield
        return
    faulthandler.dump_traceback_later(110, exit=False)
    yield
    faulthandler.cancel_dump_traceback_later()
