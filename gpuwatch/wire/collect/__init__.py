"""Everyone but the ranks: the node process, and the monitor's links to it.

The names are resolved on first use: a monitor does not pay for the node process.
"""

from typing import TYPE_CHECKING, Any

__all__ = [
    "Agent",
    "AgentRunningError",
    "Door",
    "JobKey",
    "KeyFileError",
    "ListenError",
    "NodeLink",
    "Pipe",
    "PipeLink",
    "PipeTarget",
    "Stdio",
    "TcpLink",
    "TcpTarget",
    "TcpWay",
    "Way",
    "agent_presence",
    "listen",
    "load_key",
    "make_key",
    "parse_address",
]

if TYPE_CHECKING:
    from gpuwatch.wire.collect.agent import Agent, AgentRunningError
    from gpuwatch.wire.collect.complaints import PipeTarget, TcpTarget
    from gpuwatch.wire.collect.discovery import agent_presence
    from gpuwatch.wire.collect.door import Door
    from gpuwatch.wire.collect.keys import JobKey, KeyFileError, load_key, make_key
    from gpuwatch.wire.collect.link import NodeLink
    from gpuwatch.wire.collect.listener import ListenError, listen, parse_address
    from gpuwatch.wire.collect.pipe import Stdio
    from gpuwatch.wire.collect.pipelink import Pipe, PipeLink
    from gpuwatch.wire.collect.tcplink import TcpLink, TcpWay
    from gpuwatch.wire.collect.way import Way

_HOMES = {
    "Agent": "agent",
    "AgentRunningError": "agent",
    "Door": "door",
    "JobKey": "keys",
    "KeyFileError": "keys",
    "ListenError": "listener",
    "NodeLink": "link",
    "Pipe": "pipelink",
    "PipeLink": "pipelink",
    "PipeTarget": "complaints",
    "Stdio": "pipe",
    "TcpLink": "tcplink",
    "TcpTarget": "complaints",
    "TcpWay": "tcplink",
    "Way": "way",
    "agent_presence": "discovery",
    "listen": "listener",
    "load_key": "keys",
    "make_key": "keys",
    "parse_address": "listener",
}


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{home}"), name)
