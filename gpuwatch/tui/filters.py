"""The filter of a list: words that must all hold.

`24` and `8-15` are ranks (for devices: those of these ranks), `!word` is a word that must not
hold; everything else is looked for in the names at hand: node, state, finding id, kind, model.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from gpuwatch.schema import GpuSample
from gpuwatch.store.views import RankView

if TYPE_CHECKING:
    from gpuwatch.diagnosis.types import Finding

__all__ = ["filter_findings", "filter_gpus", "filter_ranks", "matches"]

_RANKS = re.compile(r"(\d{1,7})(?:(?:-|\.\.)(\d{1,7}))?")


def matches(words: str, numbers: Iterable[int], names: Iterable[str]) -> bool:
    """Tell whether something with these numbers and names passes a filter."""
    known = [name.casefold() for name in names if name]
    own = set(numbers)
    for raw in words.casefold().split():
        word = raw.removeprefix("!")
        if not word:
            continue
        found = _RANKS.fullmatch(word)
        if found is not None:
            first, last = int(found[1]), int(found[2] or found[1])
            holds = any(first <= number <= last for number in own)
        else:
            holds = any(word in name for name in known)
        if holds == raw.startswith("!"):
            return False
    return True


def filter_ranks(words: str, ranks: Sequence[RankView], flags: Mapping[int, str]) -> list[int]:
    """Return the positions in `ranks` that pass; `flags` are the findings on a rank."""
    if not words.strip():
        return list(range(len(ranks)))
    return [
        i
        for i, rank in enumerate(ranks)
        if matches(words, [rank.rank], [rank.node, rank.state, flags.get(rank.rank, "")])
    ]


def filter_findings(words: str, findings: Sequence[Finding]) -> tuple[Finding, ...]:
    """Return the findings that pass."""
    if not words.strip():
        return tuple(findings)
    return tuple(
        item
        for item in findings
        if matches(
            words,
            item.ranks,
            [item.id, item.kind, item.severity, item.summary, item.state, *item.nodes],
        )
    )


def filter_gpus(
    words: str, gpus: Sequence[tuple[str, GpuSample, int | None]]
) -> list[tuple[str, GpuSample, int | None]]:
    """Return the devices that pass, each as (node, device, rank on it or None)."""
    if not words.strip():
        return list(gpus)
    return [
        item
        for item in gpus
        if matches(
            words,
            [] if item[2] is None else [item[2]],
            [item[0], f"{item[0]}/{item[1].index}", item[1].name, item[1].uuid, *item[1].reasons],
        )
    ]
