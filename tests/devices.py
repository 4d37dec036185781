"""A device that runs behind the host, on a clock that the test moves; nobody may wait for it."""

import struct
from typing import Any

from gpuwatch.probe import events
from gpuwatch.probe.accounting import RawStep
from gpuwatch.probe.device import DeviceClock, DeviceMemory
from gpuwatch.probe.events import Recorder, Replay
from gpuwatch.probe.twin import DeviceStep

MS = 1_000_000


class Clock:
    def __init__(self) -> None:
        self.ns = 1_000_000_000

    def __call__(self) -> int:
        # The host's clock is never the same twice, as with perf_counter_ns.
        self.ns += 1
        return self.ns

    def pass_ms(self, ms: float) -> None:
        self.ns += int(ms * MS)


class Stream:
    """Work in a row: it begins when it has been queued and what was queued before is done."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.free_ns = 0

    def work(self, ms: float) -> None:
        self.free_ns = max(self.free_ns, self._clock.ns) + int(ms * MS)

    def wait_for(self, other: "Stream") -> None:
        self.free_ns = max(self.free_ns, other.free_ns)


class FakeEvent:
    def __init__(self, device: "FakeDevice") -> None:
        self._device = device
        self.at_ns: int | None = None

    def record(self, stream: Stream) -> None:
        assert not self._device.captures, "recorded into a graph"
        self.at_ns = max(stream.free_ns, self._device.clock.ns)

    def query(self) -> bool:
        assert not self._device.captures, "asked for while a graph is captured"
        self._device.queries += 1
        return self.at_ns is not None and self.at_ns <= self._device.clock.ns

    def elapsed_time(self, later: "FakeEvent") -> float:
        assert self.at_ns is not None
        assert later.at_ns is not None
        assert max(self.at_ns, later.at_ns) <= self._device.clock.ns, "not ready"
        (ms,) = struct.unpack("f", struct.pack("f", (later.at_ns - self.at_ns) / MS))
        return float(ms)

    def synchronize(self) -> None:
        raise AssertionError("synchronizes")

    wait = synchronize


class FakeTensor:
    """A number on the device: whoever reads it would wait."""

    is_cuda = True
    is_cpu = False

    def __init__(self, device: "FakeDevice", value: float) -> None:
        self.device = device
        self.value = value

    def get_device(self) -> int:
        return self.device.index

    def detach(self) -> "FakeTensor":
        return self

    def reshape(self, shape: tuple[int, ...]) -> "FakeTensor":
        assert shape == ()
        return self

    def to(self, dtype: Any) -> "FakeTensor":
        return self

    def __float__(self) -> float:
        raise AssertionError("synchronizes")

    item = tolist = cpu = __bool__ = __int__ = __float__


class _Place:
    def __init__(self, device: "FakeDevice") -> None:
        self._device = device
        self._there_ns = 0
        self._value = float("nan")

    def copy_(self, tensor: FakeTensor, non_blocking: bool) -> None:
        self._device.wrong |= self._device.captures or not non_blocking
        self._there_ns = max(self._device.current.free_ns, self._device.clock.ns)
        self._value = tensor.value

    def item(self) -> float:
        assert self._there_ns <= self._device.clock.ns, "read before it has arrived"
        return self._value


class FakeDevice:
    """What `DeviceClock` sees of a device."""

    index = 0

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.current = Stream(clock)
        self.captures = False
        self.wrong = False  # a copy that waits, or one into a graph
        self.made = 0
        self.queries = 0
        self.memory_reads = 0

    def event(self) -> FakeEvent:
        self.made += 1
        return FakeEvent(self)

    def stream(self) -> Stream:
        return self.current

    def capturing(self) -> bool:
        return self.captures

    def memory(self) -> DeviceMemory | None:
        self.memory_reads += 1
        return DeviceMemory(1000, 2000, 3000, self.memory_reads)

    def pinned(self, count: int) -> list[_Place]:
        return [_Place(self) for _ in range(count)]


class Job:
    """A training loop on the fake device: each part takes host time, and queues device time."""

    def __init__(self, *, start: bool = True) -> None:
        self.clock = Clock()
        self.device = FakeDevice(self.clock)
        self.recorder = Recorder(self.clock)
        self.told: list[str] = []
        self.replay = Replay(self.recorder, self.told.append)
        self.timer = DeviceClock(self.recorder, self.device, self.told.append)
        if start:
            self.timer.start()

    def run(self, host_ms: float, device_ms: float = 0.0) -> None:
        """Queue work early, as the host does, and take the host's time for it."""
        if device_ms:
            self.device.current.work(device_ms)
        self.clock.pass_ms(host_ms)

    def mark(self, code: int, *args: Any) -> None:
        self.recorder.push((code, self.clock(), *args))

    def fetch(self, ms: float, key: str = "train", *, first: bool = False) -> None:
        self.mark(events.FETCH_BEGIN, key, first)
        self.run(ms)
        self.mark(events.FETCH_END, 8)

    def backward(self, host_ms: float, device_ms: float, exposed_ms: float = 0.0) -> None:
        self.mark(events.BACKWARD_BEGIN)
        self.run(host_ms, device_ms)
        if exposed_ms:
            self.mark(events.COMPUTE_END)
            self.run(0, exposed_ms)
        self.mark(events.BACKWARD_END)

    def optimizer(self, host_ms: float, device_ms: float, key: int = 1) -> None:
        self.mark(events.OPTIMIZER_BEGIN, key)
        self.run(host_ms, device_ms)
        self.recorder.optimizer_end(key)

    def step(
        self,
        wait: float = 1,
        forward: tuple[float, float] = (2, 10),
        backward: tuple[float, float] = (2, 20),
        optimizer: tuple[float, float] = (1, 3),
        exposed: float = 0.0,
    ) -> None:
        self.fetch(wait)
        self.run(*forward)
        self.backward(*backward, exposed)
        self.optimizer(*optimizer)

    def drain(self) -> None:
        """The host reads a number, so it waits for the device."""
        self.clock.ns = max(self.clock.ns, self.device.current.free_ns)

    def taken(self) -> list[tuple[RawStep, DeviceStep | None]]:
        """Every step of the host by now, with the same step on the device."""
        self.replay.catch_up()
        host = [item for item in self.replay.accountant.out if isinstance(item, RawStep)]
        found = {step.step_index: step for step in self.replay.device_steps}
        assert len(found) == len(self.replay.device_steps), "a step twice"
        return [(step, found.get(step.step_index)) for step in host]

    def device_ms(self) -> dict[int, dict[str, float] | None]:
        """Phases on the device in ms, by step; None where they are not known."""
        names = ("data_wait", "h2d", "forward", "backward", "comm", "optimizer", "other")
        return {
            step.step_index: None
            if step.phases_ns is None
            else {
                n: round(v / MS, 1)
                for n, v in zip(names, step.phases_ns, strict=True)
                if v >= 50_000
            }
            for _, step in self.taken()
            if step is not None
        }
