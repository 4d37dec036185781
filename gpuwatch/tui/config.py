"""The person's own settings: `$XDG_CONFIG_HOME/gpuwatch/config.toml`.

    theme = "light"        # dark, light, contrast, ansi
    ascii = false          # true: no glyphs beyond ASCII

    [keys]
    pause = "P"            # names as in the help; several: "P, space"
    view-1 = "0"           # digits are keys too

A setting that cannot be used costs one sentence on the screen and nothing else.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from gpuwatch.tui.keymap import ACTIONS, KeyNames, conflicts

__all__ = ["THEMES", "Config", "config_path", "load_config", "read_config"]

THEMES = ("dark", "light", "contrast", "ansi")

_KEY = re.compile(r"(?:(?:ctrl|shift|alt|super|meta)\+)*(?:[a-z][a-z0-9_]*|[A-Z0-9])|[^\s,\w]")
"""A key by Textual's name (`ctrl+f`, `pageup`), a letter, a digit, or a sign as it is printed."""

_MOST_BYTES = 65_536


@dataclass(frozen=True, slots=True)
class Config:
    """Settings in force. `theme` empty and `ascii` None: by what the terminal can show."""

    theme: str = ""
    ascii: bool | None = None
    keys: KeyNames = field(default_factory=dict)
    problems: tuple[str, ...] = ()


def config_path(environ: Mapping[str, str] | None = None) -> Path:
    """Return where the settings are looked for."""
    environ = os.environ if environ is None else environ
    home = environ.get("XDG_CONFIG_HOME") or ""
    base = Path(home) if home.startswith("/") else Path(environ.get("HOME") or "~").expanduser()
    return (base if home.startswith("/") else base / ".config") / "gpuwatch" / "config.toml"


def load_config(path: Path | None = None) -> Config:
    """Read the settings; without a file they are all at their defaults. Raises nothing."""
    try:
        path = config_path() if path is None else path
        if not path.is_file():
            return Config()
        if path.stat().st_size > _MOST_BYTES:
            return Config(problems=(f"{path.name} is too large to be settings; it is left out",))
        text = path.read_text("utf-8")
    except (OSError, ValueError, RuntimeError) as exc:
        return Config(problems=(f"the settings cannot be read: {exc}",))
    return read_config(text, path.name)


def _like(word: str, known: list[str]) -> str:
    from difflib import get_close_matches

    near = get_close_matches(word, known, 1)
    return f"; did you mean {near[0]}?" if near else f"; there are {', '.join(sorted(known))}"


def read_config(text: str, name: str = "config.toml") -> Config:
    """Return the settings in a TOML text, with a sentence for each one that cannot be used."""
    import tomllib

    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as exc:
        return Config(problems=(f"{name}: {exc}",))
    problems: list[str] = []
    theme, plain, keys = "", None, {}
    for key, value in document.items():
        if key == "theme":
            if value in THEMES:
                theme = value
            else:
                problems.append(f"{name}: no theme {value!r}{_like(str(value), list(THEMES))}")
        elif key == "ascii":
            if isinstance(value, bool):
                plain = value
            else:
                problems.append(f"{name}: ascii is true or false, not {value!r}")
        elif key == "keys" and isinstance(value, dict):
            keys = _keys(value, name, problems)
        else:
            problems.append(f"{name}: no setting {key!r}{_like(key, ['theme', 'ascii', 'keys'])}")
    return Config(theme, plain, keys, tuple(problems))


def _keys(table: Mapping[str, object], name: str, problems: list[str]) -> dict[str, str]:
    chosen: dict[str, str] = {}
    for action, value in table.items():
        if action not in ACTIONS:
            problems.append(f"{name}: no action {action!r}{_like(action, list(ACTIONS))}")
            continue
        parts = [part.strip() for part in value.split(",")] if isinstance(value, str) else []
        if not parts or not all(_KEY.fullmatch(part) for part in parts):
            problems.append(f"{name}: keys.{action} = {value!r} is no key")
            continue
        chosen[action] = ",".join(parts)
    problems += [
        f"{name}: {key} is the key of {' and of '.join(actions)}: give each its own"
        for key, actions in conflicts(chosen)
    ]
    return chosen
