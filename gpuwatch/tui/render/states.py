"""What stands on the screen when there is no run to draw, or no room to draw it."""

from gpuwatch.tui.render.text import Line, fit, hanging, wrap
from gpuwatch.tui.scene import Scene

__all__ = ["LEAST_HEIGHT", "LEAST_WIDTH", "idle_lines", "is_too_small", "too_small_lines"]

LEAST_WIDTH = 60
LEAST_HEIGHT = 12

TRY = (
    ("gpuwatch demo", "see it work, nothing to set up"),
    ("gpuwatch run -- python train.py", "your script as it is, started anew"),
    ("import gpuwatch; gpuwatch.watch()", "or this in it, before the loop"),
)
"""The commands that get a person from nothing to a picture, exactly as they are typed."""


def is_too_small(width: int, height: int) -> bool:
    """Whether a terminal has too little room to draw in."""
    return width < LEAST_WIDTH or height < LEAST_HEIGHT


def too_small_lines(width: int, height: int) -> list[Line]:
    """Return the notice for a terminal that is too small to draw in: as much of it as fits."""
    least = f"{LEAST_WIDTH}x{LEAST_HEIGHT}"
    rows: list[str] = []
    for text in (
        f"gpuwatch: {width}x{height} is too small, it needs {least}. q quits",
        f"gpuwatch needs {least}. q quits",
        f"needs {least}, q quits",
        f"needs {least}",
        least,
    ):
        rows = wrap(text, width)
        if len(rows) <= height and " ".join(rows).split() == text.split():
            break
    return [fit([(row, "warning")], width) for row in rows[:height]]


def idle_lines(scene: Scene, width: int) -> list[Line]:
    """Return the picture without a run: connecting, no contact, or nothing found yet."""
    view = scene.view
    lines: list[Line] = [[("", "text")]]
    told = ""
    if view.link == "connecting":
        lines.append([("  Connecting …", "strong")])
        told = view.message
        lines += hanging([("  ", "text")], told, "dim", width) if told else []
    elif view.link == "lost":
        lines.append([("  ✖ No contact", "critical")])
        told = view.message
        lines += hanging([("  ", "text")], told, "text", width) if told else []
    elif scene.job is not None:
        waits = "Its training has not begun yet"
        if scene.job.ended:
            waits = "It has ended without a training that gpuwatch has seen"
        lines.append([(f"  {waits}", "strong")])
        lines += hanging([("  ", "text")], scene.job.command, "dim", width)
        lines.append([("", "text")])
        text = "l shows its output; its run appears here with its first step"
        lines += hanging([("  ", "text")], text, "dim", width)
    else:
        lines.append([("  No training run found yet", "strong")])
        told = view.message or "every run of this user appears here by itself"
        lines += hanging([("  ", "text")], told, "dim", width)
        lines.append([("", "text")])
        for command, why in TRY:
            lines.append([("    ", "text"), (f"{command:<36}", "hint"), (why, "dim")])
    for text in view.notices:
        if text not in told:
            lines += hanging([("  ▲ ", "warning")], text, "text", width)
    lines.append([("", "text")])
    return [fit(line, width) for line in lines]
