"""Textual's bindings from the table of keys."""

from textual.binding import Binding, BindingType

from gpuwatch.tui.keymap import ACTIONS

__all__ = ["bind"]


def bind(*actions: str) -> list[BindingType]:
    """Return the bindings of these actions, each with its name as id, so that it can be rebound."""
    return [
        Binding(ACTIONS[name].keys, ACTIONS[name].call, ACTIONS[name].words, show=False, id=name)
        for name in actions
    ]
