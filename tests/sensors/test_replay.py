"""GPUs out of a file: at their own pace, marked, and one sentence where there are none."""

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuwatch.frames import FrameStream, decode_sensor_frame, encode, packed
from gpuwatch.schema import GpuSample, Reading, SensorFrame
from gpuwatch.sensors.replay import ReplayBackend


def frame(at_s: float, *utils: float) -> bytes:
    gpus = tuple(
        GpuSample(
            i, f"GPU-{i}", "card", {"gpu_util": Reading(value, "%", "NVML")}, driver="570.00.00"
        )
        for i, value in enumerate(utils)
    )
    return packed(encode(SensorFrame(1, int(at_s), 1000.0 + at_s, gpus=gpus)))


def utils(backend: ReplayBackend) -> list[float | None]:
    return [gpu.readings["gpu_util"].value for gpu in backend.sample().gpus]


def test_at_its_own_pace_and_again(tmp_path: Path) -> None:
    path = tmp_path / "frames"
    path.write_bytes(frame(0, 10.0, 20.0) + frame(1, 30.0, 40.0) + frame(2, 50.0))
    now_s = [500.0]
    backend = ReplayBackend(str(path), lambda: now_s[0])
    assert backend.probe() == ""
    seen = []
    for _ in range(7):
        seen.append(utils(backend))
        now_s[0] += 0.5
    assert seen == [[10, 20], [10, 20], [30, 40], [30, 40], [50], [50], [10, 20]]
    assert backend.sample().gpus[0].readings["gpu_util"].source == "replay of NVML"
    assert backend.sample().gpus[0].driver == "570.00.00"
    backend.close()


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (None, "No such file"),
        (b"", "no sensor frame in it"),
        (b"garbage" * 100, "cannot replay"),
        (packed(b"\x00"), "cannot replay"),
    ],
)
def test_what_cannot_be_played_is_one_sentence(
    tmp_path: Path, data: bytes | None, says: str
) -> None:
    path = tmp_path / "frames"
    if data is not None:
        path.write_bytes(data)
    backend = ReplayBackend(str(path))
    assert says in backend.probe()
    assert backend.sample().gpus == ()
    assert says in backend.sample().reason


@given(st.binary(max_size=200), st.integers(0, 200))
def test_damage_costs_what_is_behind_it(noise: bytes, cut: int) -> None:
    import tempfile

    whole = frame(0, 10.0) + frame(1, 30.0)
    with tempfile.NamedTemporaryFile() as file:
        file.write(whole[: len(whole) - cut % len(whole)] + noise)
        file.flush()
        backend = ReplayBackend(file.name)
        if backend.probe() == "":
            assert len(utils(backend)) <= 1 or noise


def test_the_sampler_plays_a_file(tmp_path: Path) -> None:
    path = tmp_path / "frames"
    path.write_bytes(frame(0, 77.0))
    child = subprocess.Popen(
        [sys.executable, "-P", "-m", "gpuwatch.sensors", "--interval-s", "0.2",
         "--replay-gpus", str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )  # fmt: skip
    try:
        assert child.stdout is not None
        stream = FrameStream()
        found: list[SensorFrame] = []
        while not any(f.gpus for f in found):
            assert len(found) < 50
            data = child.stdout.read1(65536)  # type: ignore[attr-defined]
            assert data
            found += [decode_sensor_frame(message) for message in stream.feed(data)]
    finally:
        child.kill()
        child.communicate(timeout=10)
    assert found[-1].gpus[0].readings["gpu_util"].value == 77.0
