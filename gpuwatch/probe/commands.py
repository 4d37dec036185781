"""Commands as the telemetry thread takes them: checked, done once, and told to everyone.

`stack`, `memory` and `fetch` are answered at once, also while the training hangs. `profile` and
`set` are accepted and lie on the desk until the training thread comes to a step boundary; what
became of them leaves with the next frame. The id of a command is its idempotency key: the same id
again gets the answer that there is, and nothing is done twice.
"""

import time
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping

from gpuwatch.probe.boundary import Desk, Job, Outcome
from gpuwatch.probe.pace import CommandError
from gpuwatch.probe.text import TEXT, wire_text
from gpuwatch.schema import Command, Logged, Reply

__all__ = ["KEPT_LOGGED", "Args", "Commands", "only", "text_arg", "whole_arg"]

Args = Mapping[str, str | int | float | bool]

WAITING = 16
"""Commands that wait for the training thread at most; further ones are refused."""

KEPT_LOGGED = 64
_ANSWERS = 256
_LARGE_ANSWERS = 8  # of stacks, which are up to 200 kB each
_DATA = 262_144  # as in the schema
_REPLIES_A_FRAME = 16
_UNLOGGED = ("snapshot", "fetch")
_NOT_KEPT = ("fetch",)  # asking for a piece again does no harm, and 256 of them are 50 MB
_STEPS_TO_LIVE = 3
"""A command lives for so many steps at least, where steps are longer than its time to live."""


class Commands:
    """Takes commands in the telemetry thread.

    Args:
        desk: where the training thread finds its jobs.
        at_once: verbs that are answered at once; each returns (message, data).
        later: verbs for the training thread; each returns (message, job).
        changing: verbs that change the training.
        control: whether those are allowed.
        step_s: how long a step lately took, in seconds; 0 where that is not known.

    A verb raises `CommandError` with one sentence for what it cannot do.
    """

    def __init__(
        self,
        desk: Desk,
        *,
        at_once: Mapping[str, Callable[[Command], tuple[str, str]]],
        later: Mapping[str, Callable[[Command], tuple[str, Job]]],
        changing: tuple[str, ...] = ("set",),
        control: bool = False,
        step_s: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self._desk = desk
        self._at_once = at_once
        self._later = later
        self._changing = changing
        self._control = control
        self._step_s = step_s
        self._answers: OrderedDict[str, Reply] = OrderedDict()
        self._large: OrderedDict[str, Reply] = OrderedDict()
        self._waiting: dict[str, Command] = {}
        self._unsent: deque[Reply] = deque()
        self._fresh: deque[Logged] = deque(maxlen=KEPT_LOGGED)
        self._past: deque[Logged] = deque(maxlen=KEPT_LOGGED)

    def answer(self, command: Command) -> Reply:
        """Return the answer to a command: what there is already, or what it leads to now."""
        if not command.id:
            return Reply("", "error", "a command needs an id")
        for kept in (self._answers, self._large):
            if command.id in kept:
                kept.move_to_end(command.id)
                return kept[command.id]
        reply = self._obey(command)
        if command.verb in _NOT_KEPT:
            return reply
        self._keep(command.verb, reply)
        self._log(command, reply)
        return reply

    def _obey(self, command: Command) -> Reply:
        verb = command.verb
        try:
            if verb in self._at_once:
                message, data = self._at_once[verb](command)
                return _reply(command.id, Outcome("done", message, data))
            if verb not in self._later:
                known = ", ".join(sorted(["snapshot", *self._at_once, *self._later]))
                raise CommandError(
                    f"this gpuwatch does not know the verb {verb[:64]!r}; it knows {known}"
                )
            if verb in self._changing and not self._control:
                raise CommandError(
                    "this training does not allow control: start it with gpuwatch run "
                    "--allow-control, or watch(allow_control=True)"
                )
            if len(self._waiting) >= WAITING:
                raise CommandError(f"busy: {WAITING} commands wait already")
            message, job = self._later[verb](command)
        except CommandError as exc:
            return _reply(command.id, Outcome("error", str(exc)))
        except Exception as exc:
            return _reply(
                command.id, Outcome("error", f"{verb} failed: {type(exc).__name__}: {exc}")
            )
        self._waiting[command.id] = command
        ttl_s = max(command.ttl_s, _STEPS_TO_LIVE * self._step_s())
        self._desk.put(job, ttl_s)
        return Reply(command.id, "accepted", wire_text(message, TEXT))

    def _keep(self, verb: str, reply: Reply) -> None:
        if verb in self._at_once and reply.status == "done":
            self._large[reply.id] = reply
            while len(self._large) > _LARGE_ANSWERS:
                self._large.popitem(last=False)
            return
        self._answers[reply.id] = reply
        # What still waits stays, or it could be done twice; it is never more than a few.
        excess = len(self._answers) - _ANSWERS
        for old in [i for i in self._answers if i not in self._waiting][: max(0, excess)]:
            del self._answers[old]

    def _log(self, command: Command, reply: Reply) -> None:
        if command.verb in _UNLOGGED:
            return
        logged = Logged(
            time.time(),
            command.id,
            command.verb,
            wire_text(_in_words(command), TEXT),
            reply.status,
            reply.message,
        )
        self._fresh.append(logged)
        self._past.append(logged)

    # --- frames --------------------------------------------------------------------------------

    def collect(self) -> None:
        """Take what the training thread has done since, and what it has not come to in time."""
        self._desk.expire()
        outcomes = self._desk.outcomes
        while outcomes:
            ident, outcome = outcomes.popleft()
            command = self._waiting.pop(ident, None)
            if command is None:
                continue
            reply = _reply(ident, outcome)
            self._answers[ident] = reply
            self._unsent.append(reply)
            self._log(command, reply)

    def fresh(self) -> tuple[tuple[Reply, ...], tuple[Logged, ...]]:
        """Return what the next frame carries."""
        replies = [self._unsent.popleft() for _ in range(min(len(self._unsent), _REPLIES_A_FRAME))]
        logged = tuple(self._fresh)
        self._fresh.clear()
        return tuple(replies), logged

    @property
    def pending(self) -> bool:
        """Whether answers wait for a frame."""
        return bool(self._unsent or self._desk.outcomes)

    def past(self) -> tuple[Logged, ...]:
        """Return what a snapshot carries, oldest first."""
        return tuple(self._past)


def _reply(ident: str, outcome: Outcome) -> Reply:
    return Reply(
        ident, outcome.status, wire_text(outcome.message, TEXT), wire_text(outcome.data, _DATA)
    )


def _in_words(command: Command) -> str:
    args = command.args
    if command.verb == "set" and "knob" in args:
        at = f" at={args['at']}" if "at" in args else ""
        return f"{args['knob']} {args.get('value', '')}{at}".strip()
    return " ".join(f"{name}={value}" for name, value in args.items())


# --- arguments ---------------------------------------------------------------------------------


def only(command: Command, *known: str) -> Args:
    """Return the arguments of a command. Raises `CommandError` for one that it does not take."""
    for name in command.args:
        if name not in known:
            takes = f"takes {', '.join(known)}" if known else "takes no arguments"
            raise CommandError(f"{command.verb} {takes}, not {name[:64]!r}")
    return command.args


def whole_arg(args: Args, name: str, low: int, high: int, default: int | None = None) -> int | None:
    """Return a whole number between two limits. Raises `CommandError` for anything else."""
    value = args.get(name, default)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise CommandError(
            f"{name} must be a whole number from {low:,} to {high:,}, not {str(value)[:64]!r}"
        )
    return value


def text_arg(args: Args, name: str, what: str) -> str:
    """Return a text that has to be there. Raises `CommandError` otherwise."""
    value = args.get(name)
    if not isinstance(value, str) or not value:
        raise CommandError(f"{name} must be {what}")
    return value
