"""Every key as data: what it does, where it works. Bindings, footer and help are made from it.

`ACTIONS` is what a person's configuration may rebind, by these names.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

__all__ = [
    "ACTIONS",
    "PLACES",
    "VIEWS",
    "Action",
    "KeyNames",
    "conflicts",
    "has_key",
    "label_of",
    "pretty",
]

VIEWS = ("overview", "ranks", "gpus", "findings", "compare")
"""The views in the order of their digits."""

VIEW_TITLES = ("Overview", "Ranks", "GPUs", "Findings", "Compare")


@dataclass(frozen=True, slots=True)
class Action:
    """One thing a key does. `keys` are Textual's names, `call` the method, `words` for help."""

    keys: str
    call: str
    words: str
    label: str = ""


ACTIONS: Mapping[str, Action] = {
    **{
        f"view-{i}": Action(str(i), f"view({i})", f"view {title}")
        for i, title in enumerate(VIEW_TITLES, 1)
    },
    "down": Action("j,down", "move(1)", "move down", "j/k"),
    "up": Action("k,up", "move(-1)", "move up", "k"),
    "page-down": Action("pagedown,ctrl+d", "page(1)", "a page down", "pgdn"),
    "page-up": Action("pageup,ctrl+u", "page(-1)", "a page up", "pgup"),
    "first": Action("g,home", "jump(0)", "first", "g"),
    "last": Action("G,end", "jump(-1)", "last", "G"),
    "open": Action("enter", "open", "open what is selected", "enter"),
    "close": Action("escape,backspace", "back", "back", "esc"),
    "focus-next": Action("tab", "other_list", "the other list", "tab"),
    "filter": Action("slash", "filter", "filter: a rank, 8-15, a node, a state, F1, !not", "/"),
    "sort": Action("s", "sort", "sort by the next thing"),
    "metric": Action("m", "metric", "next metric of the heat map"),
    "heat": Action("h", "heat", "heat map of all ranks on the whole screen"),
    "events": Action("e", "events", "the whole event log"),
    "pause": Action("space", "pause", "pause and resume the picture; the training is not touched"),
    "back": Action("left", "travel(-1)", "back in time, ten minutes at most", "← →"),
    "forward": Action("right", "travel(1)", "forward in time", "right"),
    "back-far": Action("shift+left,comma", "travel(-10)", "back by ten times as much", ","),
    "forward-far": Action(
        "shift+right,full_stop", "travel(10)", "forward by ten times as much", "."
    ),
    "zoom-in": Action("plus,equals_sign", "zoom(-1)", "curves of less time", "+"),
    "zoom-out": Action("minus", "zoom(1)", "curves of more time", "+ -"),
    "previous": Action(
        "left_square_bracket,N", "step(-1)", "the previous run, rank, device or finding", "["
    ),
    "next": Action(
        "right_square_bracket,n", "step(1)", "the next run, rank, device or finding", "[ ]"
    ),
    "evidence": Action("enter", "evidence", "to the finding's evidence on the time axis", "enter"),
    "copy": Action("c", "copy", "copy the finding's first hint: buffer of tmux or clipboard"),
    "copy-markdown": Action("y", "copy_markdown", "copy what is shown as Markdown"),
    "snooze": Action("x", "snooze", "finding aside for ten minutes, unless worse; again: back"),
    "verify": Action("v", "verify", "freeze the finding's window to check a change; again: not"),
    "choose": Action("o", "choose", "choose what is compared, A and B"),
    "all": Action("a", "all", "equal settings too, or the differences alone"),
    "memory": Action("M", "memory", "memory of the rank: its process, CUDA, its tensors"),
    "tensors": Action("T", "tensors", "count its tensors too: holds the rank for 50 ms at most"),
    "profile": Action("p", "profile", "profile a few steps of the rank"),
    "knobs": Action("K", "knobs", "live knobs of the run, and the commands of every monitor"),
    "apply": Action("a", "apply", "set what the finding's hint proposes, in this training"),
    "set": Action("enter", "set_knob", "type another value for the knob"),
    "confirm": Action("enter", "confirm", "do it"),
    "more": Action("plus,equals_sign", "count(1)", "one step more", "+"),
    "fewer": Action("minus", "count(-1)", "one step fewer", "-"),
    "fetch": Action("f", "fetch", "bring the trace of the profile to this machine"),
    "stacks": Action("t", "stacks", "where every thread of the rank stands now"),
    "output": Action("l", "output", "what the command prints, of gpuwatch run --tui"),
    "report": Action("r", "report", "how the command ended, of gpuwatch run --tui"),
    "search": Action("slash", "filter", "search the output", "/"),
    "find": Action("n,right_square_bracket", "step(1)", "the next line that holds it", "n/N"),
    "find-back": Action("N,left_square_bracket", "step(-1)", "the line before that holds it", "N"),
    "left": Action("left", "shift(-1)", "to the left in long lines", "← →"),
    "right": Action("right", "shift(1)", "to the right in long lines"),
    "detach": Action("d", "detach", "leave the command running and quit"),
    "stop": Action("s", "stop_job", "stop the command; again: at once"),
    "runs": Action("o", "runs", "list of the runs, to go to another"),
    "write": Action("w", "write", "write picture (SVG) and findings (Markdown) to files"),
    "palette": Action("colon,ctrl+p", "palette", "every command by its name", ":"),
    "help": Action("question_mark", "help", "this page", "?"),
    "quit": Action("q", "leave", "quit; the training goes on, or as you say"),
}

_PRETTY = {
    "slash": "/",
    "question_mark": "?",
    "colon": ":",
    "left_square_bracket": "[",
    "right_square_bracket": "]",
    "plus": "+",
    "minus": "-",
    "equals_sign": "=",
    "comma": ",",
    "full_stop": ".",
    "escape": "esc",
    "pageup": "pgup",
    "pagedown": "pgdn",
}

_NAMES = {sign: name for name, sign in _PRETTY.items()}

_MOVES = ("down", "up", "page-down", "page-up", "first", "last")
_OF_FINDING = ("copy", "copy-markdown", "snooze", "verify", "apply", "stacks", "previous", "next")

PLACES: Mapping[str, tuple[str, ...]] = {
    "lists": (*_MOVES, "open", "focus-next", "filter", "sort", "close", *_OF_FINDING),
    "compare": (*_MOVES, "close", "choose", "all"),
    "finding": (*_MOVES, "close", "evidence", *_OF_FINDING),
    "memory": (*_MOVES, "close", "memory", "tensors", "copy-markdown"),
    "profile": (
        *(*_MOVES, "close", "profile", "confirm", "more", "fewer", "fetch", "copy-markdown"),
    ),
    "knobs": (*_MOVES, "close", "set", "confirm", "previous", "next"),
    "output": (*_MOVES, "close", "search", "find", "find-back", "left", "right"),
    "leaving": (*_MOVES, "close", "detach", "stop"),
}
"""Actions that work on the same screens; those in none of them work everywhere."""

KeyNames = Mapping[str, str]
"""Keys that the person chose, by action: Textual's names, separated by commas."""


def _key_set(keys: str) -> frozenset[str]:
    """Return Textual's names of keys, `/` as `slash`."""
    parts = [key.strip() for key in keys.split(",")]
    return frozenset([_NAMES.get(key, key) for key in parts])


def has_key(action: str, key: str, chosen: KeyNames) -> bool:
    """Whether a key, by Textual's name, is one of an action's."""
    return key in _key_set(chosen.get(action, ACTIONS[action].keys))


def _meet(one: str, other: str) -> bool:
    """Whether two actions work on the same screen and are not made to share a key there."""
    if _key_set(ACTIONS[one].keys) & _key_set(ACTIONS[other].keys):
        return False  # the one on top hides the other, as it is meant to
    places = [{place for place, names in PLACES.items() if name in names} for name in (one, other)]
    return not places[0] or not places[1] or bool(places[0] & places[1])


def conflicts(chosen: KeyNames) -> list[tuple[str, list[str]]]:
    """Return each key that the person gave to an action and that another one has too, with both."""
    keys = {name: _key_set(chosen.get(name, action.keys)) for name, action in ACTIONS.items()}
    found: dict[str, list[str]] = {}
    for name in chosen:
        for key in sorted(keys[name]):
            others = [o for o in ACTIONS if o != name and key in keys[o] and _meet(name, o)]
            for item in (name, *others) if others else ():
                if item not in found.setdefault(pretty(key), []):
                    found[pretty(key)].append(item)
    return list(found.items())


def pretty(keys: str) -> str:
    """Return keys as they are shown, `slash` as `/`, several separated by a space."""
    return " ".join([_PRETTY.get(key.strip(), key.strip()) for key in keys.split(",")])


def label_of(action: str, chosen: KeyNames) -> str:
    """Return the key of an action as a footer shows it."""
    if action in chosen:
        return pretty(chosen[action]).split(" ")[0]
    item = ACTIONS[action]
    return item.label or pretty(item.keys).split(" ")[0]


def keys_of(action: str, chosen: KeyNames) -> str:
    """Return all keys of an action as help shows them."""
    return pretty(chosen.get(action, ACTIONS[action].keys))


def help_entries(actions: Iterable[str], chosen: KeyNames) -> list[tuple[str, str]]:
    """Return (keys, words) of each action."""
    return [(keys_of(name, chosen), ACTIONS[name].words) for name in actions]
