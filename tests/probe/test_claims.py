"""Which trainings under one run id are one run."""

import fcntl
import os
import time
from pathlib import Path

import pytest

from gpuwatch.probe import claims
from gpuwatch.probe.claims import Member, Slot, claim, place
from gpuwatch.probe.identity import Identity
from gpuwatch.wire.publish import boot_id, process_start_ticks

ALONE = Identity("mine", "GPUWATCH_RUN_ID", 0, 1, None)


def member(pid: int, rank: int = 0, *, well: bool = False) -> Member:
    return Member(pid, 1, rank, well)


def slot(*members: Member, group: str = "", command: str = "a") -> Slot:
    return Slot(group, command, list(members))


def index(
    slots: list[Slot],
    *,
    rank: int = 0,
    group: str = "",
    command: str = "a",
    relaunched: bool = False,
    living: tuple[int, ...] = (),
    pid: int = 9,
) -> int:
    return place(
        slots,
        member(pid, rank),
        group,
        command,
        relaunched=relaunched,
        alive=lambda m: m.pid in living,
    )


def test_the_first_one_has_the_first_place_and_keeps_it() -> None:
    assert index([]) == 0
    assert index([slot(member(9))], living=(9,)) == 0
    assert index([slot(member(1)), slot(member(9))], living=(1, 9)) == 1


def test_side_by_side_each_has_its_own() -> None:
    assert index([slot(member(1))], living=(1,)) == 1
    assert index([slot(member(1)), slot(member(2))], living=(1, 2)) == 2


def test_one_that_failed_and_starts_again_is_the_same() -> None:
    assert index([slot(member(1))]) == 0
    assert index([slot(member(1)), slot(member(2), command="b")]) == 0
    # Another script is another run, and so is one more after a good end.
    assert index([slot(member(1))], command="b") == 1
    assert index([slot(member(1, well=True))]) == 1


def test_ranks_of_one_launch_are_one_run() -> None:
    first = slot(member(1), group="g")
    assert index([first], rank=1, group="g", living=(1,)) == 0
    assert index([first], rank=0, group="g", living=(1,)) == 1  # there is a rank 0
    assert index([first], rank=1, group="other", living=(1,)) == 1
    # The next launch of the script on the same port.
    over = slot(member(1, 0, well=True), member(2, 1, well=True), group="g")
    second = slot(member(3, 0), group="g", command="b")
    assert index([over], rank=0, group="g", command="b") == 1
    assert index([over, second], rank=1, group="g", command="b", living=(3,)) == 1


def test_what_its_launcher_starts_again_is_the_same() -> None:
    # One rank had come to its end when another one failed.
    failed = slot(member(1, 0, well=True), member(2, 1), group="g")
    assert index([failed], group="new port") == 1
    assert index([failed], group="new port", relaunched=True) == 0
    assert index([failed], group="g", command="b", relaunched=True) == 0


# --- the file ----------------------------------------------------------------------------------


def test_a_claim_lasts_beyond_its_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    born: dict[int, int] = {}
    monkeypatch.setattr("gpuwatch.probe.claims.process_start_ticks", born.get)
    monkeypatch.setattr(os, "getpid", lambda: max(born))

    def train() -> tuple[str, claims.Claim]:
        born[max(born, default=0) + 1] = 7
        identity, held = claim(tmp_path, ALONE, {})
        assert held is not None
        assert identity.run == held.run
        return identity.run, held

    first, held = train()
    assert first == "mine"
    assert claim(tmp_path, ALONE, {})[0].run == "mine"  # the same process once more
    held.end(well=True)
    second, failing = train()
    assert second == "mine.2"
    failing.end(well=False)
    del born[2]
    born[3] = 7
    assert claim(tmp_path, ALONE, {})[0].run == "mine.2"
    fourth, moved = train()
    assert fourth == "mine.3"
    moved.withdraw()
    assert train()[0] == "mine.3"
    (path,) = tmp_path.iterdir()
    assert path.stat().st_mode & 0o777 == 0o600
    path.write_bytes(b'{"boot": 3')
    assert train()[0] == "mine"


def test_a_long_id_keeps_its_number(tmp_path: Path) -> None:
    long = Identity("x" * 128, "GPUWATCH_RUN_ID", 0, 1, None)
    me = Member(1, process_start_ticks(1) or 0, 0)
    path = claims._path(tmp_path, long.run)
    claims._write(path, claims._Book(boot_id(), [Slot("", "other", [me])]))
    assert claim(tmp_path, long, {})[0].run == "x" * 120 + ".2"


@pytest.mark.parametrize(
    ("identity", "environ"),
    [
        (Identity("drawn", "random", 0, 1, None), {}),
        (Identity("hash", "MASTER_ADDR", 0, 2, 0), {}),
        (Identity("mine", "GPUWATCH_RUN_ID", 0, 4, 0), {"LOCAL_WORLD_SIZE": "2"}),
        (Identity("mine", "GPUWATCH_RUN_ID", 0, 4, 0), {"SLURM_NNODES": "2"}),
    ],
)
def test_what_nobody_here_can_tell_apart_keeps_its_id(
    tmp_path: Path, identity: Identity, environ: dict[str, str]
) -> None:
    assert claim(tmp_path, identity, environ) == (identity, None)
    assert list(tmp_path.iterdir()) == []


def test_a_lock_that_is_never_given_back_costs_the_number_only(tmp_path: Path) -> None:
    fd = os.open(tmp_path, os.O_RDONLY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        began_s = time.monotonic()
        assert claim(tmp_path, ALONE, {}) == (ALONE, None)
        assert time.monotonic() - began_s < 10
    finally:
        os.close(fd)
    assert claim(tmp_path / "nowhere", ALONE, {}) == (ALONE, None)


def test_files_of_old_runs_go(tmp_path: Path) -> None:
    old, recent, held = (tmp_path / f"runs-{name}.json" for name in ("old", "recent", "held"))
    me = Member(os.getpid(), process_start_ticks(os.getpid()) or 0, 0)
    for path, found in ((old, member(1)), (recent, member(1)), (held, me)):
        claims._write(path, claims._Book(boot_id(), [slot(found)]))
    for path in (old, held):
        os.utime(path, (1, 1))
    claim(tmp_path, ALONE, {})
    assert not old.exists()
    assert recent.exists()
    assert held.exists()
