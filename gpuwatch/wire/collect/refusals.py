"""Who was refused at a door, said seldom: whoever reaches the port could fill a log otherwise."""

from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["FIRST_PAUSE_S", "KEYLESS", "LONGEST_PAUSE_S", "WRONG_KEY", "Refusals"]

WRONG_KEY = "with a wrong key"
KEYLESS = "without a key"

FIRST_PAUSE_S = 60.0
LONGEST_PAUSE_S = 3600.0


@dataclass(slots=True)
class _Kind:
    since_s: float
    pause_s: float
    count: int = 0
    address: str = ""


class Refusals:
    """Counts them, and says the first one at once, the next ones in a minute with their number, and
    while that goes on ever less: once an hour in the end.

    Args:
        say: called with a line.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._kinds: dict[str, _Kind] = {}

    def add(self, what: str, address: str, now_s: float) -> None:
        """Count a peer; `what` it is, `WRONG_KEY` say, and its address; empty if it was gone too
        soon to be known.
        """
        kind = self._kinds.get(what)
        if kind is not None:
            kind.count += 1
            kind.address = address or kind.address
            return
        self._kinds[what] = _Kind(now_s, FIRST_PAUSE_S)
        self._say(
            f"a peer {what} was refused{f' (from {address})' if address else ''}: who is to watch "
            "needs a copy of the key file of this door"
        )

    def look(self, now_s: float) -> None:
        """Say what is due."""
        for what, kind in list(self._kinds.items()):
            waited_s = now_s - kind.since_s
            if waited_s < kind.pause_s:
                continue
            if not kind.count:
                del self._kinds[what]
                continue
            last = f" (last from {kind.address})" if kind.address else ""
            peers = "1 peer" if kind.count == 1 else f"{kind.count:,} peers"
            self._say(f"{peers} {what} refused in the last {_span(waited_s)}{last}")
            pause_s = min(LONGEST_PAUSE_S, 2 * kind.pause_s)
            self._kinds[what] = _Kind(now_s, pause_s)


def _span(seconds: float) -> str:
    minutes = max(1, round(seconds / 60))
    return "minute" if minutes == 1 else f"{minutes} minutes"
