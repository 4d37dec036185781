"""Files of /proc that only grow, and the device under a path."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuwatch.sensors.counters import (
    Disk,
    Rates,
    disk_readings,
    parse_diskstats,
    parse_net,
    parse_pressure,
    parse_vmstat,
)
from gpuwatch.sensors.storage import (
    FileSystem,
    NfsReads,
    block_device,
    locate,
    parse_mountinfo,
    parse_nfs,
)


def test_pressure() -> None:
    text = "some avg10=1.02 avg60=1.56 avg300=1.55 total=25802099\nfull avg10=0.00 total=7\n"
    assert parse_pressure(text) == {"some": 25802099, "full": 7}


def test_vmstat() -> None:
    assert parse_vmstat("nr_free 1\npgmajfault 5\npswpin 6\npswpout x\n") == {
        "pgmajfault": 5,
        "pswpin": 6,
    }


def test_diskstats_of_old_and_new_kernels() -> None:
    text = (
        " 254 0 vda 11 1 2200 30 40 1 500 60 0 70 80 1 2 3 4\n"
        "   8 0 sda 1 2 3 4 5 6 7 8 9 10 11\n   8 1 short 1 2 3\n"
    )
    assert parse_diskstats(text) == {
        "vda": Disk(11, 2200, 30, 500, 70),
        "sda": Disk(1, 3, 4, 7, 10),
    }


def test_network() -> None:
    head = "Inter-| Receive\n face |bytes\n"
    text = head + "  eth0: 10 1 0 0 0 0 0 0 20 1 0 0 0 0 0 0\nveth:1:30 1 0 0 0 0 0 0 40 0 0\nx\n"
    assert parse_net(text) == {"eth0": (10, 20), "veth:1": (30, 40)}


@given(st.text())
def test_nonsense_raises_nothing(text: str) -> None:
    for parse in (
        parse_pressure,
        parse_vmstat,
        parse_diskstats,
        parse_net,
        parse_mountinfo,
        parse_nfs,
    ):
        parse(text)


@given(
    st.lists(
        st.dictionaries(st.sampled_from("abc"), st.integers(0, 10**15)), min_size=2, max_size=6
    )
)
def test_rates_are_never_negative_nor_invented(looks: list[dict[str, int]]) -> None:
    rates = Rates()
    before: dict[str, int] = {}
    for number, totals in enumerate(looks):
        found = rates.look(totals, 10.0 + 2.0 * number)
        assert set(found) == set(totals)
        for name, rate in found.items():
            if number == 0 or name not in before or totals[name] < before[name]:
                assert rate is None
            else:
                assert rate == pytest.approx((totals[name] - before[name]) / 2.0)
        before = totals


def test_a_disk_that_is_always_busy_is_not_more_than_that() -> None:
    now = Disk(20, 0, 9000, 0, 2100)
    got = disk_readings(Disk(10, 0, 0, 0, 0), now, 2.0)
    assert got["busy_percent"].value == 100.0
    assert got["read_latency"].value == 900.0


MOUNTS = [
    FileSystem("/", "254:0", "ext4", "/dev/vda"),
    FileSystem("/data", "0:50", "nfs4", "server:/export"),
    FileSystem("/data/fast", "259:3", "xfs", "/dev/nvme0n1p3"),
    FileSystem("/data", "0:51", "nfs4", "other:/export"),
]


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("/data/a", "other:/export"),  # mounted over the first
        ("/data/fast", "/dev/nvme0n1p3"),
        ("/data/fast/x/../y", "/dev/nvme0n1p3"),
        ("/data/faster", "other:/export"),
        ("/database", "/dev/vda"),
        ("/", "/dev/vda"),
    ],
)
def test_the_mount_below_a_path(path: str, source: str) -> None:
    found = locate(path, MOUNTS)
    assert found is not None
    assert found.source == source


def test_what_is_no_absolute_path_is_nowhere() -> None:
    assert locate("data", MOUNTS) is None
    assert locate("/x", []) is None


def test_mountinfo_with_optional_fields_and_spaces() -> None:
    text = (
        "36 35 98:0 / /mnt/my\\040data rw,noatime master:1 shared:2 - ext3 /dev/root rw\nbroken\n"
    )
    assert parse_mountinfo(text) == [FileSystem("/mnt/my data", "98:0", "ext3", "/dev/root")]


def test_the_disk_of_a_partition_of_a_btrfs_and_of_nothing() -> None:
    links = {
        "/sys/dev/block/259:3": "/sys/devices/pci/nvme0/nvme0n1/nvme0n1p3",
        "/sys/class/block/nvme0n1p3": "/sys/devices/pci/nvme0/nvme0n1/nvme0n1p3",
        "/dev/mapper/pool": "/dev/dm-2",
    }

    def device(mount: FileSystem) -> str:
        return block_device(
            mount, lambda path: links.get(path, path), lambda path: "p3/partition" in path
        )

    assert device(MOUNTS[2]) == "nvme0n1"
    assert device(FileSystem("/b", "0:44", "btrfs", "/dev/mapper/pool")) == "dm-2"
    assert device(FileSystem("/o", "0:45", "overlay", "overlay")) == ""


def test_nfs_reads_by_mount() -> None:
    text = (
        "device rootfs mounted on / with fstype rootfs\n"
        "device server:/e mounted on /my\\040data with fstype nfs4 statvers=1.1\n"
        "\tage:\t100\n\tper-op statistics\n\t        NULL: 1 1 0 44 24 0 0 0\n"
        "\t        READ: 12 12 0 2400 98304 3 60 66 0\n"
        "device proc mounted on /proc with fstype proc\n\t READ: 9 9 9 9 9 9 9 9 9\n"
    )
    assert parse_nfs(text) == {"/my data": NfsReads(12, 98304, 66)}
