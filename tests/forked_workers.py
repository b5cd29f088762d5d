"""Plugin of pytest: the workers of pytest-xdist are forks of a process with the packages that most
tests import. ``make test`` loads it by ``-p tests.forked_workers``.

Each worker imports all tests, and most of that time goes into packages such as torch, which the
plugin has imported once. For a few tests that would take longer than it saves.
"""

from __future__ import annotations

import os
from typing import Any

from tests.forks import Server, serve

_PRELOADED = (
    *("torch", "torch._dynamo", "torch.distributed.fsdp", "torch.utils.data"),
    *("torch.distributed.checkpoint.state_dict", "pandas", "scipy.optimize", "scipy.stats"),
    *("xarray", "aiohttp", "sqlalchemy.dialects.sqlite", "alembic.command", "optuna"),
    *("redis.asyncio", "h5py", "rich.live", "malletrain.cli", "malletrain.daemon.main"),
)
"""Not those with plugins of pytest, which it wants to import itself (hypothesis, AnyIO)."""


def pytest_xdist_setupnodes() -> None:
    """Have execnet fork the workers of pytest-xdist where it would start interpreters."""
    from execnet import gateway_io

    server = Server(__name__)

    class Worker(gateway_io.Popen2IOMaster):  # type: ignore[misc]
        """The streams of a worker; ``args``: how execnet would start it."""

        def __init__(self, args: list[str], execmodel: Any) -> None:
            stdin, to_worker = os.pipe()
            from_worker, stdout = os.pipe()
            self.popen = server.start(["-c", args[-1]], (stdin, stdout, 2), dict(os.environ))
            os.close(stdin)
            os.close(stdout)
            streams = os.fdopen(to_worker, "wb"), os.fdopen(from_worker, "rb")
            gateway_io.Popen2IO.__init__(self, *streams, execmodel=execmodel)

    gateway_io.Popen2IOMaster = Worker


def _run(argv: list[str]) -> None:
    exec(argv[1], {"__name__": "__main__"})


if __name__ == "__main__":
    serve(_PRELOADED, _run)
