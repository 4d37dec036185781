"""A file of frames: whole, cut at every byte, damaged, hostile, on a full disk."""

import random
import resource
import struct
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest
import support
from builders import T0_S, hello, node_frame, rank_frame, record, sensors

from gpuwatch.errors import TargetError
from gpuwatch.frames import MAX_FRAME_BYTES, decode_node_frame, decode_rank_frame, packed
from gpuwatch.recording import Recorder, RecordingFullError, open_recording
from gpuwatch.recording.read import is_recording
from gpuwatch.recording.write import HEAD, MAGIC
from gpuwatch.schema import RankAge


def frames(count: int, *, run: str = "run-1", node: str = "node0") -> list[bytes]:
    """So many node frames of two ranks, ten a second."""
    found = []
    for i in range(1, count + 1):
        ranks = [
            rank_frame(
                i,
                [record(i - 1, {"forward": 60.0, "other": 40.0})],
                rank=rank,
                run=run,
                hello=hello(rank, 2) if i == 1 else None,
                sent_s=T0_S + i / 10,
            )
            for rank in range(2)
        ]
        tick = sensors(i) if i % 5 == 0 else None
        found.append(node_frame(i, ranks, sensors=tick, node=node, sent_s=T0_S + i / 10))
    return found


def written(path: Path, data: Sequence[bytes]) -> Path:
    with Recorder(path) as recorder:
        for frame in data:
            recorder.write(frame)
    return path


def read(path: Path) -> list[bytes]:
    with open_recording(path) as recording:
        return [frame for _, frame in recording.frames()]


def refusal(path: Path) -> str:
    with pytest.raises(TargetError) as caught:
        open_recording(path)
    return str(caught.value)


# --- whole -------------------------------------------------------------------------------------


def test_what_is_written_is_read(tmp_path: Path) -> None:
    data = frames(30)
    path = written(tmp_path / "a.gpuwatch", data)
    with open_recording(path) as recording:
        assert [frame for _, frame in recording.frames()] == data
        assert recording.problem == ""
        assert recording.started_s == T0_S + 0.1
        assert recording.duration_s == pytest.approx(2.9)
        assert [round(recording.time_s(i), 6) for i in range(3)] == [0.0, 0.1, 0.2]
    assert path.read_bytes() == HEAD + b"".join(map(packed, data))


def test_frames_are_in_the_file_before_it_is_closed(tmp_path: Path) -> None:
    data = frames(3)
    path = tmp_path / "a.gpuwatch"
    recorder = Recorder(path)
    for count, frame in enumerate(data, start=1):
        recorder.write(frame)
        assert read(path) == data[:count]
    recorder.close()


def test_a_file_that_is_there_is_not_overwritten(tmp_path: Path) -> None:
    path = written(tmp_path / "a.gpuwatch", frames(2))
    before = path.read_bytes()
    with pytest.raises(TargetError, match=r"a\.gpuwatch exists; name another file or remove it"):
        Recorder(path)
    assert path.read_bytes() == before
    with pytest.raises(TargetError, match="no such file or directory"):
        Recorder(tmp_path / "nowhere" / "a.gpuwatch")
    with pytest.raises(TargetError, match="exists"):
        Recorder(tmp_path)


def test_one_run_of_several(tmp_path: Path) -> None:
    path = tmp_path / "a.gpuwatch"
    age = RankAge("other", 0, "inc0", 5.0)
    mine = [rank_frame(1, run="mine"), rank_frame(1, rank=1, run="mine", hello=hello(1, 2))]
    mixed = node_frame(1, [mine[0], rank_frame(1, run="other"), mine[1]], ages=[age])
    pure = node_frame(2, [rank_frame(2, run="mine")])
    with Recorder(path, run="mine") as recorder:
        recorder.write(mixed)
        recorder.write(pure)
        recorder.write(b"no frame at all")
        assert (recorder.frames, recorder.refused) == (2, 1)
    first, second = read(path)
    assert [decode_rank_frame(raw) for raw in decode_node_frame(first).frames] == mine
    assert decode_node_frame(first).ages == ()
    assert second == pure


def test_what_is_a_recording(tmp_path: Path) -> None:
    path = written(tmp_path / "file", frames(1))
    assert is_recording(str(path))
    assert is_recording("not-there.gpuwatch")
    assert is_recording("not-there.jsonl")
    assert not is_recording("not-there")
    assert not is_recording(str(tmp_path))


# --- damaged -----------------------------------------------------------------------------------


def test_a_file_cut_at_every_byte(tmp_path: Path) -> None:
    data = [node_frame(i, [rank_frame(i, hello=hello())]) for i in (1, 2, 3)]
    whole = HEAD + b"".join(map(packed, data))
    ends = [len(HEAD)]
    for frame in data:
        ends.append(ends[-1] + 4 + len(frame))
    path = tmp_path / "a.gpuwatch"
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        complete = sum(end <= size for end in ends) - 1
        if complete < 1:
            assert ("holds no frame" if size else "is empty") in refusal(path)
            continue
        with open_recording(path) as recording:
            assert [frame for _, frame in recording.frames()] == data[:complete]
            if size == ends[complete]:
                assert recording.problem == ""
            else:
                assert recording.problem == (
                    f"{path} ends in the middle of a frame at byte {size:,}"
                )


def test_one_damaged_byte_costs_one_frame(tmp_path: Path) -> None:
    data = frames(6)
    whole = HEAD + b"".join(map(packed, data))
    rng = random.Random(3)
    path = tmp_path / "a.gpuwatch"
    for _ in range(300):
        at = rng.randrange(len(HEAD), len(whole))
        broken = bytearray(whole)
        broken[at] ^= 1 << rng.randrange(8)
        path.write_bytes(broken)
        with open_recording(path) as recording:
            left = [frame for _, frame in recording.frames()]
            # The frame that was hit is gone, or differs: every other one is there.
            assert len([frame for frame in data if frame in left]) >= len(data) - 1
            assert len(left) <= len(data)
            if len(left) < len(data):
                assert recording.problem.startswith(f"{path} ")


def test_the_damage_is_named(tmp_path: Path) -> None:
    data = frames(5)
    path = tmp_path / "a.gpuwatch"
    garbage = bytes(1000)
    path.write_bytes(HEAD + packed(data[0]) + garbage + packed(data[1]) + packed(data[2])[:-1])
    with open_recording(path) as recording:
        assert [frame for _, frame in recording.frames()] == data[:2]
        at = len(HEAD) + 4 + len(data[0])
        assert recording.problem == (
            f"{path} is damaged at byte {at:,} (what stands there is no frame): 1,000 bytes are "
            f"left out, and it ends in the middle of a frame at byte {path.stat().st_size:,}"
        )


@pytest.mark.parametrize("length", [MAX_FRAME_BYTES + 1, 2**31, 2**32 - 1])
def test_hostile_lengths_are_refused(tmp_path: Path, length: int) -> None:
    data = frames(3)
    path = tmp_path / "a.gpuwatch"
    evil = struct.pack(">I", length) + b"x" * 50
    path.write_bytes(HEAD + packed(data[0]) + evil + packed(data[1]))
    with open_recording(path) as recording:
        assert [frame for _, frame in recording.frames()] == data[:2]
        assert f"a frame of {length:,} bytes is announced, over" in recording.problem
        assert "54 bytes are left out" in recording.problem


def test_a_length_beyond_the_file_does_not_hide_what_follows(tmp_path: Path) -> None:
    data = frames(3)
    path = tmp_path / "a.gpuwatch"
    path.write_bytes(HEAD + packed(data[0]) + struct.pack(">I", 2**20) + packed(data[1]))
    with open_recording(path) as recording:
        assert [frame for _, frame in recording.frames()] == data[:2]
        assert "the file ends before the frame does" in recording.problem


def test_any_bytes_are_read_or_refused_with_a_sentence(tmp_path: Path) -> None:
    rng = random.Random(7)
    path = tmp_path / "a.gpuwatch"
    for head in (HEAD, MAGIC, b"", b"{", b"\x89"):
        for _ in range(20):
            path.write_bytes(head + rng.randbytes(rng.randrange(400)))
            sentence = refusal(path)
            assert sentence.startswith(str(path))
            assert "\n" not in sentence


def test_what_is_no_recording(tmp_path: Path) -> None:
    path = tmp_path / "a.gpuwatch"
    assert refusal(path) == f"there is no file {path}"
    path.write_bytes(b"PK\x03\x04" + bytes(100))
    assert "it begins neither as one of gpuwatch record nor with a JSON line" in refusal(path)
    path.write_bytes(HEAD.replace(b"\r\n", b"\n") + packed(frames(1)[0]))
    assert "was damaged by a transfer as text" in refusal(path)
    path.write_bytes(MAGIC + b"\x00\x02" + packed(frames(1)[0]))
    assert "is a recording of version 2, this gpuwatch reads 1" in refusal(path)
    newer = node_frame(1, version=2)
    path.write_bytes(HEAD + packed(newer))
    assert "wire version 2" in refusal(path)
    path.unlink()
    path.mkdir()
    assert "is a directory" in refusal(path)


# --- several nodes and their clocks ------------------------------------------------------------


def times(path: Path) -> list[float]:
    with open_recording(path) as recording:
        return [round(recording.time_s(i), 6) for i in range(len(recording))]


def test_nodes_whose_clocks_agree_keep_their_times(tmp_path: Path) -> None:
    data = [
        node_frame(1, node="a", sent_s=T0_S),
        node_frame(1, node="b", sent_s=T0_S + 0.05),
        node_frame(2, node="a", sent_s=T0_S + 0.1),
        node_frame(2, node="b", sent_s=T0_S + 0.15),
        node_frame(3, node="b", sent_s=T0_S + 60.0),  # a long silence is a long silence
    ]
    assert times(written(tmp_path / "a.gpuwatch", data)) == [0.0, 0.05, 0.1, 0.15, 60.0]


def test_clocks_that_differ_or_are_set_do_not_make_the_recording_longer(tmp_path: Path) -> None:
    data = [
        node_frame(1, node="a", sent_s=T0_S),
        node_frame(1, node="b", sent_s=T0_S + 3600.0),  # an hour ahead
        node_frame(2, node="a", sent_s=T0_S + 1.0),
        node_frame(2, node="b", sent_s=T0_S + 3601.0),
        node_frame(3, node="a", sent_s=T0_S - 7200.0),  # set back
        node_frame(4, node="a", sent_s=T0_S - 7199.0),
        node_frame(5, node="a", sent_s=4.2e9),  # nonsense
        node_frame(3, node="b", sent_s=T0_S + 3602.5),
    ]
    assert times(written(tmp_path / "a.gpuwatch", data)) == [0, 0, 1, 1, 1, 2, 2, 2.5]


# --- no room -----------------------------------------------------------------------------------


def test_the_limit_ends_it_with_whole_frames(tmp_path: Path) -> None:
    data = frames(10)
    path = tmp_path / "a.gpuwatch"
    with Recorder(path, limit_bytes=3000) as recorder:
        while recorder.size_bytes + len(data[recorder.frames]) + 4 <= 3000:
            recorder.write(data[recorder.frames])
        with pytest.raises(RecordingFullError, match=r"has reached its limit of 3,000 bytes"):
            recorder.write(data[recorder.frames])
        count = recorder.frames
    assert read(path) == data[:count]
    assert 0 < count < 10


def test_a_full_device_is_one_sentence() -> None:
    with pytest.raises(RecordingFullError, match=r"cannot write to /dev/full: the disk is full"):
        Recorder("/dev/full")


FULL_DISK = """
import sys
sys.path.insert(0, {tests!r})
from test_files import frames
from gpuwatch.errors import GpuwatchError
from gpuwatch.recording import Recorder
recorder = Recorder({path!r})
try:
    for frame in frames(40):
        recorder.write(frame)
except GpuwatchError as exc:
    print(exc)
"""


@pytest.mark.process
def test_a_disk_that_fills_up_leaves_whole_frames(tmp_path: Path) -> None:
    path = tmp_path / "a.gpuwatch"
    limit = len(HEAD) + sum(4 + len(f) for f in frames(40)) // 2 + 7

    def limited() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

    here = Path(__file__).parent
    code = f"import sys; sys.path.insert(0, {str(here.parent)!r})\n" + FULL_DISK.format(
        tests=str(here), path=str(path)
    )
    # -B: a module that is compiled there would be cut in its cache too, for everybody after it.
    done = subprocess.run(
        [support.PYTHON, "-B", "-c", code],
        preexec_fn=limited,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    whole = read(path)
    assert done.stdout == (
        f"cannot write to {path}: the file size limit is reached; it holds {len(whole)} frames\n"
    )
    assert whole == frames(40)[: len(whole)]
    assert 10 < len(whole) < 40
    with open_recording(path) as recording:
        assert recording.problem == ""
