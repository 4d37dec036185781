"""Targets on other machines, and the session on them: one store, fed over several ways."""

import os
import re
import resource
import shlex
import sys
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace

import msgspec

from gpuwatch import __version__
from gpuwatch.commands.target import PROGRAM
from gpuwatch.errors import AgentError, TargetError
from gpuwatch.frames import encode, printable
from gpuwatch.schema import WIRE_VERSION, Command, NodeFrame
from gpuwatch.store import Store, View
from gpuwatch.store.live import SILENT_S
from gpuwatch.store.views import Event, NodeView, RankView, RunView
from gpuwatch.wire.collect import (
    JobKey,
    Pipe,
    PipeLink,
    PipeTarget,
    TcpLink,
    TcpTarget,
    TcpWay,
    Way,
    load_key,
)
from gpuwatch.wire.collect.pipelink import ANSWER_S

__all__ = [
    "RemoteSession",
    "make_room",
    "open_session",
    "parse_target",
    "parse_via",
]

_AGENT = ("agent", "--stdio")

SSH_ARGV = (
    "ssh",
    "-T",
    # There is a screen, or nobody, where ssh would ask: it says what it misses instead.
    "-oBatchMode=yes",
    "-oConnectTimeout=10",
    # A link that is dead without a word is noticed within 15 s.
    "-oServerAliveInterval=5",
    "-oServerAliveCountMax=3",
)

# Neither may begin with a dash: ssh would take it for an option.
_USER = r"[A-Za-z0-9_.][A-Za-z0-9_.\\+-]{0,63}"
_HOST = r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,252}|\[[0-9A-Fa-f:.]{2,45}(?:%[A-Za-z0-9_.-]{1,15})?\]"
_SSH = re.compile(
    rf"ssh://(?:(?P<user>{_USER})@)?(?P<host>{_HOST})(?::(?P<port>\d{{1,5}}))?"
    r"(?:[:/](?P<run>[^/\s]{1,256}))?/?"
)

_TCP = re.compile(
    rf"tcp://(?P<host>{_HOST}):(?P<port>\d{{1,5}})(?:[:/](?P<run>[^/\s]{{1,256}}))?/?"
)

MANY = 32
"""To more targets than this a second is soon enough: at ten frames a second each, so many cost a
monitor some 6 % of a core (`benchmarks/bench_many.py`), and a screen has no room for more nodes."""
MANY_INTERVAL_S = 1.0

_CONNECT_S = ANSWER_S + 2.0
"""A pipe says of itself that nobody answers, and what its command has said until then."""
_ANSWER_S = 3.0
_ASK_AGAIN_S = 1.0
_ASK_LONGEST_S = 60.0
_ASKS = 256
_ASKS_A_S = 50.0
"""Of ranks whose frames are missing: ten minutes of one are 70 kB, which take a monitor some 5 ms,
and after a pause of its own it misses frames of all of them."""
_EVENTS = 200
_NOTICES = 16
_LABEL = 48
_KEPT_RANKS = 40_000
_FILES = 128
_FILES_A_PIPE = 4  # three, and one of a command that is ending
_FILES_A_SOCKET = 5  # the connection, three that wake who waits, and one that is closing


def parse_target(
    text: str, program: str = PROGRAM, key: JobKey | None = None
) -> PipeTarget | TcpTarget:
    """Return what `ssh://[user@]host[:port][/run]` means, `tcp://host:port[/run]`, or `local`.

    `:run` may stand for `/run` where the run's name is not a number. `GPUWATCH_SSH` is taken in
    place of `ssh` and its options.

    `key` is the job key, which tcp:// needs; without it that in the file `GPUWATCH_KEY` is taken.

    Raises:
        TargetError: it is none of these, or a key is missing.
    """
    if text == "local":
        return PipeTarget(
            "local",
            (sys.executable, "-P", "-m", "gpuwatch", *_AGENT),
            f"{PROGRAM} {' '.join(_AGENT)}",
            "this machine",
        )
    if text.startswith("tcp://"):
        return _tcp_target(text, key)
    found = _SSH.fullmatch(text)
    if found is None and re.fullmatch(_HOST, text):
        raise TargetError(
            f"{text!r} may be a run on this machine, and that stands alone; beside other targets "
            f"write local for this machine, or ssh://{text} for another one"
        )
    if found is None:
        raise TargetError(
            f"{printable(text)!r} is no target; write ssh://host, ssh://user@host:port, "
            "ssh://host/run or tcp://host:port"
        )
    port = found["port"]
    if port is not None and not 1 <= int(port) <= 65535:
        raise TargetError(f"{port} in {text} is no port; a run that is a number is written /{port}")
    host = found["host"].strip("[]")
    user = f"{found['user']}@" if found["user"] else ""
    aim = (*(("-p", port) if port else ()), user + host)
    return PipeTarget(
        label=f"ssh://{user}{found['host']}{f':{port}' if port else ''}",
        # The far shell splits the last word again, as it does whatever ssh is told to run.
        argv=(*_ssh(), *aim, " ".join((program, *_AGENT))),
        reach=" ".join(("ssh", *aim)),
        place=host,
        program=program,
        run=found["run"] or "",
    )


def _tcp_target(text: str, key: JobKey | None) -> TcpTarget:
    found = _TCP.fullmatch(text)
    if found is None or not 1 <= int(found["port"]) <= 65535:
        raise TargetError(
            f"{printable(text)!r} is no target; write tcp://host:port or tcp://host:port/run"
        )
    named = os.environ.get("GPUWATCH_KEY", "")
    if key is None and named:
        key = load_key(named)
    if key is None:
        raise TargetError(
            f"{text} needs the key of the job, a copy of its key file: --key FILE, or "
            "GPUWATCH_KEY=FILE"
        )
    host, port = found["host"], int(found["port"])
    return TcpTarget(f"tcp://{host}:{port}", host.strip("[]"), port, key, found["run"] or "")


def _ssh() -> tuple[str, ...]:
    own = os.environ.get("GPUWATCH_SSH", "").strip()
    return tuple(_split(own, "GPUWATCH_SSH")) if own else SSH_ARGV


def parse_via(text: str, program: str = PROGRAM) -> PipeTarget:
    """Return the target that a command leads to: its words, then `gpuwatch agent --stdio`.

    No shell takes part: quotes group words, and that is all.

    Raises:
        TargetError: it is no command.
    """
    words = _split(text, "--via")
    if not words:
        raise TargetError("--via needs a command, such as 'kubectl exec -i POD --'")
    shown = printable(text.strip().removesuffix("--").rstrip())
    label = shown if len(shown) <= _LABEL else f"{shown[: _LABEL - 1]}…"
    return PipeTarget(
        label=label,
        argv=(*words, *_split(program, "--remote-command"), *_AGENT),
        reach=shown,
        program=program,
    )


def _split(text: str, name: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as exc:
        raise TargetError(f"{name} {printable(text)!r} is no command: {exc}") from None


def make_room(pipes: int, sockets: int = 0) -> None:
    """Raise the limit on open files, where it is too low for so many pipes and TCP connections.

    Raises:
        TargetError: the hard limit is too low; libzmq and Python end badly without descriptors.
    """
    targets = pipes + sockets
    needed = _FILES + _FILES_A_PIPE * pipes + _FILES_A_SOCKET * sockets
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise TargetError(
            f"{targets} targets need {needed:,} open files and the limit is {hard:,}; raise it "
            "(ulimit -Hn), or attach to fewer"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


def open_session(
    targets: Sequence[str],
    *,
    via: Sequence[str] = (),
    program: str = PROGRAM,
    key: JobKey | None = None,
    tap: Callable[[bytes], None] | None = None,
    many_runs: bool = False,
) -> "tuple[RemoteSession, str | None]":
    """Return a session on all of the targets, and the run that one of them names.

    `key` is the job key of those over TCP. With `many_runs` they may name several, and the first is
    returned.

    Raises:
        TargetError: one of them is no target, or there are too many, or they name several runs.
    """
    found = [parse_target(text, program, key) for text in targets]
    found += [parse_via(text, program) for text in via]
    found = list(dict.fromkeys(found))
    runs = list(dict.fromkeys(target.run for target in found if target.run))
    if len(runs) > 1 and not many_runs:
        raise TargetError(f"the targets name {len(runs)} runs, {runs[0]!r} and {runs[1]!r}")
    sockets = sum(isinstance(target, TcpTarget) for target in found)
    make_room(len(found) - sockets, sockets)
    return RemoteSession(found, tap=tap), next(iter(runs), None)


class RemoteSession:
    """A `Session` on other machines. It connects for ever; a target that cannot be reached is said.

    What is known of a node that cannot be reached stays; its ranks count as silent, whatever they
    do. `tap` is called with the bytes of every frame after they are in the picture, one at a time,
    in the thread of the pipes or that of the TCP connections.
    """

    def __init__(
        self,
        targets: Sequence[PipeTarget | TcpTarget],
        *,
        tap: Callable[[bytes], None] | None = None,
    ) -> None:
        self._tap = tap
        self._lock = threading.Lock()  # pipes and connections have a thread each
        self._store = Store()
        self._changes = 0
        self._events: deque[Event] = deque(maxlen=_EVENTS)
        self._asked: dict[tuple[str, int], tuple[float, float]] = {}
        self._to_ask: dict[tuple[str, int], Way] = {}
        self._asks = float(_ASKS)
        self._filled_s = 0.0
        self._speakers: dict[str, Way] = {}
        self._incarnations: dict[Way, str] = {}
        self._names: dict[str, dict[Way, str]] = {}
        self._waited_s = 0.0  # in vain, for those that have not answered until now
        piped = [target for target in targets if isinstance(target, PipeTarget)]
        called = [target for target in targets if isinstance(target, TcpTarget)]
        interval_s = MANY_INTERVAL_S if len(targets) > MANY else 0.0
        self._link = PipeLink(piped, __version__, self._on_frame, self._on_state, interval_s)
        self._tcp: TcpLink | None = None
        if called:
            self._tcp = TcpLink(called, __version__, self._on_frame, self._on_state, interval_s)
        pipes = iter(self._link.pipes)
        calls = iter(self._tcp.ways if self._tcp is not None else ())
        self._ways: tuple[Way, ...] = tuple(
            next(calls if isinstance(target, TcpTarget) else pipes) for target in targets
        )
        self._link.start()
        if self._tcp is not None:
            self._tcp.start()

    @property
    def version(self) -> int:
        """Rises with every change."""
        return self._store.version + self._changes

    @property
    def pipes(self) -> tuple[Way, ...]:
        """The ways to the targets, in their order: pipes, and connections over TCP."""
        return self._ways

    # --- frames in -----------------------------------------------------------------------------

    def _on_frame(self, way: Way, data: bytes, frame: NodeFrame, received_s: float) -> None:
        with self._lock:
            self._take(way, data, frame, received_s)

    def _take(self, way: Way, data: bytes, frame: NodeFrame, received_s: float) -> None:
        name = self._name_of(way, frame)
        if name != frame.node:
            frame = msgspec.structs.replace(frame, node=name)
            data = encode(frame)
        missing = self._store.apply(frame, received_s)
        self._own(way, name)
        for run, rank in missing:
            key = (run, rank)
            asked_s, pause_s = self._asked.get(key, (0.0, 0.0))
            if received_s - asked_s <= pause_s or len(self._to_ask) >= _KEPT_RANKS:
                continue
            # A connection that is too slow for its frames is not to carry their past each second.
            often = received_s - asked_s < 4 * pause_s
            pause_s = min(_ASK_LONGEST_S, 2 * pause_s) if often else _ASK_AGAIN_S
            self._asked[key] = (received_s, pause_s)
            self._to_ask[key] = way
        if self._to_ask:
            self._ask_for_missing(received_s)
        if self._tap is not None:
            self._tap(data)

    def _ask_for_missing(self, now_s: float) -> None:
        """Ask for the past of ranks whose frames are missing, of as many as is good now."""
        more = _ASKS_A_S * max(0.0, now_s - self._filled_s)
        self._asks, self._filled_s = min(float(_ASKS), self._asks + more), now_s
        while self._to_ask and self._asks >= 1:
            self._asks -= 1
            run, rank = next(iter(self._to_ask))
            self._send(self._to_ask.pop((run, rank)), _command("snapshot", run, rank))

    def _name_of(self, way: Way, frame: NodeFrame) -> str:
        """Return what the node is called here: containers may all have one name."""
        self._incarnations[way] = frame.incarnation
        names = self._names.setdefault(frame.node, {})
        if way not in names:
            same = [n for p, n in names.items() if self._incarnations[p] == frame.incarnation]
            new = frame.node if not names else f"{frame.node[:240]} ({len(names) + 1})"
            names[way] = same[0] if same else new
        return names[way]

    def _own(self, way: Way, name: str) -> None:
        """Note which way a node is heard through, by the name that it has here."""
        if len(self._asked) > _KEPT_RANKS:
            self._asked = {}
        self._speakers[printable(name)] = way

    def _on_state(self, way: Way) -> None:
        if way.state == "live" and not way.trouble:
            text, severity = "attached" if way.attached == 1 else "attached again", "note"
        else:
            text, severity = way.trouble, "warning"
        with self._lock:
            self._events.append(Event(time.time(), f"{way.target.label}: {text}", severity))
            self._changes += 1

    # --- views out -----------------------------------------------------------------------------

    def view(self) -> View:
        """Return the present picture."""
        view = self._store.view()
        ways = self._ways
        owners = self._speakers
        away = {way for way in ways if not way.fresh}
        runs = tuple(_unheard(run, owners, away) for run in view.runs) if away else view.runs
        link, message = _link_of(ways)
        events = sorted((*view.events, *self._events), key=lambda event: event.at_s)
        return replace(
            view,
            version=self.version,
            runs=runs,
            link=link,
            message=message,
            events=tuple(events),
            notices=(*self.troubles(), *view.notices),
        )

    def raw_run(self, run: str) -> str:
        """Return a run id as its owner spells it, which is how frames name it."""
        return self._store.raw_run(run)

    def settled_view(self, timeout_s: float = _CONNECT_S) -> View:
        """Wait until every target has answered with its past and two ticks of its sensors.

        Targets that cannot be reached are waited for until their first failure, the others at most
        `timeout_s`, and 3 s more for what they know, or for a node process that is in trouble
        there. Of a target that has not answered until then a sentence is among the notices.

        Raises:
            AgentError: none of them can be reached; one sentence and line a target.
        """
        deadline_s = time.monotonic() + timeout_s
        answer_s = 0.0
        while True:
            now_s = time.monotonic()
            view = self.view()
            there = [p for p in self._ways if p.heard_s]
            away = [p for p in self._ways if not p.heard_s]
            if all(p.trouble for p in away):
                lost = all(p.state == "lost" for p in away)
                if lost and not there:
                    break
                answer_s = answer_s or now_s + _ANSWER_S
                known = lost and all(p.had_past for p in there) and _is_complete(view)
                if known or now_s >= answer_s:
                    break
            if now_s >= deadline_s:
                break
            time.sleep(0.05)
        self._waited_s = timeout_s
        if there:
            return self.view()
        raise AgentError("\ngpuwatch: ".join(self.troubles()) or "no target has answered")

    def troubles(self) -> tuple[str, ...]:
        """Return a sentence for each target that is in trouble, a line each, and not too many."""
        return _notices(self._ways, self._waited_s)

    # --- commands ------------------------------------------------------------------------------

    def send(
        self,
        verb: str,
        run: str,
        rank: int | None = None,
        args: dict[str, str | int | float | bool] | None = None,
    ) -> str:
        """Queue a command for the nodes that have the run, or the rank, and return its id."""
        command = _command(verb, self._store.raw_run(run), rank, args)
        owners = self._speakers
        found = {owners[name] for name in self._store.nodes_of(run, rank) if name in owners}
        for way in found or self._ways:
            self._send(way, command)
        return command.id

    def _send(self, way: Way, command: Command) -> None:
        if isinstance(way, Pipe):
            self._link.send(way, command)
        elif isinstance(way, TcpWay) and self._tcp is not None:
            self._tcp.send(way, command)

    def close(self) -> None:
        """End the ways and the commands of pipes; returns within 0.5 s."""
        if self._tcp is not None:
            self._tcp.close(0.1)
        self._link.close()


def _command(
    verb: str,
    run: str,
    rank: int | None,
    args: dict[str, str | int | float | bool] | None = None,
) -> Command:
    return Command(WIRE_VERSION, uuid.uuid4().hex, verb, run=run, rank=rank, args=args or {})


def _is_complete(view: View) -> bool:
    """Whether every rank has said who it is, and rates of the machines are known: two ticks."""
    return all(r.hello is not None for run in view.runs for r in run.ranks) and all(
        node.host is not None and _has_rate(node) for node in view.nodes
    )


def _has_rate(node: NodeView) -> bool:
    reading = node.host.readings.get("cpu_percent") if node.host is not None else None
    return reading is not None and reading.value is not None


def _unheard(run: RunView, owners: dict[str, Way], away: set[Way]) -> RunView:
    """Return the run with the ranks that no way reaches now as silent."""
    ranks = tuple(_silent(r, owners.get(r.node), away) for r in run.ranks)
    return (
        run
        if all(a is b for a, b in zip(ranks, run.ranks, strict=True))
        else replace(run, ranks=ranks)
    )


def _silent(rank: RankView, owner: Way | None, away: set[Way]) -> RankView:
    if owner is None or owner not in away:
        return rank
    if rank.state in {"ended", "gone"} or rank.age_s <= SILENT_S:
        return rank
    # How long it stands where it was last seen is not known any more: that is no hang.
    seen_s = max(0.0, rank.phase_age_s - rank.age_s)
    reason = f"no contact with {owner.target.label}"
    return replace(rank, state="silent", state_reason=reason, phase_age_s=seen_s)


def _link_of(ways: Sequence[Way]) -> tuple[str, str]:
    if any(p.state == "live" and not p.trouble for p in ways):
        return "live", ""
    troubled = _notices(ways)
    if not troubled:
        return "connecting", f"connecting to {', '.join(p.target.label for p in ways[:4])}"
    more = f" (and {len(troubled) - 1} more)" if len(troubled) > 1 else ""
    return "lost", f"{troubled[0]}{more}"


def _notices(ways: Sequence[Way], waited_s: float = 0.0) -> tuple[str, ...]:
    """Return a sentence for each target that is in trouble, or was waited for so long in vain."""
    texts = []
    for way in ways:
        if way.trouble:
            texts.append(f"{way.target.label}: {way.trouble}")
        elif waited_s and not way.heard_s:
            texts.append(f"{way.target.label}: {_no_answer(way.target, waited_s)}")
    if len(texts) > _NOTICES:
        texts[_NOTICES - 1 :] = [f"{len(texts) - _NOTICES + 1} more targets cannot be reached"]
    return tuple(texts)


def _no_answer(target: PipeTarget | TcpTarget, waited_s: float) -> str:
    waited = f"no answer within {waited_s:.0f} s"
    if isinstance(target, TcpTarget):
        return f"{waited}; is a door open there, on port {target.port}?"
    return f"{waited}; to see more, type: {target.reach}"
