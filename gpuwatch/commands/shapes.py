"""The JSON documents. Their shapes are stable: fields are added, never renamed or removed."""

import math
from typing import Any

from gpuwatch.diagnosis import Abstain, Finding, RunDiagnosis
from gpuwatch.diagnosis.howto import lines_of
from gpuwatch.schema import PHASES, Ledger, Reading
from gpuwatch.store.mfu import mfu_of
from gpuwatch.store.views import NodeView, RankView, RunView, View, same_device

__all__ = ["SCHEMA", "diagnosis_document", "finding_document", "status_document"]

SCHEMA = 1


def _round(value: float | None, digits: int = 6) -> float | None:
    """Round, and turn what JSON cannot hold (NaN, infinity) into null."""
    if value is None or not math.isfinite(value):
        return None
    return round(value, digits)


def _reading(reading: Reading) -> dict[str, Any]:
    return {
        "value": _round(reading.value),
        "unit": reading.unit,
        "state": reading.state,
        "reason": reading.reason or None,
        "age_s": _round(reading.age_s, 3),
        "source": reading.source,
    }


def _ledger(ledger: Ledger) -> dict[str, Any]:
    wall_s = ledger.wall_ns / 1e9
    return {
        "train_s": _round(ledger.training_ns / 1e9),
        "data_wait_s": _round(ledger.data_wait_ns / 1e9),
        "comm_s": _round(ledger.comm_ns / 1e9),
        "eval_s": _round(ledger.eval_ns / 1e9),
        "checkpoint_s": _round(ledger.checkpoint_ns / 1e9),
        "lost_s": _round(ledger.lost_ns / 1e9),
        "wall_s": _round(wall_s),
        "goodput": _round(ledger.training_ns / ledger.wall_ns) if ledger.wall_ns else None,
    }


def _phases_na(rank: RankView) -> dict[str, str]:
    """Give every n/a phase a reason, the rank's own where it gave one."""
    empty = "no steady step yet" if not rank.window else "not measured"
    return {
        name: rank.phases_na.get(name, empty) for name in PHASES if rank.phases_ms.get(name) is None
    }


def _signals(rank: RankView) -> dict[str, Any]:
    told = rank.told
    return {
        "learning_rate": _round(told.learning_rate, 12),
        "grad_norm": _round(told.grad_norm),
        "loss_scale": _round(told.loss_scale),
        "recompiles": told.recompiles,
        "gc_pauses": told.gc_pauses,
        "gc_pause_ms": _round(told.gc_pause_ns / 1e6, 3),
        "flops_per_step": told.flops_per_step,
        "flops_source": told.flops_source or None,
        "memory_peak_bytes": told.memory_peak_bytes,
        "memory_reserved_bytes": told.memory_reserved_bytes,
        "memory_retries": told.memory_retries,
    }


def _mfu(rank: RankView, said_tflops: float | None) -> dict[str, Any]:
    found = mfu_of(rank, said_tflops)
    return {
        "value": _round(found.value),
        "reason": found.reason or None,
        "peak_tflops": found.peak_tflops,
        "peak_source": found.peak_source or None,
    }


def _rank(rank: RankView, peak_tflops: float | None) -> dict[str, Any]:
    process = rank.process
    return {
        "rank": rank.rank,
        "node": rank.node,
        "pid": rank.pid,
        "state": rank.state,
        "state_reason": rank.state_reason or None,
        "age_s": _round(rank.age_s, 3),
        "steps": rank.steps,
        "window": len(rank.window),
        "clock": rank.clock,
        "step_ms": _round(rank.step_ms),
        "step_p50_ms": _round(rank.step_p50_ms),
        "step_p95_ms": _round(rank.step_p95_ms),
        "own_ms": _round(rank.own_ms),
        "phases_ms": {name: _round(rank.phases_ms.get(name)) for name in PHASES},
        "phases_na": _phases_na(rank),
        "data_wait_ratio": _round(rank.data_wait_ratio),
        "device_stall_ms": _round(rank.device_stall_ms),
        "device_dropped": rank.device_dropped,
        "samples_per_s": _round(rank.samples_per_s),
        "loss": _round(rank.loss),
        "signals": _signals(rank),
        "mfu": _mfu(rank, peak_tflops),
        "loader": {
            "batch_wall_ms": _round(rank.batch_wall_ms),
            "batch_cpu_ms": _round(rank.batch_cpu_ms),
            "collate_ms": _round(rank.collate_ms),
            "reason": rank.batch_na or None,
            "queue_depth": _round(rank.queue_depth),
            "queue_capacity": rank.queue_capacity,
        },
        "ledger": _ledger(rank.ledger),
        "lost": rank.lost,
        "dropped": rank.dropped,
        "restarts": rank.restarts,
        "process": (
            None
            if process is None
            else {
                "status": process.status,
                **{name: _reading(r) for name, r in process.readings.items()},
            }
        ),
        "workers": [
            {"pid": w.pid, "status": w.status, **{n: _reading(r) for n, r in w.readings.items()}}
            for w in rank.workers
        ],
    }


def _run(run: RunView, peak_tflops: float | None) -> dict[str, Any]:
    return {
        "run": run.run,
        "name": run.name,
        "state": run.state,
        "world_size": run.world_size,
        "steps": run.steps,
        "simulated": run.simulated,
        "ranks": [_rank(rank, peak_tflops) for rank in run.ranks],
    }


def _gpus(view: View) -> list[dict[str, Any]]:
    found = []
    for node in view.nodes:
        owners = {
            rank.pid: {"run": run.run, "rank": rank.rank}
            for run in view.runs
            for rank in run.ranks
            if rank.node == node.node and rank.pid is not None
        }
        for gpu in node.gpus:
            ranks = [
                {"run": run.run, "rank": rank.rank}
                for run in view.runs
                for rank in run.ranks
                if rank.node == node.node
                and rank.hello is not None
                and same_device(rank.hello.device_uuid, gpu.uuid)
            ]
            found.append(
                {
                    "index": gpu.index,
                    "uuid": gpu.uuid,
                    "name": gpu.name,
                    "node": node.node,
                    "ranks": ranks,
                    "simulated": gpu.uuid.startswith("SIMULATED"),
                    "lost": gpu.lost or None,
                    "driver": gpu.driver or None,
                    "driver_reason": gpu.driver_reason or None,
                    "reasons": list(gpu.reasons),
                    "parent": gpu.parent or None,
                    "slice": gpu.slice or None,
                    "events": [
                        {
                            "code": event.code,
                            "text": event.text,
                            "time_s": _round(event.time_s, 3),
                            "hardware": event.hardware,
                        }
                        for event in gpu.events
                    ],
                    "processes_reason": gpu.processes_reason or None,
                    "processes": [
                        {
                            "pid": process.pid,
                            "memory_bytes": process.memory_bytes,
                            "kind": process.kind,
                            "name": process.name,
                            "user": process.user,
                            "visible": process.visible,
                            "rank": owners.get(process.pid),
                        }
                        for process in gpu.processes
                    ],
                    **{name: _reading(r) for name, r in gpu.readings.items()},
                }
            )
    return found


def _host(node: NodeView) -> dict[str, Any]:
    host = node.host
    return {
        "node": node.node,
        "cores": host.cores if host is not None else None,
        "sensors_age_s": _round(node.sensors_age_s, 3),
        "sensors_reason": node.sensors_reason or None,
        "core_percents": list(host.core_percents) if host is not None else [],
        "io": [
            {
                "name": item.name,
                "kind": item.kind,
                "path": item.path or None,
                "filesystem": item.filesystem or None,
                **{name: _reading(r) for name, r in item.readings.items()},
            }
            for item in (host.io if host is not None else ())
        ],
        **({name: _reading(r) for name, r in host.readings.items()} if host is not None else {}),
    }


def status_document(view: View, peak_tflops: float | None = None) -> dict[str, Any]:
    """Return the document of `gpuwatch status --json`; `peak_tflops` as the user gave it."""
    gpus = _gpus(view)
    reasons = [n.gpus_reason for n in view.nodes if n.gpus_reason]
    hosts = [_host(node) for node in view.nodes]
    return {
        "schema": SCHEMA,
        "simulated": any(run.simulated for run in view.runs)
        or any(gpu["simulated"] for gpu in gpus),
        "runs": [_run(run, peak_tflops) for run in view.runs],
        "gpus_reason": None if gpus else (reasons[0] if reasons else "no sensor reading yet"),
        "gpus": gpus,
        "host": hosts[0] if hosts else None,
        "hosts": hosts,
        "notices": list(view.notices),
    }


def finding_document(finding: Finding) -> dict[str, Any]:
    """Return one finding."""
    return {
        "id": finding.id,
        "kind": finding.kind,
        "severity": finding.severity,
        "state": finding.state,
        "ranks": list(finding.ranks),
        "nodes": list(finding.nodes),
        "cost_ms": _round(finding.cost_ms, 3),
        "share": _round(finding.share, 4),
        "confidence": finding.confidence,
        "summary": finding.summary,
        "opened_step": finding.opened_step,
        "resolved_step": finding.resolved_step,
        "life": [{"what": e.what, "step": e.step, "text": e.text} for e in finding.life],
        "evidence": [
            {
                "metric": e.metric,
                "value": e.value,
                "unit": e.unit,
                "compared_with": e.compared_with,
                "source": e.source,
            }
            for e in finding.evidence
        ],
        "ruled_out": list(finding.ruled_out),
        "hints": [
            {
                "change": h.change,
                "knob": h.knob,
                "from": h.old,
                "to": h.new,
                "predicted_ms": (
                    None if h.predicted_ms is None else [round(v, 3) for v in h.predicted_ms]
                ),
                "lines": lines_of(h),
            }
            for h in finding.hints
        ],
        "follows": finding.follows,
        "stacks": [{"rank": s.rank, "frames": list(s.frames)} for s in finding.stacks],
    }


def _abstain(abstain: Abstain) -> dict[str, Any]:
    return {"kind": abstain.kind, "needs": abstain.needs}


def diagnosis_document(run: RunView | None, diagnosis: RunDiagnosis | None) -> dict[str, Any]:
    """Return the document of `gpuwatch diagnose --json`."""
    return {
        "schema": SCHEMA,
        "run": run.run if run is not None else None,
        "steps": run.steps if run is not None else 0,
        "window": run.window if run is not None else 0,
        "findings": (
            [finding_document(f) for f in diagnosis.findings if f.state == "open"]
            if diagnosis is not None
            else []
        ),
        "abstained": ([_abstain(a) for a in diagnosis.abstained] if diagnosis is not None else []),
    }
