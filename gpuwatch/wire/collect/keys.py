"""The job key: a file that lets its holder attach over TCP.

It holds one CURVE key pair, the same for the door and for every monitor: who has the file may
watch, and steer where the training allows it. It is made anew for each job, since nothing can take
back what a key has opened.
"""

import contextlib
import os
import re
import stat
from dataclasses import dataclass, field

from gpuwatch.errors import TargetError
from gpuwatch.frames import printable

__all__ = ["JobKey", "KeyFileError", "load_key", "make_key"]

_HEAD = "gpuwatch job key 1"
_FILE_BYTES = 4096
# Z85: 32 bytes as 40 characters (ZeroMQ RFC 32).
_Z85 = r"[0-9A-Za-z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}"
_FORM = re.compile(rf"{re.escape(_HEAD)}\npublic ({_Z85})\nsecret ({_Z85})\n?")


class KeyFileError(TargetError):
    """A key file cannot be made, cannot be read, or is not to be trusted."""


@dataclass(frozen=True, slots=True)
class JobKey:
    """A CURVE key pair, each half as 40 characters of Z85."""

    public: bytes
    secret: bytes = field(repr=False)


def make_key(path: str) -> JobKey:
    """Write a new key to a file of mode 0600 that does not exist yet, and return it.

    Raises:
        KeyFileError: the file is there already, or cannot be written.
    """
    import zmq

    public, secret = zmq.curve_keypair()
    text = f"{_HEAD}\npublic {public.decode()}\nsecret {secret.decode()}\n"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    shown = printable(path)
    try:
        fd = os.open(path, flags, 0o600)
    except FileExistsError:
        raise KeyFileError(f"{shown} is there already, and no key is ever overwritten") from None
    except (OSError, ValueError) as exc:
        raise KeyFileError(f"{shown} cannot be made: {_reason(exc)}") from None
    try:
        with open(fd, "w", encoding="ascii") as file:
            os.fchmod(fd, 0o600)  # whatever the umask is
            file.write(text)
            file.flush()
            os.fsync(fd)
    except OSError as exc:
        with contextlib.suppress(OSError):
            os.unlink(path)
        raise KeyFileError(f"{shown} cannot be written: {_reason(exc)}") from None
    return JobKey(public, secret)


def load_key(path: str) -> JobKey:
    """Return the key in a file.

    Raises:
        KeyFileError: it cannot be read, others may read or have written it, or it is damaged.
    """
    import zmq

    shown = printable(path)
    try:
        # A pipe of that name must not make us wait.
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        raise KeyFileError(
            f"there is no key file {shown}; copy that of the job, or make one: "
            f"gpuwatch keygen {shown}"
        ) from None
    except (OSError, ValueError) as exc:
        raise KeyFileError(f"the key file {shown} cannot be read: {_reason(exc)}") from None
    try:
        data = _trusted(fd, shown)
    finally:
        os.close(fd)
    found = _FORM.fullmatch(data.decode("latin-1").replace("\r\n", "\n"))
    if found is None:
        raise KeyFileError(
            f"{shown} is no key file of gpuwatch, or it is damaged; make one: gpuwatch keygen FILE"
        )
    public, secret = (half.encode("ascii") for half in found.groups())
    try:
        fits = zmq.curve_public(secret) == public
    except (zmq.ZMQError, ValueError):
        fits = False
    if not fits:
        raise KeyFileError(f"the key file {shown} is damaged: its two halves do not fit")
    return JobKey(public, secret)


def _trusted(fd: int, shown: str) -> bytes:
    """Return what is in an open key file, if nobody else can have read or written it."""
    info = os.fstat(fd)
    if not stat.S_ISREG(info.st_mode):
        raise KeyFileError(f"{shown} is no file, so it holds no key")
    if info.st_uid != os.geteuid():
        raise KeyFileError(
            f"the key file {shown} belongs to another user; make a copy of your own: "
            f"install -m 600 {shown} MY-KEY"
        )
    if info.st_mode & 0o077:
        raise KeyFileError(
            f"the key file {shown} is open to other users; type: chmod 600 {shown}, or make a "
            "new one if somebody may have read it"
        )
    try:
        return os.read(fd, _FILE_BYTES)
    except OSError as exc:
        raise KeyFileError(f"the key file {shown} cannot be read: {_reason(exc)}") from None


def _reason(exc: Exception) -> str:
    return (exc.strerror or str(exc)) if isinstance(exc, OSError) else str(exc)
