"""What `gpuwatch run` brings into every Python of a job: it waits for torch, and then watches.

Python imports the first `sitecustomize` on its path at start-up, before the script. This one stands
alone in its directory, which `gpuwatch run` puts in front of PYTHONPATH. It takes itself off the
path again, leaves one finder behind that knows the name torch only, and hands over to the
`sitecustomize` it has hidden. A process that never imports torch loads nothing of ours beyond it.

It meets every interpreter of the job, also one without gpuwatch and of another version: standard
library only, nothing newer than Python 3.8, and it never raises or prints.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Any


class _TorchFinder:
    """On the first import of torch: lets the others find it, and is called when it is complete."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name != "torch":
            return None
        for finder in list(sys.meta_path):
            find = getattr(finder, "find_spec", None)
            if finder is self or find is None:
                continue
            spec: ModuleSpec | None = find(name, path, target)
            if spec is not None:
                self._wait_for(spec)
                return spec
        return None  # not here; a later sys.path may have it

    def _wait_for(self, spec: ModuleSpec) -> None:
        if self in sys.meta_path:
            sys.meta_path.remove(self)
        loader: Any = spec.loader
        execute = getattr(loader, "exec_module", None)
        if execute is None:
            return

        def exec_module(module: ModuleType) -> None:
            del loader.exec_module
            execute(module)
            _torch_is_there()

        # When the import of torch fails, Python leaves its own import frames out of the traceback;
        # by this name ours is one of them, so the user reads what is there without us.
        exec_module.__code__ = exec_module.__code__.replace(
            co_filename="<frozen importlib._bootstrap_external>"
        )
        try:
            loader.exec_module = exec_module
        except AttributeError:
            return
        _show_presence()


def _show_presence() -> None:
    """Map this file, so that /proc tells whoever looks that the hook runs in this process."""
    try:
        import mmap

        with open(__file__, "rb") as file:
            sys._gpuwatch_boot = mmap.mmap(  # type: ignore[attr-defined]
                file.fileno(), 0, access=mmap.ACCESS_READ
            )
    except Exception:
        return


def _torch_is_there() -> None:
    try:
        from gpuwatch.probe import _watch_when_training

        _watch_when_training()
    except ImportError as exc:
        _leave_note(exc)
    except Exception:
        return


def _leave_note(error: ImportError) -> None:
    """Tell `gpuwatch run` which interpreter cannot load gpuwatch; it says so to the user."""
    try:
        import json

        directory = os.environ.get("GPUWATCH_DIR") or f"/tmp/gpuwatch-{os.getuid()}"
        os.makedirs(directory, mode=0o700, exist_ok=True)
        note = {
            "pid": os.getpid(),
            "python": sys.executable,
            "missing": error.name or "",
            "words": str(error)[:500],
        }
        path = os.path.join(directory, f"note-{os.getpid()}.json")
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW
        fd = os.open(path, flags, 0o600)
        try:
            os.write(fd, json.dumps(note).encode())
        finally:
            os.close(fd)
    except Exception:
        return


def _wait_for_card() -> None:
    """Let `gpuwatch run` write its card before this process, the job's first, is gone.

    Who waits for the job (a shell with its prompt) then sees the card first. At most two seconds,
    and nothing where no rank has reported in.
    """
    try:
        if os.environ.get("GPUWATCH_CARD") != str(os.getpid()):
            return  # a forked child
        import socket

        directory = os.environ.get("GPUWATCH_DIR") or f"/tmp/gpuwatch-{os.getuid()}"
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as door:
            door.settimeout(2.0)
            door.connect(os.path.join(directory, f"card-{os.getpid()}.s"))
            door.recv(1)
    except BaseException:
        return


def _boot() -> None:
    if os.environ.get("GPUWATCH_CARD") == str(os.getpid()):
        import atexit

        atexit.register(_wait_for_card)  # the first to be registered is called last
    if getattr(sys, "_gpuwatch_boot", None):
        return
    sys._gpuwatch_boot = True  # type: ignore[attr-defined]
    if "torch" in sys.modules:  # a .pth file was faster
        _show_presence()
        _torch_is_there()
    else:
        sys.meta_path.insert(0, _TorchFinder())


def _step_aside() -> None:
    """Leave sys.path as it is without us. PYTHONPATH stays, for the children's sake."""
    own = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry or ".") != own]
    sys.path_importer_cache.pop(own, None)


try:
    _boot()
    _step_aside()
except Exception:
    pass
# Whatever comes next, its absence and its errors are as they would be without us: site.py knows
# what to say.
sys.modules.pop("sitecustomize", None)
import sitecustomize  # type: ignore[import-not-found]  # noqa: E402, F401
