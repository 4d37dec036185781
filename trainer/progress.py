"""A progress line on stderr for work that takes a while; nothing where nobody looks."""

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import TextIO

import click

__all__ = ["progress"]


@contextlib.contextmanager
def progress(
    label: str, length: int, *, err: TextIO | None = None
) -> Iterator[Callable[[str], None]]:
    """A bar of `length` parts; call what is yielded after each, with what comes next in words.

    Writes to `err`, stderr by default, and only where that is a terminal: a log or a pipe gets
    nothing.
    """
    stream = err if err is not None else sys.stderr
    if not stream.isatty():
        yield lambda _doing: None
        return
    with click.progressbar(
        length=length,
        label=label,
        file=stream,
        item_show_func=lambda doing: doing,
        show_eta=False,
        width=20,
    ) as bar:

        def advance(doing: str) -> None:
            bar.update(1, doing)

        yield advance
