"""Picture and findings as files."""

import os
import re
import tempfile
import time
from pathlib import Path

from gpuwatch.tui.render.markdown import report_markdown
from gpuwatch.tui.scene import Scene

__all__ = ["free_path", "trace_target", "write_files"]


def _folder() -> Path:
    """Return the first of current directory, home and /tmp that can be written."""
    for folder in (Path.cwd(), Path.home()):
        if os.access(folder, os.W_OK):
            return folder
    return Path(tempfile.gettempdir())


def _plain(text: str, most: int) -> str:
    """Return text as a part of a file's name: nothing that leads elsewhere, no hidden file."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("-.")[-most:].strip("-.")


def free_path(path: Path) -> Path:
    """Return the path, or one beside it where something is there: nothing is overwritten."""
    number = 1
    free = path
    while free.exists():
        number += 1
        free = path.with_name(f"{number}~{path.name}")
    return free


def trace_target(run: str, rank: int, name: str, folder: Path | None = None) -> Path:
    """Return where the trace of a rank goes, beside what `write_files` writes."""
    folder = _folder() if folder is None else folder
    known = _plain(run, 60) or "run"
    return folder / f"gpuwatch-{known}-rank{rank}-{_plain(name, 80) or 'trace'}"


def write_files(scene: Scene, svg: str, folder: Path | None = None) -> tuple[Path, Path]:
    """Write `gpuwatch-RUN-DATE.svg` and `.md` and return where they are; nothing is overwritten.

    Raises:
        OSError: they cannot be written.
    """
    folder = _folder() if folder is None else folder
    run = scene.run.name or scene.run.run if scene.run is not None else "no-run"
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", run).strip("-.")[:60] or "run"
    stem = f"gpuwatch-{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    number = 1
    while (folder / f"{stem}.svg").exists() or (folder / f"{stem}.md").exists():
        number += 1
        stem = f"{stem.split('~', maxsplit=1)[0]}~{number}"
    picture, text = folder / f"{stem}.svg", folder / f"{stem}.md"
    picture.write_text(svg, "utf-8")
    text.write_text(report_markdown(scene), "utf-8")
    return picture, text
