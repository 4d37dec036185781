"""The memory of a rank as a page."""

from __future__ import annotations

from gpuwatch.store.views import RankView
from gpuwatch.tui.answers import CudaMemory, MemoryAnswer, TensorKind
from gpuwatch.tui.render import numbers
from gpuwatch.tui.render.bars import gauge
from gpuwatch.tui.render.text import Line, fit, hanging, heading, pad, rpad, width_of

__all__ = ["memory_lines", "memory_markdown", "size_text", "waiting_lines"]

_CHILDREN = 8
_KINDS = 12
_LABEL = 14


def size_text(value: float | None) -> str:
    """Return bytes in at most 7 cells: `180 MB`, `61.2 GB`, `n/a`."""
    if value is not None and 9.95e9 <= value < 99.95e9:
        return f"{value / 1e9:.1f} GB"
    return numbers.bytes_rate(value).removesuffix("/s")


def waiting_lines(
    title: str, rank: RankView | None, text: str, width: int, *, problem: bool = False
) -> list[Line]:
    """Return a page that has nothing to show yet, or never: one sentence says why."""
    note = ""
    if rank is not None and rank.phase:
        note = f"in {rank.phase} for {numbers.age(rank.phase_age_s)}, step {rank.steps:,}"
    lines = [heading(title, width, note=note, focused=True), fit([("", "text")], width)]
    lead, style = (" ▲ ", "warning") if problem else (" ", "dim")
    return [*lines, *hanging([(lead, style)], text, "text" if problem else "dim", width)]


def _entry(label: str, parts: list[tuple[str, str]], width: int) -> Line:
    return fit([(f"   {pad(label, _LABEL)}", "dim"), *parts], width)


def _long(
    label: str, parts: list[tuple[str, str]], text: str, style: str, width: int
) -> list[Line]:
    """Return an entry whose last part takes as many lines as it needs."""
    return hanging([(f"   {pad(label, _LABEL)}", "dim"), *parts], text, style, width)


def _na(label: str, reason: str, width: int) -> list[Line]:
    """Return n/a with its reason, all of it."""
    return _long(label, [], f"n/a: {reason}" if reason else "n/a", "dim", width)


def memory_lines(
    rank: int, node: str, answer: MemoryAnswer, age_s: float, width: int
) -> list[Line]:
    """Return the answer: the process, its devices, its tensors."""
    note = f"on {node}, {numbers.age(age_s)} old" if node else f"{numbers.age(age_s)} old"
    blank = fit([("", "text")], width)
    lines = [heading(f"Memory of rank {rank}", width, note=note, focused=True), blank]
    lines += _process(answer, width)
    lines += [blank, heading("CUDA allocator", width)]
    if answer.cuda:
        for device in answer.cuda:
            lines += _device(device, width)
    else:
        lines += _na("devices", answer.cuda_reason or "the rank has told none", width)
    lines += [blank, heading("Tensors", width)]
    tensors = answer.tensors
    if tensors is None:
        lines += _na("tensors", answer.tensors_reason or "they were not counted", width)
        return lines
    total = f"{numbers.count(tensors.count)} of {size_text(tensors.bytes)} together"
    lines.append(_entry("all", [(total, "strong")], width))
    for kind in tensors.largest[:_KINDS]:
        lines += _kind(kind, tensors.bytes, width)
    return lines


def _process(answer: MemoryAnswer, width: int) -> list[Line]:
    lines = [heading("Process", width)]
    shared = f"{size_text(answer.shared_bytes)} of it shared"
    lines.append(
        _entry(
            "resident",
            [(rpad(size_text(answer.rss_bytes), 9), "strong"), (f"   {shared}", "text")],
            width,
        )
    )
    lines.append(_entry("virtual", [(rpad(size_text(answer.vms_bytes), 9), "text")], width))
    children = answer.children
    if children is None:
        lines += _na("children", "they could not be read", width)
    elif not children:
        lines.append(_entry("children", [("none", "dim")], width))
    else:
        known = [child.rss_bytes for child in children if child.rss_bytes is not None]
        total = size_text(sum(known) if known else None)
        number = len(children)
        words = f"   {number} process{'es' if number != 1 else ''}, resident together"
        lines.append(_entry("children", [(rpad(total, 9), "strong"), (words, "text")], width))
        largest = sorted(children, key=lambda child: -(child.rss_bytes or 0))
        for child in largest[:_CHILDREN]:
            pid = f"pid {child.pid}" if child.pid is not None else "pid n/a"
            parts = [(rpad(size_text(child.rss_bytes), 9), "text"), ("   ", "dim")]
            lines += _long(f"  {pid}", parts, child.name, "dim", width)
        if number > _CHILDREN:
            lines.append(_entry("", [(f"{number - _CHILDREN} smaller ones", "faint")], width))
    if answer.python is not None:
        counts = answer.python.gc_counts
        words = f"{numbers.count(answer.python.objects)} objects"
        if answer.python.objects is None:
            words = "objects n/a: they are counted with the tensors"
        if counts:
            shown = "/".join("n/a" if count is None else str(count) for count in counts)
            words += f", the collector's counters {shown}"
        lines += _long("python", [], words, "text", width)
    return lines


def _device(device: CudaMemory, width: int) -> list[Line]:
    number = "GPU" if device.device is None else f"{device.device}"
    label = number if number.startswith(("GPU", "cuda")) else f"cuda:{number}"
    retries, ooms = numbers.count(device.retries), numbers.count(device.ooms)
    bad = bool(device.retries or device.ooms)
    told: Line = [(f"out of memory {ooms}   cache freed {retries}", "warning" if bad else "dim")]
    name: Line = [(device.name or "n/a", "strong")]
    if _LABEL + width_of(name) + width_of(told) + 7 <= width:
        lines = [_entry(label, [*name, ("   ", "text"), *told], width)]
    else:
        lines = [*_long(label, [], name[0][0], "strong", width), _entry("", told, width)]
    rows = (
        ("  allocated", device.allocated_bytes, device.peak_allocated_bytes),
        ("  reserved", device.reserved_bytes, device.peak_reserved_bytes),
    )
    total = device.total_bytes
    for label, now, peak in rows:
        share = now / total if now is not None and total else None
        parts = [
            (rpad(size_text(now), 9), "strong"),
            (f"   peak {rpad(size_text(peak), 7)}   ", "text"),
        ]
        if total:
            parts += gauge(share, max(8, min(32, width - 58)))
            parts.append((f" {numbers.share(share)} of {size_text(total)}", "dim"))
        lines.append(_entry(label, parts, width))
    free = f"   of {size_text(total)}, what other processes hold taken off"
    lines.append(
        _entry("  free", [(rpad(size_text(device.free_bytes), 9), "strong"), (free, "dim")], width)
    )
    return lines


def _shape(kind: TensorKind) -> str:
    if kind.shape is None:
        return numbers.NA
    if isinstance(kind.shape, str):
        return kind.shape
    return "x".join(str(size) for size in kind.shape) or "scalar"


def _kind(kind: TensorKind, total: int | None, width: int) -> list[Line]:
    share = kind.bytes / total if kind.bytes is not None and total else None
    what = f"{_shape(kind)}  {kind.dtype.removeprefix('torch.')}  {kind.device}"
    parts = [
        (rpad(size_text(kind.bytes), 9), "text"),
        (f" {rpad(numbers.share(share), 4)}  ", "dim"),
        (rpad(f"{numbers.count(kind.count)} x", 9) + " ", "text"),
    ]
    return _long("", parts, what.strip(), "text", width)


def _cell(value: object) -> str:
    return " ".join(str(value).split()).replace("|", "\\|") or "n/a"


def memory_markdown(run: str, rank: int, node: str, answer: MemoryAnswer) -> str:
    """Return the answer as Markdown, for a message or an issue."""
    where = f" on {_cell(node)}" if node else ""
    lines = [
        f"## Memory of rank {rank} of {_cell(run)}{where}",
        "",
        f"- process: {size_text(answer.rss_bytes)} resident, {size_text(answer.shared_bytes)} of "
        f"it shared, {size_text(answer.vms_bytes)} virtual",
    ]
    lines += [
        f"- child {child.pid} {_cell(child.name)}: {size_text(child.rss_bytes)}"
        for child in answer.children or ()
    ]
    if answer.python is not None:
        lines.append(f"- Python: {numbers.count(answer.python.objects)} objects")
    lines.append("")
    if answer.cuda:
        lines += [
            "| device | allocated | peak | reserved | peak | free | total | OOMs | retries |",
            "|---|---:|---:|---:|---:|---:|---:|---:|---:|",
        ]
        for item in answer.cuda:
            sizes = (
                *(item.allocated_bytes, item.peak_allocated_bytes, item.reserved_bytes),
                *(item.peak_reserved_bytes, item.free_bytes, item.total_bytes),
            )
            cells = [
                _cell(f"{'' if item.device is None else item.device} {item.name}"),
                *(size_text(size) for size in sizes),
                numbers.count(item.ooms),
                numbers.count(item.retries),
            ]
            lines.append(f"| {' | '.join(cells)} |")
        lines.append("")
    else:
        lines += [f"CUDA: n/a ({_cell(answer.cuda_reason or 'no device was told')})", ""]
    tensors = answer.tensors
    if tensors is None:
        lines += [f"Tensors: n/a ({_cell(answer.tensors_reason or 'they were not counted')})", ""]
        return "\n".join(lines)
    lines += [
        f"{numbers.count(tensors.count)} tensors, {size_text(tensors.bytes)}:",
        "",
        "| shape | dtype | device | count | bytes |",
        "|---|---|---|---:|---:|",
    ]
    for kind in tensors.largest:
        lines.append(
            f"| {_cell(_shape(kind))} | {_cell(kind.dtype)} | {_cell(kind.device)} "
            f"| {numbers.count(kind.count)} | {size_text(kind.bytes)} |"
        )
    return "\n".join([*lines, ""])
