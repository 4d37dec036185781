"""The two lines at the top: what is watched and whether it is live; then the verdict."""

from gpuwatch.store.views import RunView, View
from gpuwatch.tui.render import numbers
from gpuwatch.tui.render.bars import gauge
from gpuwatch.tui.render.text import Line, clip, fit, join, spread, width_of
from gpuwatch.tui.scene import Scene

__all__ = ["SILENT_AFTER_S", "header_line", "link_word", "verdict_line"]

SILENT_AFTER_S = 3.0
"""Data older than this is called silent (the liveness rule of the wire)."""


def link_word(scene: Scene) -> tuple[str, str]:
    """Return the one word that says whether the numbers are alive, with its style."""
    view, run = scene.view, scene.run
    if scene.paused:
        behind = f" -{numbers.age(scene.behind_s)}" if scene.behind_s else ""
        return f"PAUSED{behind}", "warning"
    if view.link == "connecting":
        return "CONNECTING", "dim"
    if view.link == "lost":
        return "NO CONTACT", "critical"
    if run is None:
        return ("REPLAY", "accent") if view.link == "replay" else ("LIVE", "ok")
    states = {rank.state for rank in run.ranks}
    if "gone" in states and states <= {"gone", "ended"}:
        return "GONE", "critical"
    if run.state == "ended":
        return "ENDED", "accent"
    if view.link == "replay":
        return "REPLAY", "accent"
    age_s = run.age_s + scene.since_s
    if age_s >= SILENT_AFTER_S:
        return f"SILENT {numbers.age(age_s)}", "warning"
    return f"LIVE {numbers.age(age_s)}", "ok"


def _size(run: RunView) -> str:
    nodes, world = len(run.nodes), run.world_size
    ranks = f"{world:,} rank{'s' if world != 1 else ''}"
    if nodes <= 1:
        return ranks
    if world % nodes == 0:
        return f"{nodes:,} nodes x {world // nodes:,} ranks"
    return f"{ranks} on {nodes:,} nodes"


def _lost(view: View, run: RunView | None) -> Line:
    # That of the view is of all runs, this one too.
    lost = view.lost if run is None else run.lost
    line: Line = [(f"{lost:,} lost", "warning" if lost else "dim")]
    if run is not None and run.dropped:
        line.append((f"  {run.dropped:,} dropped", "warning"))
    if view.refused:
        line.append((f"  {view.refused:,} refused", "warning"))
    return line


def _replay_bar(scene: Scene, width: int) -> Line:
    """Return where a recording is: `▶ 00:03:12 ━━━━──── 00:10:00`."""
    replay = scene.replay
    if replay is None:
        return []
    track = max(6, min(24, (width - 60) // 2))
    part = replay.position_s / replay.duration_s if replay.duration_s > 0 else None
    sign = "⏸" if replay.paused else "▶"
    return [
        (f"{sign} ", "accent"),
        (numbers.clock(replay.position_s).removeprefix("00:"), "text"),
        (" ", "text"),
        *gauge(part, track, "accent"),
        (" ", "text"),
        (numbers.clock(replay.duration_s).removeprefix("00:"), "dim"),
    ]


def header_line(scene: Scene, width: int) -> Line:
    """Return the first line: run, size, progress; at the right liveness, loss, elapsed time."""
    run, view = scene.run, scene.view
    word, style = link_word(scene)
    right: Line = [(word, style), ("  ", "text"), *_lost(view, run)]
    if scene.replay is not None:
        right += [("  ", "text"), *_replay_bar(scene, width)]
    elif run is not None and width >= 70:
        right += [("  ", "text"), (numbers.clock(_elapsed_s(scene, run)), "dim")]
    right.append((" ", "text"))
    lead: Line = [(" ◉ ", style)]
    job: Line = []
    if scene.job is not None:
        job = [(scene.job.word, scene.job.style)]
    if run is None:
        lead.append(("gpuwatch", "strong"))
        if job:
            lead += [("  ", "text"), *job]
        return spread(lead, right, width)
    if run.simulated:
        lead += [(" SIMULATED ", "badge"), (" ", "text")]
    if width >= 100:
        lead.append(("gpuwatch  ", "dim"))
    parts: list[Line] = [[*lead, (clip(run.name or run.run, max(12, width // 4)), "strong")]]
    parts.append(job)
    if len(view.runs) > 1:
        place = next((i for i, item in enumerate(view.runs) if item.run == run.run), 0)
        parts.append([(f"run {place + 1}/{len(view.runs)}", "accent")])
    step = f"step {run.steps:,}"
    if run.total_steps:
        step += f"/{run.total_steps:,}"
    parts.append([(step, "text")])
    parts.append([(_size(run), "text")])
    room = max(1, width - width_of(right) - 1)
    left = join(parts, ("  ", "text"), room)
    if run.loss is not None:
        # A loss that is no number is the news of the day, not a gap in the data.
        style = "text" if numbers.known(run.loss) else "critical"
        room -= width_of([("  loss ", ""), (numbers.loss(run.loss), style)])
    if run.epoch is not None and width_of(left) < room:
        left = join([left, [("epoch ", "dim"), (_epoch(run.epoch), "text")]], ("  ", "text"), room)
    if run.loss is not None and width_of(left) <= room:
        # Last, for it has another length at every step.
        left += [("  loss ", "dim"), (numbers.loss(run.loss), style)]
    return spread(left, right, width)


def _epoch(value: float) -> str:
    """Return an epoch, a whole one or, where the loop counts parts, with two decimals."""
    if not numbers.known(value):
        return numbers.loss(value)
    return f"{value:,.0f}" if value == int(value) else f"{value:,.2f}"


def _elapsed_s(scene: Scene, run: RunView) -> float:
    """Return how long a run has gone on, of one that is over until its last rank ended."""
    ends = [rank.ended_s for rank in run.ranks]
    if run.state == "ended" and ends and None not in ends:
        return max([end for end in ends if end is not None]) - run.started_s
    return scene.view.at_s - run.started_s


def _end(run: RunView) -> Line:
    """Return what was wrong with the end of a run, nothing where all was well."""
    gone = [rank for rank in run.ranks if rank.state == "gone"]
    failed = gone or [rank for rank in run.ranks if rank.state_reason.startswith("exception")]
    if not failed:
        return []
    sign, style, word = ("✖", "critical", "gone") if gone else ("▲", "warning", "ended")
    who = f"rank {failed[0].rank}" if len(failed) == 1 else f"{len(failed):,} ranks"
    reason = failed[0].state_reason
    return [(f"{sign} {who} {word}" + (f": {reason}" if reason else ""), style)]


def _trouble(scene: Scene) -> Line:
    if scene.run is not None and scene.run.state == "ended":
        return _end(scene.run)
    if scene.summary is None or scene.summary.first_trouble is None:
        return []
    rank = scene.summary.first_trouble
    number = scene.summary.states.get(rank.state, 1)
    critical = rank.state in ("gone", "hung")
    text = f"{'✖' if critical else '▲'} rank {rank.rank} {rank.state}"
    if number > 1:
        text = f"{'✖' if critical else '▲'} {number:,} ranks {rank.state}"
    if rank.state == "hung":
        text += f" in {rank.phase} {numbers.age(rank.phase_age_s + scene.since_s)}"
    elif rank.state == "silent":
        text += f" {numbers.age(rank.age_s + scene.since_s)}"
    if rank.state_reason and rank.state_reason not in text:
        text += f": {rank.state_reason}"
    return [(text, "critical" if critical else "warning")]


_OF_WAIT = frozenset(
    {"data_wait", "data_wait_excess", "queue_depth", "batch_cost", "wait_in_bursts"}
)
_OF_COMM = frozenset({"comm", "comm_excess", "transfer", "peer_wait"})
"""What the first evidence of a finding is about, where the figure above is the one it explains."""


def _mark(scene: Scene, metrics: frozenset[str]) -> Line:
    """Return the sign of the worst open finding about a figure, nothing where there is none."""
    severities = {
        item.severity
        for item in scene.open_findings
        if item.evidence and item.evidence[0].metric in metrics
    }
    for severity, sign in (("critical", " ✖"), ("warning", " ▲")):
        if severity in severities:
            return [(sign, severity)]
    return []


def verdict_line(scene: Scene, width: int) -> Line:
    """Return the second line: what matters now, most important first, as much as fits."""
    view, run, summary = scene.view, scene.run, scene.summary
    parts: list[Line] = []
    if run is not None and view.link != "live" and (view.message or view.notices):
        style = "critical" if view.link == "lost" else "warning"
        style = "dim" if view.link == "connecting" else style
        parts.append([(view.message or view.notices[0], style)])
    parts.append(_trouble(scene))
    if run is not None and summary is not None:
        if summary.step_ms is None:
            parts.append([("no steady step yet", "dim")])
        else:
            parts.append([("step ", "dim"), (numbers.duration(summary.step_ms), "strong")])
        if summary.wait_worst is not None:
            wait: Line = [("data wait ", "dim"), (numbers.share(summary.wait_worst), "strong")]
            wait += _mark(scene, _OF_WAIT)
            if len(run.ranks) > 1:
                wait += [
                    (" worst ", "dim"),
                    (numbers.share(summary.wait_median), "text"),
                    (" median", "dim"),
                ]
            parts.append(wait)
        if summary.comm_share is not None:
            comm: Line = [("comm ", "dim"), (numbers.share(summary.comm_share), "text")]
            parts.append([*comm, *_mark(scene, _OF_COMM)])
        if run.samples_per_s is not None:
            rate = numbers.count(run.samples_per_s)
            parts.append([(rate, "text"), (" samples/s", "dim")])
        for label, text in scene.devices:
            parts.append([(f"{label} ", "dim"), (text, "text")])
        if summary.goodput is not None:
            parts.append([("goodput ", "dim"), (numbers.share(summary.goodput), "text")])
        if summary.p95_ms is not None:
            parts.append([("p95 ", "dim"), (numbers.duration(summary.p95_ms), "text")])
    body = join(parts, (" │ ", "rule"), max(0, width - 2))
    return fit([(" ", "text"), *body], width)
