"""Parsing of proc's formats, and the walk over a tree of proc files made by hand."""

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuwatch.schema import ProcessSample
from gpuwatch.sensors import processes
from gpuwatch.sensors.processes import (
    MAX_PROCESSES,
    ProcessBackend,
    parse_children,
    parse_io,
    parse_stat,
)

LINE = (
    b"4242 (python3) S 4200 4242 4200 34816 4242 4194560 9017 120 3 0 731 88 5 6 20 0 17 0 "
    b"998877 2541690880 61234 18446744073709551615 1 1 0 0 0 0 0 16781312 2 0 0 0 17 1 0 0 0 0 0\n"
)
IO = (
    b"rchar: 3980\nwchar: 12\nsyscr: 9\nsyscw: 1\n"
    b"read_bytes: 40960\nwrite_bytes: 8192\ncancelled_write_bytes: 0\n"
)


def line(
    pid: int,
    ppid: int,
    *,
    comm: bytes = b"python3",
    state: str = "S",
    cpu: int = 0,
    threads: int = 1,
    started: int = 100,
    rss: int = 10,
) -> bytes:
    tail = (
        f"{state} {ppid} 1 1 0 -1 0 0 0 0 0 {cpu} 0 0 0 20 0 {threads} 0 {started} 1000 {rss} "
        "18446744073709551615 0 0\n"
    )
    return b"%d (%s) %s" % (pid, comm, tail.encode())


class Proc:
    """A directory that looks like /proc."""

    def __init__(self, root: Path, *, children_files: bool = True) -> None:
        self.root = root
        self.children_files = children_files
        me = os.getpid()  # the backend asks its own entry what this kernel has
        self.put(me, 1)

    def put(self, pid: int, ppid: int, io: int = 0, **fields: object) -> None:
        home = self.root / str(pid)
        home.mkdir(exist_ok=True)
        (home / "stat").write_bytes(line(pid, ppid, **fields))  # type: ignore[arg-type]
        (home / "io").write_bytes(IO.replace(b"40960", b"%d" % io))
        self.children(pid, pid)

    def children(self, pid: int, thread: int, *pids: int) -> None:
        task = self.root / str(pid) / "task" / str(thread)
        task.mkdir(parents=True, exist_ok=True)
        if self.children_files:
            (task / "children").write_text("".join(f"{child} " for child in pids))

    def end(self, pid: int) -> None:
        (self.root / str(pid)).rename(self.root / f"ended-{pid}")


class Clock:
    """Seconds that pass when the test says so."""

    now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


def made(proc: Proc, clock: Clock, *pids: int) -> ProcessBackend:
    backend = ProcessBackend(str(proc.root), clock)
    assert backend.probe() == ""
    backend.watch(pids)
    return backend


def pids(samples: tuple[ProcessSample, ...]) -> list[tuple[int, int, str]]:
    return [(sample.pid, sample.rank_pid, sample.role) for sample in samples]


def test_stat_line() -> None:
    stat = parse_stat(LINE)
    assert stat == ("python3", "S", 4200, 731 + 88, 17, 998877, 61234, 3)


@pytest.mark.parametrize(
    "comm",
    [
        b"tmux: server",
        b"a) R 1 2 3 (b",
        b"((((",
        b"))))",
        b"",
        b") ",
        b"line\nfeed",
        b"\xff\xfe",
        b"(sd-pam)",
    ],
)
def test_stat_of_a_name_with_spaces_and_parentheses(comm: bytes) -> None:
    stat = parse_stat(LINE.replace(b"(python3)", b"(" + comm + b")"))
    assert stat[1:] == parse_stat(LINE)[1:]
    assert stat.comm == comm.decode("utf-8", "replace")


def test_stat_of_this_process() -> None:
    stat = parse_stat(Path("/proc/self/stat").read_bytes())
    assert stat.ppid == os.getppid()
    assert stat.state == "R"
    assert stat.rss_pages > 0


def test_stopped_by_a_tracer_is_stopped() -> None:
    assert parse_stat(LINE.replace(b") S ", b") t ")).state == "T"


@given(st.binary(max_size=300))
def test_no_stat_is_a_value_error(data: bytes) -> None:
    try:
        parse_stat(data)
    except ValueError:
        return
    assert b"(" in data


@given(st.integers(0, len(LINE) - 1), st.integers(0, 255))
def test_a_damaged_stat_is_a_value_error_or_a_stat(at: int, byte: int) -> None:
    data = bytearray(LINE)
    data[at] = byte
    for damaged in (bytes(data), LINE[:at]):
        try:
            parse_stat(damaged)
        except ValueError:
            continue


def test_io() -> None:
    assert parse_io(IO) == 40960
    with pytest.raises(ValueError, match="no read_bytes"):
        parse_io(b"rchar: 1\n")
    with pytest.raises(ValueError, match="invalid literal"):
        parse_io(b"read_bytes: many\n")


def test_children() -> None:
    assert parse_children(b"") == []
    assert parse_children(b"12 345 ") == [12, 345]
    with pytest.raises(ValueError, match="invalid literal"):
        parse_children(b"12 x")


@pytest.mark.parametrize("children_files", [True, False], ids=["children", "scan"])
def test_descendants_are_workers_of_their_rank(
    tmp_path: Path, clock: Clock, children_files: bool
) -> None:
    proc = Proc(tmp_path, children_files=children_files)
    for pid, ppid in ((10, 1), (11, 10), (12, 11), (20, 1), (21, 20), (99, 1)):
        proc.put(pid, ppid)
    for pid, child in ((10, 11), (11, 12), (20, 21)):
        proc.children(pid, pid, child)
    backend = made(proc, clock, 10, 20)
    assert pids(backend.sample()) == [
        (10, 10, "rank"),
        (20, 20, "rank"),
        (11, 10, "worker"),
        (12, 10, "worker"),
        (21, 20, "worker"),
    ]


def test_a_watched_child_is_a_rank_with_its_own_workers(tmp_path: Path, clock: Clock) -> None:
    proc = Proc(tmp_path)
    for pid, ppid in ((10, 1), (11, 10), (12, 11)):
        proc.put(pid, ppid)
    proc.children(10, 10, 11)
    proc.children(11, 11, 12)
    backend = made(proc, clock, 10, 11)
    assert pids(backend.sample()) == [(10, 10, "rank"), (11, 11, "rank"), (12, 11, "worker")]


def test_children_of_any_thread_are_found_and_kept(tmp_path: Path, clock: Clock) -> None:
    proc = Proc(tmp_path)
    proc.put(10, 1)
    backend = made(proc, clock, 10)
    for _ in range(2):
        assert pids(backend.sample()) == [(10, 10, "rank")]
    proc.put(11, 10)
    proc.children(10, 77, 11)  # started by a thread
    proc.put(12, 10)
    proc.children(10, 10, 12)  # started by the main thread
    assert pids(backend.sample()) == [(10, 10, "rank"), (12, 10, "worker")]
    seen = [pids(backend.sample()) for _ in range(8)]
    assert all(
        sorted(found) == [(10, 10, "rank"), (11, 10, "worker"), (12, 10, "worker")]
        for found in seen[2:]
    )


def test_rates_need_two_looks(tmp_path: Path, clock: Clock) -> None:
    ticks = os.sysconf("SC_CLK_TCK")
    proc = Proc(tmp_path)
    proc.put(10, 1, io=1000, cpu=5000, threads=3, rss=7, state="D")
    backend = made(proc, clock, 10)
    (first,) = backend.sample()
    assert first.status == "D"
    assert first.readings["cpu_percent"].value is None
    assert first.readings["cpu_percent"].state == "na"
    assert first.readings["cpu_percent"].reason == "first tick"
    assert first.readings["read_bytes_per_s"].value is None
    assert first.readings["threads"].value == 3
    assert first.readings["rss"].value == 7 * os.sysconf("SC_PAGE_SIZE")
    clock.now_s += 2.0
    proc.put(10, 1, io=5000, cpu=5000 + 3 * ticks)
    (second,) = backend.sample()
    assert second.readings["cpu_percent"].value == pytest.approx(150.0)
    assert second.readings["read_bytes_per_s"].value == pytest.approx(2000.0)
    # A new list with the same pid goes on from there.
    backend.watch([10])
    clock.now_s += 1.0
    (third,) = backend.sample()
    assert third.readings["cpu_percent"].value == 0.0


def test_no_time_passed_gives_no_rate(tmp_path: Path, clock: Clock) -> None:
    proc = Proc(tmp_path)
    proc.put(10, 1)
    backend = made(proc, clock, 10)
    backend.sample()
    (second,) = backend.sample()
    assert second.readings["cpu_percent"].value is None
    assert second.readings["read_bytes_per_s"].value is None


def test_a_process_that_ended_costs_its_own_sample_only(tmp_path: Path, clock: Clock) -> None:
    proc = Proc(tmp_path)
    for pid, ppid in ((10, 1), (11, 10), (12, 10), (20, 1)):
        proc.put(pid, ppid)
    proc.children(10, 10, 11, 12)
    backend = made(proc, clock, 10, 20, 30)
    assert len(backend.sample()) == 4
    proc.end(12)
    proc.end(20)
    assert pids(backend.sample()) == [(10, 10, "rank"), (11, 10, "worker")]


def test_another_process_with_the_pid_of_a_worker_starts_anew(tmp_path: Path, clock: Clock) -> None:
    proc = Proc(tmp_path)
    proc.put(10, 1)
    proc.put(11, 10, cpu=100, started=500)
    proc.children(10, 10, 11)
    backend = made(proc, clock, 10)
    backend.sample()
    clock.now_s += 1.0
    proc.put(11, 10, cpu=4000, started=900)
    worker = backend.sample()[1]
    assert worker.readings["cpu_percent"].reason == "first tick"
    assert worker.readings["read_bytes_per_s"].reason == "first tick"
    proc.put(11, 1, started=950)  # and now it is nobody's child here
    assert pids(backend.sample()) == [(10, 10, "rank")]


def test_another_process_with_the_pid_of_a_rank_is_not_the_rank(
    tmp_path: Path, clock: Clock
) -> None:
    proc = Proc(tmp_path)
    proc.put(10, 1, started=500)
    backend = made(proc, clock, 10)
    assert len(backend.sample()) == 1
    proc.put(10, 1, started=900)
    assert backend.sample() == ()
    backend.watch([10])
    assert backend.sample() == ()
    backend.watch([])
    assert backend.sample() == ()
    backend.watch([10])
    assert len(backend.sample()) == 1


def test_io_without_permission_says_so(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = processes._read

    def refuse(path: str) -> bytes:
        if path.endswith("/io"):
            raise PermissionError(13, "Permission denied")
        return read(path)

    proc = Proc(tmp_path)
    proc.put(10, 1)
    backend = made(proc, clock, 10)
    monkeypatch.setattr(processes, "_read", refuse)
    for _ in range(2):
        (sample,) = backend.sample()
        clock.now_s += 1.0
        reading = sample.readings["read_bytes_per_s"]
        assert (reading.value, reading.state) == (None, "na")
        assert "not permitted" in reading.reason
    assert sample.readings["cpu_percent"].value == 0.0


def test_no_more_samples_than_a_frame_takes(tmp_path: Path, clock: Clock) -> None:
    proc = Proc(tmp_path)
    proc.put(10, 1)
    proc.put(20, 1)
    children = range(100_000, 100_000 + MAX_PROCESSES + 5)
    for pid in children:
        (tmp_path / str(pid)).mkdir()
        (tmp_path / str(pid) / "stat").write_bytes(line(pid, 10))
    proc.children(10, 10, *children)
    samples = made(proc, clock, 10, 20).sample()
    assert len(samples) == MAX_PROCESSES
    assert pids(samples[:2]) == [(10, 10, "rank"), (20, 20, "rank")]


def test_no_proc_is_a_reason(tmp_path: Path) -> None:
    backend = ProcessBackend(str(tmp_path / "none"))
    assert "none" in backend.probe()
    backend.watch([1, 2])
    assert backend.sample() == ()
