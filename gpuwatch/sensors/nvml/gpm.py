"""GPM: shares of cycles and bandwidths between two samples of the device's own counters.

Hopper and newer, without a daemon and without root. Each metric is the mean between the last two
samples, which the library keeps; both are taken once a tick and swapped.
"""

from collections.abc import Callable
from typing import Any

from gpuwatch.schema import Reading
from gpuwatch.sensors.backend import FIRST_SAMPLE, failed, known, unknown
from gpuwatch.sensors.nvml.calls import Calls, NvmlError
from gpuwatch.sensors.nvml.decode import percentage
from gpuwatch.sensors.nvml.words import LASTING, NO_GPM, value_sentence

__all__ = ["METRICS", "Gpm"]

SOURCE = "GPM"

METRICS = (
    (2, "sm_active", "%"),
    (3, "sm_occupancy", "%"),
    (5, "tensor_active", "%"),
    (10, "dram_active", "%"),
    (21, "pcie_rx", "B/s"),
    (20, "pcie_tx", "B/s"),
    (60, "nvlink_rx", "B/s"),
    (61, "nvlink_tx", "B/s"),
)
"""Metric of NVML (nvmlGpmMetricId_t), reading, unit. NVML gives MiB/s where we say B/s."""

_MIB = 1024.0 * 1024.0
# "Should be greater than 100 ms due to the internal sample refresh rate" (nvml.h).
_SHORTEST_S = 0.12
# After a pause (a suspended machine, a call that hung) the mean would be over another time.
_LONGEST_S = 15.0


class Gpm:
    """GPM of one device or, with `instance`, of one GPU instance (MIG) of it."""

    def __init__(self, calls: Calls, clock: Callable[[], float], instance: int | None = None):
        self._calls = calls
        self._clock = clock
        self._instance = instance
        self._samples: list[Any] = []
        self._metrics: Any = None
        self._taken_s: float | None = None
        self._last: dict[str, Reading] = {}
        self.reason = ""

    def open(self, handle: Any) -> None:
        """Find out whether the device has GPM; `reason` says why not, empty if it has.

        Raises:
            NvmlError: the device or the driver as a whole does not answer.
        """
        self.reseed()
        try:
            support = self._calls.call("nvmlGpmQueryDeviceSupport", handle)
            self.reason = "" if support.isSupportedDevice else NO_GPM
            if not self.reason and not self._samples:
                self._samples = [self._calls.call("nvmlGpmSampleAlloc") for _ in range(2)]
        except NvmlError as exc:
            if exc.code not in LASTING:
                raise
            self.reason = NO_GPM if exc.code == 3 else f"GPM: {value_sentence(exc.code)}"
            return
        if not self.reason and self._metrics is None:
            # 19 kB and 18 µs to build: once.
            metrics = self._calls.make("c_nvmlGpmMetricsGet_t")
            metrics.version = 1
            metrics.numMetrics = len(METRICS)
            for i, (metric, _, _) in enumerate(METRICS):
                metrics.metrics[i].metricId = metric
            self._metrics = metrics

    def reseed(self) -> None:
        """Forget the former sample: the next one is a first one again."""
        self._taken_s = None
        self._last = {}

    def read(self, handle: Any) -> dict[str, Reading]:
        """Take a sample and return the readings since the last one.

        Raises:
            NvmlError: the device does not give a sample.
        """
        if self.reason:
            return {name: unknown(unit, SOURCE, self.reason) for _, name, unit in METRICS}
        now_s = self._clock()
        before_s = self._taken_s
        if before_s is not None and now_s - before_s < _SHORTEST_S and self._last:
            return self._last
        old, new = self._samples
        try:
            if self._instance is None:
                self._calls.call("nvmlGpmSampleGet", handle, new)
            else:
                self._calls.call("nvmlGpmMigSampleGet", handle, self._instance, new)
        except NvmlError as exc:
            self.reseed()
            if exc.code == 3:
                # The sample knows better than the query whether there is GPM.
                self.reason = "the driver gives no GPM sample of this device (NVML 3)"
                return self.read(handle)
            raise
        self._samples = [new, old]
        self._taken_s = now_s
        if before_s is None or now_s - before_s > _LONGEST_S:
            self._last = {name: unknown(unit, SOURCE, FIRST_SAMPLE) for _, name, unit in METRICS}
            return self._last
        metrics = self._metrics
        metrics.sample1, metrics.sample2 = old, new
        self._calls.call("nvmlGpmMetricsGet", metrics)
        self._last = {
            name: _reading(metrics.metrics[i], unit) for i, (_, name, unit) in enumerate(METRICS)
        }
        return self._last

    def close(self) -> None:
        """Free the samples. Does not raise."""
        samples, self._samples = self._samples, []
        for sample in samples:
            try:
                self._calls.call("nvmlGpmSampleFree", sample)
            except NvmlError:
                continue


def _reading(metric: Any, unit: str) -> Reading:
    code = int(metric.nvmlReturn)
    if code != 0:
        make = unknown if code in LASTING else failed
        return make(unit, SOURCE, value_sentence(code))
    if unit == "%":
        share = percentage(metric.value)
        return failed(unit, SOURCE, share) if isinstance(share, str) else known(share, unit, SOURCE)
    if not 0.0 <= metric.value < 1e9:  # 1e9 MiB/s are a thousand times what any link moves
        return failed(unit, SOURCE, f"implausible: {metric.value:.4g} MiB/s")
    return known(metric.value * _MIB, unit, SOURCE)
