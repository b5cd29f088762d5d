"""``python -m malletrain.agent``: read the options, run, say in a sentence what went wrong."""

from __future__ import annotations

import asyncio
import logging
import os
import sys

from malletrain.agent.config import parse_config
from malletrain.agent.session import NodeAgent
from malletrain.protocol import env


async def _run() -> int:
    return await NodeAgent(parse_config(sys.argv[1:], os.environ)).run()


def main() -> int:
    """Exit codes: 0 the lease was served, 1 something failed, 2 wrong options."""
    level = os.environ.get(env.LOG_LEVEL, "INFO").upper()
    logging.basicConfig(
        level=level, stream=sys.stderr, format="%(asctime)s malletrain agent: %(message)s"
    )
    try:
        return asyncio.run(_run())
    except ValueError as error:
        print(f"malletrain agent: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"malletrain agent: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
