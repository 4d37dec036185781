"""Signals beside the marks: gradient norm, learning rate, garbage collection, compiling, FLOPs.

Base marks happen in every step; what is here costs next to nothing there, or happens at most ten
times a second, or only when something out of the ordinary does (a collection, a compilation). The
values travel as notes of the step; their latest ones are read here by the telemetry thread.
"""

import contextlib
import gc
import sys
import weakref
from collections.abc import Callable
from threading import get_ident
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch.compiler import is_compiling

from gpuwatch.probe.events import Recorder
from gpuwatch.probe.flops import FORMULA, Count, Formula
from gpuwatch.probe.swap import RAISED, Calls, leave_uncompiled

if TYPE_CHECKING:
    from gpuwatch.probe.patches import Marks

__all__ = ["Signals"]

_OTHER_NS = 1_000_000_000  # an optimizer that has not stepped for so long gives way to another
_OLDEST = 2  # the generation whose collections last: those of the younger are microseconds
_FRAMEWORKS = (
    # Who calls whom: the first one on the stack runs the loop, the others are its tools.
    ("transformers.trainer", "transformers"),
    ("lightning.", "lightning"),
    ("pytorch_lightning.", "lightning"),
    ("accelerate.", "accelerate"),
)
_DEEP = 64


class Signals:
    """Installs its marks through `marks` and leaves notes with `recorder`.

    `frameworks` are the libraries whose loop was seen; `gc_pauses` and `gc_pause_ns` count the
    collections of the oldest generation since the marks went on; `sequences` are the tokens in a
    sequence of each loader, in the batch that was looked at last.
    """

    def __init__(self, marks: "Marks", recorder: Recorder) -> None:
        self._marks = marks
        self._recorder = recorder
        self._off = True
        self._late: list[tuple[str, str, str]] = []
        self._collecting_ns = 0
        self._rated = 0  # the optimizer whose learning rate is noted
        self._cast: torch.dtype | None = None  # of the last autocast that was entered
        self._model: weakref.ref[Any] | None = None
        self._formula: Formula | None = None
        self._compiled = self._compiled_before = self._again = 0
        self.dear_ns = 0
        self.sequences: dict[str, int | None] = {}
        self.count: Count | None = None
        self.frameworks: dict[str, None] = {}
        self.gc_pauses = 0
        self.gc_pause_ns = 0

    # --- install and remove --------------------------------------------------------------------

    def install(self) -> None:
        """Put the marks on."""
        self._off = False
        marks = self._marks
        clip = sys.modules.get("torch.nn.utils.clip_grad")
        # Whatever clips by norm comes through here with the norm that it found, whole: FSDP's
        # and pipelines' that were put together from parts, Accelerate's, Lightning's.
        if hasattr(clip, "_clip_grads_with_norm_"):
            marks.mark(clip, "_clip_grads_with_norm_", self._clip())
        marks.mark(torch.amp.autocast_mode.autocast, "__enter__", self._autocast())
        self._late = list(self._LATE)
        leave_uncompiled(self._compiles)
        self.late()
        gc.callbacks.append(self._collects)

    def remove(self) -> None:
        """Take off what `Marks` does not know of."""
        self.silence()
        with contextlib.suppress(ValueError):
            gc.callbacks.remove(self._collects)
        handler = _compiler("callback", "callback_handler")
        if handler is not None:
            with contextlib.suppress(ValueError, AttributeError):
                handler.remove_start_callback(self._compiles)

    def silence(self) -> None:
        """Do nothing from here on: in a forked child, or after an error."""
        self._off = True
        if self.count is not None:
            with contextlib.suppress(Exception):
                self.count.abandon()

    def ask_for_flops(self) -> None:
        """The user wants the FLOPs of a step to be counted, and knows that it slows that one."""
        if self.count is None:
            self.count = Count(self._recorder, self._obstacle)

    def late(self) -> None:
        """Mark what the script has imported by now. Cheap: a few looks into dictionaries."""
        for entry in [entry for entry in self._late if entry[0] in sys.modules]:
            module, owner, name = entry
            found = getattr(sys.modules[module], owner, None)
            if hasattr(found, name):  # not yet, in the middle of its import
                self._late.remove(entry)
                self._marks.mark(found, name, self._LATE[entry](self))
        self._hear_compiler()

    # --- gradient norm -------------------------------------------------------------------------

    def _clip(self) -> Calls:
        marks = self._marks

        def clip_begins(_: Any) -> None:
            if is_compiling() or get_ident() != marks.thread:
                return
            try:
                self._note_norm(_given_norm(sys._getframe(1).f_locals))
            except Exception:
                marks.fail()

        def clip_ends(_: None, value: Any) -> Any:
            return value

        return clip_begins, clip_ends

    def _clip_sharded(self) -> Calls:
        marks = self._marks

        def clip_begins(_: Any) -> bool:
            return not is_compiling() and get_ident() == marks.thread

        def clip_ends(begun: bool, norm: Any) -> Any:
            if begun and norm is not RAISED:
                try:
                    self._note_norm(norm)
                except Exception:
                    marks.fail()
            return norm

        return clip_begins, clip_ends

    def _note_norm(self, norm: Any) -> None:
        """Leave the norm with the step, as it is: reading it here might wait for the device."""
        local = getattr(norm, "_local_tensor", None)
        if local is not None:
            # A DTensor: reading one that is not replicated would be a collective of ours.
            if not all(placement.is_replicate() for placement in norm.placements):
                return
            norm = local
        if norm is not None:
            self._recorder.note("grad_norm", norm)

    # --- at the optimizer ----------------------------------------------------------------------

    def look(self, optimizer: Any, now_ns: int) -> None:
        """Look at an optimizer that is about to step; at most ten times a second."""
        key = id(optimizer)
        if key != self._rated:
            if now_ns - self.dear_ns < _OTHER_NS and self._rated:
                return  # of several optimizers in turn always the same
            self._rated = key
        self.dear_ns = now_ns
        rate = _learning_rate(optimizer)
        if rate is not None:
            self._recorder.note("learning_rate", rate)
        cast, self._cast = self._cast, None
        name = "" if cast is None else str(cast).removeprefix("torch.")
        if name != self._marks.autocast:
            self._marks.autocast = name
            self._marks.config_version += 1
        self._hear_compiler()

    def _autocast(self) -> Calls:
        marks = self._marks

        def enter_begins(autocast: Any) -> None:
            if is_compiling() or get_ident() != marks.thread:
                return
            if getattr(autocast, "_enabled", False) and torch.is_grad_enabled():
                self._cast = getattr(autocast, "fast_dtype", None)

        def enter_ends(_: None, value: Any) -> Any:
            return value

        return enter_begins, enter_ends

    # --- garbage collection --------------------------------------------------------------------

    def _collects(self, phase: str, info: dict[str, int]) -> None:
        # Nothing global before the first two: this may be called while the interpreter ends.
        if self._off or not self._marks.thread or info["generation"] < _OLDEST:
            return
        now_ns = perf_counter_ns()
        if phase == "start":
            self._collecting_ns = now_ns
        elif self._collecting_ns:
            pause_ns, self._collecting_ns = now_ns - self._collecting_ns, 0
            self.gc_pauses += 1
            self.gc_pause_ns += pause_ns
            if self._marks.here():
                self._recorder.note("gc_ns", pause_ns, add=True)

    # --- compiling -----------------------------------------------------------------------------

    def _hear_compiler(self) -> None:
        """Have torch.compile call us, if it is there; `torch._dynamo.reset` forgets who listens."""
        handler = _compiler("callback", "callback_handler")
        if handler is not None and self._compiles not in handler.start_callbacks:
            handler.register_start_callback(self._compiles)

    def _compiles(self, *_: Any) -> None:
        if not self._off and self._marks.here():
            self._recorder.tag("compile")

    def recompiles(self) -> int | None:
        """How often a frame was compiled that had been before; None if nothing was compiled.

        Called in the telemetry thread.
        """
        counts = _compiler("convert_frame", "FRAME_COMPILE_COUNTER")
        if counts is None:
            return None
        try:
            times = list(counts.values())
        except RuntimeError:  # one more right now
            return self._compiled_before + self._again if self._compiled else None
        compiled, again = sum(times), sum(times) - len(times)
        if again < self._again:  # torch._dynamo.reset
            self._compiled_before += self._again
        self._compiled = max(self._compiled, compiled)
        self._again = again
        return self._compiled_before + again if self._compiled else None

    # --- whose loop ----------------------------------------------------------------------------

    def see_loop(self) -> None:
        """A new iterator: whose loop is it that fetches? Looks at code alone, never at values."""
        frame = sys._getframe(1)
        seen = set()
        for _ in range(_DEEP):
            name = frame.f_globals.get("__name__", "")
            if isinstance(name, str) and name.startswith(("transf", "light", "pytorch_l", "acc")):
                seen |= {framework for prefix, framework in _FRAMEWORKS if name.startswith(prefix)}
            if frame.f_back is None:
                break
            frame = frame.f_back
        found = next((framework for _, framework in _FRAMEWORKS if framework in seen), None)
        if found is not None and found not in self.frameworks:
            self.frameworks[found] = None
            self._marks.config_version += 1

    def _training_step(self) -> Calls:
        marks = self._marks

        def step_begins(trainer: Any) -> None:
            if not is_compiling() and get_ident() == marks.thread:
                try:
                    self.see_model(trainer.model)
                except Exception:
                    marks.fail()

        def step_ends(_: None, value: Any) -> Any:
            return value

        return step_begins, step_ends

    def see_model(self, model: Any) -> None:
        """This is the model that trains."""
        if self._model is None or self._model() is not model:
            self._model = weakref.ref(model)

    # --- FLOPs ---------------------------------------------------------------------------------

    def _obstacle(self) -> str:
        if self.recompiles() is not None:
            return "torch.compile is in use, and counting would undo it"
        if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():  # type: ignore[no-untyped-call]
            return "a CUDA graph is being captured"
        return ""

    # What is marked when the script has imported it: module, class and function.
    _LATE: ClassVar[dict[tuple[str, str, str], Callable[["Signals"], Calls]]] = {
        (
            "torch.distributed.fsdp.fully_sharded_data_parallel",
            "FullyShardedDataParallel",
            "clip_grad_norm_",
        ): _clip_sharded,
        ("transformers.trainer", "Trainer", "training_step"): _training_step,
    }

    def flops(self, tokens: int | None, loader: str) -> tuple[float | None, str]:
        """FLOPs of a step of so many tokens, and where they come from, or why there are none.

        `loader` is the key of the one that the tokens came from.

        Called in the telemetry thread.
        """
        count = self.count
        if count is not None and count.flops is not None:
            return count.flops, count.source
        flops, source = self._by_formula(tokens, self.sequences.get(loader))
        if flops is None and count is not None:
            return None, count.reason
        return flops, source

    def _by_formula(self, tokens: int | None, sequence: int | None) -> tuple[float | None, str]:
        model = self._model() if self._model is not None else None
        if model is None:
            model = getattr(self._marks.comm.shown(), "module", None)
        # What is known of a model outlives it: its training may just have ended.
        if model is not None and (self._formula is None or self._formula.model() is not model):
            self._formula = Formula(model)
        if self._formula is None:
            return None, "n/a: the model was not seen; --count-flops counts"
        if self._formula.reason:
            return None, f"n/a: {self._formula.reason}; --count-flops counts"
        if {"tensor", "pipeline"} & self._marks.parallel.keys():
            return None, "n/a: the model is split between ranks"
        if not tokens or sequence is None:
            return None, "n/a: no tokens, or sequences of no common length"
        flops = self._formula.a_token(sequence)
        return None if flops is None else flops * tokens, FORMULA


def _compiler(module: str, name: str) -> Any:
    """Return something of torch's compiler, None as long as nothing has imported it."""
    return getattr(sys.modules.get(f"torch._dynamo.{module}"), name, None)


def _given_norm(names: dict[str, Any]) -> Any:
    """Return the norm that `_clip_grads_with_norm_` was called with, out of its frame's names.

    Where its code could not be exchanged, they are those of the wrapper around it.
    """
    if "total_norm" in names:
        return names["total_norm"]
    args, kwargs = names.get("args", ()), names.get("kwargs", {})
    return args[2] if len(args) > 2 else kwargs.get("total_norm")


def _learning_rate(optimizer: Any) -> Any:
    """Return the largest rate of the parameter groups: a number, or a tensor that is left as it is.

    None where it cannot be told without waiting for a device.
    """
    try:
        rates = [group["lr"] for group in optimizer.param_groups]
        if len({id(rate) for rate in rates}) == 1 and isinstance(rates[0], torch.Tensor):
            return rates[0]
        if any(isinstance(rate, torch.Tensor) and not rate.is_cpu for rate in rates):
            return None
        return max(map(float, rates))
    except (AttributeError, KeyError, TypeError, ValueError):  # an optimizer of another kind
        return None
