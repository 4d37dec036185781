"""What an import costs: the training process and the plain commands must not pay for the screen."""

import subprocess

import pytest
import support

FRAMEWORKS = {"transformers", "accelerate", "lightning"}
HEAVY = {"textual", "rich", "zmq", "msgspec", "torch", "psutil", "click"}


def loaded_after(code: str) -> set[str]:
    """Top-level modules that are loaded after the code has run in a fresh interpreter."""
    # No `site`-loaded surprises: what an editable install's .pth imports is not ours.
    report = "; import sys; print(*{n.split('.')[0] for n in sys.modules})"
    done = subprocess.run(
        [support.PYTHON, "-P", "-c", code + report],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    return set(done.stdout.splitlines()[-1].split())


def test_importing_the_package_loads_none_of_its_dependencies() -> None:
    assert loaded_after("import gpuwatch").isdisjoint(HEAVY)


def test_the_integrations_load_no_framework_before_one_is_asked_for() -> None:
    assert loaded_after("import gpuwatch.integrations").isdisjoint(HEAVY | FRAMEWORKS)


def test_the_probe_loads_no_screen_and_no_torch_before_it_watches() -> None:
    loaded = loaded_after("import gpuwatch; gpuwatch.watch")
    assert loaded.isdisjoint({"textual", "rich", "torch", "psutil", "click"})


@pytest.mark.parametrize(
    "argv", [["--version"], ["--help"], ["status", "--help"], ["demo", "--help"]]
)
def test_plain_commands_load_no_screen_and_no_torch(argv: list[str]) -> None:
    code = (
        "import sys; sys.argv = ['gpuwatch', *" + repr(argv) + "]\n"
        "from gpuwatch.commands import main\n"
        "try: main()\nexcept SystemExit as e: assert e.code == 0\n"
        "import sys"
    )
    assert loaded_after(code).isdisjoint({"textual", "rich", "zmq", "torch"})


def test_every_public_name_resolves() -> None:
    import gpuwatch

    for name in gpuwatch.__all__:
        assert getattr(gpuwatch, name) is not None
    assert gpuwatch.__all__ == sorted(gpuwatch.__all__, key=lambda n: (n[0].islower(), n))
    with pytest.raises(AttributeError):
        gpuwatch.nonsense  # noqa: B018
