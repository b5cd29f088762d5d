"""A small daemon, and real agents that leave nothing behind."""

from __future__ import annotations

import pytest

from tests.malletrain.agent.node_side import (
    RARELY_S,
    AgentProcess,
    FakeDaemon,
    eventually,
    processes_with,
)
from tests.ports import free_ports


@pytest.fixture
def daemon(request):
    """Asks for heartbeats so rarely that an agent does not take it for silent while the test stands
    still; a test that is about them says how often. Another daemon may take its port over.
    """
    port, reservation = free_ports(1)
    daemon = FakeDaemon(port, heartbeat_s=getattr(request, "param", RARELY_S))
    yield daemon
    daemon.close()
    reservation.close()


@pytest.fixture
def start(daemon, tmp_path):
    """Start agents; at the end none of their processes may be left."""
    agents = []

    def start_agent(node="n0", **options):
        agents.append(AgentProcess(daemon, node, tmp_path, **options))
        daemon.until(lambda: node in daemon.nodes, "the agent says hello")
        return agents[-1]

    yield start_agent
    for agent in agents:
        agent.kill()
        eventually(
            lambda agent=agent: not processes_with(agent.mark),
            f"nothing of the agent on {agent.node} is left",
        )
