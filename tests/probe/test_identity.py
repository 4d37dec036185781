"""Which run and rank a process takes itself for, from its launcher's words."""

import pytest

from gpuwatch.probe.identity import Identity, identify


@pytest.mark.parametrize(
    ("environ", "run", "source"),
    [
        ({"GPUWATCH_RUN_ID": "mine", "TORCHELASTIC_RUN_ID": "t"}, "mine", "GPUWATCH_RUN_ID"),
        ({"TORCHELASTIC_RUN_ID": "t"}, "t", "TORCHELASTIC_RUN_ID"),
        (
            {"TORCHELASTIC_RUN_ID": "none", "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0"},
            "slurm-7.0",
            "SLURM_JOB_ID",
        ),
    ],
)
def test_the_first_name_that_counts(environ: dict[str, str], run: str, source: str) -> None:
    found = identify(environ)
    assert (found.run, found.run_source) == (run, source)


def test_ranks_of_one_launcher_agree_and_those_of_another_port_do_not() -> None:
    words = {
        "MASTER_ADDR": "n0",
        "MASTER_PORT": "29500",
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
    }
    first = identify({**words, "RANK": "0", "TORCHELASTIC_RUN_ID": "none"})
    second = identify({**words, "RANK": "1", "TORCHELASTIC_RUN_ID": ""})
    other = identify({**words, "RANK": "1", "MASTER_PORT": "29501"})
    assert first.run == second.run
    assert first.run_source == "MASTER_ADDR"
    assert other.run != first.run
    assert (first.rank, second.rank, first.world_size) == (0, 1, 2)


def test_ranks_on_several_nodes_agree_whatever_their_launchers() -> None:
    words = {
        "MASTER_ADDR": "n0",
        "MASTER_PORT": "29500",
        "WORLD_SIZE": "4",
        "LOCAL_WORLD_SIZE": "2",
    }
    one_node = {**words, "WORLD_SIZE": "2"}
    assert identify(words).run == identify({**words, "RANK": "3"}).run
    assert identify(words).run != identify(one_node).run


def test_a_process_alone_keeps_the_id_it_drew() -> None:
    assert identify({}).run == identify({}).run
    assert identify({}).run_source == "random"
    assert identify({}) == Identity(identify({}).run, "random", 0, 1, None)


@pytest.mark.parametrize("word", ["", "x", "-1", "1e3"])
def test_words_that_are_no_numbers_are_not_believed(word: str) -> None:
    found = identify({"RANK": word, "WORLD_SIZE": word, "LOCAL_RANK": word})
    assert (found.rank, found.world_size, found.local_rank) == (0, 1, None)


def test_slurm_without_a_launcher_of_torch() -> None:
    words = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "1", "SLURM_PROCID": "3", "SLURM_NTASKS": "4"}
    found = identify({**words, "SLURM_LOCALID": "1"})
    assert (found.run, found.rank, found.world_size, found.local_rank) == ("slurm-7.1", 3, 4, 1)
