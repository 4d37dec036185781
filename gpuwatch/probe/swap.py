"""Marks around a function that no traceback shows: its code is exchanged, the function stays.

A wrapper is one more frame in every traceback that passes through, moves the line that a warning
blames, and hides the function from whoever knows it by identity (TorchScript does). Here the
function's own source is parsed, calls are put around its body, and it is compiled again with the
same file name, lines and columns; the result becomes the `__code__` of the same function object.
"""

import __future__

import ast
import inspect
import linecache
import types
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

__all__ = ["RAISED", "Calls", "SwapError", "leave_uncompiled", "swap"]


_Node = TypeVar("_Node", bound=ast.AST)


Calls = tuple[Callable[[Any], Any], Callable[[Any, Any], Any]]
"""What `swap` puts around a function: `begin` and `end`."""


class _Raised:
    def __repr__(self) -> str:
        return "RAISED"


RAISED: Any = _Raised()
"""Given to `end` in place of a value: the function has raised."""

# Dunder names: no class mangles them, and pretty tracebacks leave such locals out.
_TOKEN = "__gpuwatch_token__"
_RAISED = "__gpuwatch_raised__"
_COMPILER_FLAGS = sum(
    getattr(__future__, name).compiler_flag for name in __future__.all_feature_names
)
_COMPARED = (
    "co_name",
    "co_code",
    "co_names",
    "co_varnames",
    "co_cellvars",
    "co_freevars",
    "co_flags",
    "co_argcount",
    "co_posonlyargcount",
    "co_kwonlyargcount",
    "co_firstlineno",
    "co_linetable",
    "co_exceptiontable",
)
_TOP = ast.Pass(lineno=1, col_offset=0, end_lineno=1, end_col_offset=0)
_UNFIT = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR


class SwapError(Exception):
    """The function's code cannot be exchanged; the message says why."""


def swap(
    function: Any, begin: Callable[[Any], Any], end: Callable[[Any, Any], Any]
) -> Callable[[], None]:
    """Call `begin` and `end` around the function, and return what puts its own code back.

    `begin(first_argument)` runs before the body and returns a token. `end(token, value)` runs when
    the return value is known and returns what to return; when the body raises, `value` is
    `RAISED` and the result is ignored. Neither may raise. One swap at a time for a function; the
    name of a function must be unique among the swapped ones of a module.

    Raises:
        SwapError: not a plain function, its source is not there or is not what it was compiled
            from, or its code is swapped already.
    """
    if not isinstance(function, types.FunctionType):
        raise SwapError(f"{function!r} is no plain function")
    original = function.__code__
    name = original.co_name.strip("_")
    begin_name, end_name = f"__gpuwatch_begin_{name}__", f"__gpuwatch_end_{name}__"
    if begin_name in original.co_names:
        raise SwapError(f"{original.co_qualname} is swapped already")
    swapped = _with_calls(function, begin_name, end_name)
    # These stay in the module for good: a call that is under way when the code is put back still
    # looks them up at its end.
    function.__globals__.update({begin_name: begin, end_name: end, _RAISED: RAISED})
    function.__code__ = swapped

    def undo() -> None:
        # Whoever has exchanged the code again since may go on calling through ours.
        if function.__code__ is swapped:
            function.__code__ = original

    return undo


def leave_uncompiled(*functions: Callable[..., Any], callees: bool = True) -> None:
    """Let torch.compile pass these functions by, with all that they call unless `callees` is False.

    Between the graphs of a compiled function, every Python frame is offered to the compiler, ours
    too: it would trace them, guard on what they count, and compile again at every step.
    """
    try:
        from torch._C._dynamo import eval_frame

        action = eval_frame._FrameAction
        below = action.SKIP if callees else action.DEFAULT
        strategy = eval_frame._FrameExecStrategy(action.SKIP, below)
        leave = eval_frame.set_code_exec_strategy
    except (ImportError, AttributeError):
        return  # an older torch
    for function in functions:
        code = getattr(function, "__code__", None)
        if code is not None:
            leave(code, strategy)


# --- the code ----------------------------------------------------------------------------------


def _with_calls(function: types.FunctionType, begin: str, end: str) -> types.CodeType:
    """Return the function's code with the calls in it."""
    code = function.__code__
    if code.co_freevars:
        raise SwapError(f"{code.co_qualname} is a closure")
    if code.co_flags & _UNFIT:
        raise SwapError(f"{code.co_qualname} is a generator or a coroutine")
    if not code.co_argcount:
        raise SwapError(f"{code.co_qualname} has no argument")
    wrapper = _class_of(code)
    tree = _parse(code, wrapper)
    tree.body[:0] = _imports(function)
    if not _is_same(_compile(tree, code, wrapper), code):
        raise SwapError(f"the source of {code.co_qualname} is not what it was compiled from")
    node = _definition(tree, code)
    _put_around(node, code.co_varnames[0], begin, end)
    swapped = _compile(tree, code, wrapper)
    return swapped.replace(co_qualname=code.co_qualname)


def _class_of(code: types.CodeType) -> str:
    """Return the name of the class that the code is a method of, empty for a plain function."""
    path = code.co_qualname.split(".")
    if "<locals>" in path or len(path) > 2:
        raise SwapError(f"{code.co_qualname} is nested")
    return path[0] if len(path) == 2 else ""


def _parse(code: types.CodeType, wrapper: str) -> ast.Module:
    """Parse the function alone, with the lines and columns of its file."""
    first = code.co_firstlineno
    lines = linecache.getlines(code.co_filename)[first - 1 : _last_line(code)]
    if not lines:
        raise SwapError(f"the source of {code.co_qualname} is not there")
    # A class around it, in the place of the real one: names are mangled alike, columns stay.
    header = f"class {wrapper}:\n" if wrapper else ""
    try:
        tree = ast.parse(header + "".join(lines))
    except (SyntaxError, ValueError):
        raise SwapError(f"the source of {code.co_qualname} cannot be parsed") from None
    ast.increment_lineno(tree, first - 1 - bool(wrapper))
    return tree


def _imports(function: types.FunctionType) -> list[ast.stmt]:
    """Return import statements for the names that the function's module has imported.

    They are never run. But the compiler calls a method of an imported name in another way.
    """
    found: list[ast.stmt] = []
    for name in function.__code__.co_names:
        value = function.__globals__.get(name)
        foreign = (
            isinstance(value, type | types.FunctionType) and value.__module__ != function.__module__
        )
        if isinstance(value, types.ModuleType) or foreign:
            found.append(ast.Import([ast.alias(name)]))
    return [_placed(statement, _TOP) for statement in found]


def _last_line(code: types.CodeType) -> int:
    last = max(end or 0 for _, end, _, _ in code.co_positions())
    for nested in _nested(code):
        last = max(last, _last_line(nested))
    return last


def _nested(code: types.CodeType) -> Iterator[types.CodeType]:
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield constant


def _definition(tree: ast.Module, code: types.CodeType) -> ast.FunctionDef:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.name == code.co_name:
            return node
    raise SwapError(f"the source of {code.co_qualname} does not hold it")


def _compile(tree: ast.Module, code: types.CodeType, wrapper: str) -> types.CodeType:
    """Compile the tree and return the function's code object; nothing of it is run."""
    flags = code.co_flags & _COMPILER_FLAGS
    found: types.CodeType = compile(tree, code.co_filename, "exec", flags=flags, dont_inherit=True)
    for name in filter(None, (wrapper, code.co_name)):
        inner = next((c for c in _nested(found) if c.co_name == name), None)
        if inner is None:
            raise SwapError(f"the source of {code.co_qualname} does not hold it")
        found = inner
    return found


def _is_same(one: types.CodeType, other: types.CodeType) -> bool:
    """Whether both are the same code at the same place. `==` also sees what running has left."""
    return (
        all(getattr(one, name) == getattr(other, name) for name in _COMPARED)
        and len(one.co_consts) == len(other.co_consts)
        and all(map(_is_same_constant, one.co_consts, other.co_consts))
    )


def _is_same_constant(one: Any, other: Any) -> bool:
    if isinstance(one, types.CodeType) and isinstance(other, types.CodeType):
        return _is_same(one, other)
    return type(one) is type(other) and repr(one) == repr(other)


# --- the tree ----------------------------------------------------------------------------------


class _Returns(ast.NodeTransformer):
    """Passes the value of every return of this function through `end`."""

    def __init__(self, end: str) -> None:
        self._end = end

    def visit_Return(self, node: ast.Return) -> ast.Return:
        value = node.value or ast.copy_location(ast.Constant(None), node)
        passed = _call(self._end, ast.Name(_TOKEN, ast.Load()), value)
        return _placed(ast.copy_location(ast.Return(passed), node), node)

    def _leave(self, node: ast.AST) -> ast.AST:
        return node

    visit_FunctionDef = visit_AsyncFunctionDef = visit_ClassDef = visit_Lambda = _leave  # noqa: N815


def _put_around(node: ast.FunctionDef, first: str, begin: str, end: str) -> None:
    """Turn `body` into: token = begin(first); try: body, its returns through end; except: end."""
    docstring = node.body[:1] if ast.get_docstring(node, clean=False) is not None else []
    body = node.body[len(docstring) :]
    if not body:
        raise SwapError(f"{node.name} has no body")
    start, stop = body[0], body[-1]
    token = ast.Assign([ast.Name(_TOKEN, ast.Store())], _call(begin, ast.Name(first, ast.Load())))
    returns = _Returns(end)
    marked: list[ast.stmt] = [returns.visit(statement) for statement in body]
    if not isinstance(stop, ast.Return | ast.Raise):
        ended = ast.Return(_call(end, ast.Name(_TOKEN, ast.Load()), ast.Constant(None)))
        marked.append(_placed(ended, stop))
    told = _call(end, ast.Name(_TOKEN, ast.Load()), ast.Name(_RAISED, ast.Load()))
    handler = ast.ExceptHandler(
        ast.Name("BaseException", ast.Load()), None, [ast.Expr(told), ast.Raise()]
    )
    guarded = ast.Try(marked, [_placed(handler, stop)], [], [])
    node.body = [*docstring, _placed(token, start), ast.copy_location(guarded, start)]


def _call(function: str, *arguments: ast.expr) -> ast.Call:
    return ast.Call(ast.Name(function, ast.Load()), list(arguments), [])


def _placed(node: _Node, at: ast.AST) -> _Node:
    """Give the new nodes in a tree the place of `at`; those of the source keep theirs."""
    for inner in ast.walk(node):
        if "lineno" in inner._attributes and not hasattr(inner, "lineno"):
            ast.copy_location(inner, at)
    return node
