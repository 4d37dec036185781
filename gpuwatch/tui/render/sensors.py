"""Sensor readings by name, and the panel of one node: host, processes, devices.

Readings are looked up under the names below; a reading that is missing is n/a, never 0.
"""

from collections.abc import Sequence

from gpuwatch.schema import GpuSample, HostSample, IoSample, ProcessSample
from gpuwatch.store.views import NodeView, RankView
from gpuwatch.tui.render import numbers
from gpuwatch.tui.render.bars import gauge
from gpuwatch.tui.render.text import Line, clip, fit, heading, join, pad, rpad, spread

__all__ = ["device_figures", "host_row", "node_heading", "node_lines"]

CPU = "cpu_percent"
LOAD = "load1"
MEMORY_USED = "memory_used"
MEMORY_TOTAL = "memory_total"
RSS = "rss"
GPU_UTIL = "gpu_util"
SM_ACTIVE = "sm_active"
POWER = "power"
TEMPERATURE = "temperature"


def _mean(values: Sequence[float | None]) -> float | None:
    present = [value for value in values if value is not None]
    return sum(present) / len(present) if present else None


def device_figures(gpus: Sequence[GpuSample]) -> list[tuple[str, str]]:
    """Return label and text of what the header says about devices; empty without devices."""
    if not gpus:
        return []
    util = _mean([numbers.reading_value(gpu.readings.get(GPU_UTIL)) for gpu in gpus])
    active = _mean([numbers.reading_value(gpu.readings.get(SM_ACTIVE)) for gpu in gpus])
    used = [numbers.reading_bytes(gpu.readings.get(MEMORY_USED)) for gpu in gpus]
    total = [numbers.reading_bytes(gpu.readings.get(MEMORY_TOTAL)) for gpu in gpus]
    return [
        ("GPU-util", numbers.percent(util)),
        ("SM-active", numbers.percent(active)),
        ("mem", numbers.bytes_pair(_mean(used), _mean(total))),
    ]


def node_heading(
    node: NodeView | None,
    number: int,
    since_s: float,
    width: int,
    simulated: bool = False,
    past: bool = False,
) -> Line:
    """Return the heading of the node panel; `number` is how many nodes there are.

    In a picture of the `past` it says that the host is not: only of devices the past is kept.
    """
    if node is None:
        return heading("Host", width)
    note = f"{node.host.cores} cores" if node.host is not None and node.host.cores else ""
    if number > 1:
        note = f"{note}  1 of {number} nodes".strip()
    right = "SIMULATED" if simulated else ""
    if node.sensors_age_s is not None:
        age_s = node.sensors_age_s + since_s
        # A second is the sampler's own beat; only what is older deserves a word.
        if age_s >= 5.0:
            right = f"{right}  sampled {numbers.age(age_s)} ago".strip()
    if past and node.host is not None:
        right = f"{right}  the host as it is now".strip()
    return heading(clip(node.node, 24) or "Host", width, note=note, right=right)


def _meter(label: str, fraction: float | None, text: str, rest: str, width: int) -> Line:
    """One labelled gauge: label, track, value, and what else belongs to it."""
    track = max(6, min(24, width - 40))
    line: Line = [(f" {pad(label, 8)}", "dim"), *gauge(fraction, track), (" ", "text")]
    known = text != numbers.NA
    line.append((rpad(text, 12), "text" if known else "dim"))
    if rest:
        line.append((f"  {rest}", "dim"))
    return fit(line, width)


def _process_line(
    rank: RankView, workers: Sequence[ProcessSample], width: int, cores: int = 0
) -> Line:
    process = rank.process
    readings = process.readings if process is not None else {}
    cpu = numbers.reading_value(readings.get(CPU))
    rss = numbers.reading_bytes(readings.get(RSS))
    line: Line = [
        (f" {pad(f'rank {rank.rank}', 8)}", "dim"),
        ("cpu ", "dim"),
        (rpad(numbers.percent(cpu), 5), "text" if cpu is not None else "dim"),
        ("  rss ", "dim"),
        (rpad(numbers.bytes_pair(rss), 7), "text" if rss is not None else "dim"),
    ]
    if workers:
        loads = [numbers.reading_value(item.readings.get(CPU)) for item in workers]
        total = [value for value in loads if value is not None]
        noun = "worker" if len(workers) == 1 else "workers"
        line += [
            (f"  {rpad(str(len(workers)), 3)} {noun} cpu ", "dim"),
            (numbers.percent(sum(total) if total else None), "text"),
        ]
        if len(workers) > 1 and total:
            line.append((f"  busiest {max(total):.0f}%", "dim"))
    elif rank.hello is not None and rank.hello.loaders:
        asked = max(loader.num_workers for loader in rank.hello.loaders)
        line.append(("  loads in the training process" if asked == 0 else "  workers n/a", "dim"))
    quota = numbers.reading_value(readings.get("cpu_quota_cores"))
    if quota is not None:
        held = numbers.reading_value(readings.get("cpu_throttled_percent"))
        line.append((f"  quota {quota:g} cores", "dim"))
        style = "warning" if held is not None and held >= 1.0 else "dim"
        line.append((f" throttled {numbers.percent(held)}", style))
    allowed = numbers.reading_value(readings.get("affinity_cores"))
    if allowed is not None and cores and allowed < cores:
        line.append((f"  on {allowed:.0f} of {cores} cores", "dim"))
    return fit(line, width)


def _gpu_line(gpu: GpuSample, ranks: Sequence[RankView], width: int) -> Line:
    util = numbers.reading_value(gpu.readings.get(GPU_UTIL))
    active = numbers.reading_value(gpu.readings.get(SM_ACTIVE))
    memory = numbers.bytes_pair(
        numbers.reading_bytes(gpu.readings.get(MEMORY_USED)),
        numbers.reading_bytes(gpu.readings.get(MEMORY_TOTAL)),
    )
    owner = [rank.rank for rank in ranks if rank.hello and rank.hello.device_uuid == gpu.uuid]
    track = 8
    line: Line = [(f" {pad(f'gpu {gpu.index}', 8)}", "dim")]
    line += gauge(None if util is None else util / 100.0, track)
    line += [
        (" util ", "dim"),
        (rpad(numbers.percent(util), 4), "text" if util is not None else "dim"),
        (" sm ", "dim"),
        (rpad(numbers.percent(active), 4), "text" if active is not None else "dim"),
    ]
    parts: list[Line] = [
        line,
        [("mem ", "dim"), (rpad(memory, 12), "text" if memory != numbers.NA else "dim")],
    ]
    if gpu.lost:
        parts.append([("✖ lost", "critical")])
    if owner:
        parts.append([(f"rank {owner[0]}", "dim")])
    parts.append([(rpad(numbers.reading(gpu.readings.get(POWER), "W"), 6), "dim")])
    parts.append([(rpad(numbers.reading(gpu.readings.get(TEMPERATURE), "°C"), 6), "dim")])
    if gpu.name:
        parts.append([(clip(gpu.name, 20), "dim")])
    return fit(join(parts, ("  ", "text"), width), width)


def _host_lines(node: NodeView, width: int) -> list[Line]:
    if node.host is None:
        why = node.sensors_reason or "the sampler has not reported yet"
        return [fit([(f" host n/a: {why}", "dim")], width)]
    readings = node.host.readings
    cpu = numbers.reading_value(readings.get(CPU))
    load = numbers.reading_value(readings.get(LOAD))
    rest = f"load {load:.1f}" if load is not None else "load n/a"
    waiting = numbers.reading_value(readings.get("cpu_iowait_percent"))
    if waiting is not None and waiting >= 1.0:
        rest += f"  waits for disks {waiting:.0f}%"
    fraction = None if cpu is None else cpu / 100.0
    lines = [_meter("cpu", fraction, numbers.percent(cpu), rest, width)]
    used = numbers.reading_bytes(readings.get(MEMORY_USED))
    total = numbers.reading_bytes(readings.get(MEMORY_TOTAL))
    fraction = used / total if used is not None and total else None
    swap = numbers.reading_bytes(readings.get("swap_used"))
    rest = f"swap {numbers.bytes_pair(swap)}" if swap and swap >= 5e7 else ""
    lines.append(_meter("ram", fraction, numbers.bytes_pair(used, total), rest, width))
    return lines


_PRESSURES = (("cpu", "psi_cpu_some"), ("memory", "psi_memory_some"), ("io", "psi_io_some"))


def _pressure_line(host: HostSample, width: int) -> list[Line]:
    """Return for how much of the time tasks stood still for want of CPU, memory or disks."""
    values = [
        (name, numbers.reading_value(host.readings.get(reading))) for name, reading in _PRESSURES
    ]
    if all(value is None for _, value in values):
        return []
    line: Line = [(f" {pad('stalled', 8)}", "dim")]
    for name, value in values:
        style = "dim" if value is None else "warning" if value >= _PRESSED else "text"
        line += [(f"{name} ", "dim"), (rpad(numbers.percent(value), 4), style), ("   ", "text")]
    line.append(("of the time", "faint"))
    return [fit(line, width)]


_PRESSED = 10.0
"""From this share of the time on pressure is worth a colour; judging is the rules' task."""


def _io_lines(host: HostSample, width: int, rows: int) -> list[Line]:
    """Return where datasets lie, then the busiest disks: what they give and how long it takes."""

    def busy(sample: IoSample) -> float:
        return numbers.reading_value(sample.readings.get("busy_percent")) or 0.0

    data = [sample for sample in host.io if sample.kind == "dataset"]
    below = {sample.name for sample in data}
    disks = [s for s in host.io if s.kind == "disk" and s.name not in below and busy(s) >= 1.0]
    lines: list[Line] = []
    for sample in [*data, *sorted(disks, key=busy, reverse=True)][:rows]:
        read = sample.readings
        rate = numbers.reading_value(read.get("read_bytes_per_s"))
        wait = numbers.reading_value(read.get("read_latency"))
        used = numbers.reading_value(read.get("busy_percent"))
        label = "data" if sample.kind == "dataset" else "disk"
        line: Line = [(f" {pad(label, 8)}", "dim"), (rpad(numbers.bytes_rate(rate), 9), "text")]
        line.append((" read", "dim"))
        if wait is not None:
            line += [("  ", "text"), (numbers.duration(wait), "text"), (" a read", "dim")]
        if used is not None:
            line += [("  busy ", "dim"), (numbers.percent(used), "text")]
        where = " on ".join(text for text in (sample.path, sample.name) if text)
        if sample.filesystem and sample.kind == "dataset":
            where += f" ({sample.filesystem})"
        line.append((f"  {where}", "faint"))
        lines.append(fit(line, width))
    return lines


def host_row(node: NodeView | None, number: int, width: int) -> Line:
    """Return heading and host in one line, for a short terminal."""
    if node is None:
        return heading("Host", width)
    parts: list[Line] = [[(clip(node.node, 16), "title")]]
    if number > 1:
        parts.append([(f"1 of {number} nodes", "dim")])
    if node.host is None:
        why = node.sensors_reason or "the sampler has not reported yet"
        parts.append([(f"host n/a: {why}", "dim")])
    else:
        readings = node.host.readings
        cpu = numbers.reading_value(readings.get(CPU))
        used = numbers.reading_bytes(readings.get(MEMORY_USED))
        total = numbers.reading_bytes(readings.get(MEMORY_TOTAL))
        load = numbers.reading_value(readings.get(LOAD))
        cores = f" of {node.host.cores} cores" if node.host.cores else ""
        parts.append([("cpu ", "dim"), (numbers.percent(cpu), "text"), (cores, "dim")])
        parts.append([("load ", "dim"), (numbers.NA if load is None else f"{load:.1f}", "text")])
        parts.append([("ram ", "dim"), (numbers.bytes_pair(used, total), "text")])
    left: Line = [(" ", "text"), *join(parts, ("  ", "text"), width - 2), (" ", "text")]
    return spread(left, [], width, "─", "rule")


def node_lines(
    node: NodeView | None,
    ranks: Sequence[RankView],
    width: int,
    *,
    compact: bool = False,
    devices: bool = True,
) -> list[Line]:
    """Return the lines of a node: CPU, memory, its ranks' processes, its devices.

    `ranks` are the run's ranks in the order in which they should be shown; those of other nodes
    are left out. `compact` leaves out the host, which `host_row` has, `devices` False the devices.
    """
    if node is None:
        return [fit([(" n/a: no node has been heard of yet", "dim")], width)]
    lines = [] if compact else _host_lines(node, width)
    here = [rank for rank in ranks if rank.node == node.node]
    cards = [_gpu_line(gpu, here, width) for gpu in node.gpus] if devices else []
    cores = node.host.cores if node.host is not None else 0
    processes = [_process_line(rank, rank.workers, width, cores) for rank in here[:8]]
    if not node.gpus and devices:
        why = node.gpus_reason or "not reported yet"
        cards = [fit([(f" no GPUs: {why}", "dim")], width)]
    lines += cards + processes if node.gpus else processes + cards
    if len(here) > 8:
        lines.append(fit([(f" … {len(here) - 8} more ranks on this node", "dim")], width))
    if not compact and node.host is not None:
        lines += _pressure_line(node.host, width)
        lines += _io_lines(node.host, width, 3)
    for text in node.notices:
        lines.append(fit([(" ▲ ", "warning"), (text, "warning")], width))
    return lines
