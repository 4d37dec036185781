"""Waiting for the first sign of training, in a process that may never train.

Under `gpuwatch run` every process that imports torch has the marks: the ranks, and with them the
launchers and the loaders' workers. A process is announced as a rank when it first fetches a batch,
runs a backward or steps an optimizer, or when it joins a process group.
"""

import multiprocessing
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from gpuwatch.probe.events import Recorder
from gpuwatch.probe.patches import Marks

if TYPE_CHECKING:
    from gpuwatch.probe.knobs import Live

__all__ = ["Pending", "is_loader_worker"]

# Sets the default process group, at the end of init_process_group: nothing of the user's runs
# inside, so a wrapper shows in no traceback.
_GROUP_SETTER = "_update_default_pg"


def is_loader_worker() -> bool:
    """Whether this process loads batches for another one, or is a child still starting up."""
    worker = sys.modules.get("torch.utils.data._utils.worker")
    if getattr(worker, "_worker_info", None) is not None:
        return True
    return bool(getattr(multiprocessing.current_process(), "_inheriting", False))


class Pending:
    """Marks that are on, and nobody told.

    Args:
        recorder: what the marks are left in.
        marks: installed; silenced if the process turns out to be a loader's worker.
        notices: what the user has been told so far.
        trains: called once, at the first sign and before it is counted; must not raise.
    """

    def __init__(
        self, recorder: Recorder, marks: Marks, notices: list[str], trains: Callable[[], None]
    ) -> None:
        self.recorder = recorder
        self.marks = marks
        self.notices = notices
        self.knobs: dict[str, Live] = {}
        """What the script has registered before it trained."""
        self._trains = trains
        self._undo: Callable[[], None] | None = None

    def arm(self) -> None:
        """Wait for the first sign from now on."""
        self.marks.wait_for_sign(self._seen)
        module = sys.modules.get("torch.distributed.distributed_c10d")
        setter = getattr(module, _GROUP_SETTER, None)
        if setter is None:
            return

        def set_default_group(*args: Any, **kwargs: Any) -> Any:
            done = setter(*args, **kwargs)
            if args and args[0] is not None:
                self._seen()
            return done

        def undo() -> None:
            if getattr(module, _GROUP_SETTER, None) is set_default_group:
                setattr(module, _GROUP_SETTER, setter)

        setattr(module, _GROUP_SETTER, set_default_group)
        self._undo = undo

    def disarm(self) -> None:
        """Wait no longer; the marks stay on."""
        self.marks.stop_waiting()
        if self._undo is not None:
            self._undo()
            self._undo = None

    def _seen(self) -> None:
        self.disarm()
        if is_loader_worker():
            self.marks.silence()
        else:
            self._trains()
