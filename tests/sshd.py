"""A real sshd of a test's own: its keys, its port, loopback only."""

import contextlib
import os
import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import support

SSHD = shutil.which("sshd", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin")

needs_sshd = pytest.mark.skipif(
    SSHD is None or shutil.which("ssh") is None,
    reason="no sshd on this machine (Debian: apt-get install openssh-server)",
)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def keygen(path: Path) -> None:
    subprocess.run(
        ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(path)], check=True, timeout=20
    )


@contextlib.contextmanager
def an_sshd(directory: Path, port: int) -> Iterator[None]:
    """An sshd of the test's own: its keys, its port, loopback only."""
    assert SSHD is not None
    keygen(directory / "host")
    keygen(directory / "user")
    shutil.copy(directory / "user.pub", directory / "authorized")
    (directory / "sshd_config").write_text(
        f"Port {port}\nListenAddress 127.0.0.1\nHostKey {directory / 'host'}\n"
        f"AuthorizedKeysFile {directory / 'authorized'}\nStrictModes no\nUsePAM no\n"
        "PidFile none\nPasswordAuthentication no\nKbdInteractiveAuthentication no\n"
        "PermitRootLogin prohibit-password\nPrintMotd no\n"
    )
    if os.getuid() == 0:
        Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)  # where Debian's sshd drops to
    log = directory / "sshd.log"
    argv = [SSHD, "-D", "-e", "-f", str(directory / "sshd_config")]
    with support.process(argv, {"PATH": os.environ["PATH"]}, output=log):

        def listens() -> bool:
            with socket.socket() as probe:
                return probe.connect_ex(("127.0.0.1", port)) == 0

        try:
            support.wait_until(listens, 10, "sshd")
            yield
        except AssertionError as exc:
            raise AssertionError(f"{exc}; sshd said:\n{support.text_of(log)[-2000:]}") from exc
