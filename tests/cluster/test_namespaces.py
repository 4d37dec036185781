"""One job of eight ranks on four machines, watched through a pipe to each of them.

The machines are network namespaces with hostnames of their own on one switch, so the slow link and
the slow machine are real. One launch, one session, one story.
"""

import json
import os
import shlex
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import support
from cluster.hosts import Host, NoHostsError, cluster

from gpuwatch.commands.remote import RemoteSession, open_session
from gpuwatch.diagnosis import Engine
from gpuwatch.diagnosis.types import Finding
from gpuwatch.store.views import RunView, View

JOB = Path(__file__).parent / "job.py"
NAMES = ("alder", "birch", "cedar", "dogwood")
RUN = "four-hosts"
MBIT = 50  # an all-reduce of half a megabyte between eight ranks takes about 150 ms through it
SLOW_MS = 120.0  # what job.py sleeps longer on a slow machine
LOOK_S = 1.0


class Watcher:
    """Looks once a second, as the screen does: one engine over the views of one session."""

    def __init__(self, session: RemoteSession) -> None:
        self.session = session
        self._engine = Engine()
        self._found: dict[str, Finding] = {}
        self.said = ""

    def view(self) -> View:
        return self.session.view()

    @property
    def run(self) -> RunView:
        run = self.view().run(RUN)
        assert run is not None
        return run

    def look(self) -> None:
        view = self.view()
        run = view.run(RUN)
        if run is None:
            self.said = f"no run; {view.link} {view.message}"
            return
        found = self._engine.evaluate(view, run).findings
        self._found = {f.kind: f for f in found if f.state == "open"}
        findings = [(f.kind, f.ranks, f.severity, f.cost_ms) for f in self._found.values()]
        states = [r.state for r in run.ranks]
        self.said = f"step {run.steps}, {run.step_ms} ms, {states}, {findings}, {view.notices}"

    def until(self, condition: Callable[[], bool], timeout_s: float, what: str) -> None:
        """Look until the condition holds; what was seen last is in the failure."""

        def seen() -> bool:
            self.look()
            return condition()

        began_s = time.monotonic()
        try:
            support.wait_until(seen, timeout_s, every_s=LOOK_S)
        except AssertionError:
            raise AssertionError(f"{what}: not within {timeout_s} s; {self.said}") from None
        print(f"{what}: {time.monotonic() - began_s:.1f} s; {self.said}")

    def finding(self, kind: str) -> Finding | None:
        return self._found.get(kind)

    def cost_ms(self, kind: str) -> float:
        """What an open finding costs; 0 without one, or where it follows from another."""
        found = self._found.get(kind)
        return (found.cost_ms or 0.0) if found is not None else 0.0


@pytest.fixture
def hosts() -> Iterator[list[Host]]:
    try:
        with cluster(NAMES) as made:
            yield made
    except NoHostsError as exc:
        pytest.skip(f"machines cannot be made here: {exc}")


def start(hosts: list[Host], directory: Path) -> tuple[list[str], dict[str, str]]:
    """The command of the job and its environment."""
    machines = [
        json.dumps({"holder": h.holder, "environment": {"GPUWATCH_DIR": str(h.directory)}})
        for h in hosts
    ]
    env = support.environment(
        directory,
        LOCAL_WORLD_SIZE="2",
        MASTER_ADDR=hosts[0].address,
        MASTER_PORT="29500",
        GLOO_SOCKET_IFNAME="eth0",
        GPUWATCH_RUN_ID=RUN,
    )
    return [support.PYTHON, str(JOB), str(directory), *machines], env


@pytest.mark.distributed
@pytest.mark.alone
@pytest.mark.timeout(240)
def test_four_hosts_are_one_job_and_what_happens_to_one_of_them_is_told(
    hosts: list[Host], tmp_path: Path
) -> None:
    argv, env = start(hosts, tmp_path)
    with support.process(argv, env, output=tmp_path / "out") as job:
        session, _ = open_session(
            [], via=[h.via for h in hosts], program=shlex.join(support.GPUWATCH)
        )
        try:
            story(hosts, tmp_path, Watcher(session), job)
        except AssertionError:
            print(support.text_of(tmp_path / "out"))
            raise
        finally:
            session.close()


def story(
    hosts: list[Host], directory: Path, watcher: Watcher, job: "subprocess.Popen[bytes]"
) -> None:
    watcher.until(lambda: all_are_seen(watcher.view()), 90, "eight ranks and four samplers")
    # How much of the step two crowded cores make of communication anyhow.
    watcher.until(lambda: watcher.run.window >= 24, 60, "a quiet window")
    quiet_ms = watcher.cost_ms("comm_bound")

    shaped = hosts[1].slow_down(MBIT)
    if shaped:
        limit_ms = quiet_ms + 60.0
        watcher.until(
            lambda: watcher.cost_ms("comm_bound") > limit_ms, 60, f"a slow link, by {shaped}"
        )
        found = watcher.finding("comm_bound")
        assert found is not None
        assert found.ranks == tuple(range(8))
        assert found.follows is None
        assert watcher.cost_ms("straggler") < watcher.cost_ms("comm_bound") / 2
        hosts[1].heal()

    (directory / "slow").write_text(hosts[2].name)
    watcher.until(
        lambda: (f := watcher.finding("straggler")) is not None and f.ranks == (4, 5),
        60,
        "a slow machine",
    )
    found = watcher.finding("straggler")
    assert found is not None
    assert found.nodes == (hosts[2].name,)
    assert 0.5 * SLOW_MS < watcher.cost_ms("straggler") < 2 * SLOW_MS
    assert "forward" in found.summary
    (directory / "slow").unlink()

    partition(watcher, hosts[3].name)

    (directory / "stop").touch()
    watcher.until(lambda: watcher.run.state == "ended", 20, "the end")
    assert {r.state_reason for r in watcher.run.ranks} == {"finished"}
    assert job.wait(60) == 0
    if not shaped:
        pytest.skip("all but the slow link: this kernel has neither tc netem nor tc tbf")


def all_are_seen(view: View) -> bool:
    """Whether every rank trains on its machine, and every machine's sampler has readings of it."""
    run = view.run(RUN)
    if run is None or len(run.ranks) != 8 or len(view.nodes) != len(NAMES):
        return False
    return (
        [r.node for r in run.ranks] == [name for name in NAMES for _ in range(2)]
        and run.world_size == 8
        and all(r.window and r.process is not None for r in run.ranks)
        and all(n.host is not None and "cpu_percent" in n.host.readings for n in view.nodes)
    )


def partition(watcher: Watcher, name: str) -> None:
    """Stop the far end of one machine's pipe for a few seconds: the monitor alone is cut off."""
    pipe = next(p for p in watcher.session.pipes if p.node == name)
    pid = pipe.pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    try:
        watcher.until(
            lambda: all(r.state == "silent" for r in watcher.run.ranks[6:]), 10, "silence"
        )
        here, there = watcher.run.ranks[:6], watcher.run.ranks[6:]
        # Nothing is known of them, and nothing is claimed: the others train on with them.
        assert {r.state_reason for r in there} == {f"no contact with {pipe.target.label}"}
        assert {r.state for r in here} == {"training"}
        assert watcher.view().link == "live"
        steps = here[0].steps
        support.wait_until(lambda: watcher.run.ranks[0].steps > steps, 10, "the others go on")
    finally:
        os.kill(pid, signal.SIGCONT)
    watcher.until(
        lambda: all(r.state == "training" for r in watcher.run.ranks), 30, "all of them again"
    )
    watcher.until(
        lambda: min(r.steps for r in watcher.run.ranks[6:]) > steps and not watcher.run.lost,
        30,
        "their past",
    )
    for rank in watcher.run.ranks:
        indices = [r.index for r in rank.window]
        assert indices == list(range(indices[0], indices[0] + len(indices)))
    assert watcher.view().lost == 0
