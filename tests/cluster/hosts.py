"""Machines that share this one: each a network namespace with a hostname, joined by a switch.

A namespace lives as long as its holder, a process that sleeps: when that is ended nothing is left,
neither interfaces nor names. Needs root.
"""

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import support

_NETWORK = "10.213.77"
_SHAPES = {
    # Both ways of a slow link that a kernel may know; the second has no delay of its own.
    "netem": ("netem", "delay", "2ms", "rate", "{mbit}mbit"),
    "tbf": ("tbf", "rate", "{mbit}mbit", "burst", "64kb", "latency", "400ms"),
}


class NoHostsError(Exception):
    """Namespaces are not permitted here; why, in a sentence."""


@dataclass(frozen=True)
class Host:
    """One machine: `enter` goes before a command that is to run there, as `ssh HOST` would."""

    name: str
    holder: int
    directory: Path
    address: str = ""

    @property
    def enter(self) -> tuple[str, ...]:
        return ("nsenter", "--target", str(self.holder), "--net", "--uts", "--")

    def run(self, *argv: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*self.enter, *argv], capture_output=True, text=True, timeout=20, check=False
        )

    def must(self, *argv: str) -> None:
        done = self.run(*argv)
        if done.returncode:
            raise NoHostsError(f"{' '.join(argv)}: {done.stderr.strip()}")

    def slow_down(self, mbit: int) -> str:
        """Limit what leaves this machine; returns how, empty where the kernel knows no way."""
        for kind, words in _SHAPES.items():
            shaped = (word.format(mbit=mbit) for word in words)
            if not self.run("tc", "qdisc", "replace", "dev", "eth0", "root", *shaped).returncode:
                return kind
        return ""

    def heal(self) -> None:
        self.run("tc", "qdisc", "del", "dev", "eth0", "root")

    @property
    def via(self) -> str:
        """What `gpuwatch attach --via` takes to get there."""
        return " ".join((*self.enter, "env", f"GPUWATCH_DIR={self.directory}"))


@contextlib.contextmanager
def _held(name: str, directory: Path) -> Iterator[Host]:
    script = 'hostname "$1" && ip link set lo up && touch "$2" && exec sleep 600'
    up = directory / "up"
    argv = ["unshare", "--net", "--uts", "sh", "-c", script, "sh", name, str(up)]
    said = directory / "holder"
    with support.process(argv, dict(os.environ), output=said) as holder:
        with contextlib.suppress(AssertionError):
            support.wait_until(lambda: up.exists() or holder.poll() is not None, 10)
        if not up.exists():
            raise NoHostsError(support.text_of(said).strip() or "unshare does not answer")
        yield Host(name, holder.pid, directory)


@contextlib.contextmanager
def cluster(names: Sequence[str]) -> Iterator[list[Host]]:
    """So many machines on one switch, each with a run directory of its own.

    Raises:
        NoHostsError: it is not permitted here.
    """
    missing = [tool for tool in ("unshare", "nsenter", "ip", "tc") if shutil.which(tool) is None]
    if sys.platform != "linux" or os.geteuid() or missing:
        raise NoHostsError(f"it takes root on Linux, and {', '.join(missing) or 'iproute2'}")
    with contextlib.ExitStack() as stack:
        # The directories go last: a node process in one of them is ended before.
        directories = [stack.enter_context(support.run_directory()) for _ in range(len(names) + 1)]
        switch = stack.enter_context(_held("switch", directories.pop()))
        switch.must("ip", "link", "add", "br0", "type", "bridge")
        switch.must("ip", "link", "set", "br0", "up")
        hosts = []
        for at, (name, directory) in enumerate(zip(names, directories, strict=True), 1):
            host = stack.enter_context(_held(name, directory))
            pair = ("type", "veth", "peer", "name", "eth0", "netns", str(host.holder))
            switch.must("ip", "link", "add", f"port{at}", *pair)
            switch.must("ip", "link", "set", f"port{at}", "master", "br0", "up")
            address = f"{_NETWORK}.{at}"
            host.must("ip", "address", "add", f"{address}/24", "dev", "eth0")
            host.must("ip", "link", "set", "eth0", "up")
            hosts.append(Host(name, host.holder, directory, address))
        yield hosts
