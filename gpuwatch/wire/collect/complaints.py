"""What is wrong with a way to another machine, in one sentence with what to type."""

import errno
import os
import re
from collections.abc import Callable
from dataclasses import dataclass

from gpuwatch.frames import printable
from gpuwatch.schema import WIRE_VERSION
from gpuwatch.wire.collect.keys import JobKey
from gpuwatch.wire.collect.pipe import PIPE_VERSION, Preamble

__all__ = [
    "Complaint",
    "PipeTarget",
    "TcpTarget",
    "why_ended",
    "why_no_connection",
    "why_no_handshake",
    "why_other_version",
]

_WORDS = 200


@dataclass(frozen=True, slots=True)
class PipeTarget:
    """Where a pipe leads.

    `label` is what the screen calls it; `argv` the command whose stdin and stdout are the pipe;
    `reach` what a person types to get there; `place` the far side within a sentence; `program` the
    command of gpuwatch over there; `run` the run to show first, empty for any.
    """

    label: str
    argv: tuple[str, ...]
    reach: str
    place: str = "the far side"
    program: str = "gpuwatch"
    run: str = ""


@dataclass(frozen=True, slots=True)
class TcpTarget:
    """Where a TCP connection leads: `host` is a name or an address, without brackets.

    `label` is what the screen calls it, `run` the run to show first, empty for any.
    """

    label: str
    host: str
    port: int
    key: JobKey
    run: str = ""

    @property
    def place(self) -> str:
        """The far side within a sentence."""
        return self.host


@dataclass(frozen=True, slots=True)
class Complaint:
    """A sentence without its subject, and whether trying again soon may help."""

    text: str
    soon: bool = True


_Words = Callable[[PipeTarget, str], str]

# What ssh says to type, in some builds of it, and what it calls the host in all. A far side may say
# such words too: what a shell would read otherwise than as a name is not passed on.
_FORGET = re.compile(
    r'^\s*(ssh-keygen -f "[\w./@%+~, -]+" -R (?:"[\w.:%\[\]-]+"|[\w.:-]+))\s*$', re.MULTILINE
)
_KEY_OF = re.compile(r"Host key for ([\w.:%\[\]-]+) has changed")
_KEY_IN = re.compile(r"^Offending \S+ key in ([\w./@%+~, -]+):\d+\s*$", re.MULTILINE)

# What the far side says of a terminal comes through that terminal, on stdout; ssh says goodbye on
# stderr, whatever the reason was.
_NO_PIPE = re.compile(r"through pipes, and this is a terminal")
_GOODBYE = re.compile(r"^(?:Shared connection|Connection) to \S+ closed\.?\s*$", re.MULTILINE)


def _changed(target: PipeTarget, said: str) -> str:
    line, file, name = _FORGET.search(said), _KEY_IN.search(said), _known_as(target, said)
    quoted = f'"{name}"' if "[" in name else name  # to a shell it is a pattern
    where = f'-f "{file[1]}" ' if file is not None else ""
    forget = line[1] if line is not None else f"ssh-keygen {where}-R {quoted}"
    return (
        f"the host key of {target.place} is not the one that is known; if the machine was set up "
        f"anew, type: {forget}, then once: {target.reach}"
    )


def _known_as(target: PipeTarget, said: str) -> str:
    """Return what known_hosts calls a host: by its HostName, and with a port that is not 22."""
    name = _KEY_OF.search(said)
    port = re.match(r"ssh -p (\d+) ", target.reach)
    if name is not None:
        return name[1]
    return f"[{target.place}]:{port[1]}" if port is not None else target.place


def _denied(target: PipeTarget, _line: str) -> str:
    words = (
        "the login is refused (permission denied), and no password can be asked for here; type: "
    )
    if not target.reach.startswith("ssh "):
        return f"{words}{target.reach}"
    return f"{words}ssh-copy-id {target.reach[4:]}, or ssh-add for a key with a passphrase"


def _no_gpuwatch(target: PipeTarget, _line: str) -> str:
    return (
        f"there is no {_short(target.program, 60)!r} on {target.place} for a command without a "
        "login shell; type there: pip install gpuwatch-monitor, or here: "
        "--remote-command /path/to/gpuwatch"
    )


# (pattern in what the command said, whether to try again soon, the sentence). In this order: the
# first that fits is said. The words are those of OpenSSH 7 to 10, kubectl, docker, the shells and
# Python.
_SAID: tuple[tuple[str, bool, _Words], ...] = (
    (
        r"REMOTE HOST IDENTIFICATION HAS CHANGED",
        False,
        _changed,
    ),
    (
        r"host key verification failed|no \S+ host key is known",
        False,
        lambda t, _: f"the host key of {t.place} is not known yet; type once: {t.reach}",
    ),
    (
        r"permission denied \(|too many authentication failures|no supported authentication",
        False,
        _denied,
    ),
    (
        r"could not resolve hostname|name or service not known",
        False,
        lambda t, _: (
            f"no machine is called {t.place}; look at the spelling, or add it to ~/.ssh/config"
        ),
    ),
    (
        r"connection refused",
        True,
        lambda t, _: f"{t.place} refuses the connection; to see more, type: {t.reach}",
    ),
    (
        r"timed out|no route to host|network is unreachable|timeout, server .* not responding",
        True,
        lambda t, _: f"{t.place} does not answer; is it up? To see more, type: {t.reach}",
    ),
    (
        r"no such option:? '?--stdio",
        False,
        lambda t, _: (
            f"the gpuwatch on {t.place} is too old to be attached to; type there: "
            "pip install --upgrade gpuwatch-monitor"
        ),
    ),
    (
        r"No module named '?gpuwatch'?",
        False,
        lambda t, _: (
            f"the Python on {t.place} has no gpuwatch; type there: pip install gpuwatch-monitor, "
            "or here: --remote-command /path/to/gpuwatch"
        ),
    ),
    (
        r"executable file not found|: command not found|: not found|unknown command",
        False,
        _no_gpuwatch,
    ),
)


def why_ended(
    target: PipeTarget, status: int | None, stderr: bytes, noise: bytes, *, greeted: bool
) -> Complaint:
    """Return why a pipe has ended.

    Args:
        target: where it led.
        status: the exit status of its command, negative for a signal; None if it still runs.
        stderr: the end of what the command said there.
        noise: what came on stdout before the preamble.
        greeted: whether the preamble had come.
    """
    said = stderr.decode("utf-8", "replace")
    before = "" if greeted else noise.decode("utf-8", "replace")
    if _NO_PIPE.search(before) or (not greeted and _NO_PIPE.search(said)):
        return Complaint("a terminal stands in the way: leave out -t (and -tt, --tty)", False)
    if not greeted:
        said = _GOODBYE.sub("", said)
        for pattern, soon, words in _SAID:
            if re.search(pattern, said, re.IGNORECASE):
                return Complaint(words(target, said), soon)
        if status == 127:
            return Complaint(_no_gpuwatch(target, said), False)
    line = _last_line(said) or _last_line(before)
    end = _end(status)
    if status is not None and status < 0 and (greeted or not line):
        name = _short(os.path.basename(target.argv[0]), 60)
        more = f": {line}" if line else ""
        return Complaint(f"its own command on this machine, {name}, was ended by {end}{more}")
    if greeted:
        if re.search(r"timeout, server .* not responding|broken pipe|reset by peer", said, re.I):
            return Complaint(f"the connection was lost ({line})")
        return Complaint(f"the far side has ended ({end}{': ' if line else ''}{line})")
    if status == 126:
        return Complaint(f"{target.program} cannot be run there ({line or end})", False)
    return Complaint(
        f"{line} ({end})"
        if line
        else f"it ended without a word ({end}); to see more, type: {target.reach}"
    )


def why_no_connection(target: TcpTarget, number: int) -> Complaint:
    """Return why there is no TCP connection, from the system's error number."""
    if number == errno.ECONNREFUSED:
        return Complaint(
            f"nobody listens on port {target.port} of {target.host}; type there: "
            f"gpuwatch agent --listen :{target.port} --key FILE"
        )
    if number in (errno.ETIMEDOUT, errno.EAGAIN):
        return Complaint(
            f"{target.host} does not answer on port {target.port}; is it up, and does every "
            "firewall on the way let the port through?"
        )
    return Complaint(f"there is no way to {target.host} ({os.strerror(number).lower()})")


_OTHERS = ((b"SSH-", "an ssh server; write ssh://"), (b"HTTP/", "a web server"))


def why_no_handshake(target: TcpTarget, greeting: bytes) -> Complaint:
    """Return why a door does not open, from how whoever listens there has greeted us.

    The greeting of ZMTP 3 is 64 bytes: a signature that begins with 0xff, the version in bytes 10
    and 11, and in bytes 12 to 31 the name of the security mechanism.
    """
    where = f"what listens on port {target.port} of {target.host}"
    if greeting[:1] == b"\xff" and len(greeting) >= 32:
        if greeting[12:32].rstrip(b"\0") == b"CURVE":
            return Complaint(
                f"the key does not fit: {where} has another one, or lets nobody in now; copy its "
                "key file here",
                False,
            )
        return Complaint(f"{where} takes no key: that is no gpuwatch agent --listen", False)
    for begin, name in _OTHERS:
        if greeting.startswith(begin):
            return Complaint(f"{where} is {name}{target.host if 'ssh' in name else ''}", False)
    if greeting:
        return Complaint(f"{where} is no gpuwatch agent --listen", False)
    return Complaint(f"{where} does not say a word; is it a gpuwatch agent --listen, and stopped?")


def why_other_version(
    target: PipeTarget | TcpTarget, there: Preamble, package: str
) -> Complaint | None:
    """Return what to do about a far side of another version, None where both fit."""
    if (there.pipe_version, there.wire_version) == (PIPE_VERSION, WIRE_VERSION):
        return None
    newer = (there.pipe_version, there.wire_version) > (PIPE_VERSION, WIRE_VERSION)
    place, other = ("here", there.package) if newer else (f"on {target.place}", package)
    name = re.sub(r"[^A-Za-z0-9.+!-]", "", other)
    return Complaint(
        f"gpuwatch {_short(there.package, 20)} on {target.place} is "
        f"{'newer' if newer else 'older'} than this {package} and they do not fit; type {place}: "
        f"pip install gpuwatch-monitor=={name}",
        False,
    )


def _end(status: int | None) -> str:
    if status is None:
        return "its output was closed"
    return f"signal {-status}" if status < 0 else f"exit status {status}"


def _last_line(text: str) -> str:
    lines = [line for raw in text.splitlines() if (line := printable(raw).strip())]
    return _short(lines[-1].removeprefix("gpuwatch: "), _WORDS) if lines else ""


def _short(text: str, length: int) -> str:
    text = printable(text)
    return text if len(text) <= length else f"{text[: length - 1]}…"
