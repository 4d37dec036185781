"""Fixtures for every test."""

import contextlib
import faulthandler
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import pytest_timeout
import support
from hypothesis import settings

# The same examples each time, however busy the machine: a run says something of the change, not of
# its luck. HYPOTHESIS_PROFILE=explore draws others.
settings.register_profile("steady", derandomize=True, deadline=None)
settings.register_profile("explore", deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "steady"))


# These drive real processes or a real terminal: what else runs on the machine can spoil one.
REAL = ("terminal", "distributed", "process")
_limits: dict[str, pytest_timeout.Settings] = {}


def pytest_configure(config: pytest.Config) -> None:
    """A shell starts what is to run in the background with SIGINT ignored, and children inherit
    that: tests that interrupt one would wait for ever.
    """
    config.addinivalue_line("markers", "process: starts real processes and waits for them")
    # Whatever had a second try is named at the end, with the traceback of the first one.
    config.option.rerun_show_tracebacks = True
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    # Hundreds of processes import the same modules: compiled once, not in each of them.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    # Manifests of the trainings that tests start are nobody's.
    os.environ["XDG_STATE_HOME"] = tempfile.mkdtemp(prefix="gpuwatch-state-")


def pytest_unconfigure() -> None:
    """Leave nothing behind."""
    shutil.rmtree(os.environ["XDG_STATE_HOME"], ignore_errors=True)


def is_real(item: pytest.Item) -> bool:
    """Whether a test drives real processes or a real terminal."""
    return any(item.get_closest_marker(name) is not None for name in REAL)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests of real processes, and no others, have a second try when the first one fails."""
    if not config.pluginmanager.hasplugin("rerunfailures") or config.option.usepdb:
        return
    for item in items:
        if is_real(item) and item.get_closest_marker("flaky") is None:
            item.add_marker(pytest.mark.flaky(reruns=1))


@pytest.hookimpl(tryfirst=True, optionalhook=True)
def pytest_timeout_set_timer(item: pytest.Item, settings: pytest_timeout.Settings) -> bool | None:
    """The timeout of a real test fails that test, which then ends what it has started.

    By `timeout_method` it would end the whole run, and leave processes behind.
    """
    if not is_real(item) or settings.method == "signal":
        return None
    _limits[item.nodeid] = settings = settings._replace(method="signal")
    hook = item.config.pluginmanager.hook
    return hook.pytest_timeout_set_timer(item=item, settings=settings)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Each try has the whole timeout: the first one's ended with it."""
    if getattr(item, "execution_count", 1) > 1 and item.nodeid in _limits:
        hook = item.config.pluginmanager.hook
        hook.pytest_timeout_cancel_timer(item=item)
        hook.pytest_timeout_set_timer(item=item, settings=_limits[item.nodeid])


@pytest.fixture
def rundir(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A run directory of the test's own, also in the environment of this process."""
    with support.run_directory() as path:
        monkeypatch.setenv("GPUWATCH_DIR", str(path))
        yield path


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Threads of torch that wait for a core make hundreds of small steps slow."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def zygote() -> Iterator[support.Zygote]:
    """A process that has imported torch, from which scripts are forked."""
    with contextlib.closing(support.Zygote()) as made:
        yield made


@pytest.fixture(autouse=True)
def _stacks_on_hang(request: pytest.FixtureRequest) -> Iterator[None]:
    """Dump the stacks of a distributed test that hangs, before the timeout ends it."""
    if request.node.get_closest_marker("distributed") is None:
        yield
        return
    faulthandler.dump_traceback_later(110, exit=False)
    yield
    faulthandler.cancel_dump_traceback_later()
