"""Changing some keys of one section in a TOML file, and nothing else: comments stay."""

import json
import os
import re
import shutil
import tempfile
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from trainer.errors import ConfigError

__all__ = ["Scalar", "set_keys", "write_keys"]

Scalar = bool | int | float | str
"""What can be written."""


def set_keys(text: str, section: str, values: Mapping[str, Scalar]) -> str:
    """`text` with the keys of ``[section]`` set, everything else byte for byte as it was.

    A key that is there is changed in its place; others are added at the end of the section, which
    is added at the end of the file if need be. Dotted keys (``section.key = 1``) and an inline
    table (``section = {...}``) are understood.

    Raises:
        ConfigError: `text` is not TOML, or it cannot be changed without touching the rest.
    """
    before = _parsed(text)
    if not isinstance(before.get(section, {}), dict):
        raise ConfigError(f"{section} is a plain value there, not a section")
    newline = "\r\n" if "\r\n" in text else "\n"
    statements = _statements(text)
    left = dict(values)
    table: tuple[str, ...] = ()
    end: int | None = None  # where new keys go
    dotted = False
    for index, statement in enumerate(statements):
        tree = _parsed(statement)
        if not tree:
            continue  # blank, or a comment
        if statement.lstrip().startswith("["):
            table = _path(tree)
            if table == (section,):
                end, dotted = index, False
            continue
        inside = table == (section,)
        own = tree if inside else tree.get(section) if not table else None
        if not isinstance(own, dict):
            continue
        inline = not inside and _is_inline(statement, section)
        if inline:
            statements[index] = _inline(statement, section, {**own, **left})
            left.clear()
            break
        end, dotted = index, not inside
        (key,) = own
        if key in left:
            statements[index] = _replaced(statement, left.pop(key))
    if left:
        prefix = f"{section}." if dotted else ""
        lines = [f"{prefix}{key} = {_toml(value)}{newline}" for key, value in left.items()]
        if end is None:
            gap = newline if text.strip() else ""
            lines = [gap, f"[{section}]{newline}", *lines]
            end = len(statements) - 1
        if end >= 0 and statements[end] and not statements[end].endswith("\n"):
            statements[end] += newline
        statements[end + 1 : end + 1] = lines
    result = "".join(statements)
    wanted = {**before, section: {**before.get(section, {}), **values}}
    try:
        found: Any = tomllib.loads(result)
    except tomllib.TOMLDecodeError:
        found = None
    if found != wanted:
        words = ", ".join(f"{key} = {_toml(value)}" for key, value in values.items())
        raise ConfigError(f"it cannot be changed in place: write {words} under [{section}] by hand")
    return result


def write_keys(
    path: Path,
    section: str,
    values: Mapping[str, Scalar],
    *,
    check: Callable[[Path], object] = lambda _path: None,
) -> None:
    """`set_keys` on a file, which is made if it is missing, and replaced at once or not at all.

    `check` is called with what was written, before it replaces the file.

    Raises:
        ConfigError: it cannot be read, changed or written, or `check` raises that.
    """
    target = path.resolve()  # a link stays a link
    try:
        text = target.read_bytes().decode() if target.exists() else ""
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not TOML: {error}") from None
    try:
        result = set_keys(text, section, values)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    try:
        handle, temporary = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from None
    try:
        with open(handle, "wb") as file:
            file.write(result.encode())
            file.flush()
            os.fsync(file.fileno())
        if target.exists():
            shutil.copymode(target, temporary)
        else:
            mask = os.umask(0)
            os.umask(mask)
            os.chmod(temporary, 0o666 & ~mask)
        try:
            check(Path(temporary))
        except ConfigError as error:
            sentence = str(error).replace(temporary, str(path))
            raise ConfigError(f"{path} is left as it was: {sentence}") from None
        os.replace(temporary, target)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from None
    finally:
        Path(temporary).unlink(missing_ok=True)


def _parsed(text: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"it is not TOML: {error}") from None


def _statements(text: str) -> list[str]:
    """The text in pieces that are TOML each: a line, or more where a value spans several.

    Everything up to the end of a statement is TOML; up to a line inside one it is not.
    """
    statements: list[str] = []
    piece = ""
    for line in re.findall(r"[^\n]*\n|[^\n]+", text):
        piece += line
        try:
            tomllib.loads(piece)
        except tomllib.TOMLDecodeError:
            continue
        statements.append(piece)
        piece = ""
    return [*statements, piece] if piece else statements


def _path(tree: Mapping[str, Any]) -> tuple[str, ...]:
    """The names of a header's table; of an array's, as ``[[a]]``, none that a section has."""
    path: list[str] = []
    inner: Any = tree
    while isinstance(inner, dict) and inner:
        ((name, inner),) = inner.items()
        path.append(name)
    return tuple(path) if isinstance(inner, dict) else (*path, "")


def _is_inline(statement: str, section: str) -> bool:
    """``section = {...}``, as against ``section.key = ...``."""
    key, _, _ = statement.partition("=")
    return _parsed(f"{key} = 1") == {section: 1}


def _replaced(statement: str, value: Scalar) -> str:
    """The statement with another value; what stands around it stays."""
    key, _, rest = statement.partition("=")
    body = statement.rstrip("\r\n")
    comment = ""
    tree = _parsed(statement)
    for match in re.finditer("#", body):
        # The first # that is not inside the value.
        try:
            if tomllib.loads(body[: match.start()]) == tree:
                value_end = body[: match.start()].rstrip()
                comment = body[len(value_end) :]
                break
        except tomllib.TOMLDecodeError:
            continue
    space = rest[: len(rest) - len(rest.lstrip(" \t"))]
    return f"{key}={space}{_toml(value)}{comment}{statement[len(body) :]}"


def _inline(statement: str, section: str, values: Mapping[str, Any]) -> str:
    body = statement.rstrip("\r\n")
    inner = ", ".join(f"{key} = {_toml(value)}" for key, value in values.items())
    return f"{section} = {{{inner}}}{statement[len(body) :]}"


def _toml(value: Any) -> str:
    # For booleans, numbers and strings JSON's spelling is TOML's, DEL apart. A date in an inline
    # table is written as text, and found to be another value then.
    return json.dumps(value, ensure_ascii=False, default=str).replace("\x7f", "\\u007F")
