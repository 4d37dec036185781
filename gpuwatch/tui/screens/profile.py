"""A profile of a few steps of a rank: how many, what came, and its trace."""

from __future__ import annotations

from typing import ClassVar

from textual.binding import Binding, BindingType

from gpuwatch.tui.binding import bind
from gpuwatch.tui.keymap import VIEWS, label_of
from gpuwatch.tui.profiling import DEFAULT_STEPS, MOST_STEPS, Profile
from gpuwatch.tui.render.memory import waiting_lines
from gpuwatch.tui.render.profile import ask_lines, profile_lines, profile_markdown, waiting_text
from gpuwatch.tui.render.text import Line
from gpuwatch.tui.requests import Task
from gpuwatch.tui.scene import Scene
from gpuwatch.tui.screens.asking import AskingScreen

__all__ = ["ProfileScreen"]


class ProfileScreen(AskingScreen):
    """Asks how many steps; then shows what became of the profile of that rank.

    The profile goes on when the page is closed, and is there when it is opened again.
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("backspace", "erase", show=False),
        *(Binding(str(digit), f"digit({digit})", show=False) for digit in range(10)),
        *bind("close", "profile", "confirm", "more", "fewer", "fetch", "copy-markdown"),
    ]
    HERE = (*AskingScreen.HERE, "confirm", "more", "fewer", "profile", "fetch", "copy-markdown")

    def __init__(self, run: str, rank: int, profile: Profile | None = None) -> None:
        super().__init__(run, rank)
        self._profile = profile
        self._steps = profile.steps if profile is not None else DEFAULT_STEPS
        self._typed = ""
        self._asking = profile is None
        self._problem = ""

    def moves(self) -> bool:
        """Ages and what has been fetched."""
        return not self._asking

    def shows(self, task: Task) -> bool:
        """Whether what a task has to tell stands on the page."""
        return task is self._profile

    def page(self, scene: Scene, width: int) -> list[Line]:
        """Return the question, what is being waited for, or the profile."""
        profile = self._profile
        if self._asking or profile is None:
            return ask_lines(self._rank, self._typed, self._steps, MOST_STEPS, self._problem, width)
        view = self.gpuwatch.watcher.newest
        rank = self.rank_in(view)
        title = f"Profile of rank {self._rank}"
        if profile.error:
            text = self.explained(profile.error, rank)
            return waiting_lines(title, rank, text, width, problem=True)
        if profile.answer is None:
            waited_s = profile.request.waited_s
            text = waiting_text(profile.status, rank, waited_s, view.link)
            return waiting_lines(title, rank, text, width)
        node = rank.node if rank is not None else ""
        key = label_of("fetch", self.gpuwatch.key_names)
        return profile_lines(
            self._rank, node, profile.answer, profile.age_s, profile.fetch, key, width
        )

    def more_keys(self, scene: Scene) -> list[tuple[str, str]]:
        """Return what can be done here."""
        if self._asking or self._profile is None:
            return [("confirm", "start"), ("more", "more"), ("fewer", "fewer")]
        if self._profile.answer is None:
            waits = self._profile.waits(self.gpuwatch.watcher.newest)
            return [] if waits else [("profile", "another")]
        keys = [("profile", "another"), ("copy-markdown", "copy")]
        return [("fetch", "fetch trace"), *keys] if self._profile.answer.trace else keys

    # --- how many ------------------------------------------------------------------------------

    def action_digit(self, digit: int) -> None:
        """Type a digit of the number; where none is asked for, go to a view as everywhere."""
        if self._asking:
            self._typed = f"{self._typed}{digit}"[:3]
            self._problem = ""
            self.gpuwatch.refresh_scene(force=True)
        elif 1 <= digit <= len(VIEWS):
            self.gpuwatch.action_view(digit)

    def action_erase(self) -> None:
        """Take back a digit, or go back."""
        if not self._asking or not self._typed:
            self.action_back()
            return
        self._typed = self._typed[:-1]
        self.gpuwatch.refresh_scene(force=True)

    def action_count(self, step: int) -> None:
        """Ask for more steps or fewer."""
        if not self._asking:
            self.gpuwatch.action_zoom(-step)
            return
        number = int(self._typed) if self._typed else self._steps
        self._steps = max(1, min(MOST_STEPS, number + step))
        self._typed, self._problem = "", ""
        self.gpuwatch.refresh_scene(force=True)

    def action_confirm(self) -> None:
        """Start it."""
        if not self._asking:
            return
        number = int(self._typed) if self._typed else self._steps
        if not 1 <= number <= MOST_STEPS:
            self._problem = f"a profile is of 1..{MOST_STEPS} steps, not of {number}"
            self.gpuwatch.refresh_scene(force=True)
            return
        self._steps, self._typed, self._asking = number, "", False
        self._profile = self.gpuwatch.profile_rank(self._run, self._rank, number)
        self.to_top()
        self.gpuwatch.refresh_scene(force=True)

    def action_profile(self) -> None:
        """Ask for another one, unless one is under way."""
        view = self.gpuwatch.watcher.newest
        if self._profile is not None and not self._asking and self._profile.waits(view):
            self.gpuwatch.tell("one is under way", "warning")
            return
        self._asking = True
        self.to_top()
        self.gpuwatch.refresh_scene(force=True)

    # --- what came -----------------------------------------------------------------------------

    def action_fetch(self) -> None:
        """Bring the trace here."""
        if self._profile is None or self._asking:
            self.gpuwatch.tell("there is no trace to fetch", "warning")
            return
        problem = self.gpuwatch.fetch_trace(self._profile, self.run_name())
        if problem:
            self.gpuwatch.tell(problem, "warning", 8.0)
        self.gpuwatch.refresh_scene(force=True)

    def action_copy_markdown(self) -> None:
        """Copy the profile as Markdown."""
        if self._profile is None or self._profile.answer is None:
            self.gpuwatch.tell("there is no profile to copy yet", "warning")
            return
        rank = self.rank_in(self.gpuwatch.watcher.newest)
        node = rank.node if rank is not None else ""
        text = profile_markdown(self.run_name(), self._rank, node, self._profile.answer)
        self.gpuwatch.copy_text(text, f"the profile of rank {self._rank} as Markdown")
