import json
from pathlib import Path

import pytest
import torch

from trainer.config import Config, DistConfig
from trainer.distributed import Placement
from trainer.manifest import KEPT, environment, git_state, write_manifest

HERE = Placement(0, 2, 0, 2, True, torch.device("cpu"))


def test_holds_what_the_run_consisted_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setenv("NCCL_ALGO", "allreduce:tree")
    config = Config(dist=DistConfig(comm_hook="bf16_compress_hook"))
    path = write_manifest(config, HERE, "fp32")
    assert path is not None
    assert path.is_relative_to(tmp_path)
    found = json.loads(path.read_text())
    assert found["schema"] == 1
    assert Config.model_validate(found["configuration"]) == config
    assert found["configuration"]["dist"]["comm_hook"] == "bf16_compress_hook"
    assert found["settled"] == {"precision": "fp32", "device": "cpu"}
    assert found["versions"]["torch"].partition("+")[0] == torch.__version__.partition("+")[0]
    assert found["ranks"] == {"world_size": 2, "on_this_node": 2}
    assert found["environment"]["NCCL_ALGO"] == "allreduce:tree"


def test_secrets_stay_out() -> None:
    kept = environment(
        {
            "NCCL_DEBUG": "INFO",
            "TRAINER_PASSPHRASE": "x",
            "TORCH_API_TOKEN": "x",
            "AWS_REGION": "x",
            "MASTER_PORT": "29500",
        }
    )
    assert kept == {"MASTER_PORT": "29500", "NCCL_DEBUG": "INFO"}


def test_without_git_it_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert git_state(tmp_path) == {"commit": None, "reason": "not in a git repository"}
    monkeypatch.setenv("PATH", str(tmp_path))
    assert git_state(tmp_path) == {"commit": None, "reason": "git is not installed"}


def test_a_file_in_the_way_costs_the_manifest_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "gpuwatch-trainer").write_text("")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert write_manifest(Config(), HERE, "fp32") is None


def test_the_oldest_are_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    runs = tmp_path / "gpuwatch-trainer/runs"
    for number in range(KEPT + 3):
        folder = runs / f"20260101-{number:06d}-cnn-1"
        folder.mkdir(parents=True)
        (folder / "manifest.json").write_text("{}")
    (runs / "mine").mkdir()
    (runs / "20260101-000000-cnn-1/notes.txt").write_text("kept")
    path = write_manifest(Config(), HERE, "fp32")
    assert path is not None
    left = sorted(folder.name for folder in runs.iterdir())
    assert path.parent.name in left
    assert "mine" in left
    # What else somebody has put there is not ours to delete.
    assert "20260101-000000-cnn-1" in left
    assert "20260101-000002-cnn-1" not in left
    assert len(left) == KEPT + 2
