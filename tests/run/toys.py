"""Functions with everything in them that a change of their code could disturb."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

log: list[str] = []


def plain(x: Any, /, y: int = 2, *rest: int, z: int = 3, **more: int) -> Any:
    """Its docstring."""
    if y == 0:
        return  # noqa: RET502
    total = sum(rest, x + y + z) + sum(more.values())
    return total  # noqa: RET504


def falls_off(x: list[int]) -> None:
    for item in x:
        if item > 2:
            break
        x.append(item + 1)


def raises(x: int) -> float:
    def inner(y: int) -> float:
        return 1 / y

    try:
        return inner(x)
    except ZeroDivisionError as exc:
        raise ValueError("not by zero") from exc
    finally:
        log.append("finally")


def recurses(x: int) -> int:
    return recurses(x - 1) + 1 if x else int("none")


def warns(x: int) -> int:
    warnings.warn("blames the caller", stacklevel=2)
    return x


@contextmanager
def logged() -> Iterator[None]:
    log.append("in")
    yield
    log.append("out")


def keeps(x: int, cache: dict[int, int] = {}) -> int:  # noqa: B006
    with logged():
        square = lambda y: y * y  # noqa: E731
        return cache.setdefault(x, square(x))


class Toy:
    __secret = 5

    def method(self, add: int) -> int:
        """A private name, which its class mangles."""
        return self.__secret + add

    def __next__(self) -> int:
        return self.__secret


def generator(x: int) -> Iterator[int]:
    yield x


def closure() -> Any:
    def inside(x: int) -> int:
        return x + len(log) + offset

    offset = 1
    return inside


def no_argument() -> int:
    return 1
