"""Every command by its name, found by typing a part of it."""

from collections.abc import Mapping
from typing import ClassVar

from textual.binding import BindingType
from textual.widget import Widget

from gpuwatch.tui.binding import bind
from gpuwatch.tui.config import THEMES
from gpuwatch.tui.keymap import ACTIONS, keys_of
from gpuwatch.tui.layout import Rect
from gpuwatch.tui.metrics import METRICS
from gpuwatch.tui.render.text import Line, fit, heading, pad, spread
from gpuwatch.tui.scene import Scene
from gpuwatch.tui.screens.base import FedScreen
from gpuwatch.tui.screens.help import EVERYWHERE, OF_A_JOB
from gpuwatch.tui.widgets.pane import ListPane, place
from gpuwatch.tui.widgets.prompt import PromptPane

__all__ = ["Command", "PaletteScreen", "commands_for", "found_in"]

Command = tuple[str, str, str]
"""What is done, its key (may be empty), and the action, which runs on the screen below."""


def commands_for(scene: Scene, here: tuple[str, ...], keys: Mapping[str, str]) -> list[Command]:
    """Return the commands that make sense now, those of the screen below first."""
    skipped = {"down", "up", "page-down", "page-up", "first", "last", "close", "open", "palette"}
    names = [name for name in (*here, *EVERYWHERE) if name not in skipped]
    found: list[Command] = []
    for name in dict.fromkeys(names):
        action = ACTIONS[name]
        found.append((action.words, keys_of(name, keys), action.call))
    found += [(f"theme {name}", "", f"app.theme('{name}')") for name in THEMES]
    found.append(("ASCII glyphs on or off", "", "app.ascii"))
    found += [
        (f"metric {item.label}: {item.words}", "", f"app.metric('{item.name}')") for item in METRICS
    ]
    for item in scene.findings:
        found.append(
            (f"finding {item.id} {item.summary or item.kind}", "", f"app.finding('{item.id}')")
        )
    for i, run in enumerate(scene.view.runs):
        found.append((f"run {run.name or run.run}", "", f"app.show_run({i})"))
    if scene.run is not None:
        ranks = scene.run.ranks
        found += [
            (f"rank {rank.rank}  {rank.node}", "", f"app.rank({rank.rank})") for rank in ranks
        ]
    return found


def found_in(commands: list[Command], words: str) -> list[Command]:
    """Return the commands that hold every word, those that hold them as typed in front."""
    parts = words.casefold().split()
    hits = [item for item in commands if all(part in item[0].casefold() for part in parts)]
    if parts:
        whole = " ".join(parts)
        hits.sort(key=lambda item: (whole not in item[0].casefold(), not _begins(item, whole)))
    return hits


def _begins(item: Command, words: str) -> bool:
    return item[0].casefold().startswith(words)


class _CommandsPane(ListPane, can_focus=False):
    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self.hits: list[Command] = []
        self.cells = 0

    def draw(self, selected: int) -> None:
        """Make the lines with that command selected."""
        hits, width = self.hits, self.cells

        def row(index: int) -> Line:
            words, key, _ = hits[index]
            mark, style = ("▌", "strong") if index == selected else (" ", "text")
            left: Line = [(mark, "focus"), (f" {words}", style)]
            return spread(left, [(pad(key, 12), "key")], width)

        title = heading("Commands", width, right=f"{len(hits):,}", focused=True)
        self.show([title], row, range(len(hits)), len(hits), selected)
        if not hits:
            self.show([title, fit([(" nothing is called that", "dim")], width)], row, (), 0, 0)


class PaletteScreen(FedScreen):
    """Type, choose with the arrows, enter does it."""

    BINDINGS: ClassVar[list[BindingType]] = bind("close")
    AUTO_FOCUS = "#prompt"
    HEADER = 1
    HERE = ("close",)
    TYPED = True

    def __init__(self, here: tuple[str, ...]) -> None:
        super().__init__()
        self._here = here
        self._list = _CommandsPane(id="commands")
        self._line = PromptPane(":", "part of a command, a metric, a rank, F1", id="prompt")
        self._words = ""
        self._commands: list[Command] = []

    def bodies(self) -> Mapping[str, Widget]:
        """The list and the line that is typed."""
        return {"commands": self._list, "prompt": self._line}

    def list_pane(self) -> Widget | None:
        """Keys go to the line."""
        return self._line

    def keys(self, scene: Scene) -> list[tuple[str, str]]:
        """Return what can be done with what was found."""
        return [("open", "do it")]

    def line(self) -> PromptPane | None:
        """Return the line: it takes all that is typed, from the key that opened it on."""
        return self._line if self._line.typing else None

    def draw(self, scene: Scene, room: Rect) -> None:
        """The line on top, what it finds below."""
        place(self._line, Rect(0, room.y + 1, room.width, 1))
        place(self._list, Rect(0, room.y + 3, room.width, max(1, room.height - 3)))
        if not self._commands:
            # Made once: ten thousand ranks are ten thousand commands.
            here = self._here if scene.job is None else (*self._here, *OF_A_JOB)
            self._commands = commands_for(scene, here, self.gpuwatch.key_names)
        self._list.hits = found_in(self._commands, self._words)
        self._list.cells = room.width
        self._list.draw(min(self._list.selected, max(0, len(self._list.hits) - 1)))

    def on_prompt_pane_changed(self, message: PromptPane.Changed) -> None:
        """Find while it is typed."""
        message.stop()
        self._words = message.text
        self._list.select(0)
        if self._scene is not None:
            self.feed(self._scene)

    def on_prompt_pane_moved(self, message: PromptPane.Moved) -> None:
        """Move in the list."""
        self._list.action_move(message.step)

    def on_list_pane_opened(self, message: ListPane.Opened) -> None:
        """Do what was clicked twice."""
        self._run(message.item)

    def on_prompt_pane_closed(self, message: PromptPane.Closed) -> None:
        """Do it, or go back."""
        message.stop()
        if message.kept and self._list.hits:
            self._run(self._list.selected)
        else:
            self.dismiss(None)

    def _run(self, item: int) -> None:
        _, _, call = self._list.hits[item]
        app = self.gpuwatch
        self.dismiss(None)
        app.call_later(app.run_call, call)
