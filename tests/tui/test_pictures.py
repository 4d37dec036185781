"""The pictures of the views, as text at the three sizes, checked against files."""

from __future__ import annotations

import math
from array import array
from dataclasses import replace

import msgspec
import pytest

from gpuwatch.diagnosis.types import Finding, Hint, LifeEvent, RankStack
from gpuwatch.schema import (
    Ddp,
    GpuEvent,
    GpuProcess,
    GpuSample,
    HostSample,
    IoSample,
    Precision,
    ProcessSample,
    Versions,
)
from gpuwatch.store.views import Event, RunView, View
from gpuwatch.tui.metrics import METRICS
from gpuwatch.tui.past import RANK_FIELDS, Moment, Past
from gpuwatch.tui.render.charts import gpu_series, rank_series, time_charts
from gpuwatch.tui.render.findings import finding_detail, hint_rest, hint_text, life_texts
from gpuwatch.tui.render.gpus import gpu_columns, gpu_header, gpu_page, gpu_row
from gpuwatch.tui.render.header import header_line, verdict_line
from gpuwatch.tui.render.heat import heat_lines
from gpuwatch.tui.render.markdown import finding_markdown
from gpuwatch.tui.render.rank import rank_page
from gpuwatch.tui.render.sensors import node_lines
from gpuwatch.tui.render.text import Line, width_of
from gpuwatch.tui.render.timeline import event_lines, event_page
from gpuwatch.tui.scene import Replay, Scene, order_ranks, run_nodes, summarise
from gpuwatch.tui.screens.runs import run_row
from gpuwatch.tui.theme import STYLES
from tests.tui import fakes
from tests.tui.snapshots import check_lines, text_of
from tests.tui.test_render import ODD_RUNS

SIZES = [(80, 24), (120, 32), (160, 45)]
SIZE_IDS = ["80x24", "120x32", "160x45"]


def full_gpu(**more: object) -> GpuSample:
    fields = {
        "processes": (
            GpuProcess(4024, 58_000_000_000, "compute", "python", "ada"),
            GpuProcess(999, 2_400_000_000, "compute", "", "", visible=False),
        ),
        "reasons": ("power cap",),
        "events": (GpuEvent(74, "Xid 74: NVLink error", fakes.NOW_S - 40),),
        **more,
    }
    return GpuSample(0, "GPU-node3-0", "NVIDIA H100 80GB HBM3", fakes.gpu_readings(), **fields)  # type: ignore[arg-type]


def past_of(picture: View, seconds: int = 120) -> Past:
    """Two minutes in which data wait and GPU-Util swing against each other."""
    past = Past()
    run = picture.runs[0]
    ranks = [replace(r, timeline=(), device_stall_ms=61.0) for r in run.ranks]
    run = replace(run, ranks=tuple(ranks))
    gpus = {gpu.uuid: gpu for node in picture.nodes for gpu in node.gpus}
    for i in range(seconds):
        swing = (i % 20) / 20.0
        for uuid, gpu in gpus.items():
            readings = {
                **gpu.readings,
                "gpu_util": fakes.ok(95.0 - 80.0 * swing, "%"),
                "sm_active": fakes.ok(60.0 - 40.0 * swing, "%"),
                "power": fakes.ok(650.0 - 400.0 * swing, "W"),
            }
            gpus[uuid] = GpuSample(gpu.index, uuid, gpu.name, readings)
        past.keep(run, gpus, (), fakes.NOW_S - seconds + 1.0 + i)
    # What the fakes have no steps for is filled in by hand: stall, memory.
    moments: list[Moment] = list(past.moments(run.run))
    for i, moment in enumerate(moments):
        columns = {name: moment.rank_column(name) for name in RANK_FIELDS}
        columns["stall_ms"] = array("f", [61.0 * ((i % 20) / 20.0)]) * len(moment.ranks)
        columns["memory_gb"] = array("f", [0.3 + 0.002 * i]) * len(moment.ranks)
        rows = zip(*columns.values(), strict=True)
        moments[i] = replace(moment, values=array("f", [value for row in rows for value in row]))
    past._runs[run.run].clear()
    past._runs[run.run].extend(moments)
    return past


def scene_of(picture: View, **more: object) -> Scene:
    run = picture.runs[0]
    nodes = run_nodes(picture, run)
    scene = Scene(
        picture,
        run=run,
        summary=summarise(run),
        order=order_ranks(run, ()),
        nodes=nodes,
        gpus={gpu.uuid: gpu for node in nodes for gpu in node.gpus},
        events=tuple(sorted(picture.events, key=lambda item: -item.at_s)),
        end_s=picture.at_s,
        diagnosed=True,
        findings=(fakes.few_workers(), fakes.peer_wait()),
        past=past_of(picture),
    )
    return replace(scene, **more)  # type: ignore[arg-type]


def cluster_scene(**more: object) -> Scene:
    picture = fakes.cluster()
    node3 = replace(picture.nodes[3], gpus=(full_gpu(), *picture.nodes[3].gpus[1:]))
    picture = replace(picture, nodes=(*picture.nodes[:3], node3))
    run = picture.runs[0]
    ranks = list(run.ranks)
    slow = ranks[24]
    assert slow.hello is not None
    hello = msgspec.structs.replace(
        slow.hello,
        ddp=Ddp(25.0, gradient_bytes=102_000_000, backend="nccl", bucket_bytes=(25_000_000,) * 4),
        precision=Precision("high", True, "bfloat16", False),
        versions=Versions("0.1.0", "3.11.7", "2.13.0", "12.6", "2.21.5"),
        parallel=("ddp",),
        device="cuda:0",
    )
    ranks[24] = replace(
        slow,
        hello=hello,
        window=fakes.records(slow.phases_ms, first=12_416),
        batch_wall_ms=360.0,
        batch_cpu_ms=340.0,
        device_stall_ms=58.2,
        process=with_limits(slow.process),
    )
    picture = replace(picture, runs=(replace(run, ranks=tuple(ranks)),))
    return scene_of(picture, selected=24, **more)


def with_limits(process: ProcessSample | None) -> ProcessSample:
    assert process is not None
    readings = {
        **process.readings,
        "cpu_quota_cores": fakes.ok(4.0, "", "cgroup"),
        "cpu_throttled_percent": fakes.ok(31.0, "%", "cgroup"),
        "affinity_cores": fakes.ok(1.0, "", "sched"),
        "read_bytes_per_s": fakes.ok(180e6, "B/s", "io"),
    }
    return ProcessSample(process.pid, process.rank_pid, process.role, process.status, readings)


ODD_NUMBERS = (math.nan, math.inf, -5.0, 0.0, 1e300)


@pytest.mark.parametrize("name", ODD_RUNS)
def test_every_page_of_every_run_has_the_width(name: str) -> None:
    run = ODD_RUNS[name]
    picture = fakes.view([run], [fakes.node_view(gpus=2)])
    scene = replace(scene_of(picture), end_s=fakes.NOW_S)
    odd = {
        reading: fakes.ok(ODD_NUMBERS[i % len(ODD_NUMBERS)], "%")
        for i, reading in enumerate(fakes.gpu_readings())
    }
    gpus = [
        full_gpu(),
        GpuSample(9, "", "", {}),
        GpuSample(4096, "GPU-x", "学習" * 40, odd, processes_reason="学" * 200, lost="x" * 900),
    ]
    for width in (60, 80, 120, 160, 300):
        lines = [line for gpu in gpus for line in gpu_page("学" * 40, gpu, None, scene, width)]
        columns = gpu_columns(width, ["学" * 40])
        lines += [gpu_row("学" * 40, gpu, scene.rank, columns) for gpu in gpus]
        for metric in METRICS:
            lines += heat_lines(run, width, 9, metric=metric, gpus=scene.gpus, selected=3)
        for rank in run.ranks[:2]:
            windowed = replace(
                rank,
                window=fakes.records({"data_wait": 0.0, "forward": 1e6, "comm": None}),
                device_stall_ms=math.nan,
                batch_wall_ms=math.inf,
                notices=("学習 " * 200,),
            )
            for item in (rank, windowed):
                lines += rank_page(item, scene, width)
                lines += time_charts(scene, rank_series(scene, item), width, 20)
                lines += run_rows(run, width)
        for line in lines:
            assert width_of(line) == width
            assert {style for _, style in line} <= STYLES.keys()


def run_rows(run: RunView, width: int) -> list[Line]:
    return [run_row(run, width, selected=True, shown=False, since_s=math.nan)]


@pytest.mark.parametrize(("width", "height"), SIZES, ids=SIZE_IDS)
def test_a_rank(width: int, height: int) -> None:
    scene = cluster_scene()
    assert scene.rank is not None
    check_lines(f"rank-{width}", rank_page(scene.rank, scene, width), width)


@pytest.mark.parametrize(("width", "height"), SIZES, ids=SIZE_IDS)
def test_a_gpu(width: int, height: int) -> None:
    scene = cluster_scene()
    lines = gpu_page("node3", scene.nodes[3].gpus[0], scene.rank, scene, width)
    check_lines(f"gpu-{width}", lines, width)


def test_a_gpu_that_is_lost() -> None:
    lost = full_gpu(lost="GPU is lost (NVML 15): it fell off the bus", reasons=(), events=())
    scene = cluster_scene()
    lines = gpu_page("node3", lost, None, scene, 80)
    check_lines("gpu-lost-80", lines, 80, 6)


@pytest.mark.parametrize("width", [80, 120, 160])
def test_the_table_of_gpus(width: int) -> None:
    gpus = [
        full_gpu(),
        full_gpu(reasons=(), events=(), lost="GPU is lost (NVML 15)"),
        GpuSample(1, "GPU-x", "T4", {"gpu_util": fakes.unknown("%")}),
        full_gpu(reasons=("idle",), events=()),
    ]
    labels = ["node3/0", "node3/1", "node12/1", "node12/2"]
    columns = gpu_columns(width, labels)
    rank = fakes.rank_view(24)
    rows = [
        gpu_row(label, gpu, rank if i == 0 else None, columns, selected=i == 0, focused=True)
        for i, (label, gpu) in enumerate(zip(labels, gpus, strict=True))
    ]
    check_lines(f"gpus-{width}", [gpu_header(columns), *rows], width)


@pytest.mark.parametrize(("width", "rows"), [(80, 20), (120, 26), (160, 40)])
def test_a_thousand_ranks_on_one_screen(width: int, rows: int) -> None:
    run = fakes.heavy().runs[0]
    lines = heat_lines(run, width, rows, selected=616)
    glyphs = sum(
        sum(text.count(glyph) for glyph in "▁▂▃▄▅▆▇█")
        for line in lines[:-1]
        for text, style in line
        if style.startswith("heat.")
    )
    assert glyphs == 1024
    check_lines(f"heat-1024-{width}", lines, width)


@pytest.mark.parametrize("width", [80, 160])
def test_curves_on_one_axis(width: int) -> None:
    scene = cluster_scene(cursor_s=fakes.NOW_S - 30)
    assert scene.rank is not None
    lines = time_charts(scene, rank_series(scene, scene.rank), width, 14)
    check_lines(f"curves-{width}", lines, width)


@pytest.mark.parametrize("width", [80, 120, 160])
def test_a_finding(width: int) -> None:
    scene = scene_of(fakes.two_ranks())
    check_lines(f"finding-{width}", finding_detail(fakes.few_workers(), scene, width), width)


def test_the_host_with_its_limits() -> None:
    host = HostSample(
        16,
        {
            "cpu_percent": fakes.ok(96.0, "%"),
            "cpu_iowait_percent": fakes.ok(12.0, "%"),
            "memory_used": fakes.ok(3.1e9, "B"),
            "memory_total": fakes.ok(7.8e9, "B"),
            "swap_used": fakes.ok(0.9e9, "B"),
            "load1": fakes.ok(4.1),
            "psi_cpu_some": fakes.ok(34.0, "%"),
            "psi_memory_some": fakes.ok(0.0, "%"),
            "psi_io_some": fakes.unknown("%"),
        },
        io=(
            IoSample(
                "nfs1:/data",
                "dataset",
                "/data/imagenet",
                "nfs4",
                {
                    "read_bytes_per_s": fakes.ok(180e6, "B/s"),
                    "read_latency": fakes.ok(12.4, "ms"),
                },
            ),
            IoSample("sda", "disk", readings={"busy_percent": fakes.ok(0.2, "%")}),
            IoSample(
                "nvme0n1",
                "disk",
                readings={
                    "read_bytes_per_s": fakes.ok(2.1e9, "B/s"),
                    "busy_percent": fakes.ok(71.0, "%"),
                },
            ),
        ),
    )
    rank = fakes.rank_view(0)
    rank = replace(rank, process=with_limits(rank.process))
    node = fakes.node_view(host=host)
    check_lines("host-120", node_lines(node, [rank], 120), 120)


STATES = {
    "live": {},
    "silent": {"since_s": 14.0},
    "paused": {"paused": True},
    "scrolled back": {"paused": True, "cursor_s": fakes.NOW_S - 43.0},
}


def test_headers_in_every_state() -> None:
    states = [scene_of(fakes.two_ranks(), **more) for more in STATES.values()]
    lines = [header_line(scene, 120) for scene in states]
    gone = fakes.rank_view(1, state="gone", state_reason="exit code -9 (killed)")
    pictures = [
        fakes.view([fakes.run_view([fakes.rank_view(0), gone])]),
        fakes.view([fakes.run_view([replace(gone, rank=0), gone], state="ended")]),
        fakes.view([fakes.run_view([fakes.rank_view(state="ended")], state="ended")]),
        fakes.view([fakes.run_view([fakes.rank_view()], simulated=True, lost=7, dropped=3)]),
        replace(fakes.two_ranks(), link="lost", message="the node process 77 does not answer"),
    ]
    for picture in pictures:
        scene = scene_of(picture)
        lines += [header_line(scene, 120), verdict_line(scene, 120)]
    replayed = scene_of(
        replace(fakes.two_ranks(), link="replay"), replay=Replay(192.0, 600.0, paused=False)
    )
    lines.append(header_line(replayed, 120))
    lines.append(header_line(replace(replayed, replay=Replay(0.0, 3_700.0, paused=True)), 80))
    check_lines("headers-120", lines[:-1], 120)
    check_lines("header-replay-80", lines[-1:], 80)


def test_events_newest_first() -> None:
    scene = scene_of(fakes.two_ranks())
    check_lines("events-80", event_page(scene, 80), 80)
    then = replace(scene, cursor_s=fakes.NOW_S - 10)
    assert not any("silent" in text for line in event_lines(then, 80, 8) for text, _ in line)


def test_what_befell_ranks_at_once_is_told_of_all_of_them() -> None:
    at_s = fakes.NOW_S - 5
    events = (
        Event(at_s, "rank 0 on vm: starting", run="r1"),
        Event(at_s + 0.3, "rank 1 on vm: starting", run="r1"),
        Event(at_s + 0.4, "rank 2 on vm: starting", run="r1"),
        Event(at_s + 2, "compile 2.0 s (rank 0), kept out of step statistics", run="r1"),
        Event(at_s + 4, "rank 1 silent", "warning", "r1"),
    )
    newest_first = tuple(reversed(events))
    scene = replace(scene_of(fakes.two_ranks()), events=newest_first)
    for height, told in ((1, 1), (2, 2), (3, 3)):
        lines = [text_of(line) for line in event_lines(scene, 80, height, compact=True)]
        assert len(lines) == told
    assert lines[0].rstrip().endswith("rank 1 silent")
    assert lines[2].rstrip().endswith("ranks 0-2 on vm: starting")
    # What is a while apart, or of another severity, are two things; the log has each.
    apart = replace(scene, events=(newest_first[0], replace(newest_first[0], severity="note")))
    assert len(event_lines(apart, 80, 8, compact=True)) == 2
    whole = [text_of(line) for line in event_page(scene, 80)]
    assert sum("starting" in line for line in whole) == 3


def test_memory_of_unknown_size_has_an_axis_in_gigabytes() -> None:
    scene = cluster_scene()
    gpu = fakes.gpu_sample(0)
    gpu = msgspec.structs.replace(
        gpu, uuid="GPU-new", readings={"memory_used": fakes.ok(61.2e9, "B")}
    )
    text = "\n".join(text_of(line) for line in time_charts(scene, gpu_series(scene, gpu), 120, 14))
    assert "61.2┤" in text
    assert "61.2 GB" in text
    assert ">9999" not in text


def hung() -> Finding:
    """A hang that has come back, with the stack of who is waited for in front."""
    frames = tuple(f"/job/train.py:{n} in call_{n}" for n in range(20))
    return fakes.few_workers(
        kind="hang",
        cost_ms=None,
        share=None,
        summary="rank 1 has not come to step 77",
        hints=(),
        stacks=(RankStack(1, frames), RankStack(0, ("/lib/c10d.py:5 in wait | sure",))),
        life=(
            LifeEvent("opened", 77, fakes.NOW_S - 60),
            LifeEvent("updated", 77, fakes.NOW_S - 50, "severity warning -> critical"),
            LifeEvent("resolved", 78, fakes.NOW_S - 30),
            LifeEvent("reopened", 79, fakes.NOW_S - 9),
        ),
    )


@pytest.mark.parametrize("width", [80, 120])
def test_a_hang_shows_stacks_and_its_life(width: int) -> None:
    lines = finding_detail(hung(), scene_of(fakes.two_ranks()), width)
    check_lines(f"finding-hang-{width}", lines, width)
    text = finding_markdown(hung(), scene_of(fakes.two_ranks()))
    assert "Stack of rank 1:\n\n```text\n/job/train.py:0 in call_0\n" in text
    assert "4 calls further out\n```" in text
    assert "/lib/c10d.py:5 in wait | sure" in text
    assert "- updated at step 77, 14:12:30: severity warning -> critical" in text


def test_a_long_life_is_told_by_its_beginning_and_its_end() -> None:
    life = tuple(LifeEvent("updated", step, 0.0) for step in range(40))
    told = life_texts(fakes.few_workers(life=life))
    assert told[:2] == ["updated at step 0", "32 more turns"]
    assert told[-1] == "updated at step 39"
    assert len(told) == 9


def test_a_hint_is_said_once_and_with_one_number() -> None:
    change = (
        "num_workers 1 -> 7 on ranks 0-1: predicted step 213 -> 148..160 ms; 16 cores, 4.2 busy"
    )
    hint = Hint(change, "num_workers", 1, 7, (148.0, 160.0))
    scene = scene_of(fakes.two_ranks())
    assert scene.summary is not None
    lines = finding_detail(fakes.few_workers(hints=(hint,)), scene, 120)
    text = "\n".join(text_of(line).rstrip() for line in lines)
    assert text.count("num_workers 1 -> 7") == 1
    assert text.count("predicted step") == 1
    assert "213" not in text
    assert "on ranks 0-1; 16 cores, 4.2 busy   gain" in text
    # In a rule's own words, and where it predicts something else than the mean step.
    words = Hint("a cheaper collate_fn: predicted step 213 -> 22..28 ms", "collate_fn")
    assert hint_text(words, 212.0) == words.change
    words = replace(words, predicted_ms=(22.0, 28.0))
    assert hint_text(words, 212.0) == "a cheaper collate_fn: predicted step 212 -> 22..28 ms"
    assert hint_rest(words) == ""
    other = Hint(
        "log every 1 -> 50: predicted step with its part 300 -> 20 ms", "log", 1, 50, (9.0, 9.5)
    )
    assert hint_rest(other).endswith("predicted step with its part 300 -> 20 ms")
