"""What a hostile or broken peer does to a socket. Run as a process, it does what its lines say.

    {"attack": NAME, "path": SOCKET, ...}   ->   a line of JSON at its start and at its end

It is nice: what it takes of the machine it takes from nobody, so that what is measured is what it
does to its victim.
"""

import contextlib
import itertools
import json
import os
import secrets
import socket
import struct
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import zmq

from gpuwatch.frames import encode
from gpuwatch.schema import WIRE_VERSION, Command, RankFrame
from gpuwatch.wire.collect.keys import load_key
from gpuwatch.wire.collect.pipe import preamble
from gpuwatch.wire.publish import Presence, boot_id, process_start_ticks, write_atomic

GREETING = b"\xff" + bytes(8) + b"\x7f" + b"\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
LONG, MORE, COMMAND = 2, 1, 4
CHUNK = bytes(60_000)


def ready(kind: bytes) -> bytes:
    """The command that ends a handshake of ZMTP 3."""
    name, value = b"Socket-Type", kind
    body = b"\x05READY" + bytes([len(name)]) + name + struct.pack(">I", len(value)) + value
    return bytes([COMMAND, len(body)]) + body


@contextlib.contextmanager
def raw(path: str, *, kind: bytes = b"", timeout_s: float = 2.0) -> Iterator[socket.socket]:
    """A connection to a path or HOST:PORT; with a kind, after the handshake of such a socket."""
    host, _, port = path.rpartition(":")
    with socket.socket(socket.AF_INET if host else socket.AF_UNIX, socket.SOCK_STREAM) as made:
        made.settimeout(timeout_s)
        made.connect((host, int(port)) if host else path)
        if kind:
            made.sendall(GREETING)
            made.recv(64)
            made.sendall(ready(kind))
            with contextlib.suppress(OSError):
                made.recv(256)
        yield made


@contextlib.contextmanager
def peer(
    path: str, kind: int, queue: int = 1000, key: str = "", server: str = ""
) -> Iterator["zmq.Socket[bytes]"]:
    """A socket of ZeroMQ; with a key file of its own, and the server's, by CURVE."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        made = context.socket(kind)
        made.linger = 0
        made.sndtimeo = 200
        made.sndhwm = queue
        if key:
            own = load_key(key)
            made.curve_serverkey = load_key(server).public
            made.curve_publickey, made.curve_secretkey = own.public, own.secret
        made.connect(f"tcp://{path}" if ":" in path else f"ipc://{path}")
        yield made
    finally:
        context.destroy(linger=0)


_begun = False


def begun() -> None:
    """Say, once an attack, that it is on its way."""
    global _begun
    if not _begun:
        _begun = True
        print(json.dumps({"begun": True}), flush=True)


def until(seconds: float) -> Iterator[None]:
    """Go on for so long, and say when it has begun for good."""
    ends_s = time.monotonic() + seconds
    for count in itertools.count():
        if count == 20:
            begun()
        if time.monotonic() >= ends_s:
            return
        yield


def garbage(path: str, seconds: float, **_: Any) -> int:
    """Random bytes, with and without a handshake before them."""
    done = 0
    for _ in until(seconds):
        with contextlib.suppress(OSError), raw(path, kind=b"DEALER" if done % 2 else b"") as peer:
            peer.sendall(secrets.token_bytes(300))
        done += 1
    return done


def announced(path: str, seconds: float, kind: str = "DEALER", size: int = 2**40, **_: Any) -> int:
    """A frame of so many bytes is announced 32 times, and a part of it sent each time."""
    done = 0
    with contextlib.ExitStack() as stack:
        for _ in range(32):
            with contextlib.suppress(OSError):
                one = stack.enter_context(raw(path, kind=kind.encode(), timeout_s=0.2))
                done += 1
                one.sendall(bytes([LONG]) + struct.pack(">Q", size))
                for _ in range(70):
                    one.sendall(CHUNK)
        begun()
        time.sleep(seconds)
    return done


def endless(path: str, seconds: float, most_bytes: int = 20_000_000, **_: Any) -> int:
    """One message of parts that never ends."""
    sent = 0
    with contextlib.suppress(OSError), raw(path, kind=b"DEALER", timeout_s=0.5) as one:
        part = bytes([LONG | MORE]) + struct.pack(">Q", len(CHUNK)) + CHUNK
        while sent < most_bytes:
            one.sendall(part)
            sent += len(part)
        begun()
        time.sleep(seconds)
    return sent


def subscriptions(path: str, seconds: float, count: int = 20_000, **_: Any) -> int:
    with peer(path, zmq.SUB, queue=0) as one:
        for _ in range(count):
            one.setsockopt(zmq.SUBSCRIBE, secrets.token_bytes(24))
        begun()
        time.sleep(seconds)
    return count


def half_open(path: str, seconds: float, count: int = 300, **_: Any) -> int:
    """Connections that say nothing, or half a greeting."""
    with contextlib.ExitStack() as stack:
        made = 0
        for at in range(count):
            with contextlib.suppress(OSError):
                one = stack.enter_context(raw(path, timeout_s=0.2))
                one.sendall(GREETING[: at % 60])
                made += 1
        begun()
        time.sleep(seconds)
    return made


def commands(
    path: str,
    seconds: float,
    verb: str = "snapshot",
    run: str = "",
    same: bool = False,
    key: str = "",
    server: str = "",
    **_: Any,
) -> int:
    """Requests as fast as they are taken; their answers are not read."""
    done = 0
    last = uuid.uuid4().hex
    with peer(path, zmq.DEALER, key=key, server=server) as one:
        one.send(preamble("hostile"))  # the words of who attaches through a door
        for _ in until(seconds):
            command = Command(WIRE_VERSION, last if same else uuid.uuid4().hex, verb, run)
            with contextlib.suppress(zmq.Again):
                one.send(encode(command))
                done += 1
    return done


def parts(path: str, seconds: float, key: str, server: str, **_: Any) -> int:
    """Messages of 18 MB in 300 parts, from one who has the key."""
    done = 0
    with peer(path, zmq.DEALER, key=key, server=server) as one:
        one.send(preamble("hostile"))
        for _ in until(seconds):
            with contextlib.suppress(zmq.Again):
                one.send_multipart([CHUNK] * 300)
                done += 1
    return done


def nonsense(path: str, seconds: float, **_: Any) -> int:
    """Messages that are no commands, of one part and of several."""
    done = 0
    with peer(path, zmq.DEALER) as one:
        for _ in until(seconds):
            with contextlib.suppress(zmq.Again):
                one.send_multipart([secrets.token_bytes(100)] * (1 + done % 3))
                done += 1
    return done


def forged(path: str, seconds: float, victim: dict[str, Any], **_: Any) -> int:
    """A process announces itself under the name of a rank that lives, and speaks in its name.

    It says that it is the same rank started anew, the very same process, and nobody known.
    """
    folder = Path(path).parent
    ticks = process_start_ticks(os.getpid()) or 0
    done = 0
    with contextlib.ExitStack() as stack:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        stack.callback(context.destroy, linger=0)
        for at, incarnation in enumerate(("forged", victim["incarnation"])):
            name = f"rank-{os.getpid()}-0000000{at}"
            sender, receiver = context.socket(zmq.PUB), context.socket(zmq.ROUTER)
            for one, ending in ((sender, "t"), (receiver, "c")):
                one.bind(f"ipc://{folder / name}.{ending}")
            presence = Presence(
                version=WIRE_VERSION,
                role="rank",
                pid=os.getpid(),
                started_ticks=ticks,
                boot=boot_id(),
                telemetry=f"ipc://{folder / name}.t",
                control=f"ipc://{folder / name}.c",
                run=victim["run"],
                rank=victim["rank"],
                incarnation=incarnation,
            )
            file = folder / f"{name}.json"
            write_atomic(file, msgspec.json.encode(presence))
            stack.callback(file.unlink)
            for seq in range(10**6, 10**6 + int(seconds / 0.04)):
                for who in ("forged", "nobody"):
                    frame = RankFrame(
                        WIRE_VERSION, victim["run"], victim["rank"], who, seq, time.time(), 0
                    )
                    sender.send(encode(frame))
                    done += 1
                begun()
                time.sleep(0.02)
    return done


ATTACKS: dict[str, Callable[..., int]] = {
    f.__name__: f
    for f in (
        garbage,
        announced,
        endless,
        subscriptions,
        half_open,
        commands,
        parts,
        nonsense,
        forged,
    )
}


def main() -> None:
    os.nice(10)
    print(json.dumps({"up": os.getpid()}), flush=True)
    global _begun
    for line in sys.stdin:
        task = json.loads(line)
        _begun = False
        done = ATTACKS[task.pop("attack")](**task)
        begun()
        print(json.dumps({"done": done}), flush=True)


if __name__ == "__main__":
    main()
