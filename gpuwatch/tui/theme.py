"""Themes: quiet greys, Okabe-Ito for phases, colour only where it repeats a glyph.

`STYLES` maps the style names of `render` to Rich styles, `use_theme` fills it. Every name has a
style and every piece of text has a name: Textual's NO_COLOR filter fails on text without one.
Text and background stay apart in 16 colours too: `ansi` uses the terminal's own sixteen.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from rich.color import Color, blend_rgb
from rich.segment import Segment
from rich.style import Style
from textual.color import Color as Ground
from textual.filter import LineFilter
from textual.theme import Theme

__all__ = [
    "PALETTES",
    "SELECTED_STYLES",
    "STYLES",
    "Palette",
    "Through",
    "styles_through",
    "textual_theme",
    "use_theme",
]

PHASES = ("data_wait", "h2d", "forward", "backward", "comm", "optimizer", "other")


@dataclass(frozen=True, slots=True)
class Palette:
    """The colours of one theme, as Rich knows them: `#rrggbb`, or a name of the sixteen.

    `phases` are in the order of the schema, `heat` eight levels from low to high. `tint` is how
    much of a phase's colour lies behind its glyph, enough to read as one bar.
    """

    background: str
    surface: str
    text: str
    strong: str
    dim: str
    faint: str
    rule: str
    title: str
    accent: str
    ok: str
    amber: str
    red: str
    series: str
    phases: tuple[str, ...]
    heat: tuple[str, ...]
    dark: bool = True
    ansi: bool = False
    tint: float = 0.30


# Okabe and Ito's palette: apart for every common kind of colour blindness.
_OKABE_ITO = ("#e69f00", "#f0e442", "#0072b2", "#56b4e9", "#d55e00", "#cc79a7", "#78828f")

PALETTES: Mapping[str, Palette] = {
    "dark": Palette(
        background="#0f1216",
        surface="#1a2029",
        text="#c5ccd6",
        strong="#f0f4f8",
        dim="#808a97",
        faint="#566070",
        rule="#2c343f",
        title="#a9bdd4",
        accent="#7cb7ff",
        ok="#6fcfae",
        amber="#e8b64c",
        red="#ff7a70",
        series="#6f9fd0",
        phases=_OKABE_ITO,
        # Luminance rises with the value, so that the ramp survives without colour.
        heat=(
            "#4a5f80",
            "#4d7291",
            "#53869c",
            "#679a9c",
            "#8fac86",
            "#b9ba6c",
            "#dfc257",
            "#ffcf45",
        ),
    ),
    "light": Palette(
        background="#fbfbfa",
        surface="#e8edf3",
        text="#2b333d",
        strong="#05090e",
        dim="#5c6773",
        faint="#8a94a0",
        rule="#cdd4dc",
        title="#2f4d70",
        accent="#0a58b8",
        ok="#00735c",
        amber="#8a5d00",
        red="#970f14",
        series="#3b6ea5",
        # The same hues, dark enough for a white ground.
        phases=("#d38b00", "#7d7600", "#00558a", "#3f9fd0", "#8a3000", "#c46a9c", "#59626d"),
        heat=(
            "#b3bfcd",
            "#9fb3c4",
            "#86a3b6",
            "#6c8fa0",
            "#5f7b68",
            "#6b6a2c",
            "#6f4f00",
            "#5c2f00",
        ),
        dark=False,
        tint=0.22,
    ),
    "contrast": Palette(
        background="#000000",
        surface="#26303c",
        text="#f2f2f2",
        strong="#ffffff",
        dim="#c3cad2",
        faint="#9aa4b0",
        rule="#6b7683",
        title="#d8e8ff",
        accent="#8fc4ff",
        ok="#63e6be",
        amber="#ffd24d",
        red="#ff8f85",
        series="#9ecbff",
        phases=("#ffb52e", "#fff59a", "#2f86d8", "#9fe0ff", "#f0681a", "#e79bc6", "#8d959f"),
        heat=(
            "#6f8bb3",
            "#769fc0",
            "#7fb3c8",
            "#97c6c6",
            "#bcd6ae",
            "#e0e28f",
            "#ffe97a",
            "#fff7b0",
        ),
        tint=0.18,
    ),
    "ansi": Palette(
        background="default",
        surface="default",
        text="default",
        strong="default",
        dim="default",
        faint="default",
        rule="default",
        title="default",
        accent="blue",
        ok="green",
        amber="yellow",
        red="red",
        series="cyan",
        phases=("yellow", "bright_yellow", "blue", "cyan", "red", "magenta", "default"),
        heat=("blue", "blue", "cyan", "cyan", "green", "green", "yellow", "yellow"),
        ansi=True,
    ),
}


def _tint(palette: Palette, colour: str) -> str | None:
    """Return the colour behind a bar; sixteen colours have none between."""
    if palette.ansi:
        return None
    front = Color.parse(colour).get_truecolor()
    back = Color.parse(palette.background).get_truecolor()
    return blend_rgb(back, front, palette.tint).hex


def _fronts(palette: Palette) -> dict[str, Style]:
    # Sixteen colours have no greys that can be relied on: what is quiet there is dim.
    quiet = True if palette.ansi else None
    phases = dict(zip(PHASES, palette.phases, strict=True))
    return {
        "text": Style(color=palette.text),
        "strong": Style(color=palette.strong, bold=True),
        "dim": Style(color=palette.dim, dim=quiet),
        "faint": Style(color=palette.faint, dim=quiet),
        "rule": Style(color=palette.rule, dim=quiet),
        "title": Style(color=palette.title, bold=True),
        "title.focus": Style(color=palette.accent, bold=True),
        "focus": Style(color=palette.accent, bold=True),
        "accent": Style(color=palette.accent),
        "ok": Style(color=palette.ok),
        "hint": Style(color=palette.ok),
        "key": Style(color=palette.strong, bold=True),
        "tab": Style(color=palette.strong, bold=True, underline=True),
        "critical": Style(color=palette.red, bold=True),
        "warning": Style(color=palette.amber, bold=True),
        "note": Style(color=palette.dim, dim=quiet),
        "badge": Style(color=palette.amber, bold=True, reverse=True),
        "cursor": Style(color=palette.accent, bold=True, reverse=True),
        "heat.cursor": Style(color=palette.strong, bold=True),
        "gauge": Style(color=palette.series),
        "spark": Style(color=palette.series),
        **{f"phase.{name}": Style(color=colour) for name, colour in phases.items()},
        **{
            f"bar.{name}": Style(color=colour, bgcolor=_tint(palette, colour))
            for name, colour in phases.items()
            if name != "other"
        },
        "bar.other": Style(color=phases["other"]),
        **{f"heat.{level}": Style(color=colour) for level, colour in enumerate(palette.heat)},
    }


STYLES: dict[str, Style] = {}
"""Style name -> Rich style. The background is part of it: lines are not painted over one."""

SELECTED_STYLES: dict[str, Style] = {}
"""The same on a selected row."""


def use_theme(name: str) -> None:
    """Fill `STYLES` and `SELECTED_STYLES` with a theme of `PALETTES`."""
    palette = PALETTES[name]
    fronts = _fronts(palette)
    plain = Style(bgcolor=palette.background)
    # Sixteen colours have no second ground: there the selected row is told by its mark alone.
    selected = Style(bgcolor=palette.surface)
    STYLES.update({key: plain + style for key, style in fronts.items()})
    SELECTED_STYLES.update({key: selected + style for key, style in fronts.items()})
    _filtered.clear()


Through = tuple[tuple[LineFilter, ...], Ground]
"""Textual's filters that styles go through before they reach the terminal, and the ground of it."""

_filtered: dict[Through, tuple[Mapping[str, Style], Mapping[str, Style]]] = {}


def styles_through(through: Through) -> tuple[Mapping[str, Style], Mapping[str, Style]]:
    """Return `STYLES` and `SELECTED_STYLES` as they are behind filters; made once a theme."""
    found = _filtered.get(through)
    if found is None:
        found = (_behind(STYLES, through), _behind(SELECTED_STYLES, through))
        _filtered[through] = found
    return found


def _behind(styles: Mapping[str, Style], through: Through) -> Mapping[str, Style]:
    filters, ground = through
    segments = [Segment("x", style) for style in styles.values()]
    for item in filters:
        segments = item.apply(segments, ground)
    found = [segment.style or Style.null() for segment in segments]
    return dict(zip(styles, found, strict=True))


use_theme("dark")


def textual_theme(name: str) -> Theme:
    """Return the theme as Textual knows it, under the name `gpuwatch-NAME`."""
    palette = PALETTES[name]

    def colour(value: str) -> str:
        return f"ansi_{value}" if palette.ansi else value

    return Theme(
        name=f"gpuwatch-{name}",
        primary=colour(palette.accent),
        accent=colour(palette.accent),
        warning=colour(palette.amber),
        error=colour(palette.red),
        success=colour(palette.ok),
        foreground=colour(palette.text),
        background=colour(palette.background),
        surface=colour(palette.background),
        panel=colour(palette.surface),
        dark=palette.dark,
        ansi=palette.ansi,
        # Named by Textual's own style sheets; native themes have to give them.
        variables={"ansi-background": "ansi_default", "ansi-foreground": "ansi_default"}
        if palette.ansi
        else {},
    )
