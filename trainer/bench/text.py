"""Tables and numbers for a terminal."""

import textwrap
from collections.abc import Sequence

__all__ = ["counted", "mebibytes", "ms", "percent", "prose", "rows_of"]

_WIDTH = 100


def prose(*sentences: str | None) -> list[str]:
    """Each sentence on lines of its own, at most 100 characters; None is left out."""
    return [
        line
        for sentence in sentences
        if sentence
        for line in textwrap.wrap(sentence, _WIDTH, break_long_words=False, break_on_hyphens=False)
    ]


def rows_of(head: Sequence[str], rows: Sequence[Sequence[str]], *, left: int = 1) -> list[str]:
    """Lines of aligned columns, two spaces apart; the first `left` to the left, others right."""
    widths = [max(len(line[i]) for line in (head, *rows)) for i in range(len(head))]
    return [
        "  ".join(
            cell.ljust(width) if column < left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in (head, *rows)
    ]


def counted(number: int, noun: str) -> str:
    """A number with its noun, in the plural where it has to be."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def ms(value: float | None) -> str:
    """Milliseconds with three digits."""
    if value is None:
        return "n/a"
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def percent(share: float | None) -> str:
    """A share as a percentage."""
    return "n/a" if share is None else f"{share:.0%}"


def mebibytes(count: int | None) -> str:
    """Bytes in MiB."""
    if count is None:
        return "n/a"
    size = count / 2**20
    return f"{size:,.0f} MiB" if size >= 10 else f"{size:.1f} MiB"
