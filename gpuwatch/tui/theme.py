"""One dark theme: quiet greys, Okabe-Ito for phases, colour only where it repeats a glyph.

`STYLES` maps the style names of `render` to Rich styles. Every name has a style and every piece
of text has a name: Textual's NO_COLOR filter fails on text without one.
"""

from rich.color import Color, blend_rgb
from rich.style import Style
from textual.theme import Theme

__all__ = ["BACKGROUND", "SELECTED_STYLES", "STYLES", "THEME"]

BACKGROUND = "#0f1216"
SURFACE = "#1a2029"
TEXT = "#c5ccd6"
STRONG = "#f0f4f8"
DIM = "#808a97"
FAINT = "#566070"
RULE = "#2c343f"
TITLE = "#a9bdd4"
ACCENT = "#7cb7ff"
OK = "#7fc99a"
AMBER = "#e8b64c"
RED = "#ff7a70"

PHASE_COLOURS = {
    "data_wait": "#e69f00",
    "h2d": "#f0e442",
    "forward": "#0072b2",
    "backward": "#56b4e9",
    "comm": "#d55e00",
    "optimizer": "#cc79a7",
    "other": "#78828f",
}
"""Okabe and Ito's palette: apart for every common kind of colour blindness."""

HEAT_COLOURS = (
    "#4a5f80",
    "#4d7291",
    "#53869c",
    "#679a9c",
    "#8fac86",
    "#b9ba6c",
    "#dfc257",
    "#ffcf45",
)
"""Luminance rises with the value, so that the ramp survives without colour."""

_BAR_TINT = 0.30
"""How much of a phase's colour lies behind its glyph: enough to read as one bar."""


def _tint(colour: str, part: float) -> str:
    front = Color.parse(colour).get_truecolor()
    back = Color.parse(BACKGROUND).get_truecolor()
    return blend_rgb(back, front, part).hex


_FRONTS: dict[str, Style] = {
    "text": Style(color=TEXT),
    "strong": Style(color=STRONG, bold=True),
    "dim": Style(color=DIM),
    "faint": Style(color=FAINT),
    "rule": Style(color=RULE),
    "title": Style(color=TITLE, bold=True),
    "title.focus": Style(color=ACCENT, bold=True),
    "focus": Style(color=ACCENT, bold=True),
    "accent": Style(color=ACCENT),
    "ok": Style(color=OK),
    "hint": Style(color=OK),
    "key": Style(color=STRONG, bold=True),
    "critical": Style(color=RED, bold=True),
    "warning": Style(color=AMBER, bold=True),
    "note": Style(color=DIM),
    "badge": Style(color=BACKGROUND, bgcolor=AMBER, bold=True),
    "gauge": Style(color="#6f9fd0"),
    "spark": Style(color="#6f9fd0"),
    **{f"phase.{name}": Style(color=colour) for name, colour in PHASE_COLOURS.items()},
    **{
        f"bar.{name}": Style(color=colour, bgcolor=_tint(colour, _BAR_TINT))
        for name, colour in PHASE_COLOURS.items()
        if name != "other"
    },
    "bar.other": Style(color=PHASE_COLOURS["other"]),
    **{f"heat.{level}": Style(color=colour) for level, colour in enumerate(HEAT_COLOURS)},
}

STYLES = {name: Style(bgcolor=BACKGROUND) + style for name, style in _FRONTS.items()}
"""Style name -> Rich style. The background is part of it: lines are not painted over one."""

SELECTED_STYLES = {name: Style(bgcolor=SURFACE) + style for name, style in _FRONTS.items()}
"""The same on a selected row."""

THEME = Theme(
    name="gpuwatch",
    primary=ACCENT,
    accent=ACCENT,
    warning=AMBER,
    error=RED,
    success=OK,
    foreground=TEXT,
    background=BACKGROUND,
    surface=BACKGROUND,
    panel=SURFACE,
    dark=True,
)
