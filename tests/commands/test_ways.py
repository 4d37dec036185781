"""What is said of a way that does not work: by whose fault, and what to type."""

import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import support
from sshd import an_sshd, free_port, needs_sshd

from gpuwatch.commands import remote
from gpuwatch.commands.remote import SSH_ARGV, RemoteSession, open_session, parse_target, parse_via
from gpuwatch.errors import AgentError, TargetError
from gpuwatch.wire.collect import PipeTarget
from gpuwatch.wire.collect.complaints import why_ended

CHANGED = """\
@    WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED!     @\r
Add correct host key in /home/me/.ssh/known_hosts to get rid of this message.\r
Offending ED25519 key in /home/me/.ssh/known_hosts:3\r
  remove with:\r
  ssh-keygen -f "/home/me/.ssh/known_hosts" -R "[10.0.0.7]:2222"\r
Host key for [10.0.0.7]:2222 has changed and you have requested strict checking.\r
Host key verification failed.\r
"""


def ended(
    text: str, stderr: str, noise: str = "", status: int = 255, *, greeted: bool = False
) -> str:
    target = parse_target(text) if "://" in text else parse_via(text)
    assert isinstance(target, PipeTarget)
    said = why_ended(target, status, stderr.encode(), noise.encode(), greeted=greeted)
    assert "\n" not in said.text
    return said.text


def without(text: str, *words: str) -> str:
    return "".join(line for line in text.splitlines(True) if not any(w in line for w in words))


@pytest.mark.parametrize(
    ("target", "stderr", "typed"),
    [
        # As ssh says it, which knows HostName, HostKeyAlias, the port and the file.
        ("ssh://node1", CHANGED, 'ssh-keygen -f "/home/me/.ssh/known_hosts" -R "[10.0.0.7]:2222"'),
        (
            "ssh://node1",
            CHANGED.replace('"[10.0.0.7]:2222"', "node1"),
            'ssh-keygen -f "/home/me/.ssh/known_hosts" -R node1',
        ),
        # An ssh that says the parts of it only.
        (
            "ssh://node1",
            without(CHANGED, "ssh-keygen"),
            'ssh-keygen -f "/home/me/.ssh/known_hosts" -R "[10.0.0.7]:2222"',
        ),
        ("ssh://n1", without(CHANGED, "ssh-keygen", "Offending"), '-R "[10.0.0.7]:2222"'),
        (
            "ssh://me@node1:2022",
            without(CHANGED, "ssh-keygen", "Offending", "Host key for"),
            'ssh-keygen -R "[node1]:2022"',
        ),
    ],
)
def test_a_host_key_that_changed_is_forgotten_by_the_name_ssh_has_for_it(
    target: str, stderr: str, typed: str
) -> None:
    said = ended(target, stderr)
    assert f"{typed}, then once: ssh " in said
    assert said.startswith("the host key of n")


@pytest.mark.parametrize(
    "line",
    [
        'ssh-keygen -f "/home/me/$(reboot)" -R "node1"',
        'ssh-keygen -f "/home/me/x" -R "`reboot`"',
        'ssh-keygen -f "/home/me/x" -R node1; reboot',
        'ssh-keygen -f "/home/me/x" -R "node1" && reboot',
    ],
)
def test_what_a_far_side_would_have_typed_is_not_passed_on(line: str) -> None:
    said = ended("ssh://node1:2022", f"REMOTE HOST IDENTIFICATION HAS CHANGED!\n  {line}\n")
    assert 'type: ssh-keygen -R "[node1]:2022", then once: ssh -p 2022 node1' in said
    assert "reboot" not in said


def test_a_terminal_in_the_way_is_said_whichever_way_its_words_come() -> None:
    usage = (
        "Usage: gpuwatch agent [OPTIONS]\r\n\r\nError: --stdio speaks to gpuwatch attach through "
        "pipes, and this is a terminal: leave -t out\r\n"
    )
    goodbye = "Connection to node1 closed.\r\n"
    for stderr, noise in ((goodbye, usage), ("", usage), (usage, "")):
        said = ended("ssh -tt node1", stderr, noise, 2)
        assert said == "a terminal stands in the way: leave out -t (and -tt, --tty)"
    # ssh's goodbye is no reason for anything else either.
    noise = "This account is currently not available.\r\n"
    for stderr in (goodbye, "Shared connection to node1 closed.\r\n"):
        assert ended("ssh -tt node1", stderr, noise, 1) == (
            "This account is currently not available. (exit status 1)"
        )
    # Who is past the greeting has come through no terminal, whatever is said there.
    assert "terminal" not in ended("ssh node1", "", usage, 1, greeted=True)


def test_a_command_that_was_killed_here_is_not_the_far_side() -> None:
    for greeted in (True, False):
        said = ended("ssh://node1", "", status=-9, greeted=greeted)
        assert said == "its own command on this machine, ssh, was ended by signal 9"
    assert ended("ssh://node1", "Killed by us", status=-15, greeted=True).endswith(
        "was ended by signal 15: Killed by us"
    )
    assert ended("/opt/k8s/kubectl exec -i p --", "", status=-9).startswith(
        "its own command on this machine, kubectl, was"
    )
    assert ended("ssh://node1", "", status=137, greeted=True) == (
        "the far side has ended (exit status 137)"
    )


def test_a_pipe_whose_command_is_killed_says_so(rundir: Path) -> None:
    program = shlex.join(["env", f"GPUWATCH_DIR={rundir}", *support.GPUWATCH])
    session, _ = open_session([], via=["env"], program=program)
    try:
        (pipe,) = session.pipes
        support.wait_until(lambda: pipe.state == "live", 20, "contact")
        os.kill(getattr(pipe, "pid", 0), signal.SIGKILL)
        words = "its own command on this machine, env, was ended by signal 9"
        support.wait_until(
            lambda: any(words in event.text for event in session.view().events), 10, words
        )
    finally:
        session.close()


# --- targets -----------------------------------------------------------------------------------


def test_a_run_beside_other_targets_is_told_that_it_stands_alone() -> None:
    with pytest.raises(TargetError) as caught:
        open_session(["llama", "local"])
    assert str(caught.value) == (
        "'llama' may be a run on this machine, and that stands alone; beside other targets write "
        "local for this machine, or ssh://llama for another one"
    )
    with pytest.raises(TargetError, match="'ssh:/node1' is no target; write ssh://host"):
        parse_target("ssh:/node1")


# --- who does not answer -----------------------------------------------------------------------


SLEEPS = "sh -c 'exec sleep 100'"
HANGS = "sh -c 'exec sleep 99'"


def test_a_login_that_never_ends_is_named_with_what_to_type() -> None:
    targets = [parse_via(SLEEPS), parse_via(HANGS)]
    session = RemoteSession(targets)
    try:
        with pytest.raises(AgentError) as caught:
            session.settled_view(1.0)
    finally:
        session.close()
    assert str(caught.value).splitlines() == [
        f"{SLEEPS}: no answer within 1 s; to see more, type: {SLEEPS}",
        f"gpuwatch: {HANGS}: no answer within 1 s; to see more, type: {HANGS}",
    ]


def test_a_pipe_gives_up_before_who_asks_once_does() -> None:
    from gpuwatch.wire.collect import pipelink

    assert remote._CONNECT_S > pipelink.ANSWER_S


def test_who_does_not_answer_is_named_beside_those_who_do(rundir: Path) -> None:
    program = shlex.join(["env", f"GPUWATCH_DIR={rundir}", *support.GPUWATCH])
    session = RemoteSession([parse_via("env", program), parse_via(HANGS)])
    try:
        support.wait_until(lambda: bool(session.pipes[0].heard_s), 20, "the one")
        assert session.troubles() == ()
        view = session.settled_view(1.0)
        assert [node.node for node in view.nodes]
        assert session.troubles() == (f"{HANGS}: no answer within 1 s; to see more, type: {HANGS}",)
        assert view.notices[:1] == session.troubles()
    finally:
        session.close()


# --- a real sshd -------------------------------------------------------------------------------


@needs_sshd
def test_what_is_typed_for_a_changed_host_key_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    port = free_port()
    # ssh splits its UserKnownHostsFile at blanks: in a folder without one.
    known, config = tmp_path / "known_hosts", tmp_path / "config"
    config.write_text(
        f"Host node1\n  HostName 127.0.0.1\n  Port {port}\n  IdentityFile {tmp_path / 'user'}\n"
        f"  UserKnownHostsFile {known}\n  GlobalKnownHostsFile none\n  IdentityAgent none\n"
        "  StrictHostKeyChecking yes\n"
    )
    monkeypatch.setenv("GPUWATCH_SSH", shlex.join([*SSH_ARGV, "-F", str(config)]))
    with an_sshd(tmp_path, port):
        other = " ".join((tmp_path / "user.pub").read_text().split()[:2])
        known.write_text(f"[127.0.0.1]:{port} {other}\n")

        def said(*targets: str) -> str:
            session, _ = open_session(targets, program="/nowhere/gpuwatch")
            try:
                with pytest.raises(AgentError) as caught:
                    session.settled_view()
            finally:
                session.close()
            return str(caught.value)

        changed = said("ssh://node1")
        assert "the host key of node1 is not the one that is known" in changed
        typed = changed.partition("type: ")[2].partition(", then once: ")[0]
        assert f'"[127.0.0.1]:{port}"' in typed
        subprocess.run(
            ["sh", "-c", typed if str(known) in typed else f"{typed} -f {known}"],
            check=True,
            capture_output=True,
            timeout=20,
        )
        assert "is not known yet; type once: ssh node1" in said("ssh://node1")

        host = " ".join((tmp_path / "host.pub").read_text().split()[:2])
        known.write_text(f"[127.0.0.1]:{port} {host}\n")
        session, _ = open_session(
            [],
            via=[shlex.join(["ssh", "-tt", "-F", str(config), "node1"])],
            program=shlex.join([sys.executable, "-P", "-m", "gpuwatch"]),
        )
        try:
            with pytest.raises(AgentError, match="a terminal stands in the way: leave out -t"):
                session.settled_view()
        finally:
            session.close()
