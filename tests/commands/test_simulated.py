"""Simulated GPUs: marked everywhere, under the ranks of the demo's run alone, never measured."""

from typing import Any

import pytest
from builders import Trace

from gpuwatch.commands.shapes import status_document
from gpuwatch.commands.simulate import SimulatedSession
from gpuwatch.schema import Reading
from gpuwatch.sensors.simulated import NAME, SimulatedGpus, simulated_uuid
from gpuwatch.store import Store
from gpuwatch.store.peaks import find_peak
from gpuwatch.store.views import View


class Live:
    """Stands for a live session."""

    version = 7

    def __init__(self, view: View) -> None:
        self._view = view
        self.sent: list[tuple[Any, ...]] = []
        self.closed = False

    def view(self) -> View:
        return self._view

    def send(self, *args: Any) -> str:
        self.sent.append(args)
        return "id"

    def close(self) -> None:
        self.closed = True


def pictured() -> View:
    own = {"forward": 20.0, "backward": 20.0, "optimizer": 2.0}
    trace = Trace([{**own, "data_wait": 60.0}, {**own, "data_wait": 10.0}])
    store = Store(lambda: 100.0)
    store.apply(trace.node_frame, 100.0)
    return store.view()


def test_the_demos_run_and_its_devices_are_marked() -> None:
    view = pictured()
    (run,) = view.runs
    live = Live(view)
    session: Any = SimulatedSession(live, run.run, 2)  # type: ignore[arg-type]
    shown = session.view()
    assert shown.runs[0].simulated
    document = status_document(shown)
    assert document["simulated"] is True
    assert document["gpus_reason"] is None
    assert [gpu["ranks"] for gpu in document["gpus"]] == [
        [{"run": run.run, "rank": 0}],
        [{"run": run.run, "rank": 1}],
    ]
    for gpu in document["gpus"]:
        assert gpu["simulated"] is True
        assert gpu["name"] == NAME
        assert gpu["uuid"].startswith("SIMULATED-")
        assert gpu["gpu_util"]["source"] == "simulated"
    # The rank that waits more for data leaves its device idle more.
    low, high = (gpu["gpu_util"]["value"] for gpu in document["gpus"])
    assert low < high
    assert session.version == 7
    assert session.send("stack", run.run, 0) == "id"
    session.close()
    assert live.closed
    # What was live stays as it was.
    assert not view.runs[0].simulated
    assert status_document(view)["simulated"] is False
    assert status_document(view)["gpus"] == []


def test_another_run_gets_none() -> None:
    view = pictured()
    session: Any = SimulatedSession(Live(view), "another", 2)  # type: ignore[arg-type]
    assert session.view() is view


def test_readings_are_in_range_whatever_the_load() -> None:
    now_s = [0.0]
    for load in (None, 0.0, 0.5, 1.0, 7.0, -1.0):
        backend = SimulatedGpus(3, lambda _, load=load: load, clock=lambda: now_s[0])  # type: ignore[misc]
        assert backend.probe() == ""
        for _ in range(20):
            now_s[0] += 1.0
            samples = backend.sample().gpus
            assert [gpu.uuid for gpu in samples] == [simulated_uuid(i) for i in range(3)]
            for gpu in samples:
                for reading in gpu.readings.values():
                    assert isinstance(reading, Reading)
                    assert reading.value is not None
                    assert reading.value >= 0.0
                    assert reading.unit != "%" or reading.value <= 100.0
                if not load:
                    assert gpu.readings["gpu_util"].value == 0.0
        backend.close()


@pytest.mark.parametrize(("asked", "made"), [(0, 1), (1, 1), (256, 256), (10_000, 256)])
def test_the_number_of_devices(asked: int, made: int) -> None:
    assert len(SimulatedGpus(asked).sample().gpus) == made


def test_no_peak_is_known_for_what_is_not_there() -> None:
    assert find_peak(NAME) is None
