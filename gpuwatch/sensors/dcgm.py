"""GPU readings from a dcgm-exporter that runs already: SM activity where NVML has no GPM.

The exporter's page is text in Prometheus' format. It samples by itself, every 30 s unless told
otherwise, and repeats a sample until the next: so every reading carries how long the page has said
the same. NVIDIA renamed the profiling fields in DCGM 4.6; both generations are read. The exporter's
default list of counters leaves SM_ACTIVE and SM_OCCUPANCY out.
"""

import math
import re
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from msgspec.structs import replace

from gpuwatch.schema import GpuSample, Reading
from gpuwatch.sensors.backend import Devices, unknown
from gpuwatch.sensors.sampler import GpuSource

__all__ = ["DcgmBackend", "Line", "Overlaid", "overlay", "parse_page", "read_gpus"]

SCRAPE_S = 5.0
TIMEOUT_S = 3.0
MOST_BYTES = 8 * 2**20
"""A page of 16 GPUs with every counter is about 100 KB."""

_SILENT_S = 90.0
"""The exporter's own interval three times over: what is older is stale."""

_MIB = 2.0**20


class _Field(NamedTuple):
    name: str
    unit: str
    factor: float
    most: float  # what lies above it is damage


# Shares are 0..1 in DCGM and percent here. Newer names behind the older ones.
_FIELDS: dict[str, _Field] = {}
for _names, _field in (
    (("DEV_GPU_UTIL",), _Field("gpu_util", "%", 1.0, 100.0)),
    (("DEV_FB_USED",), _Field("memory_used", "B", _MIB, 2.0**60)),
    (("DEV_FB_TOTAL",), _Field("memory_total", "B", _MIB, 2.0**60)),
    (("DEV_POWER_USAGE",), _Field("power", "W", 1.0, 1e5)),
    (("DEV_GPU_TEMP",), _Field("temperature", "°C", 1.0, 1e3)),
    (("DEV_MEMORY_TEMP",), _Field("memory_temperature", "°C", 1.0, 1e3)),
    (("DEV_SM_CLOCK",), _Field("sm_clock", "MHz", 1.0, 1e5)),
    (("DEV_MEM_CLOCK",), _Field("memory_clock", "MHz", 1.0, 1e5)),
    (("PROF_SM_ACTIVE", "PROF_SM_UTIL_RATIO"), _Field("sm_active", "%", 100.0, 1.0)),
    (
        ("PROF_SM_OCCUPANCY", "PROF_SM_OCCUPANCY_RATIO"),
        _Field("sm_occupancy", "%", 100.0, 1.0),
    ),
    (
        ("PROF_PIPE_TENSOR_ACTIVE", "PROF_TENSOR_UTIL_RATIO", "PROF_PIPE_TENSOR_UTIL_RATIO"),
        _Field("tensor_active", "%", 100.0, 1.0),
    ),
    (("PROF_DRAM_ACTIVE", "PROF_DRAM_UTIL_RATIO"), _Field("dram_active", "%", 100.0, 1.0)),
    (("PROF_PCIE_RX_BYTES",), _Field("pcie_rx", "B/s", 1.0, 1e13)),
    (("PROF_PCIE_TX_BYTES",), _Field("pcie_tx", "B/s", 1.0, 1e13)),
    (("PROF_NVLINK_RX_BYTES",), _Field("nvlink_rx", "B/s", 1.0, 1e13)),
    (("PROF_NVLINK_TX_BYTES",), _Field("nvlink_tx", "B/s", 1.0, 1e13)),
):
    for _name in _names:
        _FIELDS[f"DCGM_FI_{_name}"] = _field

_ACTIVITY = ("sm_active", "sm_occupancy", "tensor_active", "dram_active")
_DRIVER = "DCGM_FI_DRIVER_VERSION"
"""A label of every line, not a counter: so the exporter's own list has it."""

_NO_DRIVER = f"the exporter does not export it: add {_DRIVER} to its counters file as a label"
_NOT_EXPORTED = "the exporter does not export it: add it to its counters file"

_LINE = re.compile(r"([A-Za-z_:][A-Za-z0-9_:]*)(?:\{(.*)\})?\s+(\S+)(?:\s+-?\d+)?\s*")
_LABEL = re.compile(r'\s*([A-Za-z_][A-Za-z0-9_]*)\s*=\s*"((?:[^"\\]|\\.)*)"\s*(?:,|$)')
_ESCAPE = re.compile(r"\\(.)")


class Line(NamedTuple):
    """One sample of the page."""

    name: str
    labels: dict[str, str]
    value: float


def parse_page(text: str) -> Iterator[Line]:
    """Yield the samples of a page in Prometheus' text format; other lines are left out."""
    for line in text.splitlines():
        if line.startswith("#"):
            continue
        found = _LINE.fullmatch(line)
        if found is None:
            continue
        try:
            value = float(found[3])
        except ValueError:
            continue
        labels = _labels(found[2] or "")
        if labels is not None:
            yield Line(found[1], labels, value)


def _labels(text: str) -> dict[str, str] | None:
    labels = {}
    at = 0
    while at < len(text):
        found = _LABEL.match(text, at)
        if found is None:
            return None
        labels[found[1]] = _ESCAPE.sub(lambda m: "\n" if m[1] == "n" else m[1], found[2])
        at = found.end()
    return labels


def read_gpus(lines: Iterable[Line], age_s: float = 0.0) -> tuple[GpuSample, ...]:
    """Return the GPUs of a page; MIG instances are left out, for their numbers are not a GPU's."""
    names: dict[str, tuple[int, str]] = {}
    drivers: dict[str, str] = {}
    values: dict[str, dict[str, Reading]] = {}
    for line in lines:
        field = _FIELDS.get(line.name)
        uuid = line.labels.get("UUID", "")
        if field is None or not uuid or line.labels.get("GPU_I_ID"):
            continue
        index = line.labels.get("gpu", "")
        number = int(index) if index.isdecimal() and len(index) < 4 else 0
        names[uuid] = (number, line.labels.get("modelName", ""))
        readings = values.setdefault(uuid, {})
        if driver := line.labels.get(_DRIVER, ""):
            drivers[uuid] = driver[:256]
        source = "dcgm-exporter"
        if not math.isfinite(line.value) or not 0.0 <= line.value <= field.most:
            reason = f"the exporter says {line.value:g}"
            readings[field.name] = Reading(None, field.unit, source, age_s, "error", reason)
            continue
        value = line.value * field.factor
        if age_s > _SILENT_S:
            reason = "the exporter repeats itself"
            readings[field.name] = Reading(value, field.unit, source, age_s, "stale", reason)
        else:
            readings[field.name] = Reading(value, field.unit, source, age_s)
    found = []
    for uuid, (number, name) in sorted(names.items(), key=lambda item: item[1]):
        readings = values[uuid]
        _doubt_zeros(readings)
        for missing in _ACTIVITY:
            if missing not in readings:
                readings[missing] = unknown("%", "dcgm-exporter", _NOT_EXPORTED)
        driver = drivers.get(uuid, "")
        why = "" if driver else _NO_DRIVER
        told = GpuSample(number, uuid[:256], name[:256], readings, driver=driver, driver_reason=why)
        found.append(told)
    return tuple(found[:64])


def _doubt_zeros(readings: dict[str, Reading]) -> None:
    """An exporter whose profiling has stopped says 0 for ever (dcgm-exporter#662, DCGM#303)."""
    util = readings.get("gpu_util")
    active = [readings[name] for name in _ACTIVITY if name in readings]
    if util is None or util.value is None or util.value < 90.0 or not active:
        return
    if all(reading.value == 0.0 for reading in active):
        reason = f"the exporter says 0 at {util.value:.0f} % GPU-Util: its profiling has stopped"
        for name in _ACTIVITY:
            if name in readings:
                age_s = readings[name].age_s
                readings[name] = Reading(None, "%", "dcgm-exporter", age_s, "error", reason)


def overlay(first: Iterable[GpuSample], second: Iterable[GpuSample]) -> tuple[GpuSample, ...]:
    """Return the GPUs of `first`, with what `second` knows where `first` does not; by UUID."""
    more = {gpu.uuid: gpu for gpu in second}
    found = []
    for gpu in first:
        other = more.get(gpu.uuid)
        if other is None:
            found.append(gpu)
            continue
        readings = dict(gpu.readings)
        for name, reading in other.readings.items():
            mine = readings.get(name)
            if reading.value is not None and (mine is None or mine.value is None):
                readings[name] = reading
        more_known = replace(gpu, readings=readings)
        if other.driver and not gpu.driver:
            more_known = replace(more_known, driver=other.driver, driver_reason="")
        found.append(more_known)
    return tuple(found)


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *args: object, **kwargs: object) -> None:
        return None


def _fetch(url: str) -> str:
    """Return the page.

    Raises:
        OSError: it did not come, and why.
        ValueError: it is too large.
    """
    # The exporter is a neighbour: no proxy, and no page elsewhere.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), _NoRedirect())
    request = urllib.request.Request(url, headers={"Accept": "text/plain"})
    with opener.open(request, timeout=TIMEOUT_S) as answer:
        data = answer.read(MOST_BYTES + 1)
    if len(data) > MOST_BYTES:
        raise ValueError(f"its page has more than {MOST_BYTES // 2**20} MiB")
    text: str = data.decode("utf-8", "replace")
    return text


class DcgmBackend:
    """Scrapes a dcgm-exporter in a thread of its own; `sample` gives the last page.

    Args:
        url: such as `http://localhost:9400/metrics`.
        fetch: returns the page, or raises OSError or ValueError.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        url: str,
        fetch: Callable[[str], str] = _fetch,
        clock: Callable[[], float] = time.monotonic,
        scrape_s: float = SCRAPE_S,
    ) -> None:
        self._url = url
        self._fetch = fetch
        self._clock = clock
        self._scrape_s = scrape_s
        self._lock = threading.Lock()
        self._lines: tuple[Line, ...] = ()
        self._changed_s = 0.0
        self._reason = "the exporter has not answered yet"
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def reason(self) -> str:
        """One sentence that says why there are no readings; empty if there are."""
        with self._lock:
            return self._reason

    def probe(self) -> str:
        """Start to scrape. Returns a sentence if the URL is none."""
        try:
            parts = urllib.parse.urlsplit(self._url)
            fine = parts.scheme in {"http", "https"} and bool(parts.hostname)
        except ValueError:
            fine = False
        if not fine:
            self._reason = (
                f"{self._url!r} is no exporter's address; try http://localhost:9400/metrics"
            )
            return self._reason
        self._thread = threading.Thread(target=self._run, name="gpuwatch-dcgm", daemon=True)
        self._thread.start()
        return ""

    def sample(self) -> tuple[GpuSample, ...]:
        """Return what the last page said, each reading with the age of what it says."""
        with self._lock:
            lines, changed_s = self._lines, self._changed_s
        return read_gpus(lines, max(0.0, self._clock() - changed_s)) if lines else ()

    def close(self) -> None:
        """Stop scraping; a request under way is left to its thread."""
        self._closed.set()

    def _run(self) -> None:
        while not self._closed.is_set():
            self.scrape()
            self._closed.wait(self._scrape_s)

    def scrape(self) -> None:
        """Fetch the page once and keep what it says; does not raise."""
        try:
            lines = tuple(line for line in parse_page(self._fetch(self._url)) if _is_gpu(line))
        except Exception as exc:
            reason = self._sentence(exc)
            with self._lock:
                self._reason = reason
            return
        with self._lock:
            if not lines:
                self._reason = f"no GPU metrics at {self._url}: is it a dcgm-exporter?"
                self._lines = ()
                return
            self._reason = ""
            if lines != self._lines:
                self._lines, self._changed_s = lines, self._clock()

    def _sentence(self, exc: Exception) -> str:
        if isinstance(exc, urllib.error.HTTPError):
            why = f"it answers {exc.code}"
        elif isinstance(exc, urllib.error.URLError):
            why = str(getattr(exc.reason, "strerror", None) or exc.reason)
        elif isinstance(exc, TimeoutError):
            why = f"no answer in {TIMEOUT_S:.0f} s"
        else:
            why = str(exc) or type(exc).__name__
        return f"no dcgm-exporter at {self._url}: {why}"


class Overlaid:
    """The GPUs of another source, with the exporter's readings where that has none.

    Where the other source knows no GPU at all, those of the exporter are the GPUs.
    """

    def __init__(self, gpus: GpuSource, dcgm: DcgmBackend) -> None:
        self._gpus = gpus
        self._dcgm = dcgm

    def probe(self) -> str:
        """Start both."""
        self._dcgm.probe()
        return self._gpus.probe()

    def ask(self) -> None:
        """Start a sample of the other source."""
        self._gpus.ask()

    def sample(self) -> Devices:
        """Return both in one."""
        devices = self._gpus.sample()
        exported = self._dcgm.sample()
        if not devices.gpus:
            return Devices(exported, "" if exported else f"{devices.reason}; {self._dcgm.reason}")
        if exported:
            return Devices(overlay(devices.gpus, exported), devices.reason)
        reason = self._dcgm.reason
        return Devices(tuple(_explained(gpu, reason) for gpu in devices.gpus), devices.reason)

    def close(self) -> bool:
        """End both."""
        self._dcgm.close()
        return self._gpus.close()


def _explained(gpu: GpuSample, reason: str) -> GpuSample:
    """Say why the exporter, which was asked for, gives nothing either."""
    readings = {
        name: unknown("%", "dcgm-exporter", reason)
        if name in _ACTIVITY and reading.value is None
        else reading
        for name, reading in gpu.readings.items()
    }
    return replace(gpu, readings=readings)


def _is_gpu(line: Line) -> bool:
    return line.name in _FIELDS and bool(line.labels.get("UUID"))
