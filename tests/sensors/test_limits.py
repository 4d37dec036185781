"""What holds a rank back: quota, memory limit, affinity; in made-up files and for real."""

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuwatch.sensors.cgroup import (
    Cgroups,
    Cpu,
    Memory,
    Mount,
    parse_cgroup,
    parse_mounts,
    parse_stat,
)
from gpuwatch.sensors.processes import ProcessBackend, parse_cpu_list, parse_rollup

ONE = (
    "30 25 0:27 / /dev/shm rw - tmpfs tmpfs rw\n"
    "32 31 0:29 / /cg/cpu rw,relatime shared:9 - cgroup cgroup rw,cpu,cpuacct\n"
    "35 31 0:32 / /cg/memory rw - cgroup cgroup rw,memory\n"
    "41 31 0:38 / /cg/unified rw - cgroup2 cgroup2 rw\n"
)
TWO = "41 31 0:38 /docker/a\\040b /cg rw - cgroup2 cgroup2 rw\n"


class Files:
    """Files by path, as `Cgroups` reads them."""

    def __init__(self, **files: str) -> None:
        self.files = {name.replace("__", "/"): text for name, text in files.items()}

    def __call__(self, path: str) -> str:
        try:
            return self.files[path]
        except KeyError:
            raise FileNotFoundError(2, "No such file", path) from None


def test_mounts_of_both_versions() -> None:
    assert parse_mounts(ONE) == [
        Mount("/", "/cg/cpu", frozenset({"rw", "cpu", "cpuacct"})),
        Mount("/", "/cg/memory", frozenset({"rw", "memory"})),
        Mount("/", "/cg/unified", frozenset()),
    ]
    assert parse_mounts(TWO) == [Mount("/docker/a b", "/cg", frozenset())]


def test_groups_of_a_process() -> None:
    text = "9:name=systemd:/\n4:cpu,cpuacct:/jobs/7:x\n0::/user.slice\n"
    assert parse_cgroup(text) == {
        "name=systemd": "/",
        "cpu": "/jobs/7:x",
        "cpuacct": "/jobs/7:x",
        "": "/user.slice",
    }


@given(st.text())
def test_damaged_files_raise_nothing(text: str) -> None:
    parse_cgroup(text)
    parse_mounts(text)
    parse_stat(text)


def test_the_tightest_quota_of_version_2_counts() -> None:
    files = Files()
    files.files = {
        "/proc/self/mountinfo": "41 31 0:38 / /cg rw - cgroup2 cgroup2 rw\n",
        "/proc/7/cgroup": "0::/a/b/c\n",
        "/cg/a/b/c/cpu.max": "max 100000\n",
        "/cg/a/b/cpu.max": "150000 100000\n",
        "/cg/a/b/cpu.stat": "usage_usec 9\nnr_periods 40\nnr_throttled 10\nthrottled_usec 500\n",
        "/cg/a/cpu.max": "400000 100000\n",
        "/cg/a/cpu.stat": "nr_periods 1\nnr_throttled 1\nthrottled_usec 1\n",
        "/cg/a/b/c/memory.max": "max\n",
        "/cg/a/memory.max": "1000\n",
        "/cg/a/memory.current": "900\n",
    }
    groups = Cgroups("/proc", files)
    assert groups.cpu(7) == Cpu(1.5, 40, 10, 500_000)
    assert groups.memory(7) == Memory(1000, 900)
    files.files["/cg/a/b/cpu.stat"] = "nr_periods 50\nnr_throttled 10\nthrottled_usec 500\n"
    assert groups.cpu(7).periods == 40  # the same look
    groups.begin()
    assert groups.cpu(7).periods == 50


def test_version_1_and_its_way_to_say_no_limit() -> None:
    files = Files()
    files.files = {
        "/proc/self/mountinfo": ONE,
        "/proc/7/cgroup": "4:memory:/m\n2:cpu,cpuacct:/job\n0::/\n",
        "/cg/cpu/job/cpu.cfs_quota_us": "50000\n",
        "/cg/cpu/job/cpu.cfs_period_us": "100000\n",
        "/cg/cpu/job/cpu.stat": "nr_periods 8\nnr_throttled 4\nthrottled_time 700\n",
        "/cg/cpu/cpu.cfs_quota_us": "-1\n",
        "/cg/cpu/cpu.cfs_period_us": "100000\n",
        "/cg/memory/m/memory.limit_in_bytes": "9223372036854771712\n",
        "/cg/memory/m/memory.usage_in_bytes": "77\n",
    }
    groups = Cgroups("/proc", files)
    assert groups.cpu(7) == Cpu(0.5, 8, 4, 700)
    assert groups.memory(7) == Memory(None)


@pytest.mark.parametrize(
    ("root", "group", "read_at"),
    [
        ("/docker/abc", "/docker/abc/job", "/cg/job"),  # below what is mounted
        ("/docker/abc", "/docker/abc", "/cg"),
        ("/docker/abc", "/", "/cg"),  # its own group is the mount
        ("/", "/job", "/cg/job"),
    ],
)
def test_inside_a_container(root: str, group: str, read_at: str) -> None:
    files = Files()
    files.files = {
        "/proc/self/mountinfo": f"41 31 0:38 {root} /cg rw - cgroup2 cgroup2 rw\n",
        "/proc/7/cgroup": f"0::{group}\n",
        f"{read_at}/cpu.max": "200000 100000\n",
    }
    assert Cgroups("/proc", files).cpu(7) == Cpu(2.0)


@pytest.mark.parametrize(
    ("mounts", "group", "why"),
    [
        ("", "0::/\n", "no control groups are mounted"),
        ("41 31 0:38 / /cg rw - cgroup2 cgroup2 rw\n", "0::/../other\n", "outside"),
        ("41 31 0:38 / /cg rw - cgroup2 cgroup2 rw\n", "", "no control groups"),
    ],
)
def test_what_cannot_be_seen_is_an_error(mounts: str, group: str, why: str) -> None:
    files = Files()
    files.files = {"/proc/self/mountinfo": mounts, "/proc/7/cgroup": group}
    with pytest.raises(OSError, match=why):
        Cgroups("/proc", files).cpu(7)


def test_cpu_lists() -> None:
    assert parse_cpu_list("0-3,8\n") == {0, 1, 2, 3, 8}
    assert parse_cpu_list("\n") == frozenset()
    for bad in ("x", "3-1", "1-", "0-99999999"):
        with pytest.raises(ValueError, match=r"range|int"):
            parse_cpu_list(bad)


def test_private_memory() -> None:
    text = b"00400000-7ff 00:00 0 [rollup]\nRss: 9 kB\nPss:   7 kB\nPss_Anon: 1 kB\n"
    text += b"Private_Clean:  2 kB\nPrivate_Dirty:  3 kB\n"
    assert parse_rollup(text) == (5 * 1024, 7 * 1024)
    with pytest.raises(ValueError, match="smaps_rollup"):
        parse_rollup(b"Rss: 9 kB\n")


# --- the real thing -----------------------------------------------------------------------------


@contextlib.contextmanager
def quota_group(cores: float) -> Iterator[Path]:
    """A control group of this machine with a CPU quota, if making one is permitted."""
    found = next(
        (
            m
            for m in parse_mounts(Path("/proc/self/mountinfo").read_text())
            if "cpu" in m.controllers
        ),
        None,
    )
    two = found is None
    if found is None:
        mounts = parse_mounts(Path("/proc/self/mountinfo").read_text())
        found = next((m for m in mounts if not m.controllers), None)
    if found is None:
        pytest.skip("no control groups are mounted here")
    group = Path(found.path) / f"gpuwatch-test-{os.getpid()}"
    try:
        group.mkdir()
        if two:
            (group / "cpu.max").write_text(f"{int(cores * 20_000)} 20000")
        else:
            (group / "cpu.cfs_period_us").write_text("20000")
            (group / "cpu.cfs_quota_us").write_text(str(int(cores * 20_000)))
    except OSError as exc:
        with contextlib.suppress(OSError):
            group.rmdir()
        pytest.skip(f"no control group can be made here: {exc}")
    try:
        yield group
    finally:
        for _ in range(50):
            try:
                group.rmdir()
                break
            except OSError:
                time.sleep(0.05)


@pytest.mark.process
def test_a_real_quota_and_its_throttling_are_seen() -> None:
    with quota_group(0.25) as group:
        busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
        try:
            (group / "cgroup.procs").write_text(str(busy.pid))
            backend = ProcessBackend()
            backend.watch([busy.pid])
            backend.sample()
            time.sleep(0.6)
            (sample,) = backend.sample()
        finally:
            busy.kill()
            busy.wait(10)
    readings = sample.readings
    assert readings["cpu_quota_cores"].value == pytest.approx(0.25)
    throttled = readings["cpu_throttled_percent"].value
    assert throttled is not None
    assert throttled > 10.0  # of another process's machine it may get less than the quota
    held = readings["cpu_throttled_ms_per_s"].value
    assert held is not None
    assert held > 100.0


@pytest.mark.process
def test_a_process_pinned_to_one_core_and_one_without_a_quota() -> None:
    core = min(os.sched_getaffinity(0))
    idle = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        os.sched_setaffinity(idle.pid, {core})
        backend = ProcessBackend()
        backend.watch([idle.pid])
        (sample,) = backend.sample()
        for _ in range(9):
            (last,) = backend.sample()
        (last,) = backend.sample()
    finally:
        idle.kill()
        idle.wait(10)
    assert sample.readings["affinity_cores"].value == 1.0
    quota = sample.readings["cpu_quota_cores"]
    assert quota.value is not None or quota.reason == "no CPU quota"
    assert "not yet" in sample.readings["uss"].reason
    uss, rss = last.readings["uss"].value, last.readings["rss"].value
    assert uss is not None
    assert rss is not None
    assert 0 < uss <= rss * 1.5
