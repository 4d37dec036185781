"""The doctor: what is there, what is not, why, and what would help."""

import json
import os
import sys
from pathlib import Path

import pytest
import support

from gpuwatch.commands.doctor import (
    Check,
    ask_sampler,
    checks_of,
    environment_checks,
    remedy_for,
    table,
    training_checks,
)
from gpuwatch.schema import GpuSample, HostSample, ProcessSample, Reading, SensorFrame

NO_GPM = "no GPM before Hopper (GeForce: before Blackwell)"


def frame(*gpus: GpuSample, reason: str = "") -> SensorFrame:
    return SensorFrame(
        1,
        3,
        100.0,
        host=HostSample(2, {"cpu_percent": Reading(40.0, "%", "psutil")}),
        gpus=gpus,
        gpus_reason=reason,
        processes=(
            ProcessSample(
                7, 7, "rank", "R",
                {"cpu_quota_cores": Reading(None, "", "cgroup", 0.0, "na", "no CPU quota")},
            ),
        ),
    )  # fmt: skip


def card(**readings: Reading) -> GpuSample:
    return GpuSample(1, "GPU-a", "NVIDIA A100", readings)


def by_name(checks: list[Check], scope: str) -> dict[str, Check]:
    return {check.metric: check for check in checks if check.scope == scope}


def test_what_is_there_has_its_value_and_source() -> None:
    checks = checks_of(
        frame(
            card(
                gpu_util=Reading(97.4, "%", "NVML"),
                memory_used=Reading(3.0 * 2**30, "B", "NVML"),
                pcie_rx=Reading(3.25e9, "B/s", "GPM"),
                power=Reading(412.0, "W", "NVML"),
            )
        )
    )
    gpu = by_name(checks, "gpu")
    assert (gpu["gpu_util"].state, gpu["gpu_util"].value) == ("ok", "97 %")
    assert gpu["gpu_util"].device == "1 NVIDIA A100"
    assert gpu["memory_used"].value == "3.0 GiB"
    assert gpu["pcie_rx"].value == "3,250.0 MB/s"
    assert gpu["pcie_rx"].source == "GPM"
    assert gpu["power"].value == "412 W"


def test_what_is_not_there_has_its_reason_and_a_remedy() -> None:
    missing = Reading(None, "%", "GPM", 0.0, "na", NO_GPM)
    gpu = by_name(checks_of(frame(card(sm_active=missing, fan=missing))), "gpu")
    assert gpu["sm_active"].state == "na"
    assert gpu["sm_active"].reason == NO_GPM
    assert "GPUWATCH_DCGM_URL" in gpu["sm_active"].remedy
    assert gpu["power"].reason == "not reported here"
    assert gpu["power"].value == ""


def test_nothing_to_hold_back_is_no_lack() -> None:
    process = by_name(checks_of(frame()), "process")
    assert (process["cpu_quota_cores"].state, process["cpu_quota_cores"].value) == (
        "ok",
        "no CPU quota",
    )


def test_a_lost_device_and_an_error() -> None:
    bad = Reading(None, "W", "NVML", 0.0, "error", "unknown error (NVML 999)")
    lost = GpuSample(0, "GPU-b", "card", {"power": bad}, lost="GPU is lost (NVML 15)")
    checks = checks_of(frame(lost))
    assert checks[0].state == "error"
    assert checks[0].reason == "GPU is lost (NVML 15)"
    assert by_name(checks, "gpu")["power"].state == "error"


@pytest.mark.parametrize(
    ("reason", "says"),
    [
        ("no NVIDIA driver on this machine (libnvidia-ml.so.1 not found)", "--gpus all"),
        (NO_GPM, "dcgm-exporter"),
        ("no dcgm-exporter at http://x/: refused", "check GPUWATCH_DCGM_URL"),
        ("first tick", "ask again"),
        ("this kernel does not tell pressure: No such file", "psi=1"),
        ("not permitted: the process belongs to someone else", "as the user"),
        ("something new", ""),
    ],
)
def test_remedies(reason: str, says: str) -> None:
    assert says in remedy_for(reason)
    assert bool(says) == bool(remedy_for(reason))


def test_no_devices_no_sampler() -> None:
    gpu = by_name(checks_of(frame(reason="no NVIDIA driver on this machine")), "gpu")
    assert len(gpu) > 10
    assert {check.reason for check in gpu.values()} == {"no NVIDIA driver on this machine"}
    nothing = checks_of(None, "the sampler ended with status 3")
    assert [check.scope for check in nothing] == ["gpu", "host", "process"]
    assert all(check.state == "error" for check in nothing)


def test_the_table_says_a_shared_reason_once_and_keeps_to_its_width() -> None:
    checks = [*checks_of(frame(card(), reason="")), *training_checks(), *environment_checks()]
    lines = table(checks, 90)
    text = "\n".join(lines)
    assert text.count("not reported here") < 8
    for check in checks:
        assert check.metric in text
    assert "gpu 1 NVIDIA A100" in lines
    for line in lines:
        if line.lstrip()[:1] not in {"✔"}:
            assert len(line) <= 90


def sampler(code: str) -> list[str]:
    return [sys.executable, "-c", code]


@pytest.mark.process
def test_a_sampler_that_hangs_or_crashes_is_a_sentence() -> None:
    _, why = ask_sampler(sampler("import time; time.sleep(60)"), patience_s=0.3)
    assert why == "the sampler gave no reading in 0 s: a driver hangs"
    found, why = ask_sampler(sampler("raise SystemExit(11)"))
    assert found is None
    assert why == "the sampler ended with status 11 before its first reading"
    found, why = ask_sampler(sampler("print('garbage' * 99); import time; time.sleep(60)"))
    assert found is None
    assert why == "the sampler said what is no reading"


def test_an_unusable_run_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("GPUWATCH_DIR", str(tmp_path / "file"))
    (found,) = [c for c in environment_checks() if c.metric == "run directory"]
    assert found.state == "error"
    assert "GPUWATCH_DIR" in found.remedy


@pytest.mark.process
def test_the_command(rundir: Path) -> None:
    def run(*args: str) -> str:
        done = support.gpuwatch(rundir, "doctor", *args)
        assert done.returncode == 0, done.stderr
        assert done.stderr == ""
        return done.stdout

    document = json.loads(run("--json"))
    assert document["schema"] == 1
    metrics = {(m["scope"], m["metric"]): m for m in document["metrics"]}
    assert metrics["host", "cpu_percent"]["available"]
    assert metrics["process", "rss"]["available"]
    assert metrics["process", "affinity_cores"]["value"] == str(len(os.sched_getaffinity(0)))
    for metric in document["metrics"]:
        assert metric["available"] or metric["reason"]
    assert "affinity_cores" in run()
