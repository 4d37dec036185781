"""What the terminal can show, as far as its environment says."""

import os
from collections.abc import Mapping

__all__ = ["has_few_colours", "needs_ascii"]

_PLAIN_TERMS = ("linux", "vt100", "vt102", "vt220", "ansi", "cons25")
"""Consoles whose fonts have no braille and few blocks."""


def needs_ascii(environ: Mapping[str, str] | None = None, encoding: str | None = "utf-8") -> bool:
    """Tell whether only ASCII may be drawn: the console, the locale or `encoding` has no more.

    `encoding` is that of the stream that is drawn on. A locale that says nothing says nothing
    against Unicode: containers have none and sit in terminals that do.
    """
    environ = os.environ if environ is None else environ
    if environ.get("TERM", "") in _PLAIN_TERMS:
        return True
    if (encoding or "utf-8").lower().replace("-", "").replace("_", "") not in ("utf8", "utf8sig"):
        return True
    # LC_CTYPE is not asked where LANG is C: Python itself sets it then (PEP 538).
    locale = environ.get("LC_ALL") or environ.get("LANG") or environ.get("LC_CTYPE") or ""
    return bool(locale) and "utf" not in locale.lower() and locale not in ("C.utf8",)


def has_few_colours(system: str | None) -> bool:
    """Tell whether Rich's name of a colour system means sixteen colours."""
    return system == "standard"
