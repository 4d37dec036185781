import json
import subprocess
import sys
from pathlib import Path

import pytest

from trainer.commands import main
from trainer.config import PRESETS, Config
from trainer.errors import ConfigError
from trainer.sources import explain, keys, load, resolve, to_toml


def refusal(arguments: list[str], **more: object) -> str:
    with pytest.raises(ConfigError) as caught:
        load(arguments, environ={}, **more)  # type: ignore[arg-type]
    return str(caught.value)


def test_precedence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PRESETS, "cnn", {"loader": {"batch_size": 1}, "optim": {"lr": 0.1}})
    file = tmp_path / "run.toml"
    file.write_text("[loader]\nbatch_size = 2\n[train]\nepochs = 2\nseed = 2\n")
    environ = {"TRAINER_LOADER__BATCH_SIZE": "3", "TRAINER_TRAIN__EPOCHS": "3"}

    assert load(environ={}).loader.batch_size == 1
    assert load(environ={}, file=file).loader.batch_size == 2
    assert load(environ=environ, file=file).loader.batch_size == 3
    final = load(["--loader.batch_size", "4"], environ=environ, file=file)
    assert final.loader.batch_size == 4
    # What a higher source leaves out keeps its lower value, within a section too.
    assert (final.train.epochs, final.train.seed, final.optim.lr) == (3, 2, 0.1)
    assert final.data == Config().data


def test_environment_is_read_from_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAINER_LOADER__NUM_WORKERS", "auto")
    monkeypatch.setenv("TRAINER_DATA__PATH", "none")
    monkeypatch.setenv("TRAINER_TRAIN__WATCH", "false")
    config = load()
    assert config.loader.num_workers == "auto"
    assert config.data.path is None
    assert config.train.watch is False


@pytest.mark.parametrize(
    ("arguments", "suggestion"),
    [
        (["--loader.num_worker", "2"], "did you mean --loader.num_workers?"),
        (["--data.num_workers", "2"], "did you mean --loader.num_workers?"),
        (["--lr=1"], "did you mean --optim.lr?"),
        (["--optim.image_px", "1"], "did you mean --data.image_px?"),
        (["--optimizer.momentun", "1"], "did you mean --optim.momentum?"),
    ],
)
def test_unknown_option_suggests(arguments: list[str], suggestion: str) -> None:
    assert suggestion in refusal(arguments)


def test_nothing_like_it_suggests_nothing() -> None:
    assert refusal(["--zzzzqqqq", "2"]) == "no such option: --zzzzqqqq"


def test_unknown_key_in_file(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text("[loader]\nbatchsize = 2\n")
    assert refusal([], file=file) == (
        f"unknown key loader.batchsize in {file}; did you mean loader.batch_size?"
    )


def test_unknown_variable_suggests() -> None:
    with pytest.raises(ConfigError, match=r"did you mean TRAINER_LOADER__BATCH_SIZE\?"):
        load(environ={"TRAINER_LOADER_BATCH_SIZE": "2"})


def test_variables_of_a_kubernetes_service_are_not_ours() -> None:
    environ = {"TRAINER_SERVICE_HOST": "10.0.0.1", "TRAINER_PORT_80_TCP_ADDR": "10.0.0.1"}
    assert load(environ=environ) == load(environ={})


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["--loader.num_workers", "0", "--loader.prefetch_factor", "4"], "loader.prefetch_factor"),
        (["--loader.num_workers", "0", "--loader.persistent_workers", "1"], "persistent_workers"),
        (["--loader.num_workers=-1"], "at least 0"),
        (["--optim.lr", "0"], "above 0"),
        (["--train.epochs", "0"], "train.epochs=0 on the command line"),
        (["--loader.num_workers", "many"], "'auto'"),
        (["--train.watch"], "needs a value"),
        (["stray"], "unexpected argument 'stray'"),
        (["--preset", "resnet"], "preset=resnet"),
        (["--dist.comm_hook", "powerSGD_hook"], "dist.comm_hook=powerSGD_hook on the command line"),
    ],
)
def test_refused_in_one_sentence(arguments: list[str], part: str) -> None:
    sentence = refusal(arguments)
    assert part in sentence
    assert "\n" not in sentence


def test_a_bad_value_names_its_source(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text('[train]\nepochs = "three"\n')
    assert f"in {file}" in refusal([], file=file)
    with pytest.raises(ConfigError, match="in the variable TRAINER_TRAIN__EPOCHS"):
        load(environ={"TRAINER_TRAIN__EPOCHS": "three"}, file=file)


def test_broken_or_missing_file(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    assert refusal([], file=file) == f"cannot read {file}: No such file or directory"
    file.write_text("[loader\n")
    assert "is not TOML" in refusal([], file=file)


def test_shown_toml_reads_back(tmp_path: Path) -> None:
    path = 'a "quoted" folder\\with ünïcode'
    config = load(["--data.path", path, "--optim.lr", "1e-5", "--faults.rank", "1"], environ={})
    file = tmp_path / "run.toml"
    file.write_text(to_toml(config))
    assert load(environ={}, file=file) == config
    assert str(config.data.path) == path


def test_exit_codes_and_streams(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "show", "--format", "json", "--loader.batch_size", "7"]) == 0
    assert json.loads(capsys.readouterr().out)["loader"]["batch_size"] == 7
    assert main(["config", "schema"]) == 0
    assert "LoaderConfig" in json.loads(capsys.readouterr().out)["$defs"]
    assert main(["train", "--loader.batch_sise", "7"]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err == (
        "trainer: no such option: --loader.batch_sise; did you mean --loader.batch_size?\n"
    )
    assert main(["no-such-command"]) == 2


def test_help_lists_every_key(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--help"]) == 0
    text = capsys.readouterr().out
    assert all(f"--{key}" in text for key in keys())
    assert "[none]" in text


def test_help_and_config_do_not_import_torch() -> None:
    code = (
        "import sys; from trainer.commands import main\n"
        "assert main(['--help']) == 0 and 'pydantic' not in sys.modules\n"
        "assert main(['config', 'show']) == 0 and main(['train', '--help']) == 0\n"
        "assert not {'torch', 'numpy', 'PIL', 'gpuwatch'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=30)


def test_numbers_between_commas_from_every_source(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text("[model]\nstages = [1, 2, 3, 4]\n")
    assert load([], file=file, environ={}).model.stages == (1, 2, 3, 4)
    environ = {"TRAINER_MODEL__STAGES": "2,2,2,2", "TRAINER_TEXT__PATH": "none"}
    assert load([], environ=environ).model.stages == (2, 2, 2, 2)
    assert load(["--model.stages", "[1,1,1,1]"], environ=environ).model.stages == (1, 1, 1, 1)


def test_none_is_a_word_of_its_own_where_a_key_has_it() -> None:
    settled = load(["--optim.lr_scaling", "none", "--optim.clip_norm", "None"], environ={})
    assert settled.optim.lr_scaling == "none"
    assert settled.optim.clip_norm is None
    assert load(["--dist.comm_hook=none"], environ={}).dist.comm_hook is None


def test_explain_says_value_and_where_it_comes_from() -> None:
    settled, origin = resolve(["--optim.lr", "0.2", "--preset", "resnet50"], environ={})
    said = "\n".join(explain("optim.lr", settled, origin))
    assert "optim.lr = 0.2  (on the command line)" in said
    assert "a number or auto" in said
    assert "TRAINER_OPTIM__LR=VALUE" in said
    said = "\n".join(explain("optim.base_batch_size", settled, origin))
    assert "optim.base_batch_size = 256  (in the preset resnet50)" in said
    assert "(the default)" in explain("loader.in_order", settled, origin)[0]
    said = "\n".join(explain("dist.comm_hook", settled, origin))
    assert "dist.comm_hook = none  (the default)" in said
    assert all(word in said for word in ("fp16_compress_hook", "bf16_compress_hook", "or none"))
    for key in keys():
        assert "?" not in explain(key, settled, origin)[2], key
    with pytest.raises(ConfigError, match=r"no key optim\.lrr; did you mean optim\.lr\?"):
        explain("optim.lrr", settled, origin)


def test_a_fault_is_asked_for_in_one_way(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--fault", "jitter", "--faults.inject", "burst"]) == 2
    assert "one key: give one of them" in capsys.readouterr().err


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_is_a_whole_configuration(preset: str, tmp_path: Path) -> None:
    settled = load(["--preset", preset], environ={})
    file = tmp_path / "run.toml"
    file.write_text(to_toml(settled))
    assert load([], file=file, environ={}) == settled
