"""A rank without torch: publishes steps through the real sockets and answers for its past.

usage: fake_rank.py RANK WORLD_SIZE [garbage | newer | again | NUMBER]

`again` announces itself anew when its discovery file has been removed, as a real rank does. Of a
number it remembers so many steps; else 600, as a real rank does.
"""

import os
import signal
import sys
import time
import uuid
from types import FrameType

from builders import T0_S, hello, rank_frame, record

from gpuwatch.frames import decode_command, encode
from gpuwatch.schema import WIRE_VERSION, Bye, RankState, Reply
from gpuwatch.wire.publish import RankSockets, run_directory

FLUSH_S = 0.1
stopped = False


def stop(_number: int, _frame: FrameType | None) -> None:
    global stopped
    stopped = True


def main(rank: int, world_size: int, manner: str) -> None:
    signal.signal(signal.SIGTERM, stop)
    incarnation = uuid.uuid4().hex[:12]
    run = os.environ.get("GPUWATCH_RUN_ID", "fake")

    def announced() -> RankSockets:
        return RankSockets(
            run_directory(), version=WIRE_VERSION, run=run, rank=rank, incarnation=incarnation
        )

    sockets = announced()
    common = {"rank": rank, "run": run, "incarnation": incarnation}
    memory = int(manner) if manner.isdigit() else 600
    greeting = hello(rank, world_size, pid=os.getpid(), started_s=time.time())
    records = []
    seq = 0
    print("up", os.getpid(), flush=True)
    while not stopped:
        seq += 1
        if manner == "again" and not sockets.announced:
            sockets.close()
            sockets = announced()
        new = [record(seq - 1, {"forward": 60.0, "other": 40.0}, started_s=T0_S + seq / 10)]
        records += new
        frame = rank_frame(seq, new, hello=greeting if seq == 1 else None, **common)
        if manner == "garbage" and seq % 2:
            sockets.publish(os.urandom(200))
        if manner == "newer" and seq % 2:
            sockets.publish(encode(rank_frame(seq, **{**common, "version": 2})))
        sockets.publish(encode(frame))
        deadline_s = time.monotonic() + FLUSH_S
        while (left_s := deadline_s - time.monotonic()) > 0:
            for who, payload in sockets.wait(int(left_s * 1000) + 1):
                command = decode_command(payload)
                if command.verb == "snapshot":
                    past = rank_frame(
                        seq, records[-memory:], hello=greeting, snapshot=True, **common
                    )
                else:
                    reply = Reply(command.id, "done", data=f"{command.verb} of rank {rank}")
                    past = rank_frame(seq, replies=(reply,), **common)
                sockets.reply(who, encode(past))
    last = rank_frame(
        seq + 1, bye=Bye("finished"), state=RankState(status="ended", step=seq), **common
    )
    sockets.publish(encode(last))
    time.sleep(0.05)
    sockets.close()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3] if len(sys.argv) > 3 else "")
