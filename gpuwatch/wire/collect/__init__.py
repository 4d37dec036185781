"""Everyone but the ranks: the node process, and the monitor's link to it."""

from gpuwatch.wire.collect.agent import Agent, AgentRunningError
from gpuwatch.wire.collect.discovery import agent_presence
from gpuwatch.wire.collect.link import NodeLink

__all__ = ["Agent", "AgentRunningError", "NodeLink", "agent_presence"]
