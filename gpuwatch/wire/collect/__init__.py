"""Everyone but the ranks: the node process, and the monitor's links to it.

The names are resolved on first use: a monitor does not pay for the node process.
"""

from typing import TYPE_CHECKING, Any

__all__ = [
    "Agent",
    "AgentRunningError",
    "NodeLink",
    "Pipe",
    "PipeLink",
    "PipeTarget",
    "Stdio",
    "agent_presence",
]

if TYPE_CHECKING:
    from gpuwatch.wire.collect.agent import Agent, AgentRunningError
    from gpuwatch.wire.collect.complaints import PipeTarget
    from gpuwatch.wire.collect.discovery import agent_presence
    from gpuwatch.wire.collect.link import NodeLink
    from gpuwatch.wire.collect.pipe import Stdio
    from gpuwatch.wire.collect.pipelink import Pipe, PipeLink

_HOMES = {
    "Agent": "agent",
    "AgentRunningError": "agent",
    "NodeLink": "link",
    "Pipe": "pipelink",
    "PipeLink": "pipelink",
    "PipeTarget": "complaints",
    "Stdio": "pipe",
    "agent_presence": "discovery",
}


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{home}"), name)
