"""``python -m malletrain.agent``: reads options, runs the agent, reports errors as sentences."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys

from malletrain.agent.config import AgentConfig, parse_config
from malletrain.agent.run_dir import own_caches
from malletrain.agent.session import NodeAgent
from malletrain.agent.sharing import restrict
from malletrain.protocol import env
from malletrain.protocol.fault_points import FaultPoint, reached


async def _run(config: AgentConfig) -> int:
    if config.slot is not None:
        restrict(config.slot, config.node)  # before any thread or process starts
    agent = NodeAgent(config)
    os.environ.update(own_caches(os.environ, agent.directory))
    return await agent.run()


def main() -> int:
    """Run the agent. Exit codes: 0 the lease was served, 1 an error occurred, 2 wrong options.
    After the agent has run, this function ends the process.
    """
    # Slurm 25.05 starts jobs with SIGCHLD blocked. With it, dash's `wait` never returns in a health
    # check or a user's script.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
    level = os.environ.get(env.LOG_LEVEL, "INFO").upper()
    logging.basicConfig(
        level=level, stream=sys.stderr, format="%(asctime)s malletrain agent: %(message)s"
    )
    try:
        config = parse_config(sys.argv[1:], os.environ)
    except ValueError as error:
        print(f"malletrain agent: {error}", file=sys.stderr)
        return 2
    try:
        reached(FaultPoint.AGENT_STARTED)
        code = asyncio.new_event_loop().run_until_complete(_run(config))
    except (OSError, ValueError) as error:
        print(f"malletrain agent: {error}", file=sys.stderr)
        code = 1 if isinstance(error, OSError) else 2
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    # The agent has left nothing behind. Closing its event loop would wait for threads that resolve
    # a name or test a connection, while the main scheduler wants this node.
    os._exit(code)


if __name__ == "__main__":
    sys.exit(main())
