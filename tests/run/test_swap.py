"""Exchanging a function's code: everything but the calls stays as it was."""

import importlib.util
import inspect
import sys
import traceback
import types
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from gpuwatch.probe.swap import RAISED, SwapError, swap

TOYS = Path(__file__).parent / "toys.py"


@pytest.fixture
def toys() -> Iterator[Any]:
    """The functions, fresh for each test."""
    spec = importlib.util.spec_from_file_location("gw_toys", TOYS)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["gw_toys"] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules["gw_toys"]


class Counter:
    """What a mark sees: (first argument, value) of every call that has ended."""

    def __init__(self) -> None:
        self.open = 0
        self.seen: list[tuple[Any, Any]] = []

    def begin(self, first: Any) -> Any:
        self.open += 1
        return first

    def end(self, token: Any, value: Any) -> Any:
        self.open -= 1
        self.seen.append((token, value))
        return value


def outcome(call: Callable[[Any], Any], toys: Any) -> Any:
    """A value, or the traceback as the user reads it; and the warnings with what they blame."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            value: Any = call(toys)
        except BaseException:
            # Two frames are the test's own.
            value = traceback.format_exc().split("in <lambda>")[1]
    return value, [(w.filename, w.lineno, str(w.message)) for w in caught]


CALLS: dict[str, Callable[[Any], Any]] = {
    "plain": lambda t: t.plain(1, 2, 3, 4, z=5, w=6),
    "plain returns nothing": lambda t: t.plain(1, 0),
    "plain wrongly called": lambda t: t.plain(),
    "plain raises": lambda t: t.plain("1"),
    "falls_off": lambda t: t.falls_off([1]),
    "falls_off raises": lambda t: t.falls_off(3),
    "raises": lambda t: (t.raises(4), t.log),
    "raises from": lambda t: t.raises(0),
    "recurses": lambda t: t.recurses(3),
    "warns": lambda t: t.warns(1),
    "keeps": lambda t: (t.keeps(3), t.keeps(3), t.log, t.keeps.__defaults__),
    "method": lambda t: t.Toy().method(2),
    "method raises": lambda t: t.Toy().method("2"),
    "next": lambda t: next(t.Toy()),
}


@pytest.mark.parametrize("name", CALLS)
def test_it_does_what_it_did(toys: Any, name: str) -> None:
    word = name.split(maxsplit=1)[0]
    methods = {"method": toys.Toy.method, "next": toys.Toy.__next__}
    function = methods[word] if word in methods else getattr(toys, word)

    def run() -> Any:
        toys.log.clear()
        toys.keeps.__defaults__[0].clear()
        return outcome(CALLS[name], toys)

    bare = run()
    told = inspect.signature(function), function.__doc__, function.__qualname__
    code = function.__code__
    counter = Counter()
    undo = swap(function, counter.begin, counter.end)
    assert run() == bare
    assert (inspect.signature(function), function.__doc__, function.__qualname__) == told
    assert function.__code__.co_qualname == code.co_qualname
    assert counter.open == 0
    assert bool(counter.seen) == ("wrongly" not in name)
    undo()
    assert function.__code__ is code
    counter.seen.clear()
    assert run() == bare
    assert counter.seen == []


def test_what_the_calls_are_given(toys: Any) -> None:
    counter = Counter()
    for function in (toys.plain, toys.falls_off, toys.recurses):
        swap(function, counter.begin, counter.end)
    assert toys.plain(1) == 6
    items = [1]
    toys.falls_off(items)
    with pytest.raises(ValueError, match="none"):
        toys.recurses(1)
    assert counter.seen == [(1, 6), (items, None), (0, RAISED), (1, RAISED)]


def test_the_value_may_be_replaced(toys: Any) -> None:
    swap(toys.plain, lambda first: first, lambda token, value: (token, value))
    assert toys.plain(1) == (1, 6)


def test_a_call_under_way_outlives_the_undoing(toys: Any) -> None:
    undo: list[Callable[[], None]] = []
    counter = Counter()

    class Undoes:
        def __add__(self, other: int) -> int:
            undo[0]()
            return other

    undo.append(swap(toys.plain, counter.begin, counter.end))
    assert toys.plain(Undoes()) == 5
    assert len(counter.seen) == 1
    assert toys.plain(1) == 6
    assert len(counter.seen) == 1


def test_what_cannot_be_swapped_is_left_alone(toys: Any) -> None:
    counter = Counter()

    def refuses(function: Any, words: str) -> None:
        code = getattr(function, "__code__", None)
        with pytest.raises(SwapError, match=words):
            swap(function, counter.begin, counter.end)
        assert getattr(function, "__code__", None) is code

    refuses(toys.generator, "generator")
    refuses(toys.closure(), "closure")
    refuses(toys.no_argument, "no argument")
    refuses(len, "no plain function")
    refuses(toys.Toy().method, "no plain function")
    space: dict[str, Any] = {}
    exec("def made(x):\n    return x", space)
    refuses(space["made"], "source of made is not there")
    swap(toys.plain, counter.begin, counter.end)
    refuses(toys.plain, "swapped already")
    # The file was edited after it was imported.
    number = toys.recurses.__code__.co_firstlineno - 1
    code = compile("\n" * number + "def recurses(x):\n    return x", str(TOYS), "exec")
    refuses(types.FunctionType(code.co_consts[0], {}), "is not what it was compiled from")
