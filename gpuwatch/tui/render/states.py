"""What stands on the screen when there is no run to draw, or no room to draw it."""

from gpuwatch.tui.render.text import Line, fit
from gpuwatch.tui.scene import Scene

__all__ = ["LEAST_HEIGHT", "LEAST_WIDTH", "idle_lines", "too_small_line"]

LEAST_WIDTH = 60
LEAST_HEIGHT = 12

TRY = (
    ("gpuwatch demo", "see it work, nothing to set up"),
    ("gpuwatch run -- python train.py", "your script as it is, started anew"),
    ("import gpuwatch; gpuwatch.watch()", "or this in it, before the loop"),
)
"""The commands that get a person from nothing to a picture, exactly as they are typed."""


def too_small_line(width: int, height: int) -> Line:
    """Return the notice for a terminal that is too small to draw in."""
    return fit(
        [(f"gpuwatch: {width}x{height} is too small, needs 80x24. q quits", "warning")], width
    )


def idle_lines(scene: Scene, width: int) -> list[Line]:
    """Return the picture without a run: connecting, no contact, or nothing found yet."""
    view = scene.view
    lines: list[Line] = [[("", "text")]]
    if view.link == "connecting":
        lines.append([("  Connecting …", "strong")])
        if view.message:
            lines.append([(f"  {view.message}", "dim")])
    elif view.link == "lost":
        lines.append([("  ✖ No contact", "critical")])
        if view.message:
            lines.append([(f"  {view.message}", "text")])
    elif scene.job is not None:
        waits = "Its training has not begun yet"
        if scene.job.ended:
            waits = "It has ended without a training that gpuwatch has seen"
        lines.append([(f"  {waits}", "strong")])
        lines.append([(f"  {scene.job.command}", "dim")])
        lines.append([("", "text")])
        lines.append([("  l shows its output; its run appears here with its first step", "dim")])
    else:
        lines.append([("  No training run found yet", "strong")])
        lines.append(
            [(f"  {view.message or 'every run of this user appears here by itself'}", "dim")]
        )
        lines.append([("", "text")])
        for command, why in TRY:
            lines.append([("    ", "text"), (f"{command:<36}", "hint"), (why, "dim")])
    lines += [[("  ▲ ", "warning"), (text, "text")] for text in view.notices]
    lines.append([("", "text")])
    return [fit(line, width) for line in lines]
