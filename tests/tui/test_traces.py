"""A trace by hand on the screen: a reading that is a number alone has the unit of its name."""

import json
import re
from pathlib import Path

import pytest

from gpuwatch.recording.read import open_recording
from gpuwatch.recording.replay import Player
from gpuwatch.store.views import View
from gpuwatch.tui.render.gpus import gpu_columns, gpu_page, gpu_row
from tests.tui.snapshots import text_of
from tests.tui.test_pictures import scene_of

ROOT = Path(__file__).resolve().parents[2]
READINGS = {
    "gpu_util": 40,
    "memory_used": 30.5e9,
    "memory_total": 80e9,
    "power": 300,
    "temperature": 50,
    "sm_clock": 1500,
    "pcie_rx": 2e9,
}


def last_of(path: Path, *lines: object) -> View:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with open_recording(str(path)) as recording:
        *_, view = Player(recording).ticks(1.0)
    return view


def test_memory_without_a_unit_is_bytes(tmp_path: Path) -> None:
    steps = [{"type": "step", "rank": 0, "phases_ms": {"forward": 50}} for _ in range(80)]
    view = last_of(tmp_path / "t.jsonl", {"type": "gpu", "index": 0, "readings": READINGS}, *steps)
    scene = scene_of(view)
    (gpu,) = view.nodes[0].gpus
    row = text_of(gpu_row("vm/0", gpu, None, gpu_columns(160, ["vm/0"])))
    page = "\n".join(text_of(line) for line in gpu_page("vm", gpu, None, scene, 120))
    assert "30.5/80.0" in row
    assert "30.5" in page
    assert "9999" not in page
    assert gpu.readings["pcie_rx"].unit == "B/s"
    assert gpu.readings["temperature"].unit == "°C"


def documented() -> dict[str, str]:
    """Return the unit of each reading as the sensors' own source files give it."""
    found: dict[str, str] = {}
    units = "%|B|B/s|W|°C|MHz|ms|1/s|ms/s"
    pairs = re.compile(rf'"([a-z][a-z0-9_]+)"[,:]\s*(?:known\([^"\n]*, )?"({units})"')
    for path in (ROOT / "gpuwatch" / "sensors").rglob("*.py"):
        found.update(pairs.findall(path.read_text()))
    return found


@pytest.mark.parametrize("name", sorted(documented()))
def test_a_reading_has_the_unit_in_which_the_sensors_measure_it(tmp_path: Path, name: str) -> None:
    view = last_of(tmp_path / "t.jsonl", {"type": "host", "cores": 2, "readings": {name: 1}})
    host = view.nodes[0].host
    assert host is not None
    assert host.readings[name].unit == documented()[name]
