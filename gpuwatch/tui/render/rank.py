"""One rank with everything that is known of it: phases, its last steps, curves, configuration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import ceil, isfinite
from statistics import median

from gpuwatch.schema import PHASES, Reading, StepRecord
from gpuwatch.store.clocks import deciding, deciding_step_ns
from gpuwatch.store.views import RankView, RunView
from gpuwatch.tui.render import numbers
from gpuwatch.tui.render.bars import PHASE_GLYPHS, PHASE_WORDS, phase_bar
from gpuwatch.tui.render.charts import rank_series, time_charts
from gpuwatch.tui.render.text import (
    Line,
    beside,
    blank,
    clip,
    fit,
    hanging,
    heading,
    join,
    pad,
    rpad,
    width_of,
    wrap,
)
from gpuwatch.tui.scene import Scene

__all__ = ["phase_table", "rank_facts", "rank_page", "rank_preview", "recent_steps"]

_TWO_COLUMNS_FROM = 140
_CHART_ROWS = 13
_CELL = 8
_AHEAD = 0.05
"""Own times that differ by less than this share are the same."""


def _stats(values: Sequence[float]) -> tuple[float | None, float | None, float | None]:
    """Return p50, p95 (by the nearest rank) and the greatest."""
    if not values:
        return None, None, None
    ordered = sorted(values)
    return median(ordered), ordered[max(0, ceil(len(ordered) * 0.95) - 1)], ordered[-1]


def _others(run: RunView, rank: RankView) -> Mapping[str, float | None]:
    """Return the medians over the other ranks of their means: of each phase, of step and own.

    By comprehensions alone: this is asked of a thousand ranks at every tick.
    """
    number = rank.rank
    others = [other for other in run.ranks if other.rank != number]
    splits = [other.phases_ms for other in others]
    columns: dict[str, list[float | None]] = {
        name: [split.get(name) for split in splits] for name in PHASES
    }
    columns["step"] = [other.step_ms for other in others]
    columns["own"] = [other.own_ms for other in others]
    return {name: _middle(values) for name, values in columns.items()}


def _middle(values: list[float | None]) -> float | None:
    """Return the median of what is known and finite."""
    known = [value for value in values if value is not None]
    if not isfinite(sum(known)):
        known = [value for value in known if isfinite(value)]
    if not known:
        return None
    known.sort()
    half = len(known) // 2
    return known[half] if len(known) % 2 else (known[half - 1] + known[half]) / 2


def _delta(value: float | None, others: float | None) -> str:
    if value is None or others is None or not isfinite(value):
        return ""
    difference = value - others
    if abs(difference) < 0.05:
        return "0"
    digits = 1 if abs(difference) < 99.95 else 0
    return f"{difference:+,.{digits}f}"


def _note(rank: RankView, name: str, records: Sequence[StepRecord], others: float | None) -> str:
    """Return what is to be said of a phase beside its numbers; `others` is their own time."""
    if rank.phases_ms.get(name) is None and rank.step_ms is not None:
        return rank.phases_na.get(name, "not measured")
    if name == "data_wait":
        depths = [r.queue_depth for r in records if r.queue_depth is not None]
        if depths:
            empty = sum(depth < 0.5 for depth in depths)
            return f"nothing ready in {empty} of {len(depths)} steps"
    if name == "comm":
        own = rank.own_ms
        if own is not None and others is not None and others > 0.0:
            if own > others * (1 + _AHEAD):
                return "the other ranks wait for this one"
            if own < others * (1 - _AHEAD):
                return "waits for slower ranks"
    return ""


def phase_table(run: RunView, rank: RankView, width: int) -> list[Line]:
    """Return the phases of the window: mean, p50, p95, greatest, and against the other ranks."""
    several = len(run.ranks) > 1
    others: Mapping[str, float | None] = _others(run, rank) if several else {}
    records = tuple(rank.window)  # of a large run each look makes them anew
    steps = len(records)
    title = f"last {steps} steps" if steps else "means, ms"
    columns = ["mean"] + (["p50", "p95", "max"] if steps else []) + (["others"] if several else [])
    head: Line = [(f" {pad(title, 15)}", "dim")]
    head += [(rpad(name, _CELL), "dim") for name in columns]
    lines = [fit(head, width)]
    rows: list[tuple[str, str, str, float | None, list[float]]] = []
    for name in PHASES:
        known = [
            value / 1e6
            for record in records
            if (value := getattr(deciding(record), name)) is not None
        ]
        rows.append((name, PHASE_GLYPHS[name], PHASE_WORDS[name], rank.phases_ms.get(name), known))
    rows.append(("step", " ", "step", rank.step_ms, [deciding_step_ns(r) / 1e6 for r in records]))
    rows.append(("own", " ", "own time", rank.own_ms, []))
    below: list[str] = []
    for name, glyph, words, mean, known in rows:
        style = f"phase.{name}" if name in PHASES else "dim"
        whole = name in ("step", "own")
        line: Line = [(f" {glyph} ", style), (pad(words, 13), "strong" if whole else "text")]
        number = "strong" if mean is not None else "faint"
        line.append((rpad(numbers.ms(mean), _CELL), number))
        if steps:
            line += [
                (rpad(numbers.ms(value) if value is not None else "", _CELL), "text")
                for value in _stats(known)
            ]
        if several:
            delta = _delta(mean, others.get(name))
            line.append((rpad(delta, _CELL), "accent" if delta not in ("", "0") else "dim"))
        note = _note(rank, name, records, others.get("own")) if not whole else ""
        if note and width_of(line) + 3 + len(note) <= width:
            line.append((f"   {note}", "dim"))
        elif note:
            below.append(f"{words}: {note}")
        lines.append(fit(line, width))
    # What has no room beside its numbers is said below them, whole.
    for text in below:
        lines += [fit([("   ", "text"), (row, "dim")], width) for row in wrap(text, width - 5)]
    return lines


def recent_steps(rank: RankView, width: int, rows: int) -> list[Line]:
    """Return the newest steps of the window as bars on one scale, newest first."""
    records = rank.window[-rows:]
    if not records or rows <= 0:
        return []
    scale_ms = max(deciding_step_ns(record) for record in records) / 1e6
    track = max(8, width - 34)
    lines = []
    for record in reversed(records):
        phases = deciding(record)
        split = {
            name: None if (value := getattr(phases, name)) is None else value / 1e6
            for name in PHASES
        }
        tags = " ".join(record.tags)
        line: Line = [(f" {rpad(f'{record.index:,}', 9)} ", "dim")]
        line += phase_bar(split, track, scale_ms)
        line += [
            (rpad(numbers.ms(deciding_step_ns(record) / 1e6), 8), "strong"),
            (f"  {tags}", "dim"),
        ]
        lines.append(fit(line, width))
    return lines


def _megabytes(size: int) -> str:
    mega = size / 1e6
    return f"{mega:.2g} MB" if mega < 9.95 else f"{mega:,.0f} MB"


def _yes(value: bool) -> str:
    return "on" if value else "off"


def _plain(item: Reading | None, text: str) -> str:
    value = numbers.reading_value(item)
    return "" if value is None else text.format(value)


def _loader(rank: RankView) -> list[str]:
    hello = rank.hello
    if hello is None or not hello.loaders:
        return []
    key = rank.window[-1].loader if rank.window else ""
    loader = next((item for item in hello.loaders if item.key == key), hello.loaders[0])
    facts = [f"num_workers {loader.num_workers}"]
    if loader.prefetch_factor is not None:
        facts.append(f"prefetch_factor {loader.prefetch_factor}")
    if rank.queue_depth is not None:
        capacity = f" of {rank.queue_capacity}" if rank.queue_capacity else ""
        facts.append(f"ready {rank.queue_depth:.1f}{capacity}")
    if rank.batch_wall_ms is not None:
        cpu = f", {numbers.duration(rank.batch_cpu_ms)} CPU" if rank.batch_cpu_ms else ""
        facts.append(f"a batch costs {numbers.duration(rank.batch_wall_ms)}{cpu}")
    elif rank.batch_na:
        facts.append(f"batch cost n/a: {rank.batch_na}")
    facts += [
        f"pin_memory {_yes(loader.pin_memory)}",
        f"persistent_workers {_yes(loader.persistent_workers)}",
    ]
    if loader.batch_size is not None:
        facts.append(f"batch_size {loader.batch_size:,}")
    if loader.batch_bytes is not None:
        facts.append(f"{_megabytes(loader.batch_bytes)} a batch")
    if loader.start_method:
        facts.append(f"workers by {loader.start_method}")
    if loader.dataset:
        facts.append(loader.dataset)
    return facts


def _precision(rank: RankView) -> list[str]:
    if rank.hello is None:
        return []
    precision = rank.hello.precision
    facts = [f"autocast {precision.autocast or 'off'}"]
    if precision.float32_matmul:
        facts.append(f"float32 matmul {precision.float32_matmul}")
    if precision.cudnn_tf32 is not None:
        facts.append(f"cudnn tf32 {_yes(precision.cudnn_tf32)}")
    if precision.grad_scaler:
        facts.append("GradScaler on")
    last = rank.last
    if last is not None:
        if last.loss_scale is not None:
            facts.append(f"loss scale {numbers.loss(last.loss_scale)}")
        if last.grad_norm is not None:
            facts.append(f"grad norm {numbers.loss(last.grad_norm)}")
        if last.learning_rate is not None:
            facts.append(f"lr {numbers.loss(last.learning_rate)}")
        if last.padding_share is not None:
            facts.append(f"padding {numbers.share(last.padding_share)}")
    return facts


def _ddp(rank: RankView) -> list[str]:
    if rank.hello is None:
        return []
    facts = list(rank.hello.parallel)
    ddp = rank.hello.ddp
    if ddp is not None:
        if ddp.bucket_bytes:
            number = len(ddp.bucket_bytes)
            plural = "s" if number != 1 else ""
            facts.append(f"{number} bucket{plural}, {_megabytes(sum(ddp.bucket_bytes))}")
        elif ddp.gradient_bytes is not None:
            facts.append(f"{_megabytes(ddp.gradient_bytes)} of gradients")
        if ddp.bucket_cap_mb is not None:
            facts.append(f"bucket_cap_mb {ddp.bucket_cap_mb:g}")
        if ddp.backend:
            facts.append(ddp.backend)
        if ddp.find_unused_parameters:
            facts.append("find_unused_parameters on")
        if ddp.static_graph:
            facts.append("static_graph on")
        if ddp.comm_hook:
            facts.append(f"hook {ddp.comm_hook}")
        if ddp.broadcast_buffers and ddp.buffers:
            facts.append(f"broadcasts {ddp.buffers:,} buffers")
    return facts


def _process(rank: RankView) -> list[str]:
    if rank.process is None:
        return []
    read = rank.process.readings
    facts = [f"pid {rank.process.pid}", f"cpu {numbers.reading(read.get('cpu_percent'), '%')}"]
    facts.append(f"rss {numbers.bytes_pair(numbers.reading_bytes(read.get('rss')))}")
    facts.append(_plain(read.get("threads"), "{:.0f} threads"))
    cores = numbers.reading_value(read.get("affinity_cores"))
    if cores is not None:
        facts.append(f"may use {cores:.0f} core{'s' if cores != 1 else ''}")
    facts.append(_plain(read.get("numa_node"), "NUMA node {:.0f}"))
    facts.append(_plain(read.get("cpu_quota_cores"), "quota {:.1f} cores"))
    facts.append(_plain(read.get("cpu_throttled_percent"), "throttled {:.0f}%"))
    limit = numbers.reading_bytes(read.get("memory_limit"))
    if limit is not None:
        used = numbers.reading_bytes(read.get("memory_limit_used"))
        facts.append(f"cgroup memory {numbers.bytes_pair(used, limit)}")
    rate = numbers.reading_value(read.get("read_bytes_per_s"))
    if rate is not None:
        facts.append(f"reads {numbers.bytes_rate(rate)}")
    return [fact for fact in facts if fact]


def _workers(rank: RankView) -> list[str]:
    if not rank.workers:
        return []
    loads = [numbers.reading_value(item.readings.get("cpu_percent")) for item in rank.workers]
    known = [value for value in loads if value is not None]
    facts = [f"{len(rank.workers)} process{'es' if len(rank.workers) != 1 else ''}"]
    if known:
        facts += [f"cpu {sum(known):.0f}% together", f"busiest {max(known):.0f}%"]
    waiting = sum(item.status == "D" for item in rank.workers)
    if waiting:
        facts.append(f"{waiting} blocked in the kernel (D)")
    return facts


def _device(rank: RankView, scene: Scene) -> list[str]:
    hello, gpu = rank.hello, scene.gpu(rank)
    if hello is None:
        return []
    if gpu is None:
        return [hello.device_name or hello.device]
    read = gpu.readings
    memory = numbers.bytes_pair(
        numbers.reading_bytes(read.get("memory_used")),
        numbers.reading_bytes(read.get("memory_total")),
    )
    facts = [
        f"gpu {gpu.index}",
        gpu.name,
        f"util {numbers.reading(read.get('gpu_util'), '%')}",
        f"SM active {numbers.reading(read.get('sm_active'), '%')}",
        f"mem {memory}",
        numbers.reading(read.get("power"), "W"),
        numbers.reading(read.get("temperature"), "°C"),
    ]
    if gpu.reasons:
        facts.append(f"clocks held by {', '.join(gpu.reasons)}")
    if gpu.lost:
        facts.append(gpu.lost)
    return [fact for fact in facts if fact]


def _goodput(rank: RankView) -> list[str]:
    ledger = rank.ledger
    wall_ns = ledger.wall_ns
    if not wall_ns:
        return []
    named = {
        "training": ledger.training_ns,
        "data wait": ledger.data_wait_ns,
        "comm": ledger.comm_ns,
        "eval": ledger.eval_ns,
        "checkpoint": ledger.checkpoint_ns,
    }
    rest_ns = max(0, wall_ns - sum(named.values()))
    named["lost"] = rest_ns
    return [
        f"{name} {numbers.share(value / wall_ns)}"
        for name, value in named.items()
        if value / wall_ns >= 0.005 or name == "training"
    ] + [f"of {numbers.clock(wall_ns / 1e9)}"]


def _versions(rank: RankView) -> list[str]:
    if rank.hello is None:
        return []
    versions = rank.hello.versions
    named = {"torch": versions.torch, "cuda": versions.cuda, "nccl": versions.nccl}
    named |= {"python": versions.python, "gpuwatch": versions.gpuwatch}
    return [f"{name} {value}" for name, value in named.items() if value] + list(
        rank.hello.frameworks
    )


def rank_facts(rank: RankView, scene: Scene, width: int) -> list[Line]:
    """Return what is configured and what the machine says, one subject a line or more."""
    telemetry = [f"{rank.lost:,} frames lost", f"{rank.dropped:,} records dropped"]
    if rank.restarts:
        telemetry.append(f"restarted {rank.restarts} times")
    sections = (
        ("loader", _loader(rank)),
        ("precision", _precision(rank)),
        ("parallel", _ddp(rank)),
        ("process", _process(rank)),
        ("workers", _workers(rank)),
        ("device", _device(rank, scene)),
        ("wall time", _goodput(rank)),
        ("telemetry", telemetry),
        ("versions", _versions(rank)),
    )
    lines: list[Line] = []
    for title, facts in sections:
        if not facts:
            continue
        for i, row in enumerate(_packed(facts, width - 14)):
            lines.append(fit([(f" {pad(title if i == 0 else '', 11)}", "dim"), *row], width))
    for text in rank.notices:
        lines += hanging([(" ▲ ", "warning")], text, "text", width)
    return lines


def _packed(facts: Sequence[str], width: int) -> list[Line]:
    """Put facts beside each other, as many a line as fit, none broken."""
    lines: list[Line] = []
    row: list[Line] = []
    used = 0
    for fact in facts:
        text = clip(fact, width)
        if row and used + 3 + len(text) > width:
            lines.append(join(row, ("   ", "text"), width))
            row, used = [], 0
        row.append([(text, "text")])
        used += len(text) + (3 if used else 0)
    if row:
        lines.append(join(row, ("   ", "text"), width))
    return lines


def _state_lines(rank: RankView, scene: Scene, width: int) -> list[Line]:
    """Return why a rank is in trouble, and nothing where it is not."""
    since = scene.since_s
    if rank.state == "silent":
        text = f" ▲ silent {numbers.age(rank.age_s + since)}: {rank.state_reason}"
        return [fit([(text, "warning")], width)]
    if rank.state == "gone":
        return [fit([(f" ✖ gone: {rank.state_reason}", "critical")], width)]
    if rank.state == "hung":
        where = f"in {rank.phase} for {numbers.age(rank.phase_age_s + since)}"
        text = f" ✖ hung {where}; t shows where it stands"
        return [fit([(text, "critical")], width)]
    if rank.state == "ended":
        return [fit([(f" ended: {rank.state_reason}", "accent")], width)]
    return []


def _title(rank: RankView) -> str:
    return f"Rank {rank.rank}  {rank.node}"


def rank_page(rank: RankView, scene: Scene, width: int) -> list[Line]:
    """Return the page of one rank; wide ones have the curves beside the numbers."""
    run = scene.run
    if run is None:
        return []
    pid = f"pid {rank.pid}  " if rank.pid else ""
    note = f"{pid}step {rank.steps:,}  {rank.state}"
    clock = f"{rank.clock} clock"
    lines = [heading(_title(rank), width, note=note, right=clock, focused=True)]
    lines += _state_lines(rank, scene, width)
    two = width >= _TWO_COLUMNS_FROM
    right = width * 45 // 100 if two else width
    left = width - right - 2 if two else width
    table = phase_table(run, rank, left)
    curves = time_charts(scene, rank_series(scene, rank), right, _CHART_ROWS)
    steps = recent_steps(rank, width, 8 if two else 5)
    if scene.cursor_s is not None:
        steps = [fit([(" the single steps of that moment are not kept", "dim")], width)]
    if two:
        lines += beside(table, curves, left, right)
    else:
        lines += table
    lines += [blank(width), heading("Newest steps", width, note="ms, each on the same scale")]
    lines += steps or [fit([(" no steady step yet", "dim")], width)]
    if not two:
        lines += [blank(width), heading("Time", width), *curves]
    lines += [blank(width), heading("Configuration and process", width)]
    lines += rank_facts(rank, scene, width)
    return lines


def rank_preview(rank: RankView | None, scene: Scene, width: int, height: int) -> list[Line]:
    """Return the selected rank beside the table: its phases, curves and facts, as they fit."""
    run = scene.run
    if rank is None or run is None:
        return []
    lines = [heading(_title(rank), width, right="enter")]
    lines += _state_lines(rank, scene, width)
    lines += phase_table(run, rank, width)
    lines.append(blank(width))
    room = height - len(lines)
    if room >= 4:
        lines += time_charts(scene, rank_series(scene, rank), width, min(room, _CHART_ROWS))
    if height - len(lines) > 2:
        lines.append(blank(width))
        lines += rank_facts(rank, scene, width)
    return lines[:height]
