"""A process of a script of the zoo: its environment, its log, its end.

Workers are forked from a server that has torch imported, so that one starts in hundredths of a
second.
"""

from __future__ import annotations

import atexit
import faulthandler
import importlib
import multiprocessing
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from tests.zoo.trace import Trace

CONTEXT = multiprocessing.get_context("forkserver")
PRELOADED = (
    *("torch", "torch.distributed", "torch.nn.parallel", "torch._dynamo", "malletrain.elastic"),
    *("torch.distributed.fsdp", "torch.distributed.checkpoint.state_dict", "torch.utils.data"),
    *("tests.zoo.scripts.parts", "tests.zoo.restart", "tests.zoo.live", "pytest"),
)
TRACE, REACHED, GO = "trace.jsonl", "reached", "go"
SETTLED = "settled-{pid}"
"""Made by a process in live mode that has left its round and waits for the next one."""
_LOOK_S = 0.001


def preload(*more: str) -> None:
    """Have the server import these, too; call it before the first worker is started."""
    CONTEXT.set_forkserver_preload([*PRELOADED, *more])


class Gate:
    """Stops this process at one of its points until the driver lets it go on.

    Args:
        folder: where the files ``reached`` and ``go`` are made.
        number: of the point; -1: none.
    """

    def __init__(self, folder: Path, number: int) -> None:
        self.folder = folder
        self.number = number

    def __call__(self, number: int) -> None:
        if number != self.number:
            return
        (self.folder / REACHED).touch()
        while not (self.folder / GO).exists():
            time.sleep(_LOOK_S)


def run_script(main: str, folder: str, save_every_s: float, number: int) -> None:
    """Run ``module:function`` in ``folder``, where its trace is; stop at the point ``number``."""
    home = Path(folder)
    os.chdir(home)
    multiprocessing.current_process().daemon = False  # a loader may have workers
    module, _, name = main.partition(":")
    script = getattr(importlib.import_module(module), name)
    trace = Trace(home / TRACE, save_every_s, Gate(home, number))
    trace.watch_updates()
    _note_settling(home)
    script(trace)


def _note_settling(home: Path) -> None:
    """Have a worker that leaves in live mode say that it has done all it does: until then its
    records are on their way.
    """
    from malletrain.elastic.link import Link

    wait_round = Link.wait_round

    def noting(link: Link, after: int) -> Any:
        if after:
            (home / SETTLED.format(pid=os.getpid())).touch()
        return wait_round(link, after)

    Link.wait_round = noting  # type: ignore[method-assign]


def work(environment: dict[str, str], output: str, arguments: tuple[Any, ...]) -> None:
    """What a forked worker does: :func:`run_script`, and the end of an interpreter."""
    fd = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    os.environ.update(environment)
    sys.argv = ["train.py"]
    faulthandler.register(signal.SIGUSR1)
    import torch

    torch.set_num_threads(1)
    code = 1
    try:
        run_script(*arguments)
        code = 0
    except SystemExit as end:
        code = int(end.code or 0)
    except BaseException:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
    atexit._run_exitfuncs()  # noqa: SLF001 (what the interpreter does before it ends)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def files_of(folder: Path) -> dict[str, str]:
    """The text of each file of results."""
    results = folder / "results"
    return {
        str(path.relative_to(results)): path.read_text(errors="replace")
        for path in sorted(results.rglob("*"))
        if path.is_file()
    }
