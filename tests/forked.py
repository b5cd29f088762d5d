"""Worker processes of tests, forked from a server that has imported torch, so that one starts in
hundredths of a second.
"""

from __future__ import annotations

import atexit
import faulthandler
import multiprocessing
import os
import random
import signal
import sys
from collections.abc import Callable
from typing import Any

CONTEXT = multiprocessing.get_context("forkserver")
_PRELOADED = (
    *("torch", "torch.distributed", "torch.nn.parallel", "torch._dynamo", "malletrain.elastic"),
    *("torch.distributed.fsdp", "torch.distributed.checkpoint.state_dict", "torch.utils.data"),
)
_FIRST, _LAST = "tests.collection_disabled", "tests.frozen_heap"


def preload(*more: str) -> None:
    """Let the server also import these modules. Call it before the first worker starts."""
    CONTEXT.set_forkserver_preload([_FIRST, *_PRELOADED, *more, _LAST])


preload()


def work(
    script: Callable[..., None],
    environment: dict[str, str],
    output: str,
    arguments: tuple[Any, ...],
) -> None:
    """Run ``script(*arguments)`` in a worker, and then its exit handlers; other threads and
    destructors are cut off. SIGUSR1 writes the stacks of all threads.

    Args:
        script: a function of a module.
        environment: variables that are set for it.
        output: file for standard output and error.
        arguments: arguments of the script.
    """
    fd = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    os.environ.update(environment)
    os.setpgid(0, 0)
    sys.argv = ["train.py"]
    random.seed(0)  # so that a saved state is the same in each run
    faulthandler.register(signal.SIGUSR1)
    import torch

    torch.set_num_threads(1)
    code = 1
    try:
        script(*arguments)
        code = 0
    except SystemExit as end:
        code = int(end.code or 0)
        if code:
            sys.last_value = SystemExit(code)  # as malletrain.launch.script does
    except BaseException:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
    atexit._run_exitfuncs()  # noqa: SLF001 (what the interpreter does before it ends)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def run_ranks(script: Callable[..., None], arguments: tuple[Any, ...], ranks: int) -> None:
    """Run ``script(rank, *arguments)`` in several processes. Raises an exception of one of them.

    Args:
        script: a function of a module.
        arguments: its arguments after the rank.
        ranks: number of processes.
    """
    import torch.multiprocessing

    torch.multiprocessing.start_processes(
        script, arguments, nprocs=ranks, start_method="forkserver"
    )
