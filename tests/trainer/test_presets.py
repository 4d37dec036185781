"""Each preset on two real ranks, watched, in one launch."""

import json
from pathlib import Path
from typing import Any

import pytest
import support

from gpuwatch.schema import PHASES
from trainer.config import PRESETS

PARAMETERS = {
    "cnn": (90_000, 120_000),
    "mlp": (40_000, 60_000),
    # Heads for the classes at hand; He et al. count 25.56 M with a thousand.
    "resnet50": (23_400_000, 25_600_000),
    "gpt-mini": (700_000, 1_000_000),
    "bert-tiny": (700_000, 4_500_000),
    "bert": (85_000_000, 110_000_000),
}


@pytest.fixture(scope="module")
def trained(jpegs: Path, zygote: support.Zygote) -> dict[str, Any]:
    """What each preset's ranks said of their first three steps."""
    script = str(Path(__file__).with_name("presets_run.py"))
    out = jpegs.parent / "presets.out"
    with support.run_directory() as directory:
        env = support.environment(directory, XDG_CACHE_HOME=str(jpegs.parent / "cache"))
        with support.Ranks(zygote, [script, str(jpegs)], env, out) as ranks:
            assert ranks.wait(115) == 0, support.text_of(out)[-4000:]
    found = [json.loads(line) for line in support.text_of(out).splitlines() if line.startswith("{")]
    return {item["preset"]: item for item in found}


@pytest.mark.distributed
@pytest.mark.parametrize("preset", PRESETS)
def test_two_ranks_train_with_complete_records(preset: str, trained: dict[str, Any]) -> None:
    found = trained[preset]
    low, high = PARAMETERS[preset]
    assert low < found["parameters"] < high
    assert found["replicas_equal"]
    assert [rank["rank"] for rank in found["ranks"]] == [0, 1]
    text = preset not in ("cnn", "mlp", "resnet50")
    for rank in found["ranks"]:
        assert rank["steps"][:3] == [0, 1, 2]
        assert rank["notices"] == [f"training {preset}"]
        assert all(rank["complete"]), "the phases add up to the step"
        for phase in PHASES:
            # On the CPU nothing is copied to a device: n/a, not 0.
            known = [value is not None for value in rank["phases"][phase]]
            assert not any(known) if phase == "h2d" else all(known), phase
        assert all(count >= 2 for count in rank["samples"])
        assert all(0.0 < loss < 1e4 for loss in rank["losses"])
        assert all(count is not None for count in rank["tokens"]) is text
        seen = [share for share in rank["padding"] if share is not None]
        assert bool(seen) is text
        assert all(0.0 <= share < 1.0 for share in seen)
