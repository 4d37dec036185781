"""The page of a dcgm-exporter: both generations of names, ages, doubt, and what is no page."""

import http.server
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from gpuwatch.schema import GpuSample, Reading
from gpuwatch.sensors import dcgm
from gpuwatch.sensors.backend import Devices, unknown
from gpuwatch.sensors.dcgm import DcgmBackend, Line, Overlaid, overlay, parse_page, read_gpus


def page(uuid: str = "GPU-a", gpu: int = 0, **fields: float) -> str:
    labels = f'gpu="{gpu}",UUID="{uuid}",device="nvidia{gpu}",modelName="NVIDIA A100",Hostname="n"'
    return "# HELP x\n" + "".join(
        f"DCGM_FI_{name}{{{labels}}} {value}\n" for name, value in fields.items()
    )


def values(sample: GpuSample) -> dict[str, float | None]:
    return {name: reading.value for name, reading in sample.readings.items()}


OLD = {"PROF_SM_ACTIVE": 0.5, "PROF_SM_OCCUPANCY": 0.25, "PROF_PIPE_TENSOR_ACTIVE": 0.125}
NEW = {"PROF_SM_UTIL_RATIO": 0.5, "PROF_SM_OCCUPANCY": 0.25, "PROF_TENSOR_UTIL_RATIO": 0.125}


@pytest.mark.parametrize("names", [OLD, NEW])
def test_both_generations_of_names(names: dict[str, float]) -> None:
    text = page(DEV_GPU_UTIL=97, DEV_FB_USED=1024, PROF_PCIE_RX_BYTES=5e9, **names)
    (gpu,) = read_gpus(parse_page(text), 12.0)
    assert (gpu.index, gpu.uuid, gpu.name) == (0, "GPU-a", "NVIDIA A100")
    assert values(gpu) == {
        "gpu_util": 97.0,
        "memory_used": 2.0**30,
        "pcie_rx": 5e9,
        "sm_active": 50.0,
        "sm_occupancy": 25.0,
        "tensor_active": 12.5,
        "dram_active": None,
    }
    assert "counters file" in gpu.readings["dram_active"].reason
    assert gpu.readings["sm_active"].source == "dcgm-exporter"
    assert gpu.readings["sm_active"].age_s == 12.0


def test_the_driver_is_a_label_of_every_line() -> None:
    text = page(DEV_GPU_UTIL=5, DEV_FB_USED=1)
    (gpu,) = read_gpus(parse_page(text))
    assert gpu.driver == ""
    assert "DCGM_FI_DRIVER_VERSION" in gpu.driver_reason
    told = text.replace('Hostname="n"', 'Hostname="n",DCGM_FI_DRIVER_VERSION="535.104.05"')
    (exported,) = read_gpus(parse_page(told))
    assert (exported.driver, exported.driver_reason) == ("535.104.05", "")
    # What NVML has told stays; where it could not, the exporter's word counts.
    other = replace(exported, driver="570.00.00")
    assert overlay([other], [exported]) == (other,)
    assert overlay([gpu], [exported])[0].driver == "535.104.05"
    assert overlay([gpu], [exported])[0].driver_reason == ""


def test_zeros_beside_a_busy_gpu_are_doubted() -> None:
    (gpu,) = read_gpus(parse_page(page(DEV_GPU_UTIL=99, PROF_SM_ACTIVE=0, PROF_DRAM_ACTIVE=0)))
    assert gpu.readings["sm_active"].value is None
    assert gpu.readings["sm_active"].state == "error"
    assert "profiling has stopped" in gpu.readings["sm_active"].reason
    (idle,) = read_gpus(parse_page(page(DEV_GPU_UTIL=0, PROF_SM_ACTIVE=0, PROF_DRAM_ACTIVE=0)))
    assert idle.readings["sm_active"].value == 0.0


def test_values_out_of_range_are_no_values() -> None:
    (gpu,) = read_gpus(parse_page(page(PROF_SM_ACTIVE=1.7, DEV_POWER_USAGE=float("nan"))))
    assert gpu.readings["sm_active"].state == "error"
    assert gpu.readings["power"].value is None


def test_an_instance_of_a_gpu_is_not_the_gpu() -> None:
    line = 'DCGM_FI_DEV_GPU_UTIL{gpu="0",UUID="GPU-a",GPU_I_ID="3",GPU_I_PROFILE="1g.10gb"} 50\n'
    assert read_gpus(parse_page(line)) == ()


def test_labels_with_quotes_and_commas() -> None:
    (line,) = parse_page('x{a="1,\\"2\\"}",b="\\\\n\\n"} 3 1700000000000')
    assert line == Line("x", {"a": '1,"2"}', "b": "\\n\n"}, 3.0)


@given(st.text() | st.text(alphabet='x{}=",\\ 1.\n'))
def test_garbage_raises_nothing(text: str) -> None:
    read_gpus(parse_page(text))


@given(
    st.dictionaries(st.text(min_size=1).filter(lambda s: s.isascii() and s.isalpha()), st.text())
)
def test_labels_come_back(labels: dict[str, str]) -> None:
    def escaped(value: str) -> str:
        return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")

    inside = ",".join(f'{name}="{escaped(value)}"' for name, value in labels.items())
    # What ends a line elsewhere is no part of a label's value in this format.
    if len(inside.splitlines()) <= 1:
        assert list(parse_page(f"x{{{inside}}} 1")) == [Line("x", labels, 1.0)]


def test_overlay_fills_what_is_missing_and_nothing_else() -> None:
    first = (
        GpuSample(
            1,
            "GPU-a",
            "card",
            {"sm_active": unknown("%", "gpm", "no GPM before Hopper"), "power": Reading(1.0, "W")},
        ),
        GpuSample(0, "GPU-b", "card", {}),
    )
    second = read_gpus(parse_page(page(PROF_SM_ACTIVE=0.5, DEV_POWER_USAGE=9.0)))
    a, b = overlay(first, second)
    assert (a.index, a.readings["sm_active"].value, a.readings["power"].value) == (1, 50.0, 1.0)
    assert "no GPM" not in a.readings["sm_active"].reason
    assert b == first[1]


def test_age_is_how_long_the_page_has_said_the_same() -> None:
    now_s, text = [100.0], [page(DEV_GPU_UTIL=5)]
    backend = DcgmBackend("http://x/", lambda _: text[0], lambda: now_s[0])
    assert backend.sample() == ()
    backend.scrape()
    now_s[0] += 30.0
    backend.scrape()
    (gpu,) = backend.sample()
    assert gpu.readings["gpu_util"].age_s == 30.0
    assert gpu.readings["gpu_util"].state == "ok"
    now_s[0] += 70.0
    (gpu,) = backend.sample()
    assert gpu.readings["gpu_util"].state == "stale"
    text[0] = page(DEV_GPU_UTIL=6)
    backend.scrape()
    (gpu,) = backend.sample()
    assert (gpu.readings["gpu_util"].age_s, gpu.readings["gpu_util"].value) == (0.0, 6.0)


@pytest.mark.parametrize(
    "url", ["", "localhost:9400", "file:///etc/passwd", "http://", "http://[x"]
)
def test_what_is_no_address_is_refused(url: str) -> None:
    backend = DcgmBackend(url)
    assert "no exporter's address" in backend.probe()
    assert backend.reason == backend.probe()


class Exporter(http.server.BaseHTTPRequestHandler):
    answer = (200, b"")

    def do_GET(self) -> None:
        status, body = type(self).answer
        self.send_response(status)
        self.send_header("Location", "http://127.0.0.1:1/")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def exporter() -> Iterator[str]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Exporter)
    thread = threading.Thread(target=server.serve_forever, args=[0.01])
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}/metrics"
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_real_exporter(exporter: str) -> None:
    Exporter.answer = (200, page(DEV_GPU_UTIL=42).encode())
    backend = DcgmBackend(exporter, scrape_s=0.05)
    assert backend.probe() == ""
    deadline = time.monotonic() + 10
    while not backend.sample() and time.monotonic() < deadline:
        time.sleep(0.01)
    (gpu,) = backend.sample()
    assert gpu.readings["gpu_util"].value == 42.0
    assert backend.reason == ""
    backend.close()


@pytest.mark.parametrize(
    ("status", "body", "says"),
    [
        (200, b"<html>hello</html>", "is it a dcgm-exporter?"),
        (200, b"\xff\x00" * 100, "is it a dcgm-exporter?"),
        (404, b"", "it answers 404"),
        (302, b"", "it answers 302"),  # nobody is followed elsewhere
        (200, b"x" * (dcgm.MOST_BYTES + 1), "more than 8 MiB"),
    ],
)
def test_wrong_answers_are_one_sentence(exporter: str, status: int, body: bytes, says: str) -> None:
    Exporter.answer = (status, body)
    backend = DcgmBackend(exporter)
    backend.scrape()
    assert says in backend.reason
    assert backend.sample() == ()


def test_nobody_there_and_nobody_answering(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/metrics"
        monkeypatch.setattr(dcgm, "TIMEOUT_S", 0.2)
        backend = DcgmBackend(url)
        backend.scrape()
        assert "no dcgm-exporter at" in backend.reason
        assert "timed out" in backend.reason or "no answer" in backend.reason
    backend.scrape()
    assert "refused" in backend.reason


class Gpus:
    """Stands for the drivers."""

    def __init__(self, *gpus: GpuSample, reason: str = "") -> None:
        self.devices = Devices(gpus, reason)
        self.calls: list[str] = []

    def probe(self) -> str:
        self.calls.append("probe")
        return ""

    def ask(self) -> None:
        self.calls.append("ask")

    def sample(self) -> Devices:
        return self.devices

    def close(self) -> bool:
        self.calls.append("close")
        return False


def overlaid(gpus: Gpus, text: str) -> Overlaid:
    backend = DcgmBackend("http://x/", lambda _: text)
    backend.scrape()
    return Overlaid(gpus, backend)


OLD_CARD = GpuSample(
    0,
    "GPU-a",
    "card",
    {"sm_active": unknown("%", "GPM", "no GPM before Hopper"), "power": Reading(5.0)},
)


def test_the_exporter_fills_in_what_the_driver_cannot_say() -> None:
    gpus = Gpus(OLD_CARD)
    both = overlaid(gpus, page(PROF_SM_ACTIVE=0.5, DEV_POWER_USAGE=9))
    both.ask()
    (gpu,) = both.sample().gpus
    assert (gpu.readings["sm_active"].value, gpu.readings["power"].value) == (50.0, 5.0)
    assert both.close() is False
    assert gpus.calls == ["ask", "close"]


def test_an_exporter_that_gives_nothing_is_why() -> None:
    (gpu,) = overlaid(Gpus(OLD_CARD), "<html>").sample().gpus
    assert "is it a dcgm-exporter?" in gpu.readings["sm_active"].reason
    assert gpu.readings["power"].value == 5.0
    none = overlaid(Gpus(reason="no NVIDIA driver"), "<html>").sample()
    assert none.gpus == ()
    assert none.reason == "no NVIDIA driver; no GPU metrics at http://x/: is it a dcgm-exporter?"


def test_an_exporter_alone() -> None:
    devices = overlaid(Gpus(reason="no NVIDIA driver"), page(DEV_GPU_UTIL=7)).sample()
    assert devices.reason == ""
    assert devices.gpus[0].readings["gpu_util"].value == 7.0


def test_the_sampler_takes_it_from_the_environment(exporter: str) -> None:
    Exporter.answer = (200, page(DEV_GPU_UTIL=42).encode())
    done = subprocess.run(
        [sys.executable, "-c", FIRST_GPUS],
        env={**os.environ, "GPUWATCH_DCGM_URL": exporter},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout.strip() == "GPU-a 42.0"


FIRST_GPUS = """
import time
from gpuwatch.sensors.__main__ import _gpus
gpus = _gpus(1.0, "left out")
gpus.probe()
for _ in range(200):
    found = gpus.sample().gpus
    if found:
        print(found[0].uuid, found[0].readings["gpu_util"].value)
        break
    time.sleep(0.05)
"""
