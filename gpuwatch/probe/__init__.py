"""Inside the training process: marks, accounting and the telemetry thread.

Nothing here raises into the caller's loop, synchronizes a device, or keeps the process from
exiting. What a person asks for may cost more: the end of a profile waits for the device, and so do
the few steps before a change that every rank makes together. In a forked child the probe is silent.
"""

import atexit
import contextlib
import multiprocessing
import os
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from gpuwatch.probe.accounting import PHASE_INDEX
from gpuwatch.probe.events import Recorder
from gpuwatch.probe.text import wire_text
from gpuwatch.schema import Bye

if TYPE_CHECKING:
    from gpuwatch.probe.patches import Marks
    from gpuwatch.probe.pending import Pending
    from gpuwatch.probe.telemetry import Telemetry

__all__ = ["annotate", "knob", "phase", "span", "step", "unwatch", "watch"]


class _Probe:
    """Everything that one watched process holds."""

    def __init__(self, recorder: Recorder, marks: "Marks", telemetry: "Telemetry") -> None:
        self.recorder = recorder
        self.marks = marks
        self.telemetry = telemetry
        self.pid = os.getpid()


_probe: _Probe | None = None
_pending: "Pending | None" = None
_lock = threading.Lock()
_hooked = False
_warned = False


def _warn(text: str) -> None:
    """Say one line, once per process: more would bury the user's own output."""
    global _warned
    if not _warned:
        _warned = True
        with contextlib.suppress(Exception):
            print(f"gpuwatch: {text}", file=sys.stderr)  # noqa: T201


def watch(
    *, name: str | None = None, allow_control: bool = False, count_flops: bool = False
) -> None:
    """Watch the training in this process; call it once, before the loop.

    Every DataLoader fetch, backward, optimizer step and collective of this process is timed from
    now on, and `gpuwatch` in another terminal shows it. A second call does nothing. Where the
    process cannot be watched, one line on stderr says why, and training goes on.

    Args:
        name: what people call this run; the run id stays what the launcher gave.
        allow_control: let a monitor change what the script has registered as a knob.
        count_flops: count the FLOPs of one step, once; that step is much slower, and tagged.
    """
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        return  # a spawned child that imports the main script again, a loader worker say
    _begin(name or "", allow_control, count_flops)


def _watch_when_training() -> None:
    """Put the marks on now, and watch from the first sign of training on; a launcher gives none.

    What `gpuwatch run` does in every process that imports torch. `watch()` may still be called.

    Raises:
        ImportError: something of gpuwatch is not installed in this environment.
    """
    global _pending
    for needed in ("msgspec", "zmq"):
        if find_spec(needed) is None:
            raise ImportError(f"no module named {needed!r}", name=needed)
    if not _lock.acquire(blocking=False):
        return  # a thread that starts to watch has it; an import waits for nobody
    try:
        if _pending is not None or _probe is not None:
            return
        try:
            _pending = _install(_begin)
            _pending.arm()
        except ImportError:
            raise
        except AttributeError as exc:
            raise ImportError(str(exc), name="torch") from exc
        except Exception as exc:
            _warn(f"not watching: {type(exc).__name__}: {exc}")
    finally:
        _lock.release()


def _why_not(exc: Exception) -> str:
    """Return why this process is not watched."""
    torch = sys.modules.get("torch")
    name = str(getattr(exc, "name", None) or "")
    if torch is not None and (name.partition(".")[0] == "torch" or isinstance(exc, AttributeError)):
        version = getattr(torch, "__version__", "of no version")
        return f"torch {version} lacks something that gpuwatch needs ({exc})"
    if isinstance(exc, ImportError):
        return f"{name or exc} is not installed in this environment"
    return f"{type(exc).__name__}: {exc}"


def _begin(name: str = "", control: bool = False, count_flops: bool = False) -> None:
    """Watch this process; never raises. `gpuwatch run` may have said more than the script."""
    global _probe, _hooked
    # Under `gpuwatch run` the end of this import puts marks on; nothing is held that it waits for.
    with contextlib.suppress(Exception):
        import_module("torch")
    with _lock:
        if _probe is not None and _probe.pid == os.getpid():
            return
        name = name or os.environ.get("GPUWATCH_RUN_NAME", "")
        control = control or os.environ.get("GPUWATCH_ALLOW_CONTROL") == "1"
        count_flops = count_flops or os.environ.get("GPUWATCH_COUNT_FLOPS") == "1"
        try:
            _probe = _start(name, control, count_flops)
        except Exception as exc:
            _warn(f"not watching: {_why_not(exc)}")
        if _probe is not None and not _hooked:
            _hooked = True
            atexit.register(_at_exit)
            if hasattr(os, "register_at_fork"):
                os.register_at_fork(after_in_child=_after_fork)


def _telling(notices: list[str]) -> Callable[[str], None]:
    """Return what warns the user here and now, and whoever reads `notices` later."""

    def warn(text: str) -> None:
        notices.append(text)
        _warn(text)

    return warn


def _install(trains: Callable[[], None]) -> "Pending":
    """Put the marks on. Raises what they raise, and leaves none of them behind then."""
    from gpuwatch.probe.patches import Marks
    from gpuwatch.probe.pending import Pending

    notices: list[str] = []
    recorder = Recorder()
    marks = Marks(recorder, _telling(notices))
    try:
        marks.install()
    except Exception:
        marks.remove()
        raise
    return Pending(recorder, marks, notices, trains)


def _start(name: str, control: bool, count_flops: bool) -> _Probe:
    global _pending
    from gpuwatch.probe.identity import identify
    from gpuwatch.probe.telemetry import Telemetry

    pending, _pending = _pending or _install(_begin), None
    pending.disarm()
    recorder, marks, notices = pending.recorder, pending.marks, pending.notices
    if count_flops:
        marks.signals.ask_for_flops()

    try:
        recorder.distributed = identify().world_size > 1
        telemetry = Telemetry(
            recorder,
            marks,
            name=name,
            control=control,
            notices=notices,
            warn=_telling(notices),
        )
        for live in pending.knobs.values():
            telemetry.knobs.register(live)
        telemetry.start()
    except Exception:
        marks.remove()
        raise
    return _Probe(recorder, marks, telemetry)


def unwatch() -> None:
    """Stop watching: take the marks off and say goodbye. `watch()` may follow."""
    global _probe, _pending
    with _lock:
        probe, _probe = _probe, None
        pending, _pending = _pending, None
    if pending is not None:
        pending.disarm()
        pending.marks.remove()
    if probe is not None and probe.pid == os.getpid():
        probe.telemetry.recall()
        probe.marks.remove()
        probe.marks.desk.close()
        probe.recorder.finish()
        probe.telemetry.stop(Bye("detached"))


def _at_exit() -> None:
    global _probe
    probe, _probe = _probe, None
    if probe is None or probe.pid != os.getpid():
        return
    probe.marks.silence()
    with contextlib.suppress(Exception):
        probe.marks.desk.close()
        probe.recorder.finish()
    probe.telemetry.stop(_last_words())


def _last_words() -> Bye:
    """What the interpreter leaves behind of an exception that nobody caught.

    The exit status is not among it: `sys.exit(3)` and a normal end look the same from here.
    """
    value = getattr(sys, "last_value", None)
    if value is None:
        return Bye("finished")
    if isinstance(value, KeyboardInterrupt):
        return Bye("interrupted", "KeyboardInterrupt")
    try:
        text = str(value).split("\n", 1)[0]
    except Exception:
        text = "(it cannot be printed)"
    detail = wire_text(f"{type(value).__name__}: {text}", 500)
    frames = [
        f"{frame.filename}:{frame.lineno} in {frame.name}"
        for frame in reversed(traceback.extract_tb(getattr(value, "__traceback__", None))[-64:])
    ]
    stack = wire_text("\n".join(frames[:_KEPT_FRAMES]), 4096)
    return Bye("exception", detail, stack, _raised_in(frames))


_KEPT_FRAMES = 12
_PLACES = {
    "/torch/utils/data/": "data_wait",
    "/torch/distributed/": "comm",
    "/torch/autograd/": "backward",
    "/torch/optim/": "optimizer",
}


def _raised_in(frames: list[str]) -> str:
    """Return the phase that the innermost telling frame belongs to, empty if there is none.

    On the way up every mark has been left: only the traceback still knows.
    """
    for frame in frames:
        for place, phase in _PLACES.items():
            if place in frame:
                return phase
    return ""


def _after_fork() -> None:
    """In the child: silent, and without touching sockets or files of the parent."""
    global _probe
    probe, _probe = _probe, None
    if probe is not None:
        probe.marks.silence()


def step() -> None:
    """Say that an iteration ends here. From the first call on, only this closes steps."""
    probe = _probe
    if probe is not None and probe.marks.here():
        probe.recorder.step()
        if probe.marks.desk.due:
            probe.marks.desk.said()


@contextlib.contextmanager
def phase(name: str) -> Iterator[None]:
    """Count the block as a phase of the step, `h2d` for copies to the device above all.

    Args:
        name: data_wait, h2d, forward, backward, comm, optimizer or other; anything else is
            ignored with one line on stderr.
    """
    probe = _probe
    index = PHASE_INDEX.get(name)
    if index is None:
        _warn(f"phase({name!r}) is ignored; there are {', '.join(PHASE_INDEX)}")
    if probe is None or index is None or not probe.marks.here():
        yield
        return
    probe.recorder.phase_begin(index)
    try:
        yield
    finally:
        probe.recorder.phase_end(index)


@contextlib.contextmanager
def span(name: str) -> Iterator[None]:
    """Count the block as time outside the steps: `eval`, `checkpoint`, or a name of your own."""
    probe = _probe
    if probe is None or not probe.marks.here():
        yield
        return
    probe.recorder.span_begin(str(name)[:256])
    try:
        yield
    finally:
        probe.recorder.span_end()


def knob(
    name: str,
    value: int | float | str | bool,
    apply: Callable[[Any], object],
    *,
    low: float | None = None,
    high: float | None = None,
    choices: Sequence[str] = (),
    effective: str = "at the next step",
    together: bool = False,
) -> None:
    """Let a monitor change a setting of this training while it runs; call it after `watch()`.

    It is shown with its value, and can be changed where control is allowed
    (`watch(allow_control=True)`, `gpuwatch run --allow-control`). The same name again replaces it.

    Args:
        name: what people call it; one of the DataLoader's, `num_workers` say, goes before the
            probe's own.
        value: where it stands now. A new value is of the same type.
        apply: called with the new value, in the training thread at a step boundary. What it raises
            is the answer to whoever asked, and the value stays. A text that it returns says when
            the change takes effect, in place of `effective`.
        low: the least number allowed.
        high: the greatest number allowed.
        choices: the texts allowed, where it is one.
        effective: when a change takes effect, in words.
        together: every rank must have the same value in the same step. A change is refused for one
            rank alone; for all it is made on a step that they have agreed upon, before which each
            waits for its CUDA device at every step, a few of them. A rank that has missed that step
            changes nothing, and answers that the ranks may differ.

    Raises:
        ValueError: the declaration is wrong, whether the process is watched or not.
    """
    from gpuwatch.probe.knobs import Live

    live = Live(
        name,
        value,
        apply,
        low=low,
        high=high,
        choices=choices,
        effective=effective,
        together=together,
    )
    probe, pending = _probe, _pending
    if probe is not None:
        probe.telemetry.knobs.register(live)
    elif pending is not None:
        pending.knobs[name] = live


def annotate(
    *,
    samples: int | None = None,
    tokens: int | None = None,
    loss: Any = None,
    epoch: float | None = None,
    total_steps: int | None = None,
    dataset_path: str | None = None,
    notice: str | None = None,
) -> None:
    """Tell the monitor what it cannot see by itself.

    Args:
        samples: samples of the present step on this rank, where a batch is no tensor.
        tokens: tokens of the present step on this rank.
        loss: a number, or a tensor with one element. A tensor on the CPU is read by the telemetry
            thread; one on a CUDA device is copied beside the training, at most ten times a second,
            and read when it has arrived. Nothing waits for it.
        epoch: the present epoch, fractions allowed.
        total_steps: optimizer steps that the run means to take.
        dataset_path: where the data lies, so that its disk can be named.
        notice: a sentence for whoever looks at this rank, such as a leak that the training has
            found. The last 16 are kept; the same one counts once.
    """
    probe = _probe
    if probe is None:
        return
    try:
        _annotate(probe, samples, tokens, loss, epoch, total_steps, dataset_path)
        if notice is not None:
            probe.telemetry.tell(str(notice))
    except Exception as exc:
        _warn(f"annotate() is ignored: {type(exc).__name__}: {exc}")


def _count(value: int) -> int:
    """Return a count that the wire can carry: sys.maxsize, say, means no end."""
    return min(max(0, int(value)), 2**53)


def _annotate(
    probe: _Probe,
    samples: int | None,
    tokens: int | None,
    loss: Any,
    epoch: float | None,
    total_steps: int | None,
    dataset_path: str | None,
) -> None:
    telemetry = probe.telemetry
    if loss is not None:
        loss = loss.detach() if hasattr(loss, "detach") else float(loss)
        # Of one on a device the state shows what has come from there with a step.
        telemetry.loss = loss if getattr(loss, "is_cpu", True) else None
        if probe.marks.here():
            probe.recorder.note("loss", loss)
    if epoch is not None:
        telemetry.epoch = float(epoch)
    if total_steps is not None:
        telemetry.total_steps = _count(total_steps)
    if dataset_path is not None and str(dataset_path) != telemetry.dataset_path:
        telemetry.dataset_path = str(dataset_path)
        probe.marks.config_version += 1
    if (samples is not None or tokens is not None) and probe.marks.here():
        probe.recorder.annotate(
            samples=None if samples is None else _count(samples),
            tokens=None if tokens is None else _count(tokens),
        )
