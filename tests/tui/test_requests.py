"""Commands to ranks from the screen: memory, profile and its trace, live changes, the log."""

from __future__ import annotations

import base64
import gzip
import hashlib
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from textual.pilot import Pilot

from gpuwatch.diagnosis.types import Hint
from gpuwatch.schema import Knob, Logged, Versions
from gpuwatch.store.views import View
from gpuwatch.tui import GpuwatchApp
from gpuwatch.tui.answers import (
    MOST_PIECE,
    AnswerError,
    MemoryAnswer,
    ProfileAnswer,
    read_memory,
    read_piece,
    read_profile,
)
from gpuwatch.tui.changes import (
    Proposal,
    knob_rows,
    limits_text,
    parse_value,
    proposals,
    why_not_applied,
)
from gpuwatch.tui.export import trace_target
from gpuwatch.tui.fetch import MOST_BYTES, Fetch
from gpuwatch.tui.render.knobs import (
    control_off_lines,
    knob_lines,
    log_entries,
    log_lines,
    no_knobs_lines,
    proposal_lines,
    set_text,
)
from gpuwatch.tui.render.memory import memory_lines, memory_markdown
from gpuwatch.tui.render.profile import profile_lines, profile_markdown, waiting_text
from gpuwatch.tui.render.text import width_of
from gpuwatch.tui.requests import Answer, Request, is_expired, pending_text
from gpuwatch.tui.screens.finding import FindingScreen
from gpuwatch.tui.screens.knobs import ChangeScreen, KnobsScreen
from gpuwatch.tui.screens.memory import MemoryScreen
from gpuwatch.tui.screens.overview import Overview
from gpuwatch.tui.screens.profile import ProfileScreen
from tests.tui.fakes import (
    KNOBS,
    NOW_S,
    FakeTraining,
    few_workers,
    found,
    rank_view,
    records,
    run_view,
    two_ranks,
    with_hello,
)
from tests.tui.snapshots import check_text, text_of
from tests.tui.test_app import drive, press, screen_text
from tests.tui.test_keys import Recording, footer
from tests.tui.test_pictures import SIZE_IDS, SIZES

MEMORY: dict[str, Any] = {
    "schema": 1,
    "rss_bytes": 1_240_000_000,
    "vms_bytes": 12_400_000_000,
    "shared_bytes": 310_000_000,
    "children": [
        {"pid": 40000, "rss_bytes": 410_000_000, "name": "pt_data_worker"},
        {"pid": 40001, "rss_bytes": None, "name": "pt_data_worker"},
    ],
    "cuda": [
        {
            "device": 0,
            "name": "NVIDIA H100 80GB HBM3",
            "allocated_bytes": 12_100_000_000,
            "reserved_bytes": 14_000_000_000,
            "peak_allocated_bytes": 61_200_000_000,
            "peak_reserved_bytes": 66_000_000_000,
            "free_bytes": 15_000_000_000,
            "total_bytes": 80_000_000_000,
            "ooms": 0,
            "retries": 3,
        }
    ],
    "cuda_reason": "",
    "python": {"gc_counts": [412, 3, 1], "objects": 812331},
    "tensors": {
        "count": 1204,
        "bytes": 3_100_000_000,
        "largest": [
            {
                "shape": [4096, 4096],
                "dtype": "torch.float32",
                "device": "cuda:0",
                "bytes": 805_306_368,
                "count": 12,
            },
            {"shape": [], "dtype": "int64", "device": "cpu", "bytes": None, "count": 90},
        ],
    },
    "tensors_reason": "",
}

ON_CPU: dict[str, Any] = {
    **MEMORY,
    "children": [],
    "cuda": [],
    "cuda_reason": "the rank computes on the CPU",
    "python": None,
    "tensors": None,
    "tensors_reason": "walking 2,000,000 objects would hold up the training",
}

PROFILE: dict[str, Any] = {
    "schema": 1,
    "first_step": 120,
    "last_step": 124,
    "wall_ms": 1155.0,
    "clock": "host",
    "operators": [
        {
            "name": "aten::convolution_backward",
            "calls": 265,
            "self_ms": 410.2,
            "total_ms": 512.3,
            "share": 0.36,
            "device_self_ms": None,
        },
        {"name": "aten::mm", "calls": 120, "self_ms": 99.0, "total_ms": 99.0, "share": 0.09},
    ],
    "kernel_share": None,
    "comm_ms": 12.4,
    "comm_overlap_share": 0.4,
    "na": {"kernel_share": "no device: nothing is launched"},
    "trace": "profile-120.json.gz",
    "trace_path": "/tmp/gpuwatch-1000/traces/profile-120.json.gz",
    "trace_bytes": 400_000,
}

FOUND = found(few_workers())


def live(**hello: Any) -> View:
    """Two ranks with full windows and knobs, that take changes."""
    fields = {"knobs": KNOBS, "allow_control": True, **hello}
    picture = with_hello(two_ranks(), **fields)
    run = picture.runs[0]
    ranks = []
    for rank in run.ranks:
        window = records(rank.phases_ms)
        ranks.append(replace(rank, window=window, last=window[-1]))
    return replace(picture, runs=(replace(run, ranks=tuple(ranks)),))


def drawn(app: GpuwatchApp) -> str:
    app.refresh_scene(force=True)
    return screen_text(app)


async def shown(app: GpuwatchApp, pilot: Pilot[None]) -> str:
    app.refresh_scene(force=True)
    await pilot.pause()
    return screen_text(app)


# What ranks answer is somebody else's text


def test_whole_answers_are_read() -> None:
    memory = read_memory(msgspec.json.encode(MEMORY).decode())
    assert memory.cuda is not None
    assert memory.cuda[0].retries == 3
    assert read_memory("{}") == MemoryAnswer()
    profile = read_profile(msgspec.json.encode(PROFILE).decode())
    assert profile.operators[1].device_self_ms is None
    # What a newer version adds is left out.
    assert read_profile('{"schema": 1, "more": [1]}') == ProfileAnswer()


@pytest.mark.parametrize(
    "data",
    [
        "",
        "{",
        "[]",
        "nothing",
        '{"rss_bytes": -1}',
        '{"rss_bytes": 1e40}',
        '{"rss_bytes": "much"}',
        '{"rss_bytes": true}',
        '{"children": [{"pid": 99999999999}]}',
        '{"cuda": {"device": 0}}',
        '{"tensors": {"largest": [{"shape": [-4]}]}}',
        '{"cuda_reason": "' + "x" * 5000 + '"}',
        "[" * 100_000,
    ],
)
def test_broken_answers_are_one_sentence(data: str) -> None:
    with pytest.raises(AnswerError, match=r"^the memory summary came damaged: ") as told:
        read_memory(data)
    assert "\n" not in str(told.value)


@given(
    st.text(max_size=60)
    | st.recursive(
        st.none() | st.integers() | st.floats() | st.text(max_size=8),
        lambda inner: st.dictionaries(
            st.sampled_from(
                ["schema", "operators", "na", "name", "calls", "share", "trace", "wall_ms"]
            ),
            inner | st.lists(inner, max_size=3),
            max_size=6,
        ),
        max_leaves=12,
    ).map(lambda value: msgspec.json.encode(value).decode())
)
def test_any_profile_is_drawn_or_refused(data: str) -> None:
    try:
        answer = read_profile(data)
    except AnswerError:
        return
    for width in (80, 160):
        for line in profile_lines(0, "node0", answer, 1.0, None, "f", width):
            assert width_of(line) == width, text_of(line)
    assert profile_markdown("run", 0, "node0", answer)


def test_another_version_says_so() -> None:
    with pytest.raises(AnswerError, match="of version 2, this gpuwatch reads 1: update it"):
        read_memory('{"schema": 2}')


def test_signs_that_json_hides_do_not_reach_the_terminal_or_the_clipboard() -> None:
    evil = {**PROFILE, "operators": [{"name": "a\u001b[2Jb\u202e|c", "calls": 1}]}
    answer = read_profile(msgspec.json.encode(evil).decode())
    assert answer.operators[0].name.isprintable()
    text = profile_markdown("r\u0007", 0, "n", answer)
    assert "\u001b" not in text
    assert "b\ufffd\\|c" in text
    memory = read_memory(
        msgspec.json.encode({"children": [{"name": "x\u001b]0;y\u0007"}]}).decode()
    )
    assert memory.children is not None
    assert memory.children[0].name.isprintable()


@pytest.mark.parametrize("answer", [MEMORY, ON_CPU, {}], ids=["GPU", "CPU", "nothing"])
def test_memory_fits_and_says_what_is_not_known(answer: dict[str, Any]) -> None:
    read = read_memory(msgspec.json.encode(answer).decode())
    for width in (80, 120, 240):
        lines = memory_lines(3, "node0", read, 2.0, width)
        assert all(width_of(line) == width for line in lines)
    text = "\n".join(text_of(line) for line in memory_lines(3, "node0", read, 2.0, 120))
    for reason in ("cuda_reason", "tensors_reason"):
        if answer.get(reason):
            assert f"n/a: {answer[reason]}" in text
    if not answer:
        assert "resident            n/a" in text
        assert "n/a: the rank has told none" in text
        assert " 0 " not in text
    markdown = memory_markdown("run", 3, "node0", read)
    assert markdown.startswith("## Memory of rank 3 of run on node0")


# What it means that nothing has come


def test_the_reason_for_no_answer() -> None:
    rank = rank_view()

    def said(status: str = "asked", waited_s: float = 5.0, link: str = "live", **more: Any) -> str:
        return pending_text(Answer(status), replace(rank, **more), waited_s, link)

    assert said(waited_s=1.0) == "asking the rank"
    assert said() == "no answer for 5.0 s: its telemetry thread may be held up by the GIL"
    assert said(link="lost") == "no answer for 5.0 s: there is no contact with its node"
    silent = {"state": "silent", "state_reason": "stopped by a signal"}
    assert said(**silent) == "no answer for 5.0 s: the rank is silent (stopped by a signal)"
    assert said("accepted", **silent).startswith("accepted, then silent: ")
    assert said("accepted", state="hung") == (
        "the rank hangs: it was accepted and waits for a step"
    )
    assert "next training step, the rank is in eval" in said("accepted", state="eval")
    long = said("accepted", phase_age_s=31.0)
    assert long == "accepted: it waits for the end of a step, the rank is in backward for 31 s"
    assert said("accepted", 1.0) == "accepted"
    # What a rank that comes to no step end throws away; one of slow steps has longer.
    status = Answer("accepted", "steps 1238-1242", step=rank.steps)
    expired = "expired: the rank came to no step end within 10 s; it was not done"
    for state in ("running", "hung", "eval"):
        assert waiting_text(status, replace(rank, state=state), 11.5, "live") == expired
    assert "expired" not in pending_text(status, rank, 10.5)
    assert "within 15 s" in pending_text(status, replace(rank, step_ms=5000.0), 16.5)
    assert "expired" not in pending_text(status, replace(rank, step_ms=5000.0), 15.5)
    assert "expired" not in pending_text(status, replace(rank, steps=1241), 60.0)
    # Of one that is not heard it is not known.
    assert not is_expired(status, replace(rank, state="silent"), 60.0)
    assert not is_expired(status, rank, 60.0, "lost")
    assert "no contact" in pending_text(status, rank, 60.0, "lost")
    status = Answer("accepted", "steps 1238-1242")
    assert waiting_text(status, rank, 1.0, "live").endswith("accepted; the rank is at step 1,240")
    over = waiting_text(status, replace(rank, steps=1243), 1.0, "live")
    assert over.endswith("the steps are over, the rank reads the profile")


def test_ranks_that_are_over_are_not_asked_and_not_waited_for() -> None:
    session = FakeTraining(live())
    session.change((1,), lambda _: {"state": "gone", "state_reason": "exit code -9"})
    request = Request("set", "r1", (0, 1, 7))
    request.send(session, session.view())
    assert [(verb, rank) for verb, rank, _ in session.sent] == [("set", 0)]
    assert request.answers[1].message == "rank 1 is gone (exit code -9): nobody answers"
    assert request.answers[7].message == "rank 7 is not known any more: nobody answers"
    session.answer("accepted", "soon")
    assert request.take(session.view())
    assert request.of("accepted") == (0,)
    # The one that was asked begins anew: it knows nothing of the question.
    session.change((0,), lambda _: {"incarnation": "b"})
    request.take(session.view())
    assert request.answers[0].status == "lost"
    assert "was started anew" in request.answers[0].message
    assert request.finished


def test_an_answer_counts_though_its_rank_has_ended_since() -> None:
    session = FakeTraining(live())
    request = Request("memory", "r1", (0,))
    request.send(session, session.view())
    session.answer("done", data=MEMORY)
    session.change((0,), lambda _: {"state": "ended", "state_reason": "finished"})
    request.take(session.view())
    assert request.answers[0].status == "done"


# Pages


@pytest.mark.parametrize(("width", "height"), SIZES, ids=SIZE_IDS)
def test_the_pages_of_commands(width: int, height: int, monkeypatch: pytest.MonkeyPatch) -> None:
    pages: list[str] = []
    session = FakeTraining(live())

    async def script(app: GpuwatchApp, pilot: Pilot[None]) -> None:
        app.watcher._clock = lambda: app.watcher._taken_at

        async def keep(name: str, *keys: str) -> str:
            if keys:
                await press(pilot, *keys)
            text = await shown(app, pilot)
            # The header has a clock of its own.
            pages.append(f"--- {name}\n" + "\n".join(text.splitlines()[1:]))
            return text

        app.select_rank(1)
        await keep("memory asked", "M")
        session.answer("done", data=MEMORY)
        await keep("memory")
        await keep("profile", "escape", "p")
        await press(pilot, "enter")
        session.answer("accepted", "steps 1241-1245")
        await keep("profile accepted")
        session.answer("done", data=PROFILE)
        await keep("profile done")
        await keep("change", "4", "enter", "a")
        await press(pilot, "enter")
        session.answer("accepted", "at the next batch", ranks=(0, 1))
        session.answer("done", "num_workers 1 -> 7 from the next batch on", ranks=(0,))
        await keep("change sent")
        await keep("knobs", "escape", "K")

    drive(session, script, size=(width, height), diagnose=FOUND)
    check_text(f"requests-{width}", "\n".join(pages))


def test_the_pages_in_ascii() -> None:
    session = FakeTraining(live())

    async def script(app: GpuwatchApp, pilot: Pilot[None]) -> None:
        await press(pilot, "colon", *"ascii", "enter")
        await press(pilot, "M")
        session.answer("done", data=MEMORY)
        assert (await shown(app, pilot)).isascii()
        await press(pilot, "escape", "p", "enter")
        session.answer("done", data=PROFILE)
        assert (await shown(app, pilot)).isascii()
        assert (await press(pilot, "escape", "K")).isascii()
        await press(pilot, "enter", *"9", "enter")
        assert isinstance(app.screen, ChangeScreen)
        assert (await shown(app, pilot)).isascii()
        await press(pilot, "escape", "colon", *"ascii", "enter")

    drive(session, script, size=(80, 24), diagnose=FOUND)


def test_memory_is_asked_for_again_and_copied() -> None:
    session = FakeTraining(live())
    copied: list[str] = []

    async def script(app: GpuwatchApp, pilot: Pilot[None]) -> None:
        app.copy_to_clipboard = copied.append  # type: ignore[method-assign]
        text = await press(pilot, "2", "M")
        assert isinstance(app.screen, MemoryScreen)
        assert "asking the rank" in text
        assert "no answer to copy yet" in footer(await press(pilot, "y"))
        asked = session.sent[0][1]
        # A rank is asked once, and anew by the same key; the old answer stands until then.
        session.answer("done", data=MEMORY)
        assert "1.2 GB" in await shown(app, pilot)
        text = await press(pilot, "M")
        assert len(session.sent) == 2
        assert "1.2 GB" in text
        session.answer("done", data={**MEMORY, "rss_bytes": 2_500_000_000})
        assert "2.5 GB" in await shown(app, pilot)
        await press(pilot, "T")
        assert session.sent[-1] == ("memory", asked, {"tensors": True})
        await press(pilot, "y")
        assert copied[0].startswith(f"## Memory of rank {asked} of resnet50-ddp on node0")
        assert "2.5 GB resident" in copied[0]
        # Damage is a sentence, and the next answer takes its place.
        await press(pilot, "M")
        session.answer("done", data="{")
        assert "the memory summary came damaged" in await shown(app, pilot)
        await press(pilot, "M")
        session.answer("error", "this gpuwatch does not know the verb 'memory'")
        text = await shown(app, pilot)
        assert "older gpuwatch" in text

    drive(session, script, size=(120, 32))


@pytest.mark.parametrize("key", ["M", "p", "t"])
def test_a_recording_answers_with_a_sentence(key: str) -> None:
    async def script(app: GpuwatchApp, pilot: Pilot[None]) -> None:
        await press(pilot, key)
        if key == "p":
            await press(pilot, "enter")
        # The fake stands for the replay, whose `send` refuses as this one does.
        assert "has no training behind it" in await shown(app, pilot)
        await press(pilot, "escape")
        assert isinstance(app.screen, Overview)

    drive(Recording(live()), script)


def test_no_rank_is_a_sentence() -> None:
    async def script(app: GpuwatchApp, pilot: Pilot[None]) -> None:
        for key in ("M", "p"):
            assert "there is no rank to ask" in footer(await press(pilot, key))
        assert "no run has been seen yet" in await press(pilot, "K")

    drive(View(version=1, at_s=NOW_S, link="live"), script)


# Profile


def test_how_many_steps_is_typed() -> None:
    session = FakeTraining(live())

    async def script(app: GpuwatchApp, pilot: Pilot[None]) -> None:
        app.select_rank(0)
        text = await press(pilot, "p")
        assert "steps  5" in text
        assert "steps  6" in await press(pilot, "plus")
        assert "steps  4" in await press(pilot, "minus", "minus")
        # Digits are a number here; elsewhere they go to views.
        assert "steps  70" in await press(pilot, "7", "0")
        text = await press(pilot, "enter")
        assert "a profile is of 1..50 steps, not of 70" in text
        assert not session.sent
        assert "steps  7 " in await press(pilot, "backspace")
        await press(pilot, "enter")
        assert session.sent == [("profile", 0, {"steps": 7})]
        assert "one is under way" in footer(await press(pilot, "p"))
        await press(pilot, "2")
        assert app.screen.id == "ranks-view"
        # The page was left; what comes is told, and there when it is opened again.
        session.answer("accepted", "steps 1242-1248")
        session.answer("done", data=PROFILE)
        assert "rank 0 is profiled; p shows it" in footer(await shown(app, pilot))
        app.select_rank(0)
        assert "aten::convolution_backward" in await press(pilot, "p")
        text = await press(pilot, "p")
        assert "steps  7" in text
        await press(pilot, "backspace")
        assert not isinstance(app.screen, ProfileScreen)

    drive(session, script, size=(120, 32))


def test_a_profile_that_ended_early_says_why() -> None:
    answer = read_profile(
        '{"first_step": 3, "note": "ended after 2 of 5 steps: the loader forked"}'
    )
    text = [text_of(line) for line in profile_lines(0, "node0", answer, 1.0, None, "f", 80)]
    assert any("ended after 2 of 5 steps: the loader forked" in line for line in text)
    assert "ended after 2 of 5 steps" in profile_markdown("run", 0, "node0", answer)


def test_a_profile_that_is_refused_says_so() -> None:
    session = FakeTraining(live(versions=Versions(gpuwatch="0.1.0")))

    async def script(app: GpuwatchApp, pilot: Pilot[None]) -> None:
        app.select_rank(1)
        await press(pilot, "p", "enter")
        session.answer("error", "this gpuwatch does not know the verb 'profile'")
        text = await shown(app, pilot)
        assert "older gpuwatch (0.1.0)" in text
        await press(pilot, "p", "enter")
        session.answer("accepted", "steps 1241-1245")
        session.change((1,), lambda _: {"state": "hung", "phase_age_s": 80.0})
        text = await shown(app, pilot)
        assert "steps 1241-1245: the rank hangs: it was accepted and waits for a step" in text
        session.change((1,), lambda _: {"state": "gone", "state_reason": "exit code -9"})
        assert "rank 1 is gone (exit code -9): nobody answers" in await shown(app, pilot)
        assert "there is no trace to fetch" in footer(await press(pilot, "f"))

    drive(session, script, size=(120, 32))


def test_a_profile_that_was_never_begun_can_be_asked_for_again() -> None:
    session = FakeTraining(live())

    async def script(app: GpuwatchApp, pilot: Pilot[None]) -> None:
        now_s = [0.0]
        app.watcher._clock = lambda: now_s[0]
        app.select_rank(1)
        await press(pilot, "p", "enter")
        session.answer("accepted", "steps 1241-1245")
        assert "1241-1245: accepted" in await shown(app, pilot)
        assert "one is under way" in footer(await press(pilot, "p"))
        now_s[0] += 60.0
        text = await shown(app, pilot)
        assert " expired: the rank came to no step end within 10 s; it was not done" in text
        assert "steps  5" in await press(pilot, "p")
        await press(pilot, "enter")
        assert len(session.sent) == 2

    drive(session, script, size=(120, 32))


def test_a_long_path_is_shown_whole() -> None:
    answer = read_profile(msgspec.json.encode(PROFILE).decode())
    folder = Path("/data/a-folder-of-experiments/with.a.long.name/2026-11-30") / ("r" * 90)
    fetch = Fetch("r1", 0, answer.trace, FakeTraining(live()), folder)
    fetch.path = folder / answer.trace
    lines = profile_lines(0, "node0", answer, 0.0, fetch, "f", 80)
    assert all(width_of(line) == 80 for line in lines)
    text = "".join(text_of(line)[17:].rstrip() for line in lines)
    assert f"fetched:{fetch.path}" in text.replace("fetched: ", "fetched:")


# The trace


class Node:
    """A rank with a file: answers `fetch`, but not every time."""

    def __init__(self, session: FakeTraining, content: bytes, piece: int = 64_000) -> None:
        self.session = session
        self.content = content
        self.piece = piece
        self.answered = 0

    def serve(self, spoil: Callable[[int, dict[str, Any]], dict[str, Any] | None]) -> None:
        """Answer what was asked since; `spoil` may change an answer, or swallow it."""
        while self.answered < len(self.session.sent):
            verb, _, args = self.session.sent[self.answered]
            self.answered += 1
            if verb != "fetch":
                continue
            part = self.content[args["offset"] : args["offset"] + self.piece]
            told: dict[str, Any] | None = {
                "schema": 1,
                "name": args["name"],
                "offset": args["offset"],
                "bytes": len(part),
                "total_bytes": len(self.content),
                "base64": base64.b64encode(part).decode(),
            }
            told = spoil(self.answered, told or {})
            if told is not None:
                self.session.answer("done", data=told, command=self.answered)


def whole(_: int, told: dict[str, Any]) -> dict[str, Any]:
    return told


def trace(size: int = 400_000) -> bytes:
    # Digests do not pack, so that there are several pieces.
    text = b"".join(hashlib.sha256(b"%d" % i).digest() for i in range(size // 32))
    return gzip.compress(text, 1, mtime=0)


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def fetching(
    path: Path, content: bytes, spoil: Callable[[int, dict[str, Any]], dict[str, Any] | None]
) -> tuple[Fetch, Node, Callable[[], None]]:
    session = FakeTraining(live())
    node, clock = Node(session, content), Clock()
    fetch = Fetch("r1", 0, "t.json.gz", session, path / "t.json.gz", clock=clock)

    def go() -> None:
        fetch.start(session.view())
        for _ in range(200):
            node.serve(spoil)
            fetch.advance(session.view())
            # The store keeps the last answers of a rank only.
            session.change(None, lambda rank: {"replies": rank.replies[-16:]})
            clock.now_s += 4.0
            if fetch.finished:
                return
        raise AssertionError("it goes on for ever")

    return fetch, node, go


def test_a_trace_comes_in_pieces(tmp_path: Path) -> None:
    content = trace()
    fetch, node, go = fetching(tmp_path, content, whole)
    go()
    assert (fetch.error, fetch.path) == ("", tmp_path / "t.json.gz")
    assert (tmp_path / "t.json.gz").read_bytes() == content
    assert [args["offset"] for _, _, args in node.session.sent] == list(
        range(0, len(content), node.piece)
    )
    assert len(list(tmp_path.iterdir())) == 1
    assert (tmp_path / "t.json.gz").stat().st_mode & 0o077 == 0
    # Nothing is overwritten.
    fetch, _, go = fetching(tmp_path, content, whole)
    go()
    assert fetch.path == tmp_path / "2~t.json.gz"


def test_lost_and_damaged_pieces_are_asked_for_again(tmp_path: Path) -> None:
    content = trace()

    def spoil(number: int, told: dict[str, Any]) -> dict[str, Any] | None:
        if number == 2:
            return None
        if number == 3:
            return {**told, "base64": "!" + told["base64"][1:]}
        if number == 5:
            return {**told, "offset": told["offset"] + 1}
        return told

    fetch, node, go = fetching(tmp_path, content, spoil)
    go()
    assert fetch.path is not None
    assert fetch.path.read_bytes() == content
    assert len(node.session.sent) == -(-len(content) // node.piece) + 3


@pytest.mark.parametrize(
    ("spoil", "sentence"),
    [
        (lambda n, told: None, "no answer to a piece at 0 bytes, asked 3 times"),
        (lambda n, told: {**told, "base64": "####"}, "it is no base64 (asked 3 times)"),
        (lambda n, told: {**told, "bytes": 7}, "bytes, it says 7 (asked 3 times)"),
        (lambda n, told: {**told, "bytes": 0, "base64": ""}, "its length is wrong (asked 3"),
        (lambda n, told: {**told, "name": "other"}, "it is another one (asked 3 times)"),
        (lambda n, told: {**told, "total_bytes": MOST_BYTES + 1}, "copy it from its node"),
        (lambda n, told: {**told, "bytes": MOST_PIECE + 1}, "came damaged"),
        (
            lambda n, told: {**told, "total_bytes": told["total_bytes"] + n - 1},
            "the trace became another one meanwhile",
        ),
        (
            lambda n, told: (
                {**told, "base64": base64.b64encode(os.urandom(told["bytes"])).decode()}
            ),
            "its checksum is wrong",
        ),
    ],
)
def test_a_trace_that_does_not_come_says_why(
    tmp_path: Path,
    spoil: Callable[[int, dict[str, Any]], dict[str, Any] | None],
    sentence: str,
) -> None:
    fetch, _, go = fetching(tmp_path, trace(), spoil)
    go()
    assert sentence in fetch.error
    fetch.close()
    assert not list(tmp_path.iterdir())


def test_a_fetch_goes_on_where_it_stood(tmp_path: Path) -> None:
    content = trace()
    stuck = [True]

    def spoil(number: int, told: dict[str, Any]) -> dict[str, Any] | None:
        return None if stuck[0] and told["offset"] >= 128_000 else told

    fetch, node, go = fetching(tmp_path, content, spoil)
    go()
    assert fetch.error == "no answer to a piece at 128,000 bytes, asked 3 times"
    assert fetch.at == 128_000
    stuck[0] = False
    before = len(node.session.sent)
    go()
    assert fetch.path is not None
    assert fetch.path.read_bytes() == content
    assert node.session.sent[before][2]["offset"] == 128_000


def test_a_cut_trace_is_not_taken_for_a_whole_one(tmp_path: Path) -> None:
    fetch, _, go = fetching(tmp_path, trace()[:-4], whole)
    go()
    assert fetch.error == "the trace came damaged: its end is missing"
    assert not list(tmp_path.iterdir())


def test_a_piece_says_what_it_is() -> None:
    told = {"name": "t", "offset": 3, "bytes": 2, "total_bytes": 5, "base64": "aGk="}
    piece, content = read_piece(msgspec.json.encode(told).decode())
    assert (piece.offset, content) == (3, b"hi")
    with pytest.raises(AnswerError):
        read_piece("{}")


@pytest.mark.parametrize("name", ["../../etc/passwd", "/abs/x.gz", "..", "", ".bashrc", "a\x00b"])
def test_the_name_of_a_trace_leads_nowhere(name: str, tmp_path: Path) -> None:
    target = trace_target("../run", 3, name, tmp_path)
    assert target.parent == tmp_path
    assert target.name.startswith("gpuwatch-run-rank3-")
    assert "/" not in target.name
    assert ".." not in target.name


def test_f_brings_the_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    session = FakeTraining(live())
    content = trace()
    node = Node(session, content)

    async def script(app: GpuwatchApp, pilot: Pilot[None]) -> None:
        app.select_rank(0)
        await press(pilot, "p", "enter")
        session.answer("done", data=PROFILE)
        assert "f brings it here" in await shown(app, pilot)
        await press(pilot, "f")
        node.serve(whole)
        text = await shown(app, pilot)
        assert "of 400 kB" in text
        # It goes on while something else is looked at.
        await press(pilot, "1")
        for _ in range(20):
            node.serve(whole)
            text = await shown(app, pilot)
            if "fetched: " in text:
                break
        assert "fetched: " in footer(text)
        assert "it is there: " in footer(await press(pilot, "p", "f"))

    drive(session, script, size=(160, 45))
    made = list(tmp_path.iterdir())
    assert [path.name for path in made] == ["gpuwatch-resnet50-ddp-rank0-profile-120.json.gz"]
    assert made[0].read_bytes() == content


def test_half_a_trace_does_not_outlive_the_app(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    session = FakeTraining(live())
    node = Node(session, trace())

    async def script(app: GpuwatchApp, pilot: Pilot[None]) -> None:
        await press(pilot, "p", "enter")
        session.answer("done", data=PROFILE)
        await shown(app, pilot)
        await press(pilot, "f")
        node.serve(whole)
        await shown(app, pilot)
        assert [Path(name).suffix for name in os.listdir(tmp_path)] == [".part"]

    drive(session, script)
    assert not list(tmp_path.iterdir())


# Live changes


def test_which_hints_can_be_set() -> None:
    run = live().runs[0]
    found_ones = proposals(few_workers(), run)
    assert [(item.row.name, item.new, item.everyone) for item in found_ones] == [
        ("num_workers", 7, True)
    ]
    assert set_text(found_ones[0], 2) == "set num_workers 1 -> 7 on all ranks of resnet50-ddp"
    assert why_not_applied(few_workers(), run) == ""
    one = proposals(few_workers(ranks=(1,)), run)[0]
    assert (one.row.ranks, one.everyone) == ((1,), False)
    # By the end of its name too.
    dotted = (msgspec.structs.replace(KNOBS[0], name="loader.num_workers"),)
    assert proposals(few_workers(), live(knobs=dotted).runs[0])[0].row.name == "loader.num_workers"


@pytest.mark.parametrize(
    ("hello", "finding", "sentence"),
    [
        ({"allow_control": False}, {}, "start it with gpuwatch run --allow-control -- ..."),
        ({"allow_control": False, "knobs": ()}, {}, "gpuwatch run --allow-control -- ..."),
        ({"knobs": ()}, {}, "num_workers is no live knob of this run"),
        ({}, {"hints": ()}, "F1 has no hint that is a value to set"),
        ({}, {"hints": (Hint("buy a disk", ""),)}, "F1 has no hint that is a value to set"),
        (
            {},
            {"hints": (Hint("fewer", "num_workers", 1, -1, None),)},
            "num_workers takes 0..16: -1 is too little",
        ),
        (
            {"knobs": (Knob("num_workers", 16, 0.0, 16.0),)},
            {"hints": (Hint("more", "num_workers", 16, 19, None),)},
            "num_workers is 16 already, the most that it takes",
        ),
        ({"knobs": (Knob("num_workers", 7, 0.0, 16.0),)}, {}, "num_workers is 7 already"),
    ],
)
def test_why_no_hint_can_be_set(
    hello: dict[str, Any], finding: dict[str, Any], sentence: str
) -> None:
    run = live(**hello).runs[0]
    told = why_not_applied(few_workers(**finding), run)
    assert sentence in told
    # It stands in the footer of 80 cells.
    assert len(told) < 80
    ended = replace(
        run, state="ended", ranks=tuple(replace(rank, state="ended") for rank in run.ranks)
    )
    if not finding:
        assert "the run has ended" in why_not_applied(few_workers(), ended)


@pytest.mark.parametrize(
    ("knob", "text", "value"),
    [
        (KNOBS[0], "7", 7),
        (KNOBS[0], " 7.0 ", 7.0),
        (KNOBS[0], "7.5", "num_workers is a whole number, not 7.5"),
        (KNOBS[0], "17", "num_workers takes 0..16: 17 is too much"),
        (KNOBS[0], "-1", "num_workers takes 0..16: -1 is too little"),
        (KNOBS[0], "seven", "num_workers is a number, not seven"),
        (KNOBS[0], "9" * 5000, "num_workers"),
        (KNOBS[1], "3e-4", 3e-4),
        (KNOBS[1], "1", 1.0),
        (KNOBS[1], "nan", "lr is a number, not nan"),
        (KNOBS[1], "-1", "lr takes at least 0: -1 is too little"),
        (KNOBS[2], "linear", "linear"),
        (KNOBS[2], "step", "schedule is one of cosine, linear, not step"),
        (Knob("amp", True), "off", False),
        (Knob("amp", True), "maybe", "amp is true or false, not maybe"),
    ],
)
def test_what_is_typed_becomes_a_value(knob: Knob, text: str, value: object) -> None:
    if isinstance(value, str) and value not in knob.choices:
        with pytest.raises(ValueError, match="^" + value.split("..")[0]):
            parse_value(knob, text)
        return
    found_value = parse_value(knob, text)
    assert found_value == value
    assert isinstance(found_value, type(knob.value)) or knob.name == "num_workers"


def test_limits_are_said() -> None:
    assert [limits_text(knob) for knob in (*KNOBS, Knob("amp", True), Knob("n", 1))] == [
        "0..16",
        "at least 0",
        "cosine, linear",
        "true, false",
        "",
    ]
    assert limits_text(Knob("n", 1, None, 4.0)) == "at most 4"
    assert limits_text(Knob("n", 1, 1.0, 1e6)) == "1..1,000,000"
    assert limits_text(Knob("x", 1.0, 1e-6, 1e6)) == "1e-06..1e+06"
    assert limits_text(Knob("n", 1, 1.0, 1e300)) == "1..1e+300"


def test_a_hint_beyond_the_limit_becomes_the_most_that_the_knob_takes() -> None:
    run = live().runs[0]
    finding = few_workers(hints=(Hint("more", "num_workers", 1, 19, (148.0, 160.0)),))
    assert why_not_applied(finding, run) == ""
    (proposal,) = proposals(finding, run)
    assert (proposal.new, type(proposal.new), proposal.asked) == (16, int, 19)
    text = "\n".join(text_of(line) for line in proposal_lines(proposal, run, 231.0, 1, 100))
    assert "set num_workers 1 -> 16" in text
    assert "the hint is 19: 16 is the most that it takes here" in text
    assert "nothing is predicted for it" in text
    assert "148" not in text
    # A whole number stays one below a limit that is none.
    odd = live(knobs=(Knob("num_workers", 1, 0.0, 8.5),)).runs[0]
    assert proposals(finding, odd)[0].new == 8


@pytest.mark.parametrize(("width", "height"), SIZES, ids=SIZE_IDS)
def test_the_page_of_knobs_says_how_control_is_had(width: int, height: int) -> None:
    knob = Knob("gradient_accumulation_steps", 1, 1.0, 1e6, (), "at the next step")

    def told(**hello: Any) -> str:
        run = live(**hello).runs[0]
        rows = knob_rows(run)
        lines = [line for row in rows for line in knob_lines(row, 2, width, selected=False)]
        lines += control_off_lines(rows, run, width) if rows else no_knobs_lines(run, width)
        assert all(width_of(line) == width for line in lines)
        return " ".join(" ".join(text_of(line) for line in lines).split())

    text = told(knobs=(knob,), allow_control=False)
    assert "control is off: start it with gpuwatch run --allow-control -- ..." in text
    assert "_steps 1 1..1,000,000 at" in text or "accumulati 1 1..1,000,000 at" in text
    assert "…" not in text
    assert "control is off" not in told(knobs=(knob,))
    text = told(knobs=())
    assert "gpuwatch.knob(name, value, apply)" in text
    assert "by themselves once the training fetches" in text


def test_values_that_differ_are_shown_by_rank() -> None:
    other = (msgspec.structs.replace(KNOBS[0], value=4), *KNOBS[1:])
    picture = with_hello(live(), (1,), knobs=other, allow_control=False)
    row = knob_rows(picture.runs[0])[0]
    assert row.by_value() == [(1, (0,)), (4, (1,))]
    assert not row.allowed
    proposal = Proposal("r1", "run", row, 7, True)
    assert set_text(proposal, 2) == "set num_workers 1, 4 -> 7 on all ranks of run"


def going_on(session: FakeTraining, number: int, factor: float) -> None:
    """Let the run go on by so many steps, the data wait by that factor of what it was."""
    rank = session.view().runs[0].ranks[0]
    first = rank.window[-1].index + 1
    split = {**rank.phases_ms, "data_wait": (rank.phases_ms["data_wait"] or 0.0) * factor}
    window = records(split, number=number, first=first)
    fields = {"window": window[-64:], "last": window[-1], "steps": first + number}
    session.change(None, lambda _: fields)
    picture = session.view()
    session.show(replace(picture, runs=(replace(picture.runs[0], steps=first + number),)))


def test_a_hint_is_set_and_checked() -> None:
    session = FakeTraining(live())

    async def script(app: GpuwatchApp, pilot: Pilot[None]) -> None:
        text = await press(pilot, "4", "enter")
        assert "a apply live" in footer(text)
        text = await press(pilot, "a")
        assert "set num_workers 1 -> 7 on all ranks of resnet50-ddp" in text
        assert "takes effect: from the next batch on" in text
        assert "predicted step 231 -> 148..160 ms" in text
        # Nothing has been sent: esc goes back.
        await press(pilot, "escape")
        assert isinstance(app.screen, FindingScreen)
        assert not session.sent
        await press(pilot, "a", "enter", "enter")
        assert session.sent == [("set", None, {"knob": "num_workers", "value": 7})]
        going_on(session, 10, 1.0)
        session.answer("accepted", "at the next batch", ranks=(0, 1))
        text = await shown(app, pilot)
        assert "accepted" in text
        session.answer("done", "num_workers 1 -> 7 from the next batch on", ranks=(0, 1))
        await shown(app, pilot)
        text = await shown(app, pilot)
        assert "ranks 0, 1" in text
        assert "num_workers 1 -> 7 from the next batch on" in text
        assert "num_workers was set at step 1,250" in text
        for _ in range(5):
            going_on(session, 64, 0.1)
            app.watcher._checked_at = -10.0
            text = await shown(app, pilot)
        # The ten steps before the answer are not counted, nor the one in which it came.
        assert "256 of 256 steps" in text
        assert "num_workers 1 -> 7: predicted 148..160 ms, got" in text
        assert "no change of that setting" not in text
        check = app.watcher.scene.checks[0]
        assert check.check.changed_step == 1250
        assert check.promise is not None
        assert check.promise.setting is not None
        assert check.promise.setting.after == 7
        text = await press(pilot, "escape")
        assert "256 of 256 steps" in text

    drive(session, script, size=(120, 36), diagnose=FOUND)


def test_a_change_that_no_rank_takes_is_not_checked() -> None:
    session = FakeTraining(live())

    async def script(app: GpuwatchApp, pilot: Pilot[None]) -> None:
        await press(pilot, "4", "enter", "a", "enter")
        session.answer("error", "num_workers cannot be changed in this epoch", ranks=(0,))
        session.change((1,), lambda _: {"state": "gone", "state_reason": "exit code -9"})
        await press(pilot, "escape")
        text = await shown(app, pilot)
        assert "num_workers was not set to 7: num_workers cannot be changed" in footer(text)
        assert app.watcher.scene.checks == ()

    drive(session, script, size=(120, 36), diagnose=FOUND)


def test_a_change_says_what_every_rank_said() -> None:
    session = FakeTraining(live())

    async def script(app: GpuwatchApp, pilot: Pilot[None]) -> None:
        await press(pilot, "4", "enter", "a", "enter")
        session.answer("accepted", ranks=(0, 1))
        session.change((1,), lambda _: {"state": "hung", "phase_age_s": 80.0})
        session.answer("done", "num_workers 1 -> 7", ranks=(0,))
        text = await shown(app, pilot)
        assert "✓ rank 0" in text
        assert "the rank hangs: it was accepted and waits for a step" in text
        session.change((1,), lambda _: {"state": "gone", "state_reason": "exit code -9"})
        text = await shown(app, pilot)
        assert "rank 1 is gone (exit code -9): nobody answers" in text
        app.watcher._checked_at = -10.0
        text = await shown(app, pilot)
        assert "CHECK" in text
        assert app.watcher.scene.checks[0].check.changed is not None

    drive(session, script, size=(120, 36), diagnose=FOUND)


def test_what_is_not_of_now_is_not_changed() -> None:
    async def paused(app: GpuwatchApp, pilot: Pilot[None]) -> None:
        text = await press(pilot, "4", "enter", "space")
        assert "apply live" not in footer(text)
        assert "the picture is paused" in footer(await press(pilot, "a"))
        assert isinstance(app.screen, FindingScreen)
        await press(pilot, "space", "a")
        assert isinstance(app.screen, ChangeScreen)
        # Paused on the page: enter does not send either.
        assert "the picture is paused" in footer(await press(pilot, "space", "enter"))

    session = FakeTraining(live())
    drive(session, paused, diagnose=FOUND)
    assert not session.sent

    async def replayed(app: GpuwatchApp, pilot: Pilot[None]) -> None:
        await press(pilot, "4", "enter", "a")
        assert "this is a recording: nothing can be set" in footer(screen_text(app))
        await press(pilot, "K", "enter")
        assert "this is a recording: nothing can be set" in footer(screen_text(app))

    drive(Recording(live()), replayed, diagnose=FOUND)


def test_a_knob_is_typed_confirmed_and_sent() -> None:
    session = FakeTraining(live())

    async def script(app: GpuwatchApp, pilot: Pilot[None]) -> None:
        text = await press(pilot, "K")
        assert isinstance(app.screen, KnobsScreen)
        assert "num_workers" in text
        assert "none was sent to this run" in text
        text = await press(pilot, "j", "enter")
        assert "lr = " in footer(text)
        # q is a letter while it is typed.
        text = await press(pilot, *"0.q", "enter")
        assert "lr is a number, not 0.q" in footer(text)
        await press(pilot, "enter", *"0.05", "escape")
        assert isinstance(app.screen, KnobsScreen)
        assert "lr is 0.1 already" in footer(await press(pilot, "enter", *"0.1", "enter"))
        text = await press(pilot, "enter", *"0.05", "enter")
        assert "set lr 0.1 -> 0.05 on all ranks" in text
        assert "takes effect: at the next step" in text
        await press(pilot, "enter")
        assert session.sent == [("set", None, {"knob": "lr", "value": 0.05})]
        session.answer("done", "lr 0.1 -> 0.05 at the next step", ranks=(0, 1))
        assert "lr 0.1 -> 0.05 at the next step" in await shown(app, pilot)
        assert app.watcher.scene.checks == ()
        await press(pilot, "escape", "K")
        assert isinstance(app.screen, Overview)

    drive(session, script, size=(120, 32), diagnose=FOUND)

    async def closed(app: GpuwatchApp, pilot: Pilot[None]) -> None:
        text = await press(pilot, "K", "enter")
        assert "start it with gpuwatch run --allow-control" in footer(text)

    drive(FakeTraining(live(allow_control=False)), closed, size=(80, 24))


# The log


def logged(number: int, status: str, at_s: float, verb: str = "set", **more: str) -> Logged:
    fields = {"args": "num_workers=7", "message": "", **more}
    return Logged(at_s, f"id{number}", verb, status=status, **fields)  # type: ignore[arg-type]


def test_the_log_is_of_all_monitors_and_tells_the_last_status() -> None:
    done = "num_workers 1 -> 7 from the next batch on"
    of_both = (logged(1, "accepted", NOW_S - 9), logged(1, "done", NOW_S - 8, message=done))
    session = FakeTraining(live())
    session.change(None, lambda _: {"commands": of_both})
    stack = logged(2, "done", NOW_S - 3, "stack", args="")
    session.change((1,), lambda _: {"commands": (*of_both, stack)})
    run = session.view().runs[0]
    entries = log_entries(run)
    assert [(e.verb, e.ranks, e.status, e.at_s) for e in entries] == [
        ("stack", (1,), "done", NOW_S - 3),
        ("set", (0, 1), "done", NOW_S - 9),
    ]
    for width in (80, 120, 160):
        lines = log_lines(entries, width)
        assert all(width_of(line) == width for line in lines)
        assert "num_workers=7" in text_of(lines[2])
    assert done in text_of(log_lines(entries, 120)[2])


def test_the_newest_command_is_first_whatever_the_clocks_of_the_nodes() -> None:
    early = logged(1, "done", NOW_S + 7200.0 - 60.0, "stack")
    late = logged(2, "done", NOW_S - 3.0)
    ranks = (
        rank_view(0, commands=(early,), ahead_s=7200),
        rank_view(1, commands=(late,)),
    )
    entries = log_entries(run_view(ranks))
    assert [(entry.verb, entry.at_s) for entry in entries] == [
        ("set", NOW_S - 3.0),
        ("stack", NOW_S - 60.0),
    ]
