"""What `gpuwatch demo` runs."""

import click
import pytest

from gpuwatch.commands.demo import FAULTS, _command


def test_every_fault_of_the_trainer_is_a_scenario() -> None:
    from trainer.faults import FAULTS as KNOWN

    assert set(FAULTS) == set(KNOWN)
    assert _command("slow_backward:40@1")[-2:] == ["--fault", "slow_backward:40@1"]
    assert _command("slow-backward")[-1] == "slow_backward"
    assert "--faults.item_latency_ms=25" in _command("slow-loader")


def test_a_script_is_one_and_anything_else_is_refused() -> None:
    assert _command(__file__) == [__file__]
    with pytest.raises(click.UsageError, match="no scenario 'nope'; there are slow-loader, slow_"):
        _command("nope")
