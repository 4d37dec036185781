"""Expected pictures as text files that a reader can check.

`GPUWATCH_SNAPSHOTS=write` writes them anew; then read the difference before it is committed.
"""

import os
from pathlib import Path

from gpuwatch.tui.render.text import Line, width_of

FOLDER = Path(__file__).with_name("snapshots")


def text_of(line: Line) -> str:
    return "".join(text for text, _ in line)


def check_lines(name: str, lines: list[Line], width: int, height: int | None = None) -> None:
    """Compare lines with the file of that name; each has exactly the width."""
    for line in lines:
        assert width_of(line) == width, text_of(line)
    shown = lines if height is None else lines[:height]
    check_text(name, "\n".join(text_of(line).rstrip() for line in shown))


def check_text(name: str, text: str) -> None:
    """Compare text with the file of that name, blanks at the ends of lines left out."""
    text = "\n".join(line.rstrip() for line in text.splitlines()).rstrip() + "\n"
    path = FOLDER / f"{name}.txt"
    if os.environ.get("GPUWATCH_SNAPSHOTS") == "write":
        FOLDER.mkdir(exist_ok=True)
        path.write_text(text, "utf-8")
    assert path.exists(), f"no {path.name}: write it with GPUWATCH_SNAPSHOTS=write"
    assert text == path.read_text("utf-8"), f"\n{text}"
