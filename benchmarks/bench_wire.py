"""What a rank frame costs to encode and to decode, beside the standard library's json.

    python benchmarks/bench_wire.py

Prints µs per record and bytes per record for frames of 1, 10 and 50 records, the heartbeat, and a
node frame; the json baseline has the same content with field names. Each figure is the median of
several runs of CPU time; the ratio is the figure to compare between machines.
"""

import json
import statistics
import time
from collections.abc import Callable
from functools import partial

import msgspec

from gpuwatch.frames import decode_node_frame, decode_rank_frame, encode
from gpuwatch.schema import (
    WIRE_VERSION,
    Ledger,
    NodeFrame,
    PhasesNs,
    RankFrame,
    RankState,
    StepRecord,
)

RUNS = 9
RUN_S = 0.04


def cost_us(call: Callable[[], object]) -> float:
    """Return the CPU time of one call in µs: the median of `RUNS` runs of about `RUN_S`."""
    start = time.process_time()
    times = 0
    while time.process_time() - start < RUN_S:
        call()
        times += 1
    runs = []
    for _ in range(RUNS):
        start = time.process_time()
        for _ in range(times):
            call()
        runs.append((time.process_time() - start) / times * 1e6)
    return statistics.median(runs)


def record(index: int) -> StepRecord:
    host = PhasesNs(12_345_678, 1_234_567, 45_678_901, 67_890_123, 8_901_234, 9_012_345, 345_678)
    return StepRecord(
        index=index,
        started_s=1.79e9 + 0.145 * index,
        step_ns=sum(value or 0 for value in msgspec.structs.astuple(host)),
        host=host,
        samples=256,
        tokens=None,
        loss=2.3456789,
        memory_bytes=12_345_678_912,
        queue_depth=3.0,
        queue_capacity=8,
        loader="train",
    )


def rank_frame(records: int) -> RankFrame:
    return RankFrame(
        version=WIRE_VERSION,
        run="a1b2c3d4",
        rank=3,
        incarnation="9f8e7d6c5b4a",
        seq=12_345,
        sent_s=1.79e9,
        dropped=0,
        records=tuple(record(10_000 + index) for index in range(records)),
        state=RankState("training", "backward", 12_345_678, 10_000, {}, 2.3, 4.2, 100_000),
        ledger=Ledger(10_000, 2_560_000, 3, 10**12, 10**11, 10**10, 10**10, 10**9, 10**9, 10**12),
    )


def dumped(content: object) -> bytes:
    return json.dumps(content).encode()


def main() -> None:
    print(f"{'records':>8} {'':>8} {'bytes/rec':>10} {'encode µs/rec':>14} {'decode µs/rec':>14}")
    for records in (0, 1, 10, 50):
        frame = rank_frame(records)
        data = encode(frame)
        named = {
            **{field: getattr(frame, field) for field in frame.__struct_fields__},
            "records": list(map(as_dict, frame.records)),
            "state": as_dict(frame.state),
            "ledger": as_dict(frame.ledger),
        }
        plain = dumped(named)
        share = max(1, records)
        ours = (
            len(data),
            cost_us(partial(encode, frame)),
            cost_us(partial(decode_rank_frame, data)),
        )
        theirs = (
            len(plain),
            cost_us(partial(dumped, named)),
            cost_us(partial(json.loads, plain)),
        )
        for title, (size, encoding, decoding) in (("gpuwatch", ours), ("json", theirs)):
            print(
                f"{records:>8} {title:>8} {size / share:>10.0f} {encoding / share:>14.2f} "
                f"{decoding / share:>14.2f}"
            )
        ratios = [their / our for our, their in zip(ours, theirs, strict=True)]
        print(f"{'':>8} {'json is':>8} {ratios[0]:>9.1f}x {ratios[1]:>13.1f}x {ratios[2]:>13.1f}x")

    raw = msgspec.Raw(encode(rank_frame(1)))
    node = NodeFrame(WIRE_VERSION, "node1", "inc", 1, 1.79e9, (raw,) * 64)
    data = encode(node)
    whole = cost_us(lambda: [decode_rank_frame(each) for each in decode_node_frame(data).frames])
    print(
        f"node frame of 64 ranks with a record each: {len(data)} bytes, "
        f"encode {cost_us(lambda: encode(node)):.1f} µs, "
        f"decode {cost_us(lambda: decode_node_frame(data)):.1f} µs, "
        f"with its rank frames {whole:.1f} µs"
    )


def as_dict(struct: msgspec.Struct) -> dict[str, object]:
    """Return the content with field names, as a json writer would have it."""
    return {
        field: as_dict(value) if isinstance(value, msgspec.Struct) else value
        for field in struct.__struct_fields__
        for value in (getattr(struct, field),)
    }


if __name__ == "__main__":
    main()
