"""The stacks of a hang: asked of the ranks that stand, once for each hang, and read.

A rank's telemetry thread answers while its training thread stands. Asking is the one thing here
that acts on the world; it goes through the function that the engine was given.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from gpuwatch.diagnosis.aligned import ranks_text
from gpuwatch.diagnosis.types import Evidence, Finding, RankStack
from gpuwatch.errors import GpuwatchError
from gpuwatch.store.views import RankView, RunView

__all__ = ["Ask", "HangStacks", "read_stack"]

Ask = Callable[[str, str, int | None], str]
"""Sends (verb, run, rank) and returns the id that the answer will carry."""

MOST_RANKS = 16
"""Whom the others wait for comes first; of hundreds that wait in one place a few say it all."""

_KEPT_FRAMES = 40
_EVIDENCE_RANKS = 8
_FRAME = re.compile(r'^\s*File "(.+)", line (\d+), in (.+)$')
_MAIN = "Thread MainThread:"
_LIBRARY = re.compile(r"site-packages|dist-packages|/lib/python3|/gpuwatch/|<frozen |<string>")
_COLLECTIVE = re.compile(
    r"distributed_c10d\.py|torch/nn/parallel/distributed\.py|_functional_collectives\.py"
    r"|/fsdp/|in _engine_run_backward$"
)
"""Frames in which a rank waits for others. A backward is one under DDP: its reducer waits in C++
below `_engine_run_backward`."""


def read_stack(text: str) -> tuple[str, ...]:
    """Return the frames of the main thread, innermost first, as `FILE:LINE in NAME`.

    `text` is what a rank answers: for each thread a line with its name, and frames as Python's
    traceback module prints them, innermost last. Empty if there is no main thread in it.
    """
    frames: list[str] = []
    inside = False
    for line in text.splitlines():
        if line.startswith("Thread "):
            inside = line.startswith(_MAIN)
        elif inside and (match := _FRAME.match(line)):
            frames.append(f"{match[1]}:{match[2]} in {match[3]}")
    return tuple(reversed(frames))[:_KEPT_FRAMES]


def _own(frames: Sequence[str]) -> str:
    """Return the innermost frame of the user's own code, or the innermost of all."""
    return next((f for f in frames if not _LIBRARY.search(f)), frames[0] if frames else "")


def _short(frame: str) -> str:
    return frame.rpartition("/")[2]


def in_collective(frames: Iterable[str]) -> bool:
    """Whether the thread waits in a collective, or in a backward that may end in one."""
    return any(_COLLECTIVE.search(frame) for frame in frames)


class HangStacks:
    """Asks the ranks of one run for their stacks when a hang opens, and puts them into it."""

    def __init__(self, ask: Ask) -> None:
        self._ask = ask
        self._opened: tuple[int, float] | None = None
        self._asked: dict[str, int] = {}
        self._stacks: dict[int, tuple[str, ...]] = {}
        self._said: dict[int, str] = {}

    def take(self, run: RunView, finding: Finding | None) -> Finding | None:
        """Return the hang with the stacks that are known by now; `finding` None: there is none."""
        if finding is None:
            self._opened = None
            return None
        if self._opened != (finding.opened_step, finding.opened_s):
            self._opened = (finding.opened_step, finding.opened_s)
            self._begin(run, finding)
        for rank in run.ranks:
            for reply in rank.replies:
                if self._asked.get(reply.id) == rank.rank and reply.status == "done":
                    del self._asked[reply.id]
                    self._stacks[rank.rank] = read_stack(reply.data)
                    self._said[rank.rank] = reply.message
        return _with_stacks(run, finding, self._stacks, self._said) if self._stacks else finding

    @property
    def waiting(self) -> bool:
        """Whether an answer is still to come."""
        return bool(self._asked)

    def _begin(self, run: RunView, finding: Finding) -> None:
        self._asked.clear()
        self._stacks.clear()
        self._said.clear()
        there = [r for r in run.ranks if r.state not in {"gone", "ended"}]
        named = frozenset(finding.ranks)
        there.sort(key=lambda r: (r.rank not in named, r.rank))
        for rank in there[:MOST_RANKS]:
            try:
                self._asked[self._ask("stack", run.run, rank.rank)] = rank.rank
            except GpuwatchError:
                return  # a recording, say: nobody is there to be asked


def _with_stacks(
    run: RunView, finding: Finding, stacks: dict[int, tuple[str, ...]], said: dict[int, str]
) -> Finding:
    there = [r for r in run.ranks if r.state not in {"gone", "ended"}]
    finding = _missing(finding, there, stacks)
    first = sorted(stacks, key=lambda rank: (rank not in finding.ranks, rank))
    evidence = [
        Evidence(
            f"stack_of_rank_{rank}",
            _short(_own(stacks[rank])) or "empty",
            "",
            _innermost(stacks[rank], said.get(rank, "")),
            "stack of its main thread",
        )
        for rank in first[:_EVIDENCE_RANKS]
    ]
    return replace(
        finding,
        evidence=(*finding.evidence, *evidence),
        stacks=tuple(RankStack(rank, stacks[rank]) for rank in first),
    )


def _innermost(frames: tuple[str, ...], said: str) -> str:
    """Return where a rank stands; what it `said` of it is of a place below its innermost frame."""
    if not frames:
        return "no main thread in it"
    return said or f"innermost {_short(frames[0])}"


def _missing(
    finding: Finding, there: list[RankView], stacks: dict[int, tuple[str, ...]]
) -> Finding:
    """Return the finding with the ranks that are missing in the collective, where its own signals
    could not tell them apart and every stack is known.
    """
    if len(finding.ranks) < len(there) or any(r.rank not in stacks for r in there):
        return finding
    away = tuple(r.rank for r in there if not in_collective(stacks[r.rank]))
    if not away or len(away) == len(there):
        return finding
    waiting = [r.rank for r in there if r.rank not in away]
    where = sorted({_short(_own(stacks[rank])) for rank in away})
    verb = "is" if len(away) == 1 else "are"
    return replace(
        finding,
        ranks=away,
        nodes=tuple(sorted({r.node for r in there if r.rank in away})),
        confidence="high",
        summary=(
            f"{finding.summary.partition(':')[0]}: {ranks_text(away)} {verb} missing in the "
            f"collective, in {', '.join(where[:3])}; {ranks_text(waiting)} "
            f"wait{'s' if len(waiting) == 1 else ''} there"
        ),
    )
