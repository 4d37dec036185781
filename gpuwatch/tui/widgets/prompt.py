"""One line to type in, at the bottom of the screen."""

from textual.events import Key, Paste
from textual.message import Message

from gpuwatch.tui.render.text import Line, clip
from gpuwatch.tui.widgets.pane import LinePane

__all__ = ["PromptPane"]

_MOST = 200


class PromptPane(LinePane, can_focus=True):
    """What is typed, with the cursor always at its end: filters are short."""

    class Changed(Message):
        """The text is another one."""

        def __init__(self, text: str) -> None:
            super().__init__()
            self.text = text

    class Closed(Message):
        """Enter (`kept`) or escape was pressed."""

        def __init__(self, text: str, kept: bool) -> None:
            super().__init__()
            self.text = text
            self.kept = kept

    class Moved(Message):
        """Up (-1) or down (1) was pressed, for the list that the text filters."""

        def __init__(self, step: int) -> None:
            super().__init__()
            self.step = step

    def __init__(self, sign: str, words: str, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self._sign = sign
        self._words = words
        self.text = ""
        self.typing = True
        """Until enter or escape: what is typed is text, whoever has the focus."""

    def on_mount(self) -> None:
        """Show that it waits for text."""
        self._draw()

    def open(self, text: str = "") -> None:
        """Start with that text."""
        self.text = text
        self.typing = True
        self._draw()

    def _draw(self) -> None:
        line: Line = [(f" {self._sign}", "key"), (clip(self.text, 60), "strong"), (" ", "cursor")]
        if not self.text:
            line.append((f"  {self._words}", "dim"))
        else:
            line.append(("   enter keeps   esc clears", "dim"))
        self.show([line])

    def _set(self, text: str) -> None:
        self.text = text[:_MOST]
        self._draw()
        self.post_message(self.Changed(self.text))

    def on_key(self, event: Key) -> None:
        """Type, or end typing; nothing else hears these keys."""
        if event.key == "ctrl+c" or not self.typing:
            return
        event.stop()
        event.prevent_default()
        if event.key in ("enter", "escape"):
            self.typing = False
            self.post_message(self.Closed(self.text, event.key == "enter"))
        elif event.key in ("up", "down"):
            self.post_message(self.Moved(1 if event.key == "down" else -1))
        elif event.key in ("backspace", "ctrl+h"):
            self._set(self.text[:-1])
        elif event.key in ("ctrl+u", "ctrl+w"):
            self._set("")
        elif event.is_printable and event.character:
            self._set(self.text + event.character)

    def on_paste(self, event: Paste) -> None:
        """Take the first line of what was pasted."""
        event.stop()
        first = event.text.splitlines()[:1]
        if first:
            self._set(self.text + "".join(char for char in first[0] if char.isprintable()))
