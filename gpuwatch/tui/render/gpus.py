"""Devices: the table of all of them, and one with every reading it gives or does not give."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from gpuwatch.schema import GpuSample, Reading
from gpuwatch.store.views import RankView
from gpuwatch.tui.render import numbers
from gpuwatch.tui.render.bars import gauge
from gpuwatch.tui.render.charts import Series, gpu_series, rank_series, time_charts
from gpuwatch.tui.render.text import (
    Line,
    beside,
    blank,
    clip,
    fit,
    hanging,
    heading,
    pad,
    rpad,
    wrap,
)
from gpuwatch.tui.scene import GPU_SORTS, Scene

__all__ = [
    "GpuColumns",
    "gpu_columns",
    "gpu_header",
    "gpu_page",
    "gpu_preview",
    "gpu_row",
    "gpu_sort_under",
]

_TWO_COLUMNS_FROM = 140

_ACTIVE = "clocks set by an application"
_QUIET_REASONS = frozenset({"idle", _ACTIVE, "display clock setting", "sync boost"})
"""Reasons for a clock that hold nothing back."""


@dataclass(frozen=True, slots=True)
class GpuColumns:
    """Widths in cells; `names` are the readings that have a column, `gauge` 0 leaves it out."""

    width: int
    label: int
    names: tuple[str, ...]
    gauge: int


_COLUMNS = {
    "gpu_util": ("util", 6, "%"),
    "sm_active": ("SM", 6, "%"),
    "sm_occupancy": ("occ", 6, "%"),
    "tensor_active": ("tensor", 8, "%"),
    "dram_active": ("dram", 6, "%"),
    "memory": ("mem GB", 11, ""),
    "power": ("W", 6, ""),
    "temperature": ("°C", 5, ""),
    "sm_clock": ("MHz", 7, ""),
}
"""Reading -> heading, cells, unit behind the number."""

_SORTS = {"memory": "memory_used"}
"""Columns that are sorted by a reading of another name."""

_NARROW = ("gpu_util", "sm_active", "memory", "power", "temperature")
_WIDE = tuple(_COLUMNS)


def gpu_columns(width: int, labels: Sequence[str]) -> GpuColumns:
    """Choose the columns of a table of `width` cells; `labels` are the names in it."""
    label = max(8, min(20, max([len(text) for text in labels], default=0) + 1))
    names = _WIDE if width >= label + 80 else _NARROW
    used = label + 8 + sum(_COLUMNS[name][1] for name in names) + 16
    return GpuColumns(width, label, names, max(0, min(10, width - used)) if width > used + 4 else 0)


def gpu_label(node: str, gpu: GpuSample, several: bool) -> str:
    """Return how a device is called: its node where there are several, and its index."""
    name = f"{gpu.index}{'.' + gpu.slice if gpu.slice else ''}"
    return f"{node}/{name}" if several else f"gpu {name}"


def gpu_header(columns: GpuColumns) -> Line:
    """Return the names of the columns."""
    line: Line = [(f" {pad('device', columns.label)}{rpad('rank', 6)}", "dim")]
    if columns.gauge:
        line.append((" " * (columns.gauge + 2), "text"))
    for name in columns.names:
        title, cells, _ = _COLUMNS[name]
        line.append((rpad(title, cells), "dim"))
    line.append(("  limits", "dim"))
    return fit(line, columns.width)


def gpu_sort_under(columns: GpuColumns, x: int) -> str | None:
    """Return what the head of the column at a cell sorts by, None where it is not sorted by."""
    spans = [(1 + columns.label, "index"), (6, ""), (columns.gauge and columns.gauge + 2, "")]
    spans += [(_COLUMNS[name][1], _SORTS.get(name, name)) for name in columns.names]
    for size, name in spans:
        if x < size:
            return name if name in GPU_SORTS else None
        x -= size
    return None


def _memory(gpu: GpuSample) -> tuple[float | None, float | None]:
    read = gpu.readings
    return (
        numbers.reading_bytes(read.get("memory_used")),
        numbers.reading_bytes(read.get("memory_total")),
    )


def _held(gpu: GpuSample) -> list[str]:
    return [reason for reason in gpu.reasons if reason not in _QUIET_REASONS]


def _last_word(gpu: GpuSample) -> tuple[str, str]:
    """Return what a row ends with: what is wrong with the device, most important first."""
    if gpu.lost:
        return f"✖ {gpu.lost}", "critical"
    hard = [event for event in gpu.events if event.hardware]
    if hard:
        return f"✖ {hard[-1].text}", "critical"
    held = _held(gpu)
    if held:
        return f"▲ {', '.join(held)}", "warning"
    if gpu.events:
        return f"· {gpu.events[-1].text}", "note"
    return "", "dim"


def gpu_row(
    label: str,
    gpu: GpuSample,
    rank: RankView | None,
    columns: GpuColumns,
    *,
    selected: bool = False,
    focused: bool = False,
) -> Line:
    """Return one row of exactly `columns.width` cells."""
    mark = "▌" if selected and focused else "▏" if selected else " "
    line: Line = [(mark, "focus" if focused else "dim")]
    line.append((pad(label, columns.label), "strong" if selected else "text"))
    line.append((rpad("-" if rank is None else str(rank.rank), 6), "text" if rank else "faint"))
    if columns.gauge:
        util = numbers.reading_value(gpu.readings.get("gpu_util"))
        line.append(("  ", "text"))
        line += gauge(None if util is None else util / 100.0, columns.gauge)
    for name in columns.names:
        _, cells, unit = _COLUMNS[name]
        if name == "memory":
            text = numbers.bytes_pair(*_memory(gpu)).removesuffix(" GB")
        else:
            value = numbers.reading_value(gpu.readings.get(name))
            text = numbers.NA if value is None else f"{value:,.0f}{unit}"
        line.append((rpad(text, cells), "text" if text != numbers.NA else "faint"))
    text, style = _last_word(gpu)
    line.append((f"  {text}", style))
    return fit(line, columns.width)


_READINGS = (
    ("gpu_util", "GPU-Util", "%", "time in which any kernel ran"),
    ("sm_active", "SM active", "%", "share of cycles"),
    ("sm_occupancy", "SM occupancy", "%", "warps resident of those possible"),
    ("tensor_active", "tensor active", "%", "share of cycles"),
    ("dram_active", "DRAM active", "%", "share of cycles"),
    ("memory_used", "memory used", "B", ""),
    ("memory_total", "memory total", "B", ""),
    ("power", "power", "W", ""),
    ("power_limit", "power limit", "W", ""),
    ("temperature", "temperature", "°C", ""),
    ("memory_temperature", "memory temp.", "°C", ""),
    ("sm_clock", "SM clock", "MHz", ""),
    ("sm_clock_max", "SM clock, most", "MHz", ""),
    ("memory_clock", "memory clock", "MHz", ""),
    ("fan", "fan", "%", ""),
    ("pcie_rx", "PCIe in", "B/s", ""),
    ("pcie_tx", "PCIe out", "B/s", ""),
    ("nvlink_rx", "NVLink in", "B/s", ""),
    ("nvlink_tx", "NVLink out", "B/s", ""),
)
"""Reading, what it is called, its unit, what it means. Others follow under their own names."""


def _shown(item: Reading, unit: str) -> str:
    value = numbers.reading_value(item)
    if value is None:
        return numbers.NA
    if unit == "B":
        size = numbers.reading_bytes(item)
        return numbers.bytes_pair(size)
    if unit == "B/s":
        return numbers.bytes_rate(value)
    if unit == "%":
        return f"{value:.0f} %"
    return f"{value:,.0f} {unit}".rstrip()


def _reading_lines(gpu: GpuSample, width: int, *, brief: bool = False) -> list[Line]:
    """Return every reading: name, value, then what it means, or why there is none.

    `brief`: what is known is not explained.
    """
    lines: list[Line] = []
    named = {name for name, *_ in _READINGS}
    rows = [*_READINGS]
    rows += [
        (name, name, item.unit, "") for name, item in gpu.readings.items() if name not in named
    ]
    for name, words, unit, meaning in rows:
        item = gpu.readings.get(name)
        if item is None:
            continue
        text = _shown(item, unit)
        known = text != numbers.NA
        rest = ("" if brief else meaning) if known else item.reason
        if known and item.state in ("stale", "error"):
            rest = f"{item.state}, {numbers.age(item.age_s)} old: {item.reason}"
        line: Line = [
            (f" {pad(words, 16)}", "dim"),
            (rpad(text, 11), "strong" if known else "dim"),
        ]
        source = f"[{item.source}]" if item.source else ""
        room = width - 33 - len(source)
        rows_of_rest = wrap(rest, room) if rest else [""]
        style = "faint" if known else "text"
        line.append((f"   {pad(rows_of_rest[0], room)}", style))
        lines.append(fit([*line, (source, "faint")], width))
        lines += [fit([(" " * 31, "text"), (row, style)], width) for row in rows_of_rest[1:]]
    if gpu.driver or gpu.driver_reason:
        value, style = (gpu.driver, "strong") if gpu.driver else (numbers.NA, "dim")
        told: Line = [(f" {pad('driver', 16)}", "dim"), (rpad(clip(value, 24), 11), style)]
        lines.append(fit([*told, (f"   {gpu.driver_reason}", "text")], width))
    return lines


def _process_lines(gpu: GpuSample, scene: Scene, width: int) -> list[Line]:
    if not gpu.processes:
        why = gpu.processes_reason or "no process holds its memory"
        return [fit([(f" {why}", "dim")], width)]
    ranks = {}
    if scene.run is not None:
        ranks = {rank.pid: rank.rank for rank in scene.run.ranks if rank.pid}
    lines = []
    for item in sorted(gpu.processes, key=lambda p: -(p.memory_bytes or 0)):
        memory = numbers.bytes_pair(item.memory_bytes)
        line: Line = [
            (f" {rpad(str(item.pid), 8)}", "text"),
            (rpad(memory, 9), "strong" if memory != numbers.NA else "dim"),
            (f"  {pad(f'rank {ranks[item.pid]}' if item.pid in ranks else '', 9)}", "accent"),
            (pad(item.kind, 9), "dim"),
            (pad(clip(item.user, 12), 13), "dim"),
            (item.name or "", "text"),
        ]
        if not item.visible:
            line.append(("  not in this process table", "warning"))
        lines.append(fit(line, width))
    return lines


def _trouble(gpu: GpuSample, width: int) -> list[Line]:
    lines: list[Line] = []
    if gpu.lost:
        lines += hanging([(" ✖ ", "critical")], gpu.lost, "text", width)
    held = _held(gpu)
    quiet = [reason for reason in gpu.reasons if reason in _QUIET_REASONS]
    if held:
        text = f"clocks held back by {', '.join(held)}"
        lines += hanging([(" ▲ ", "warning")], text, "text", width)
    if quiet:
        lines += hanging([("   ", "text")], f"clocks: {', '.join(quiet)}", "dim", width)
    for event in gpu.events:
        glyph, style = ("✖", "critical") if event.hardware else ("·", "note")
        when = time.strftime("%H:%M:%S", time.localtime(event.time_s)) if event.time_s else ""
        lines += hanging([(f" {glyph} ", style), (pad(when, 10), "dim")], event.text, "text", width)
    return lines


def _curves(gpu: GpuSample, rank: RankView | None, scene: Scene) -> list[Series]:
    """Return the device's curves, with its rank's data wait and stall between them."""
    curves = gpu_series(scene, gpu)
    if rank is None:
        return curves
    _, wait, stall, *_ = rank_series(scene, rank)
    return [curves[0], curves[1], stall, wait, *curves[2:]]


def _title(node: str, gpu: GpuSample) -> str:
    return f"GPU {node}/{gpu.index}{'.' + gpu.slice if gpu.slice else ''}"


def gpu_page(
    node: str, gpu: GpuSample, rank: RankView | None, scene: Scene, width: int
) -> list[Line]:
    """Return the page of one device: curves, what holds it back, every reading, processes."""
    note = gpu.name + (f"  rank {rank.rank}" if rank is not None else "  no rank of this run")
    simulated = "SIMULATED" if scene.run is not None and scene.run.simulated else ""
    lines = [heading(_title(node, gpu), width, note=note, right=simulated, focused=True)]
    lines += _trouble(gpu, width)
    lines += time_charts(scene, _curves(gpu, rank, scene), width, 15)
    lines.append(blank(width))
    if width >= _TWO_COLUMNS_FROM:
        right = width * 42 // 100
        left = width - right - 2
        lines += beside(
            [heading("Readings", left, right="n/a says why"), *_reading_lines(gpu, left)],
            [heading("Processes", right), *_process_lines(gpu, scene, right)],
            left,
            right,
        )
        return lines
    lines += [heading("Readings", width, right="n/a says why"), *_reading_lines(gpu, width)]
    lines += [blank(width), heading("Processes", width), *_process_lines(gpu, scene, width)]
    return lines


def gpu_preview(
    node: str, gpu: GpuSample, rank: RankView | None, scene: Scene, width: int, height: int
) -> list[Line]:
    """Return the selected device beside the table, as much as fits."""
    note = gpu.name + (f"  rank {rank.rank}" if rank is not None else "")
    lines = [heading(_title(node, gpu), width, note=clip(note, width - 30), right="enter")]
    lines += _trouble(gpu, width)
    lines += time_charts(scene, _curves(gpu, rank, scene), width, min(15, height - len(lines)))
    if height - len(lines) > 3:
        lines += [blank(width), *_reading_lines(gpu, width, brief=True)]
    return lines[:height]
