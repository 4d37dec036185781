"""Curves under each other on one time axis: what the steps did beside what the device did."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite

from gpuwatch.schema import GpuSample, Reading
from gpuwatch.store.views import RankView
from gpuwatch.tui.past import Point, grid
from gpuwatch.tui.render import numbers
from gpuwatch.tui.render.braille import braille_rows
from gpuwatch.tui.render.text import Line, cells, clip, fit, pad, rpad
from gpuwatch.tui.scene import Scene

__all__ = [
    "Series",
    "axis_line",
    "gpu_series",
    "moment_under",
    "rank_series",
    "time_charts",
    "window_of",
]

_LABEL = 13
_AXIS = 7
_NOW = 9
_LEAST_TRACK = 8


@dataclass(frozen=True, slots=True)
class Series:
    """One curve. `high` None takes the greatest value; `reason` says why there is none.

    `whole`: the axis is labelled without decimals.
    """

    label: str
    points: Sequence[Point]
    now: str
    high: float | None = None
    high_text: str = ""
    style: str = "spark"
    reason: str = ""
    whole: bool = False


def track_of(width: int) -> int:
    """Return the cells of a curve in a picture of that width."""
    return max(_LEAST_TRACK, width - _LABEL - _AXIS - 2 - _NOW)


def window_of(scene: Scene) -> tuple[float, float]:
    """Return the end of the time axis and its length in seconds.

    It ends now; where the person has scrolled back beyond it, the moment is in the middle.
    """
    end_s = scene.end_s
    if scene.cursor_s is not None and scene.cursor_s < end_s - scene.span_s:
        end_s = min(end_s, scene.cursor_s + scene.span_s / 2)
    return end_s, scene.span_s


_EDGE = "┤"
_ZOOM = f"{'+ -':<4}zoom"


def moment_under(line: Line, scene: Scene, x: int) -> float | None:
    """Return the wall-clock time at a cell of a curve or of its axis, None where there is none.

    The curve may stand beside something else; it reaches to the end of the line.
    """
    text = "".join([piece for piece, _ in line])
    edge = text.find(_EDGE)
    if edge < 0:
        edge = text.find(f" {_ZOOM} ") + _LABEL + _AXIS
        if edge < _LABEL + _AXIS:
            return None
    edge = cells(text[:edge])
    track = track_of(cells(text) - (edge - _LABEL - _AXIS))
    cell = x - edge - 1
    if not 0 <= cell < track:
        return None
    end_s, span_s = window_of(scene)
    return end_s - span_s + cell / (track - 1) * span_s


def axis_line(scene: Scene, width: int) -> Line:
    """Return the axis: its length, where findings opened, and the moment that is shown."""
    track = track_of(width)
    end_s, span_s = window_of(scene)
    cells = [" "] * track

    def place(text: str, at_s: float) -> bool:
        at = round((at_s - end_s + span_s) / span_s * (track - 1))
        at = min(at, track - len(text))
        free = at >= 0 and all(cell == " " for cell in cells[max(0, at - 1) : at + len(text) + 1])
        if free:
            cells[at : at + len(text)] = text
        return free

    cursor = scene.cursor_s
    if cursor is not None:
        place("┃", cursor)
    left = f"-{numbers.age(span_s + scene.end_s - end_s)}"
    if track >= 24:
        place(left, end_s - span_s)
        place("now" if end_s >= scene.end_s else f"-{numbers.age(scene.end_s - end_s)}", end_s)
    for item in scene.findings:
        if item.id and end_s - span_s <= item.opened_s <= end_s:
            place(f"▲{item.id}", item.opened_s)
    text = "".join(cells)
    line: Line = [(f" {pad(_ZOOM, _LABEL - 1)}", "faint"), (" " * (_AXIS + 1), "text")]
    at = text.find("┃")
    if at < 0:
        line.append((text, "dim"))
    else:
        line += [(text[:at], "dim"), ("┃", "cursor"), (text[at + 1 :], "dim")]
    return fit(line, width)


def _high(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None and isfinite(value)]
    return max(known) if known else None


def _chart(item: Series, scene: Scene, width: int, rows: int, hold_s: float) -> list[Line]:
    track = track_of(width)
    label = pad(item.label, _LABEL - 1)
    if item.reason:
        return [
            fit(
                [
                    (f" {label}", "dim"),
                    (rpad("n/a", _AXIS), "dim"),
                    (f"  {clip(item.reason, width - _LABEL - _AXIS - 3)}", "faint"),
                ],
                width,
            )
        ]
    end_s, span_s = window_of(scene)
    values = grid(item.points, end_s, span_s, 2 * track, hold_s)
    high = item.high if item.high is not None else _high(values)
    text = item.high_text or (f"{high:,.0f}" if item.whole and high else numbers.ms(high))
    if item.high is None and not item.high_text and high is None:
        text = ""
    drawn = braille_rows(values, track, rows, 0.0, high if high else 1.0)
    lines: list[Line] = []
    for y, row in enumerate(drawn):
        left: Line = [(f" {label}" if y == 0 else " " * _LABEL, "dim")]
        mark = text if y == 0 else "0" if y == rows - 1 else ""
        left.append((f"{rpad(mark, _AXIS)}{_EDGE}", "faint"))
        now = rpad(item.now, _NOW) if y == 0 else ""
        lines.append(fit([*left, (row, item.style), (now, "strong")], width))
    return lines


def time_charts(scene: Scene, series: Sequence[Series], width: int, height: int) -> list[Line]:
    """Return curves over the window of the scene and their axis, at most `height` lines.

    The first ones are the most important: they are drawn taller, the last ones are left out.
    """
    room = height - 1
    if room <= 0 or not series:
        return []
    shown = list(series)[:room]
    spare = room - len(shown)
    rows = [1] * len(shown)
    given = True
    while spare > 0 and given:
        given = False
        for i, item in enumerate(shown):
            if spare > 0 and not item.reason and rows[i] < 3:
                rows[i] += 1
                spare -= 1
                given = True
    ranks = len(scene.run.ranks) if scene.run is not None else 0
    hold_s = 1.6 * (scene.past.interval_s(ranks) if scene.past is not None else 1.0)
    lines: list[Line] = []
    for item, count in zip(shown, rows, strict=True):
        lines += _chart(item, scene, width, count, hold_s)
    lines.append(axis_line(scene, width))
    return lines[:height]


def _kept(scene: Scene, rank: RankView, field: str) -> list[Point]:
    if scene.past is None or scene.run is None:
        return []
    return scene.past.rank_points(scene.run.run, rank.rank, field)


def _joined(kept: list[Point], newer: list[Point]) -> list[Point]:
    """Return what was kept before the newer points begin, and these."""
    if not newer:
        return kept
    return [point for point in kept if point[0] < newer[0][0]] + newer


def _has(points: Sequence[Point]) -> bool:
    return any(value is not None for _, value in points)


def _reason(reading: Reading | None, fallback: str) -> str:
    return (reading.reason if reading is not None else "") or fallback


def _device(scene: Scene, gpu: GpuSample, field: str, label: str) -> Series:
    """Return a percentage of a device as a curve."""
    reading = gpu.readings.get(field)
    run = scene.run.run if scene.run is not None else ""
    points = scene.past.gpu_points(run, gpu.uuid, field) if scene.past is not None else []
    value = numbers.reading_value(reading)
    if value is not None and not points:
        points = [(scene.end_s, value)]
    reason = "" if _has(points) else _reason(reading, "not reported")
    return Series(label, points, numbers.percent(value), 100.0, "100", reason=reason)


def gpu_series(scene: Scene, gpu: GpuSample) -> list[Series]:
    """Return the curves of a device: GPU-Util, SM active, memory, power."""
    run = scene.run.run if scene.run is not None else ""
    past = scene.past
    total = numbers.reading_bytes(gpu.readings.get("memory_total"))
    used = numbers.reading_bytes(gpu.readings.get("memory_used"))
    power = numbers.reading_value(gpu.readings.get("power"))
    limit = numbers.reading_value(gpu.readings.get("power_limit"))

    def points(field: str, value: float | None) -> list[Point]:
        kept = past.gpu_points(run, gpu.uuid, field) if past is not None else []
        return kept if _has(kept) or value is None else [(scene.end_s, value)]

    memory = points("memory_used", used)
    # Where the size of the device is not known the curve has its own greatest value on top.
    most = total or _high([value for _, value in memory])
    watts = points("power", power)
    return [
        _device(scene, gpu, "gpu_util", "GPU-util %"),
        _device(scene, gpu, "sm_active", "SM active %"),
        Series(
            "memory GB",
            memory,
            numbers.bytes_pair(used),
            most,
            f"{most / 1e9:.{0 if total else 1}f}" if most else "",
            reason="" if _has(memory) else _reason(gpu.readings.get("memory_used"), "not reported"),
        ),
        Series(
            "power W",
            watts,
            numbers.NA if power is None else f"{power:.0f} W",
            limit,
            f"{limit:.0f}" if limit else "",
            reason="" if _has(watts) else _reason(gpu.readings.get("power"), "not reported"),
            whole=True,
        ),
    ]


def rank_series(scene: Scene, rank: RankView) -> list[Series]:
    """Return the curves of a rank: step, data wait, device stall, then its device or its memory.

    Steps are the longest of each second, so that one that stalled is seen.
    """
    steps: list[Point] = [(float(p.second_s + 1), p.max_ms) for p in rank.timeline]
    waits: list[Point] = [(float(p.second_s + 1), p.data_wait_ms) for p in rank.timeline]
    steps = _joined(_kept(scene, rank, "second_max_ms"), steps)
    waits = _joined(_kept(scene, rank, "second_wait_ms"), waits)
    stalls = _kept(scene, rank, "stall_ms")
    known = [value for _, value in steps if value is not None and isfinite(value)]
    top = max(known) if known else None
    now_stall = rank.device_stall_ms
    stall_reason = ""
    if not _has(stalls):
        stall_reason = (
            "the host clock decides: no device to stall"
            if rank.clock == "host"
            else "no device times yet"
        )
    wait_reason = "" if _has(waits) else rank.phases_na.get("data_wait", "no step yet")
    series = [
        Series(
            "step ms max",
            steps,
            numbers.ms(rank.step_ms),
            top,
            reason="" if _has(steps) else "no step yet",
        ),
        Series(
            "data wait ms",
            waits,
            numbers.ms(rank.phases_ms.get("data_wait")),
            top,
            style="phase.data_wait",
            reason=wait_reason,
        ),
        Series("stall ms", stalls, numbers.ms(now_stall), top, reason=stall_reason),
    ]
    gpu = scene.gpu(rank)
    if gpu is not None:
        return [*series, *gpu_series(scene, gpu)[:3]]
    cpu = _kept(scene, rank, "cpu_percent")
    memory = _kept(scene, rank, "memory_gb")
    extra: list[Series] = []
    if _has(cpu):
        last = cpu[-1][1]
        extra.append(Series("rank cpu %", cpu, numbers.percent(last), whole=True))
    if _has(memory):
        last = memory[-1][1]
        extra.append(Series("memory GB", memory, numbers.NA if last is None else f"{last:.2f} GB"))
    return [*series, *extra]
