"""The files under docs/deploy, and the commands in the pages about them, are what they say."""

import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from gpuwatch.commands.cli import cli
from gpuwatch.commands.remote import parse_target
from gpuwatch.wire.collect import PipeTarget

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
FILES = sorted((DOCS / "deploy").iterdir())
SCRIPTS = [path for path in FILES if path.suffix in {".sh", ".sbatch"}]
PAGES = [DOCS / name for name in ("deploy.md", "security.md", "attach.md")]
_ENDS = {"|", "||", "&", "&&", ";", ")", ">", "2>&1", "...)"}


# --- every command is one ----------------------------------------------------------------------


def commands_in(path: Path) -> Iterator[list[str]]:
    """The words of every `gpuwatch ...` in a script, in a block of a page, or in a manifest."""
    text = path.read_text()
    if path.suffix == ".yaml":
        for block in re.findall(r"command:\n((?: +- .*\n)+)", text):
            words = [line.strip()[2:].strip('"') for line in block.splitlines()]
            yield words[1:]
        return
    if path.suffix == ".md":
        text = "\n".join(re.findall(r"```sh\n(.*?)```", text, re.DOTALL))
    for line in text.replace("\\\n", " ").splitlines():
        shown = line.strip()
        if shown.startswith("#") or "gpuwatch " not in shown:
            continue
        calls = re.finditer(
            r"(?<![\w./-])gpuwatch ((?:attach|run|agent|keygen|status|diagnose|record).*)", shown
        )
        for call in calls:
            words, before = call[1], shown[: call.start()][-1:]
            if before in {"'", '"'}:  # in quotes: it ends with them
                words = words.rpartition(before)[0]
            lexer = shlex.shlex(words, posix=True, punctuation_chars=";&|")
            lexer.whitespace_split = True
            lexer.commenters = ""
            argv = []
            for word in lexer:
                if word in _ENDS:
                    break
                argv.append(word)
            yield argv


@pytest.mark.parametrize("path", [*FILES, *PAGES], ids=lambda path: path.name)
def test_every_gpuwatch_command_can_be_parsed(path: Path) -> None:
    found = list(commands_in(path))
    for name, *argv in found:
        command = cli.get_command(click.Context(cli), name)
        assert command is not None, name
        with command.make_context(name, list(argv)) as context:
            if name == "run":
                assert context.params["command"], argv
            if context.params.get("listen"):
                assert context.params["key"], argv
            targets = [context.params.get("target"), *context.params.get("targets", ())]
            if any(str(target).startswith("tcp://") for target in targets):
                assert context.params["key"], argv
    assert found or path.name == "security.md"


def test_a_command_that_is_none_is_noticed(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("```sh\ngpuwatch attach --nonsense x && y\n```\n")
    (words,) = commands_in(page)
    assert words == ["attach", "--nonsense", "x"]
    command = cli.get_command(click.Context(cli), "attach")
    assert command is not None
    with pytest.raises(click.NoSuchOption):
        command.make_context("attach", words[1:])


def test_the_manifest_is_one() -> None:
    yaml = pytest.importorskip("yaml", reason="PyYAML is not installed")
    service, job = yaml.safe_load_all((DOCS / "deploy" / "job.yaml").read_text())
    pod = job["spec"]["template"]["spec"]
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
    assert pod["subdomain"] == service["metadata"]["name"]
    assert pod["shareProcessNamespace"] is True
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    assert volumes["key"]["secret"]["defaultMode"] == 0o400
    for container in (*pod["initContainers"], *pod["containers"]):
        mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
        assert set(mounts) <= set(volumes)
        environ = {item["name"]: item["value"] for item in container["env"]}
        # A directory below the volume: the volume itself is open to everybody.
        assert Path(environ["GPUWATCH_DIR"]).parent == Path(mounts["gpuwatch"])
    (train,) = pod["containers"]
    assert train["command"][train["command"].index("--key") + 1] == "/etc/gpuwatch/key"


# --- the scripts run, with stand-ins for what they call -------------------------------------------

STANDINS = {
    "gpuwatch": """
        printf "%s|" "run-id=${GPUWATCH_RUN_ID:-}" gpuwatch "$@" >> "$LOG"
        echo >> "$LOG"
        if [ "$1" = keygen ]; then [ ! -e "$2" ] || exit 2; : > "$2"; fi
    """,
    "scontrol": 'if [ "$3" = "n[1-2]" ]; then echo n1; echo n2; else exit 9; fi',
    "squeue": 'case "$2" in 4711) echo "n[1-2]";; 4712) ;; *) exit 9;; esac',
    "srun": 'shift; exec "$@"',
    "kubectl": 'if [ "$4" = job-name=train ]; then echo pod/train-0-abc; echo pod/train-1-def; fi',
    "ssh": 'printf "ssh %s: " "$1" >> "$LOG"; exec sh -c "$2"',
    # One word is for a shell, several are a command: as tmux does.
    "tmux": """
        case "$1" in new-session) shift 4;; split-window) shift 6;; *) exit 0;; esac
        if [ $# = 1 ]; then exec sh -c "$1"; else exec "$@"; fi
    """,
}


def called(tmp_path: Path, script: str, *argv: str, refusal: str = "", **env: str) -> list[str]:
    """Run a script and return the calls of gpuwatch, `|` between the words."""
    places = tmp_path / "bin"
    places.mkdir()
    log = tmp_path / "log"
    for name, body in STANDINS.items():
        (places / name).write_text(f"#!/bin/sh\n{body}\n")
        (places / name).chmod(0o755)
    (tmp_path / "a dir").mkdir()
    # A login shell sets its own PATH.
    (tmp_path / ".profile").write_text(f"PATH={shlex.quote(str(places))}:$PATH\n")
    done = subprocess.run(
        ["bash", str(DOCS / "deploy" / script), *argv],
        cwd=tmp_path / "a dir",
        env={
            "PATH": f"{places}:{os.environ['PATH']}",
            "HOME": str(tmp_path),
            "LOG": str(log),
            **env,
        },
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert (done.returncode, done.stderr) == (int(bool(refusal)), refusal)
    if refusal:
        assert not log.exists()
        return []
    return log.read_text().splitlines()


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_every_script_can_be_parsed(path: Path) -> None:
    done = subprocess.run(["bash", "-n", str(path)], capture_output=True, timeout=20, check=False)
    assert (done.returncode, done.stderr) == (0, b"")


def test_a_slurm_job_opens_a_door_and_is_watched_through_it(tmp_path: Path) -> None:
    slurm = {"SLURM_JOB_ID": "4711", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_JOB_NUM_NODES": "2"}
    key = f"{tmp_path}/.gpuwatch-keys/4711"
    Path(key).parent.mkdir(mode=0o700)
    Path(key).touch()  # of this job, before it was queued again
    made, ran = called(tmp_path, "train.sbatch", **slurm)
    assert made == f"run-id=|gpuwatch|keygen|{key}|"
    begin = f"run-id=slurm-4711|gpuwatch|run|--listen|:24711|--key|{key}|--|torchrun|--nnodes=2|"
    assert ran.startswith(begin)
    assert "|--rdzv-endpoint=n1:29500|" in ran
    assert not Path(key).exists()  # it ends with the job
    assert Path(key).parent.stat().st_mode & 0o077 == 0

    Path(key).touch()
    for place in ("bin", "a dir"):
        shutil.rmtree(tmp_path / place)
    *_, watched = called(tmp_path, "watch.sh", "4711")
    assert watched == f"run-id=|gpuwatch|attach|--key|{key}|tcp://n1:24711|tcp://n2:24711|"


def test_a_slurm_job_without_a_key_is_watched_through_srun(tmp_path: Path) -> None:
    (watched,) = called(tmp_path, "watch.sh", "4711")
    step = "srun --jobid 4711 --overlap --nodes 1 --ntasks 1 --nodelist"
    assert watched == f"run-id=|gpuwatch|attach|--via|{step} n1|--via|{step} n2|"


def test_pods_are_watched_through_kubectl(tmp_path: Path) -> None:
    (watched,) = called(tmp_path, "pods.sh")
    ways = [f"kubectl exec -i pod/{name} -c train --" for name in ("train-0-abc", "train-1-def")]
    assert watched == f"run-id=|gpuwatch|attach|--via|{ways[0]}|--via|{ways[1]}|"


@pytest.mark.parametrize(
    ("script", "job", "words"),
    [
        ("watch.sh", "4712", "job 4712 has no nodes: it waits, or has ended"),
        ("pods.sh", "other", "no pod of the job other runs"),
    ],
)
def test_a_job_without_machines_is_one_sentence(
    tmp_path: Path, script: str, job: str, words: str
) -> None:
    called(tmp_path, script, job, refusal=f"{script}: {words}\n")


def test_machines_with_ssh_are_started_as_one_run(tmp_path: Path) -> None:
    first, second, watched = called(tmp_path, "nodes.sh", "n1", "n2", GPUS="4")
    for name, line in (("n1", first), ("n2", second)):
        assert re.match(rf"ssh {name}: run-id=train-\d{{4}}-\d{{4}}\|gpuwatch\|run\|--\|", line)
        assert "|torchrun|--nnodes=2|--nproc-per-node=4|" in line
        assert "|--rdzv-endpoint=n1:29500|train.py|" in line
    begin, program, end = watched.rpartition("|ssh://n1|")[0].partition("--remote-command|")
    assert (begin, program) == ("run-id=|gpuwatch|attach|", "--remote-command|")
    assert watched == f"{begin}--remote-command|{end}|ssh://n1|ssh://n2|"

    # As ssh does it: with the PATH of a shell that is no login shell, gpuwatch not on it.
    (tmp_path / "log").unlink()
    target = parse_target("ssh://n1", end)
    assert isinstance(target, PipeTarget)
    done = subprocess.run(
        ["sh", "-c", target.argv[-1]],
        env={"PATH": os.defpath, "HOME": str(tmp_path), "LOG": str(tmp_path / "log")},
        capture_output=True,
        timeout=30,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, b"")
    assert (tmp_path / "log").read_text() == "run-id=|gpuwatch|agent|--stdio|\n"


def test_tmux_holds_a_training_and_its_monitor(tmp_path: Path) -> None:
    ran, watched = called(tmp_path, "tmux.sh", "python", "my train.py")
    assert ran == "run-id=|gpuwatch|run|--|python|my train.py|"
    assert watched == "run-id=|gpuwatch|"


# --- what is named exists ----------------------------------------------------------------------


def test_every_module_that_a_page_names_exists() -> None:
    named = {
        name
        for page in (*DOCS.glob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md")
        for name in re.findall(
            r"\b((?:gpuwatch|trainer|benchmarks|tests)/[\w/]+\.py)", page.read_text()
        )
    }
    assert len(named) > 20
    assert [name for name in sorted(named) if not (ROOT / name).is_file()] == []


def test_every_test_that_the_security_page_names_exists() -> None:
    lines = [line for line in (DOCS / "security.md").read_text().splitlines() if "`test_" in line]
    assert len(lines) > 10
    for line in lines:
        (file,) = re.findall(r"`(tests/[\w/]+\.py)`", line)
        source = (ROOT / file).read_text()
        for name in re.findall(r"`(test_\w+)`", line):
            assert f"\ndef {name}(" in source, f"{file} has no {name}"
