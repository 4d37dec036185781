"""Numbers as the screens show them: fixed widths, `n/a` for what is not known, never 0 for it."""

from math import isfinite

from gpuwatch.schema import Reading

__all__ = [
    "NA",
    "age",
    "bytes_pair",
    "bytes_rate",
    "clock",
    "count",
    "duration",
    "known",
    "loss",
    "ms",
    "percent",
    "reading",
    "reading_bytes",
    "reading_value",
    "share",
]

NA = "n/a"

_MINUTE_S = 60
_HOUR_S = 3600
_DAY_S = 86400

_BYTES = {"B": 1.0, "KiB": 2.0**10, "MiB": 2.0**20, "GiB": 2.0**30, "MB": 1e6, "GB": 1e9}


def known(value: float | None) -> bool:
    """Tell whether there is a number that can be drawn: not None, NaN or infinite."""
    return value is not None and isfinite(value)


def ms(value: float | None) -> str:
    """Return a duration in ms in at most 7 cells: `0.04`, `231.4`, `12,481`, `183 s`, `3 h`.

    One decimal below 1,000 keeps the digits of a column aligned; beyond 100,000 the unit changes
    and is said.
    """
    if value is None or not isfinite(value):
        return NA
    value = max(value, 0.0)
    if value < 999.95:
        return f"{value:.1f}"
    if value < 99_999.5:
        return f"{value:,.0f}"
    seconds = value / 1000.0
    if seconds < 9_999.5:
        return f"{seconds:.0f} s"
    hours = seconds / _HOUR_S
    return f"{hours:.0f} h" if hours < 9_999.5 else ">9999 h"


def duration(value: float | None) -> str:
    """Return a duration in ms with its unit, for sentences: `231 ms`, `4.2 ms`, `183 s`."""
    if value is None or not isfinite(value):
        return NA
    if value < 99.95:
        return f"{value:.1f} ms"
    if value < 99_999.5:
        return f"{value:,.0f} ms"
    return ms(value)


def count(value: float | None) -> str:
    """Return a count with thousands separated; three significant digits and more below 100."""
    if value is None or not isfinite(value):
        return NA
    if isinstance(value, int) or abs(value) >= 99.95:
        return f"{value:,.0f}"
    return f"{value:.1f}"


def share(value: float | None) -> str:
    """Return a ratio 0..1 as a percentage: `39%`."""
    if value is None or not isfinite(value):
        return NA
    return f"{value * 100.0:.0f}%"


def percent(value: float | None) -> str:
    """Return a value that is already in percent: `39%`."""
    if value is None or not isfinite(value):
        return NA
    return f"{value:.0f}%"


def loss(value: float | None) -> str:
    """Return a loss; NaN and infinity are news and are shown as such."""
    if value is None:
        return NA
    if not isfinite(value):
        return f"{value}"
    return f"{value:.4g}"


def age(seconds: float | None) -> str:
    """Return an age in at most 6 cells: `0.3 s`, `14 s`, `3 m`, `2 h`, `5 d`."""
    if seconds is None or not isfinite(seconds):
        return NA
    seconds = max(0.0, seconds)
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    if seconds < 120:
        return f"{seconds:.0f} s"
    if seconds < 2 * _HOUR_S:
        return f"{seconds / _MINUTE_S:.0f} m"
    if seconds < 2 * _DAY_S:
        return f"{seconds / _HOUR_S:.0f} h"
    return f"{seconds / _DAY_S:.0f} d"


def clock(seconds: float | None) -> str:
    """Return elapsed time as `00:41:07`, with days in front where there are any."""
    if seconds is None or not isfinite(seconds) or seconds < 0:
        return "--:--:--"
    whole = int(seconds)
    days, rest = divmod(whole, _DAY_S)
    hours, rest = divmod(rest, _HOUR_S)
    minutes, secs = divmod(rest, _MINUTE_S)
    text = f"{hours:02d}:{minutes:02d}:{secs:02d}"
    return f"{days}d {text}" if days else text


def reading_value(item: Reading | None) -> float | None:
    """Return the number of a reading, or None where it has none that can be drawn."""
    if item is None or item.value is None or item.state in ("na", "error"):
        return None
    return item.value if isfinite(item.value) else None


def reading_bytes(item: Reading | None) -> float | None:
    """Return a reading of memory in bytes, whatever its unit; None where it is unknown."""
    value = reading_value(item)
    if value is None or item is None:
        return None
    scale = _BYTES.get(item.unit)
    return None if scale is None else value * scale


def reading(item: Reading | None, unit: str = "") -> str:
    """Return a reading as text, `n/a` where there is none: `71%`, `412 W`."""
    value = reading_value(item)
    if value is None:
        return NA
    if unit == "%":
        return percent(value)
    text = f"{value:.0f}" if abs(value) >= 9.95 else f"{value:.1f}"
    return f"{text} {unit}" if unit else text


def _gigabytes(value: float) -> str:
    giga = value / 1e9
    return f"{giga:.0f}" if giga >= 99.5 else f"{giga:.1f}"


def bytes_pair(used: float | None, total: float | None = None) -> str:
    """Return memory as `3.1/7.8 GB`, `3.1 GB` where the total is unknown, or `n/a`."""
    if used is None or not isfinite(used):
        return NA
    if total is None or not isfinite(total):
        return f"{_gigabytes(used)} GB"
    return f"{_gigabytes(used)}/{_gigabytes(total)} GB"


def bytes_rate(value: float | None) -> str:
    """Return bytes a second in at most 9 cells: `0 B/s`, `180 MB/s`, `3.1 GB/s`."""
    if value is None or not isfinite(value):
        return NA
    for unit in ("B", "kB", "MB", "GB"):
        if abs(value) < 999.5 or unit == "GB":
            digits = 1 if unit != "B" and abs(value) < 9.95 else 0
            return f"{value:,.{digits}f} {unit}/s"
        value /= 1000.0
    return NA
