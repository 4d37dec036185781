"""What many ranks cost the monitor: 1,000, 4,000 and 10,000 of them over TCP with CURVE.

    python benchmarks/bench_many.py                       # all three, about five minutes
    python benchmarks/bench_many.py --ranks 4000 --seconds 80
    python benchmarks/bench_many.py --ranks 4000 --profile   # where the CPU time goes
    python benchmarks/bench_many.py --old                    # if the doors knew no wishes
    python benchmarks/bench_many.py --gpus                   # with a sampler's ticks

One process plays the doors of all node processes, eight ranks each. It sends what they send: ten
node frames a second, each with the frames of its ranks, which hold a step a second and are
heartbeats otherwise; to a monitor that wishes so the frame that a door makes of ten of them (its
own code makes one, whose numbers are then written anew); and, when it is asked, the past of each
rank. All ranks end their steps at the same moment, as in synchronous training. A second process is
the monitor: links, session and store as `gpuwatch attach tcp://...` has them, without a screen.
Every door has an address of its own in 127.0.0.0/8, and every connection its own handshake.

With `--gpus` each node has a tick of its sampler a second as well, with twenty readings of each of
eight GPUs, five of each rank and nine of the host: four times the bytes.

Figures are of the monitor, after all ranks are known: CPU of its whole process, the age of a frame
when it is in the picture, frames that were lost, and what one view costs. Nobody looks meanwhile:
of steps the store reads then what it has no room for, once in 32 frames of a node, of which a
shorter window has nothing. Then pictures are taken as a screen takes them, which is when steps are
read, and the same is told again: of all, and of the pictures alone.
"""

import argparse
import contextlib
import cProfile
import functools
import itertools
import json
import os
import pstats
import resource
import statistics
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from pathlib import Path
from typing import Any

import msgspec
import zmq
from zmq.utils import z85

from gpuwatch.commands.remote import open_session
from gpuwatch.frames import decode_command, encode
from gpuwatch.schema import (
    WIRE_VERSION,
    Ddp,
    GpuProcess,
    GpuSample,
    Hello,
    HostSample,
    Ledger,
    Loader,
    NodeFrame,
    PhasesNs,
    ProcessSample,
    RankFrame,
    RankState,
    Reading,
    Reply,
    SensorFrame,
    StepRecord,
)
from gpuwatch.tui.watcher import Watcher
from gpuwatch.wire.collect import load_key, make_key
from gpuwatch.wire.collect.agent import INTERVAL_S
from gpuwatch.wire.collect.door import PULSE_S, PULSE_TTL_S
from gpuwatch.wire.collect.gather import CALM_S, Gather, is_calm
from gpuwatch.wire.collect.pipe import MAGIC, PreambleReader, preamble

RANKS = (1_000, 4_000, 10_000)
BUDGET_PERCENT = {1_000: 10.0, 4_000: 10.0, 10_000: 10.0}
BUDGET_ATTACH_S = 30.0
RANKS_A_NODE = 8
STEP_S = 1.0
RUN = "bench"
PAST_STEPS = 60
"""Of each rank, when it is asked: a run of a minute. One of ten minutes has 600."""

FRAMES_A_CALM_ONE = round(CALM_S / INTERVAL_S)
HZ = 4.0
PICTURE_REST_S = 10.0
"""How often a screen asks for pictures, and the longest that it waits for one."""

TICK_S = 0.005
ATTACH_TIMEOUT_S = 60.0
_ONE_IN = 20  # of the frames whose age is looked at: looking costs the monitor as well
_SEQ = 1_000_000  # from there on a number has five bytes on the wire, whatever it is
_STARTED_S = 1.0
ZAP = "inproc://zeromq.zap.01"


# --- what a node sends -------------------------------------------------------------------------


def record(index: int, started_s: float) -> StepRecord:
    host = PhasesNs(12_345_678, 1_234_567, 245_678_901, 467_890_123, 258_901_234, 9_012_345, 0)
    return StepRecord(
        index=index,
        started_s=started_s,
        step_ns=sum(value or 0 for value in msgspec.structs.astuple(host)),
        host=host,
        samples=256,
        loss=2.3456789,
        memory_bytes=12_345_678_912,
        queue_depth=3.0,
        queue_capacity=8,
        loader="train",
    )


def hello(node: int, rank: int, world_size: int) -> Hello:
    return Hello(
        host=f"node{node:05}",
        pid=1000 + rank % RANKS_A_NODE,
        pid_started_s=_STARTED_S,
        world_size=world_size,
        local_rank=rank % RANKS_A_NODE,
        run_name=RUN,
        started_s=_STARTED_S,
        cores=64,
        loaders=(Loader("train", 8, 2, pin_memory=True, batch_size=256),),
        ddp=Ddp(gradient_bytes=10**8, backend="nccl"),
    )


def rank_frame(rank: int, seq: int, sent_s: float, **more: Any) -> RankFrame:
    return RankFrame(
        version=WIRE_VERSION,
        run=RUN,
        rank=rank,
        incarnation=f"incarnation{rank:07}",
        seq=seq,
        sent_s=sent_s,
        dropped=0,
        state=RankState("training", "backward", 12_345_678, 10_000, {}, 2.3, 4.2, 100_000),
        ledger=Ledger(10_000, 2_560_000, 3, 10**12, 10**11, 10**10, 10**10, 10**9, 10**9, 10**12),
        **more,
    )


READINGS = tuple(f"reading_{at}" for at in range(20))


@functools.lru_cache(maxsize=1)
def tick() -> bytes:
    """What a sampler says of a node with a GPU a rank: the same of all nodes."""

    def some(count: int) -> dict[str, Reading]:
        return {
            name: Reading(50.0 + at / 3, "%", "nvml", 0.1)
            for at, name in enumerate(READINGS[:count])
        }

    gpus = range(RANKS_A_NODE)
    return encode(
        SensorFrame(
            WIRE_VERSION,
            1,
            _STARTED_S,
            HostSample(64, some(9), tuple(map(float, range(64)))),
            tuple(
                GpuSample(at, f"GPU-{at:032}", "NVIDIA H100", some(20), (GpuProcess(1000 + at),))
                for at in gpus
            ),
            "",
            tuple(ProcessSample(1000 + at, 1000 + at, "rank", "R", some(5)) for at in gpus),
        )
    )


@functools.lru_cache(maxsize=4)
def past_records(last: int, steps: int, now_s: int) -> tuple[StepRecord, ...]:
    """The last steps of any rank: all of them are alike."""
    return tuple(
        record(index, now_s - (last - index) * STEP_S)
        for index in range(last - steps + 1, last + 1)
    )


class Template:
    """The bytes of a frame with numbers that are written anew each time."""

    def __init__(self, data: bytes, marks: dict[str, list[int]]) -> None:
        self.data = bytearray(data)
        self._places: dict[str, list[int]] = {}
        for name, numbers in marks.items():
            places = [self.data.find(_wire(number)) for number in numbers]
            if -1 in places:
                raise AssertionError(f"{name} is not in the frame")
            self._places[name] = [at + 1 for at in places]

    def write(self, name: str, value: float) -> None:
        form = ">I" if isinstance(value, int) else ">d"
        for at in self._places[name]:
            struct.pack_into(form, self.data, at, value)


_wire = msgspec.msgpack.Encoder().encode
"""A number as MessagePack writes it: one byte that says what it is, then the number."""


class Node:
    """A node process as its monitor sees it."""

    def __init__(self, number: int, world_size: int, *, gpus: bool = False) -> None:
        self.number = number
        self.gpus = gpus
        self.world_size = world_size
        self.ranks = range(number * RANKS_A_NODE, min((number + 1) * RANKS_A_NODE, world_size))
        self.identity = b""
        self.node_seq = self.seq = _SEQ
        self.told_step = _SEQ
        self.calm = False  # its monitor wishes for a frame a second
        self._templates: dict[tuple[bool, bool], Template] = {}

    def _template(self, busy: bool) -> Template:
        key = (self.calm, busy)
        if key not in self._templates:
            self._templates[key] = self._made(busy)
        return self._templates[key]

    def _made(self, busy: bool) -> Template:
        # Numbers that occur nowhere else, and as long as those that take their places.
        numbers = [_SEQ + 7 + at for at in range(len(self.ranks))]
        times = [1.7e9 + 0.123456 + at for at in range(len(self.ranks) + 1)]
        started_s, index = 1.6e9 + 0.654321, 2_000_000_011
        whole: list[bytes] = []
        gather = Gather()
        for before in reversed(range(FRAMES_A_CALM_ONE if self.calm else 1)):
            # What came before the last one is replaced by it, but for a step in the middle.
            told = busy and before == (FRAMES_A_CALM_ONE // 2 if self.calm else 0)
            frames = [
                rank_frame(
                    rank,
                    numbers[at] - before,
                    times[at + 1] - before,
                    records=(record(index + at, started_s + at),) if told else (),
                )
                for at, rank in enumerate(self.ranks)
            ]
            made = node_frame(self, 3_000_000_019 - before, times[0] - before, frames)
            if self.gpus and (not before if self.calm else told):
                made = msgspec.structs.replace(made, sensors=msgspec.Raw(tick()))
            data = encode(made)
            whole = gather.add(data, -INTERVAL_S * before) if self.calm else [data]
        (data,) = whole or gather.take(0.0)
        marks: dict[str, list[Any]] = {"node_seq": [3_000_000_019], "seq": numbers, "sent": times}
        if busy:
            marks["index"] = [index + at for at in range(len(self.ranks))]
            marks["started"] = [started_s + at for at in range(len(self.ranks))]
        return Template(data, marks)

    def frame(self, step: int, now_s: float) -> bytes:
        """The next frame; it holds the steps that have ended since the one before."""
        self.node_seq += FRAMES_A_CALM_ONE if self.calm else 1
        self.seq += FRAMES_A_CALM_ONE if self.calm else 1
        busy = step > self.told_step
        template = self._template(busy)
        template.write("node_seq", self.node_seq)
        template.write("seq", self.seq)
        template.write("sent", now_s)
        if busy:
            self.told_step = step
            template.write("index", step)
            template.write("started", now_s - STEP_S)
        return bytes(template.data)

    def past(self, now_s: float, steps: int, reply: Reply) -> bytes:
        """What its ranks remember, and the answer that this was all."""
        self.node_seq += 1
        records = past_records(self.told_step, steps, int(now_s))
        frames = [
            rank_frame(
                rank,
                self.seq,
                now_s,
                records=records,
                hello=hello(self.number, rank, self.world_size),
                snapshot=True,
            )
            for rank in self.ranks
        ]
        return encode(node_frame(self, self.node_seq, now_s, frames, reply))


def node_frame(
    node: Node, seq: int, sent_s: float, frames: list[RankFrame], *replies: Reply
) -> NodeFrame:
    return NodeFrame(
        version=WIRE_VERSION,
        node=f"node{node.number:05}",
        incarnation=f"agent{node.number:05}",
        seq=seq,
        sent_s=sent_s,
        frames=tuple(msgspec.Raw(encode(frame)) for frame in frames),
        agent_pid=1,
        replies=replies,
    )


# --- the doors ---------------------------------------------------------------------------------


def admit(context: "zmq.Context[zmq.Socket[bytes]]", public: bytes) -> None:
    """Answer for the key, as a door does."""
    zap = context.socket(zmq.ROUTER)
    zap.bind(ZAP)

    def serve() -> None:
        while True:
            parts = zap.recv_multipart()
            known = len(parts) == 9 and z85.encode(parts[8]) == public
            status = b"200" if known else b"400"
            zap.send_multipart([parts[0], b"", b"1.0", parts[3], status, b"", b"", b""])

    threading.Thread(target=serve, daemon=True).start()


def wishes_calm(greeting: bytes) -> bool:
    """What a monitor says behind its preamble."""
    found = PreambleReader().feed(greeting)
    return found is not None and bool(found[1]) and is_calm(decode_command(found[1]))


def generate(ranks: int, key_file: str, past_steps: int, old: bool, gpus: bool) -> None:
    """Be all of the doors, on one port; ends with its parent."""
    sys.setswitchinterval(0.0005)  # a thread of its own answers for the keys of all doors
    key = load_key(key_file)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    context.set(zmq.MAX_SOCKETS, 16)
    admit(context, key.public)
    router = context.socket(zmq.ROUTER)
    router.setsockopt(zmq.BACKLOG, 4096)
    router.setsockopt(zmq.ROUTER_MANDATORY, 1)
    router.sndhwm = 300
    router.setsockopt(zmq.HEARTBEAT_IVL, int(PULSE_S * 1000))
    router.setsockopt(zmq.HEARTBEAT_TIMEOUT, int(PULSE_TTL_S * 1000))
    router.curve_server = True
    router.curve_secretkey = key.secret
    router.zap_domain = b"bench"
    router.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
    port = router.bind_to_random_port("tcp://*")
    nodes = [Node(at, ranks, gpus=gpus) for at in range(-(-ranks // RANKS_A_NODE))]
    for node in nodes:
        node.calm = not old
        for busy in (False, True):
            node._template(busy)  # takes its time
    print(port, flush=True)
    free = deque(nodes)
    attached: dict[bytes, Node] = {}
    asked: dict[Node, str] = {}  # who asks again while it waits is answered once
    turns = {False: round(INTERVAL_S / TICK_S), True: round(CALM_S / TICK_S)}
    parent, began_s = os.getppid(), time.time()
    refused = late = 0
    next_s = time.monotonic()
    for turn in itertools.count():
        next_s += TICK_S
        pause_s = next_s - time.monotonic()
        if pause_s > 0:
            time.sleep(pause_s)
        elif pause_s < -INTERVAL_S:
            late += 1
            next_s = time.monotonic()
        if turn % 200 == 0 and os.getppid() != parent:
            return
        with contextlib.suppress(zmq.Again):
            for _ in range(256):
                who, data = router.recv_multipart(zmq.NOBLOCK)
                node = attached.get(who)
                if node is None and data.startswith(MAGIC) and free:
                    node = attached[who] = free.popleft()
                    node.identity = who
                    node.calm = not old and wishes_calm(data)
                    router.send_multipart([who, preamble("bench")])
                elif node is not None and not data.startswith(MAGIC):
                    asked[node] = decode_command(data).id
        for _ in range(min(4, len(asked))):  # a past takes long to make: the frames go on
            node = next(iter(asked))
            command = asked.pop(node)
            now_s = time.time()
            node.told_step = max(node.told_step, _SEQ + past_steps + int(now_s - began_s))
            answer = node.past(now_s, past_steps, Reply(command, "done"))
            with contextlib.suppress(zmq.ZMQError):
                router.send_multipart([node.identity, answer], zmq.NOBLOCK)
        now_s = time.time()
        step = _SEQ + past_steps + int(now_s - began_s)
        for calm, every in turns.items():
            for node in nodes[turn % every :: every]:
                if node.identity and node.calm is calm:
                    try:
                        data = node.frame(step, now_s)
                        router.send_multipart([node.identity, data], zmq.NOBLOCK)
                    except zmq.Again:
                        refused += 1
                    except zmq.ZMQError:
                        node.identity = b""  # its monitor has gone
        if turn % 100 == 0:
            with contextlib.suppress(OSError):
                print(json.dumps({"refused": refused, "late": late}), flush=True)


# --- the monitor -------------------------------------------------------------------------------


class _Head(msgspec.Struct, array_like=True):
    """The first fields of a node frame, up to when it was sent."""

    version: int
    node: str
    incarnation: str
    seq: int
    sent_s: float


_heads = msgspec.msgpack.Decoder(_Head)


def monitor(port: int, ranks: int, key_file: str, seconds: float, profile: bool) -> None:
    """Attach to every door, say what it took as a line of JSON."""
    ages_s: list[float] = []
    taken = itertools.count()

    def tap(data: bytes) -> None:
        if next(taken) % _ONE_IN == 0:
            ages_s.append(time.time() - _heads.decode(data).sent_s)

    profiler = cProfile.Profile() if profile else None
    if profiler is not None:
        _profile_links(profiler)
    nodes = -(-ranks // RANKS_A_NODE)
    targets = [
        f"tcp://127.{1 + n // 250 // 250}.{n // 250 % 250}.{1 + n % 250}" for n in range(nodes)
    ]
    began_s, began_cpu_s = time.monotonic(), time.process_time()
    session, _ = open_session(
        [f"{target}:{port}" for target in targets], key=load_key(key_file), tap=tap
    )
    in_store_s = _time_store(session)
    known = session._store._ranks  # a view costs more than all of the rest
    while sum(r.hello is not None for r in list(known.values())) < ranks:
        if time.monotonic() - began_s > ATTACH_TIMEOUT_S:
            break
        time.sleep(0.1)
    attach_s, attach_cpu_s = time.monotonic() - began_s, time.process_time() - began_cpu_s
    time.sleep(3.0)  # what has waited while it attached is read
    frames = next(taken)
    ages_s.clear()
    store_s = in_store_s[0]
    wall_s, cpu_s = time.monotonic(), time.process_time()
    lost = _lost(session)
    time.sleep(seconds)
    cpu_s, wall_s = time.process_time() - cpu_s, time.monotonic() - wall_s
    store_s = in_store_s[0] - store_s
    frames = next(taken) - frames
    ordered = sorted(ages_s)
    resident = _resident()
    lost = _lost(session) - lost
    view_began_s = time.thread_time()
    view = session.view()
    view_ms = (time.thread_time() - view_began_s) * 1e3
    found = {
        "known": sum(r.hello is not None for r in view.runs[0].ranks),
        "live": sum(r.state == "training" for r in view.runs[0].ranks),
        "attach_s": attach_s,
        "attach_cpu_s": attach_cpu_s,
        "cpu_percent": 100 * cpu_s / wall_s,
        "frames_per_s": frames / wall_s,
        "us_per_frame": 1e6 * cpu_s / max(1, frames),
        "us_before_store": 1e6 * (cpu_s - store_s) / max(1, frames),
        "age_p50_ms": 1e3 * statistics.median(ordered),
        "age_p99_ms": 1e3 * ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))],
        "lost": lost,
        "resident_mb": resident / 2**20,
        "files": len(os.listdir("/proc/self/fd")),
        "view_ms": view_ms,
    }
    found |= _with_pictures(session, seconds)
    session.close()
    if profiler is not None:
        time.sleep(0.5)
        stats = pstats.Stats(profiler, stream=sys.stderr)
        stats.sort_stats("tottime").print_stats(45)
    print(json.dumps(found), flush=True)


def _lost(session: Any) -> int:
    store = session._store
    return sum(r.lost + r.open_gap for r in store._ranks.values()) + sum(
        n.lost for n in store._nodes.values()
    )


def _with_pictures(session: Any, seconds: float) -> dict[str, float]:
    """Take pictures as the screen does, at its own pace, and return what all of it costs.

    What steps and totals of the frames cost that came before it is paid in the first one, which
    is not counted; nothing is painted, and the rules are not asked.
    """
    watcher = Watcher(session, lambda _: ())
    watcher.poll(force=True)
    time.sleep(PICTURE_REST_S)
    began_s, cpu_s, mine_s = time.monotonic(), time.process_time(), time.thread_time()
    pictures = watcher._views
    while time.monotonic() < began_s + max(seconds, 2 * PICTURE_REST_S):
        watcher.poll()
        time.sleep(1.0 / HZ)
    wall_s = time.monotonic() - began_s
    pictures = watcher._views - pictures
    mine_s = time.thread_time() - mine_s
    watcher.close()
    return {
        "pictures_cpu_percent": 100 * (time.process_time() - cpu_s) / wall_s,
        "pictures_own_percent": 100 * mine_s / wall_s,
        "pictures": pictures / wall_s,
        "picture_ms": 1e3 * mine_s / max(1, pictures),
        "pictures_resident_mb": _resident() / 2**20,
    }


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def _time_store(session: Any) -> list[float]:
    """Return the CPU time of its store so far, in seconds, in a list that is kept up to date."""
    spent_s = [0.0]
    apply = session._store.apply

    def timed(frame: NodeFrame, received_s: float) -> Any:
        began_s = time.thread_time()
        try:
            return apply(frame, received_s)
        finally:
            spent_s[0] += time.thread_time() - began_s

    session._store.apply = timed
    return spent_s


def _profile_links(profiler: cProfile.Profile) -> None:
    from gpuwatch.wire.collect import TcpLink

    run = TcpLink.run

    def profiled(self: TcpLink) -> None:
        profiler.runcall(run, self)

    TcpLink.run = profiled  # type: ignore[method-assign]


# --- both --------------------------------------------------------------------------------------


def measure(
    ranks: int, seconds: float, past_steps: int, old: bool, profile: bool, gpus: bool
) -> dict[str, Any]:
    """Run doors and monitor as processes of their own and return the figures."""
    with tempfile.TemporaryDirectory(prefix="gpuwatch-bench-") as folder:
        key_file = str(Path(folder) / "key")
        make_key(key_file)
        here = [sys.executable, __file__, "--key", key_file, "--ranks", str(ranks)]
        more = [*(["--old"] if old else []), *(["--gpus"] if gpus else [])]
        doors = subprocess.Popen(
            [*here, "--part", "doors", "--past", str(past_steps), *more],
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            assert doors.stdout is not None
            port = doors.stdout.readline().strip()
            said: deque[str] = deque(maxlen=1)
            listening = threading.Thread(target=lambda: said.extend(doors.stdout or ()))
            listening.start()
            words = [*here, "--part", "monitor", "--port", port, "--seconds", str(seconds)]
            done = subprocess.run(
                [*words, *(["--profile"] if profile else [])],
                stdout=subprocess.PIPE,
                text=True,
                timeout=ATTACH_TIMEOUT_S + 2 * seconds + 90,
                check=False,
            )
        finally:
            doors.kill()
            doors.wait()
            listening.join()
            doors.stdout.close()
    if done.returncode:
        raise SystemExit(f"the monitor of {ranks} ranks ended with {done.returncode}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    found["doors"] = json.loads(said[0]) if said else {}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, action="append")
    parser.add_argument("--seconds", type=float, default=40.0)
    parser.add_argument("--past", type=int, default=PAST_STEPS, help="steps that a rank remembers")
    parser.add_argument("--old", action="store_true", help="doors that know no wishes")
    parser.add_argument("--gpus", action="store_true", help="a sampler's ticks as well")
    parser.add_argument("--profile", action="store_true", help="say where the CPU time goes")
    parser.add_argument("--json", action="store_true")
    for hidden in ("--part", "--key", "--port"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.part == "doors":
        generate(options.ranks[0], options.key, options.past, options.old, options.gpus)
        return
    if options.part == "monitor":
        monitor(int(options.port), options.ranks[0], options.key, options.seconds, options.profile)
        return
    found = {}
    for ranks in options.ranks or RANKS:
        found[ranks] = row = measure(
            ranks, options.seconds, options.past, options.old, options.profile, options.gpus
        )
        if not options.json:
            say(ranks, row)
    if options.json:
        print(json.dumps(found))


def say(ranks: int, row: dict[str, Any]) -> None:
    budget = BUDGET_PERCENT.get(ranks, 10.0)
    print(
        f"{ranks:,} ranks behind {-(-ranks // RANKS_A_NODE):,} doors, "
        f"{row['frames_per_s']:,.0f} node frames a second, {row['live']:,} ranks training\n"
        f"  ranks that are known   {row['known']:7,}     (budget {ranks:,})\n"
        f"  CPU of a core          {row['cpu_percent']:7.1f} %   (budget {budget:.0f} %); "
        f"{row['us_per_frame']:.0f} us a node frame, {row['us_before_store']:.0f} "
        f"before the store\n"
        f"  frames lost            {row['lost']:7,}     (budget 0; the doors could not send "
        f"{row['doors'].get('refused', 0):,} and were late {row['doors'].get('late', 0):,} times)\n"
        f"  until all are known    {row['attach_s']:7.1f} s   (budget {BUDGET_ATTACH_S:.0f} s), "
        f"{row['attach_cpu_s']:.1f} s of CPU\n"
        f"  age of a frame, p99    {row['age_p99_ms']:7.0f} ms  (p50 {row['age_p50_ms']:.0f} ms)\n"
        f"  memory, open files     {row['resident_mb']:7.0f} MB  {row['files']:,}\n"
        f"  one view of all        {row['view_ms']:7.0f} ms\n"
        f"  with a screen's pictures {row['pictures_cpu_percent']:5.1f} % of a core, "
        f"{row['pictures_own_percent']:.1f} of them for {row['pictures']:.2f} pictures a second of "
        f"{row['picture_ms']:.0f} ms; {row['pictures_resident_mb']:.0f} MB",
        flush=True,
    )


if __name__ == "__main__":
    main()
