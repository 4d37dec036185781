"""One GPU: what is asked of it at which tick, and what is known of it when it stops answering.

The driver takes one lock for all its callers, the training among them, so every call has to earn
its place. Every tick: utilization, memory, power, clocks, why the clocks are what they are, and
GPM (two calls for all metrics) or byte counters (one). Every `SLOW_S`: temperatures, ECC, power
limit, processes; fan, link and graphics processes at every second of these, modes at every sixth.
"""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from gpuwatch.schema import GpuEvent, GpuProcess, GpuSample, Reading
from gpuwatch.sensors.backend import FIRST_SAMPLE, aged, failed, known, unknown
from gpuwatch.sensors.nvml.calls import Calls, FieldValue, NvmlError
from gpuwatch.sensors.nvml.decode import (
    Counter,
    Listed,
    ProcessTable,
    counter_rate,
    merge_processes,
    numa_node,
    percentage,
)
from gpuwatch.sensors.nvml.gpm import METRICS, Gpm
from gpuwatch.sensors.nvml.words import (
    DRIVER_GONE,
    FUNCTION_NOT_FOUND,
    GPU_LOST,
    LASTING,
    clock_reasons,
    lost_sentence,
    value_sentence,
)

__all__ = ["SLOW_S", "Device"]

SLOW_S = 5.0
"""What changes slowly or costs the driver much (a list of processes: milliseconds)."""

SOURCE = "NVML"
_ASK_AGAIN_S = 60.0  # what was refused for a lasting reason: a reset or another mode may change it
_LOST_RETRY_S = (1.0, 2.0, 5.0, 10.0, 30.0)
# Version 2, then the older call, whose used bytes include what the driver reserves.
_MEMORY = (("nvmlDeviceGetMemoryInfo", 0x02000028), ("nvmlDeviceGetMemoryInfo",))
_MEMORY_SOURCES = (SOURCE, "NVML v1, with the driver's own")
_SM_CLOCK, _MEMORY_CLOCK = 1, 2
_GPU_TEMPERATURE = 0
_MIG_INSTANCE_GONE = frozenset({2, 6})

# Fields of nvmlDeviceGetFieldValues.
_SLOW_FIELDS = (
    (82, "memory_temperature", "°C"),
    (3, "ecc_corrected", ""),
    (4, "ecc_uncorrected", ""),
)
_COUNTER_FIELDS = (
    (198, "pcie_rx", 1.0),
    (197, "pcie_tx", 1.0),
    (139, "nvlink_rx", 1024.0),
    (138, "nvlink_tx", 1024.0),
)
"""Field, reading, bytes in one count."""

_LANE_BYTES_PER_S = {1: 0.25e9, 2: 0.5e9, 3: 0.985e9, 4: 1.969e9, 5: 3.938e9, 6: 7.563e9}
"""What one lane of PCIe moves each way, by generation: the ceiling of the PCIe counters."""

_ALWAYS = (("gpu_util", "%"), ("memory_used", "B"), ("power", "W"), ("sm_active", "%"))
"""What a device has that was lost before anything of it was read."""

_STATIC = ("sm_clock_max", "memory_clock_max", "link_gen_max", "link_width_max", "numa_node")

_NO_SLICE_UTIL = "NVML has no utilization of a MIG device: see SM active"
_NO_SLICE_VALUE = "of the whole GPU only, not of a MIG device"


class _Value(NamedTuple):
    reading: Reading
    at_s: float


class Values:
    """Readings by name, each with the time at which it was taken (seconds of one clock)."""

    def __init__(self) -> None:
        self._values: dict[str, _Value] = {}

    def put(self, name: str, reading: Reading, at_s: float) -> None:
        """Keep a reading instead of the former of that name."""
        self._values[name] = _Value(reading, at_s)

    def keep(self, names: Iterable[str], at_s: float) -> None:
        """Say that what never changes is as good as read now."""
        for name in names:
            value = self._values.get(name)
            if value is not None:
                self._values[name] = _Value(value.reading, at_s)

    def touch(self, names: Iterable[str], at_s: float) -> None:
        """Say that what is n/a still is."""
        for name in names:
            value = self._values.get(name)
            if value is not None and value.reading.state == "na":
                self._values[name] = _Value(value.reading, at_s)

    def has(self, name: str) -> bool:
        """Say whether there ever was a reading of that name."""
        return name in self._values

    def get(self, name: str) -> float | None:
        """Return the value of a reading, None where there is none."""
        value = self._values.get(name)
        return None if value is None else value.reading.value

    def readings(self, now_s: float, lost: str = "") -> dict[str, Reading]:
        """Return all readings with their ages, as errors for the reason `lost` if there is one."""
        found = {}
        for name, (reading, at_s) in self._values.items():
            if lost and reading.value is None and reading.reason == FIRST_SAMPLE:
                found[name] = failed(reading.unit, reading.source, lost)
            else:
                found[name] = aged(reading, now_s - at_s, "error" if lost else None, lost)
        return found


class _Slice:
    """One MIG device: memory and, where its GPU has it, GPM of its GPU instance."""

    def __init__(self, handle: Any, uuid: str, name: str, gi: int, ci: int) -> None:
        self.handle = handle
        self.uuid = uuid
        self.name = name
        self.gi = gi
        self.ci = ci
        self.values = Values()

    def sample(self, index: int, parent: str, now_s: float, lost: str, why: str) -> GpuSample:
        return GpuSample(
            index,
            self.uuid,
            self.name,
            self.values.readings(now_s, lost),
            processes_reason="listed with the whole GPU",
            lost=why,
            parent=parent,
            slice=f"gi {self.gi} ci {self.ci}",
        )


class Device:
    """One GPU of the driver's list, and its MIG devices.

    `register` is told the handle whenever the device is opened: whoever waits for its events.
    """

    def __init__(
        self,
        calls: Calls,
        index: int,
        clock: Callable[[], float],
        register: Callable[[int, Any], None],
        *,
        slow_s: float = SLOW_S,
        table: ProcessTable | None = None,
    ) -> None:
        self._calls = calls
        self.index = index
        self._clock = clock
        self._register = register
        self._slow_s = slow_s
        self._table = table or ProcessTable()
        self.uuid = ""
        self.name = ""
        self._handle: Any = None
        self._now_s = 0.0
        self._values = Values()
        self._skip: dict[tuple[Any, ...], float] = {}
        self._gpm = Gpm(calls, clock)
        self._elder: dict[tuple[Any, ...], int] = {}
        self._counters: dict[str, Counter] = {}
        self._reasons: tuple[str, ...] = ()
        self._slow_due_s: float | None = None
        self._slow_count = 0
        self._listed: dict[str, list[Listed]] = {}
        self._list_failures: dict[str, str] = {}
        self._processes: tuple[GpuProcess, ...] = ()
        self._modes_s = 0.0
        self._slices: dict[str, _Slice] = {}
        self._slice_gpm: dict[int, Gpm] = {}
        self._lost_code = 0
        self._lost_tries = 0
        self._retry_s = 0.0

    def sample(self, events: tuple[GpuEvent, ...] = ()) -> tuple[GpuSample, ...]:
        """Return the device and its MIG devices as they are now.

        Raises:
            NvmlError: the driver as a whole is gone (a code of `DRIVER_GONE`).
        """
        self._now_s = self._clock()
        self._calls.device = self.index
        try:
            if not self._lost_code or self._now_s >= self._retry_s:
                try:
                    self._read()
                except NvmlError as exc:
                    if exc.code in DRIVER_GONE:
                        raise
                    self._lose(exc.code)
                else:
                    self._lost_code = self._lost_tries = 0
        finally:
            self._calls.device = -1
        return self.last(events)

    def last(
        self, events: tuple[GpuEvent, ...] = (), driver_reason: str = ""
    ) -> tuple[GpuSample, ...]:
        """Return what is known without asking; `driver_reason` says why nothing can be asked."""
        now_s = self._clock()
        why = driver_reason or (lost_sentence(self._lost_code) if self._lost_code else "")
        short = driver_reason or (value_sentence(self._lost_code) if self._lost_code else "")
        whole = GpuSample(
            self.index,
            self.uuid,
            self.name,
            self._values.readings(now_s, short),
            self._processes,
            "; ".join(sorted(set(self._list_failures.values())))[:256],
            () if short else self._reasons,
            events,
            why,
        )
        slices = (s.sample(self.index, self.uuid, now_s, short, why) for s in self._slices.values())
        return (whole, *slices)

    def adopt(self, former: "Device") -> None:
        """Take over what was known of this place in the list before the driver started anew.

        If another GPU turns out to be there, that is forgotten.
        """
        self.uuid, self.name = former.uuid, former.name
        self._values = former._values
        self._processes = former._processes

    def close(self) -> None:
        """Free what the library keeps for it. Does not raise."""
        for gpm in (self._gpm, *self._slice_gpm.values()):
            gpm.close()

    # --- lost and found -----------------------------------------------------------------------

    def _lose(self, code: int) -> None:
        """Keep the last readings and look again later, ever more seldom."""
        self._lost_code = code
        self._handle = None
        for name, unit in _ALWAYS:
            if not self._values.has(name):
                self._put(name, failed(unit, SOURCE, value_sentence(code)))
        self._counters.clear()
        for gpm in (self._gpm, *self._slice_gpm.values()):
            gpm.reseed()
        delay_s = _LOST_RETRY_S[min(self._lost_tries, len(_LOST_RETRY_S) - 1)]
        self._lost_tries += 1
        self._retry_s = self._now_s + delay_s

    def _read(self) -> None:
        if self._handle is None:
            self._open()
        self._fast()
        if self._slow_due_s is None or self._now_s >= self._slow_due_s - 0.05:
            self._slow(self._slow_count)
            self._slow_count += 1
            if self._slow_due_s is None:
                # From the second time on the devices take turns: no tick has all the slow calls.
                turn = (self.index % 5) / 5.0
                self._slow_due_s = self._now_s + self._slow_s * (1.0 + turn)
            else:
                self._slow_due_s = self._now_s + self._slow_s
        self._read_slices()
        self._values.keep(_STATIC, self._now_s)

    def _open(self) -> None:
        """Take the handle and read what never changes.

        Raises:
            NvmlError: it has none.
        """
        handle = self._calls.call("nvmlDeviceGetHandleByIndex", self.index)
        uuid = _text(self._calls.call("nvmlDeviceGetUUID", handle))
        if uuid != self.uuid:
            self.uuid = uuid
            self._values = Values()
            self._processes = ()
            self._slices = {}
        try:
            self.name = _text(self._calls.call("nvmlDeviceGetName", handle))
        except NvmlError as exc:
            self._raise_if_gone(exc)
        self._handle = handle
        self._skip.clear()
        self._slow_due_s = None
        self._slow_count = 0
        for name, clock in (("sm_clock_max", _SM_CLOCK), ("memory_clock_max", _MEMORY_CLOCK)):
            self._scalar(name, "MHz", 1.0, "nvmlDeviceGetMaxClockInfo", clock)
        self._scalar("link_gen_max", "", 1.0, "nvmlDeviceGetMaxPcieLinkGeneration")
        self._scalar("link_width_max", "lanes", 1.0, "nvmlDeviceGetMaxPcieLinkWidth")
        place = self._ask((("numa_node", ""),), "nvmlDeviceGetPciInfo")
        if place is not None:
            self._put("numa_node", numa_node(_text(place.busId)))
        try:
            self._gpm.open(handle)
        except NvmlError as exc:
            self._raise_if_gone(exc)
            self._gpm.reason = f"GPM: {value_sentence(exc.code)}"
        self._register(self.index, handle)

    def _raise_if_gone(self, exc: NvmlError) -> None:
        if exc.code in GPU_LOST or exc.code in DRIVER_GONE:
            raise exc

    # --- asking -------------------------------------------------------------------------------

    def _put(self, name: str, reading: Reading) -> None:
        self._values.put(name, reading, self._now_s)

    def _ask(self, names: tuple[tuple[str, str], ...], function: str, *args: Any) -> Any:
        """Return an answer; None after saying in the readings `names` (name, unit) why not.

        Raises:
            NvmlError: the device or the driver is gone.
        """
        found = self._ask_one_of(names, (function, *args))
        return None if found is None else found[1]

    def _ask_one_of(
        self, names: tuple[tuple[str, str], ...], *calls: tuple[Any, ...]
    ) -> tuple[int, Any] | None:
        """Do the same with a function and its elders, for drivers that lack the newer ones.

        Each of `calls` is a function and its arguments. Returns which one answered, and the
        answer.
        """
        key = calls[0]
        if self._skip.get(key, 0.0) > self._now_s:
            self._values.touch((name for name, _ in names), self._now_s)
            return None
        at = self._elder.get(key, 0)
        while True:
            function, *args = calls[at]
            try:
                return at, self._calls.call(function, self._handle, *args)
            except NvmlError as exc:
                self._raise_if_gone(exc)
                if exc.code == FUNCTION_NOT_FOUND and at + 1 < len(calls):
                    at = self._elder[key] = at + 1
                    continue
                self._refused(exc.code, key, names)
                return None

    def _refused(self, code: int, key: tuple[Any, ...], names: tuple[tuple[str, str], ...]) -> None:
        lasting = code in LASTING
        if lasting:
            self._skip[key] = self._now_s + _ASK_AGAIN_S
        make = unknown if lasting else failed
        for name, unit in names:
            self._put(name, make(unit, SOURCE, value_sentence(code)))

    def _scalar(
        self, name: str, unit: str, scale: float, function: str, *args: Any, source: str = SOURCE
    ) -> None:
        answer = self._ask(((name, unit),), function, *args)
        if answer is not None:
            self._put(name, known(float(answer) * scale, unit, source))

    # --- every tick ---------------------------------------------------------------------------

    def _fast(self) -> None:
        names = (("gpu_util", "%"), ("memory_util", "%"))
        util = self._ask(names, "nvmlDeviceGetUtilizationRates")
        if util is not None:
            for (name, unit), value in zip(names, (util.gpu, util.memory), strict=True):
                share = percentage(value)
                self._put(
                    name,
                    failed(unit, SOURCE, share)
                    if isinstance(share, str)
                    else known(share, unit, SOURCE),
                )
        self._memory()
        self._scalar("power", "W", 1e-3, "nvmlDeviceGetPowerUsage")
        self._scalar("sm_clock", "MHz", 1.0, "nvmlDeviceGetClockInfo", _SM_CLOCK)
        self._scalar("memory_clock", "MHz", 1.0, "nvmlDeviceGetClockInfo", _MEMORY_CLOCK)
        self._clock_events()
        self._profile()

    def _memory(self) -> None:
        # Some GPUs have no memory of their own: n/a then, and nobody else's memory instead.
        names = (("memory_used", "B"), ("memory_total", "B"))
        found = self._ask_one_of(names, *_MEMORY)
        if found is None:
            return
        at, memory = found
        for (name, unit), value in zip(names, (memory.used, memory.total), strict=True):
            self._put(name, known(value, unit, _MEMORY_SOURCES[at]))

    def _clock_events(self) -> None:
        found = self._ask_one_of(
            (("clock_events", "bits"),),
            ("nvmlDeviceGetCurrentClocksEventReasons",),
            ("nvmlDeviceGetCurrentClocksThrottleReasons",),
        )
        if found is None:
            self._reasons = ()
            return
        self._put("clock_events", known(found[1], "bits", SOURCE))
        self._reasons = clock_reasons(found[1])

    def _profile(self) -> None:
        """GPM, or what stands in for it: n/a with the reason, and byte counters."""
        try:
            readings = self._gpm.read(self._handle)
        except NvmlError as exc:
            self._raise_if_gone(exc)
            readings = {
                name: failed(unit, "GPM", value_sentence(exc.code)) for _, name, unit in METRICS
            }
        for name, reading in readings.items():
            if not self._gpm.reason or reading.unit == "%":
                self._put(name, reading)
        if self._gpm.reason:
            self._count_bytes()

    def _count_bytes(self) -> None:
        # PCIe has another way, at the slow tick: what is not counted is not n/a yet.
        names = tuple((n, "B/s") for _, n, _ in _COUNTER_FIELDS if not n.startswith("pcie"))
        answers = self._ask_fields([field for field, _, _ in _COUNTER_FIELDS], names)
        if not answers:
            self._counters.clear()
        gen, width = self._values.get("link_gen_max"), self._values.get("link_width_max")
        ceiling = _LANE_BYTES_PER_S.get(int(gen or 0), 0.0) * (width or 0.0)
        for (_, name, scale), answer in zip(_COUNTER_FIELDS, answers, strict=False):
            if answer.code != 0:
                self._counters.pop(name, None)
                if name.startswith("pcie") and answer.code in LASTING:
                    continue
                make = unknown if answer.code in LASTING else failed
                self._put(name, make("B/s", SOURCE, value_sentence(answer.code)))
                continue
            now = Counter(answer.value * scale, answer.bits, answer.at_s or self._now_s)
            if scale != 1.0:
                now = now._replace(bits=64)  # in KiB, no counter of any width wraps in a tick
            before = self._counters.get(name)
            self._counters[name] = now
            if before is None:
                self._put(name, unknown("B/s", SOURCE, FIRST_SAMPLE))
                continue
            limit = ceiling if name.startswith("pcie") else 0.0
            rate = counter_rate(before, now, limit)
            self._put(
                name,
                unknown("B/s", SOURCE, rate)
                if isinstance(rate, str)
                else known(rate, "B/s", "NVML counters"),
            )

    def _ask_fields(
        self, fields: list[int], names: tuple[tuple[str, str], ...]
    ) -> list[FieldValue]:
        """Return fields; none after saying in `names` why not.

        Raises:
            NvmlError: the device or the driver is gone.
        """
        key = ("fields", *fields)
        if self._skip.get(key, 0.0) > self._now_s:
            self._values.touch((name for name, _ in names), self._now_s)
            return []
        try:
            answers = self._calls.fields(self._handle, fields)
        except NvmlError as exc:
            self._raise_if_gone(exc)
            self._refused(exc.code, key, names)
            return []
        for answer in answers:
            self._raise_if_gone(NvmlError("nvmlDeviceGetFieldValues", answer.code))
        if all(answer.code in LASTING for answer in answers):
            self._skip[key] = self._now_s + _ASK_AGAIN_S
        return answers

    # --- now and then -------------------------------------------------------------------------

    def _slow(self, count: int) -> None:
        self._temperatures()
        self._scalar("power_limit", "W", 1e-3, "nvmlDeviceGetEnforcedPowerLimit")
        if count % 2 == 0:
            self._scalar("fan", "%", 1.0, "nvmlDeviceGetFanSpeed")
            self._scalar("link_gen", "", 1.0, "nvmlDeviceGetCurrPcieLinkGeneration")
            self._scalar("link_width", "lanes", 1.0, "nvmlDeviceGetCurrPcieLinkWidth")
        self._list_processes(graphics=count % 2 == 0)
        if self._gpm.reason and "pcie_rx" not in self._counters:
            self._sample_pcie()
        if count % 6 == 0:
            self._scalar("persistence", "", 1.0, "nvmlDeviceGetPersistenceMode")
            self._modes()

    def _temperatures(self) -> None:
        found = self._ask_one_of(
            (("temperature", "°C"),),
            ("nvmlDeviceGetTemperatureV", _GPU_TEMPERATURE),
            ("nvmlDeviceGetTemperature", _GPU_TEMPERATURE),
        )
        if found is not None:
            self._put("temperature", known(found[1], "°C", SOURCE))
        units = tuple((name, unit) for _, name, unit in _SLOW_FIELDS)
        answers = self._ask_fields([field for field, _, _ in _SLOW_FIELDS], units)
        for (name, unit), answer in zip(units, answers, strict=False):
            if answer.code == 0:
                self._put(name, known(answer.value, unit, SOURCE))
            else:
                make = unknown if answer.code in LASTING else failed
                self._put(name, make(unit, SOURCE, value_sentence(answer.code)))

    def _list_processes(self, graphics: bool) -> None:
        for kind in ("compute", "graphics") if graphics else ("compute",):
            key = (kind, "processes")
            if self._skip.get(key, 0.0) > self._now_s:
                continue
            try:
                found = self._calls.processes(self._handle, kind.capitalize())
            except NvmlError as exc:
                self._raise_if_gone(exc)
                self._listed.pop(kind, None)
                self._list_failures[kind] = f"{kind} processes: {value_sentence(exc.code)}"
                if exc.code in LASTING:
                    self._skip[key] = self._now_s + _ASK_AGAIN_S
                continue
            self._list_failures.pop(kind, None)
            self._listed[kind] = [Listed(*item) for item in found]
        merged = merge_processes(self._listed.get("compute", ()), self._listed.get("graphics", ()))
        self._processes = self._table.describe(merged)
        if not self._listed:
            self._put(
                "processes_memory",
                unknown("B", SOURCE, "; ".join(sorted(set(self._list_failures.values())))),
            )
            return
        untold = sum(1 for _, memory, _ in merged if memory is None)
        if untold:
            self._put(
                "processes_memory",
                unknown("B", SOURCE, f"the driver tells no memory of {untold} of its processes"),
            )
        else:
            total = sum(memory or 0 for _, memory, _ in merged)
            self._put("processes_memory", known(total, "B", SOURCE))

    def _sample_pcie(self) -> None:
        """PCIe where there are no counters: each call counts for 20 ms, and blocks as long."""
        for name, counter in (("pcie_tx", 0), ("pcie_rx", 1)):
            self._scalar(
                name,
                "B/s",
                1024.0,
                "nvmlDeviceGetPcieThroughput",
                counter,
                source="NVML, counted for 20 ms",
            )

    def _modes(self) -> None:
        self._modes_s = self._now_s
        mode = self._ask((("mig", ""),), "nvmlDeviceGetMigMode")
        if mode is None:
            self._set_slices({})
            return
        self._put("mig", known(mode[0], "", SOURCE))
        self._set_slices(self._find_slices() if mode[0] else {})

    # --- MIG ----------------------------------------------------------------------------------

    def _find_slices(self) -> dict[str, _Slice]:
        found: dict[str, _Slice] = {}
        number = self._ask((), "nvmlDeviceGetMaxMigDeviceCount") or 0
        for at in range(number):
            try:
                handle = self._calls.call("nvmlDeviceGetMigDeviceHandleByIndex", self._handle, at)
                uuid = _text(self._calls.call("nvmlDeviceGetUUID", handle))
                if uuid in self._slices:
                    found[uuid] = self._slices[uuid]
                    found[uuid].handle = handle
                    continue
                name = _text(self._calls.call("nvmlDeviceGetName", handle))
                gi = int(self._calls.call("nvmlDeviceGetGpuInstanceId", handle))
                ci = int(self._calls.call("nvmlDeviceGetComputeInstanceId", handle))
            except NvmlError as exc:
                self._raise_if_gone(exc)
                continue  # no device at this place
            found[uuid] = _Slice(handle, uuid, name, gi, ci)
        return found

    def _set_slices(self, found: dict[str, _Slice]) -> None:
        if found.keys() == self._slices.keys():
            return
        for gpm in self._slice_gpm.values():
            gpm.close()
        self._slices = found
        self._slice_gpm = {}
        for gi in {piece.gi for piece in found.values()}:
            # Anew even under an old id: an instance that was made again has other counters.
            gpm = self._slice_gpm[gi] = Gpm(self._calls, self._clock, gi)
            try:
                gpm.open(self._handle)
            except NvmlError as exc:
                self._raise_if_gone(exc)
                gpm.reason = f"GPM: {value_sentence(exc.code)}"

    def _read_slices(self) -> None:
        gone = False
        shares: dict[int, dict[str, Reading]] = {}
        for gi, gpm in self._slice_gpm.items():
            try:
                shares[gi] = gpm.read(self._handle)
            except NvmlError as exc:
                self._raise_if_gone(exc)
                gone = gone or exc.code in _MIG_INSTANCE_GONE
                why = value_sentence(exc.code)
                shares[gi] = {name: failed(unit, "GPM", why) for _, name, unit in METRICS}
        for piece in self._slices.values():
            for name, reading in shares.get(piece.gi, {}).items():
                piece.values.put(name, reading, self._now_s)
            piece.values.put("gpu_util", unknown("%", SOURCE, _NO_SLICE_UTIL), self._now_s)
            for name, unit in (("power", "W"), ("temperature", "°C"), ("sm_clock", "MHz")):
                piece.values.put(name, unknown(unit, SOURCE, _NO_SLICE_VALUE), self._now_s)
            try:
                function, *args = _MEMORY[self._elder.get(_MEMORY[0], 0)]
                memory = self._calls.call(str(function), piece.handle, *args)
            except NvmlError as exc:
                self._raise_if_gone(exc)
                gone = gone or exc.code in _MIG_INSTANCE_GONE
                for name in ("memory_used", "memory_total"):
                    failure = failed("B", SOURCE, value_sentence(exc.code))
                    piece.values.put(name, failure, self._now_s)
            else:
                piece.values.put("memory_used", known(memory.used, "B", SOURCE), self._now_s)
                piece.values.put("memory_total", known(memory.total, "B", SOURCE), self._now_s)
        if gone and self._now_s - self._modes_s >= self._slow_s:
            self._modes()
            self._read_slices()  # at once: new ones have nothing to show yet


def _text(value: Any) -> str:
    """Return a name of the library as text; old pynvml gives bytes."""
    text = value.decode(errors="replace") if isinstance(value, bytes) else str(value)
    return text[:256]
