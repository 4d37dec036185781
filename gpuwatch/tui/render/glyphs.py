"""The same picture in ASCII, cell by cell, for a terminal that has no more."""

from rich.cells import cell_len

__all__ = ["to_ascii"]

_GLYPHS = {
    # Phases of a step; `#` is also the tallest block.
    "▚": "d",
    "░": "h",
    "▒": "f",
    "▓": "b",
    "█": "#",
    "▞": "o",
    "╌": "-",
    # Levels.
    "▁": "_",
    "▂": ".",
    "▃": ":",
    "▄": "-",
    "▅": "=",
    "▆": "+",
    "▇": "*",
    # Signs.
    "✖": "X",
    "▲": "!",
    "·": ".",
    "✓": "v",
    "◉": "@",
    "◀": "<",
    "▶": ">",
    "→": ">",
    "←": "<",
    "↑": "^",
    "↓": "v",
    "▸": ">",
    "‹": "<",
    "›": ">",
    "■": "#",
    "▌": "|",
    "┃": "|",
    "▏": ":",
    "│": "|",
    "┤": "|",
    "└": "+",
    "─": "-",
    "━": "=",
    "…": "~",
    "°": " ",
    "⏸": "=",
    "×": "x",
    "µ": "u",
}

_DOTS = " .:-=+*#@"
_TABLE = {ord(old): new for old, new in _GLYPHS.items()}
# A braille character is its dots as bits: as many dots as it has, as dark.
_TABLE.update({0x2800 + bits: _DOTS[bits.bit_count()] for bits in range(256)})


def to_ascii(text: str) -> str:
    """Return text of the same width in cells that is ASCII alone."""
    if text.isascii():
        return text
    text = text.translate(_TABLE)
    if text.isascii():
        return text
    return "".join([char if char.isascii() else "?" * cell_len(char) for char in text])
