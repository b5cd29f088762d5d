"""``malletrain exec``: runs a command on a node of a job, and connects this terminal to it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import shutil
import signal
import sys
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from malletrain.cli.common import INTERRUPTED, job_names, state_dir_option

if TYPE_CHECKING:
    from malletrain.client.aio import RemoteCommand
    from malletrain.protocol.commands import Terminal
    from malletrain.protocol.views import CommandPart

NOT_RUN = 255
"""Exit code if the command did not run or its end is not known, as of ssh."""
INTERRUPTS_TO_LEAVE = 3
"""Number of Ctrl-C after which this process ends without waiting for the command."""
_CHUNK = 32 * 1024


class NotRun(click.ClickException):
    """The command did not run, or its end is not known; the message is a sentence."""

    exit_code = NOT_RUN


@click.command("exec")
@click.argument("job", metavar="JOB", shell_complete=job_names(unfinished=True))
@click.option("--rank", type=click.IntRange(min=0), help="On the node of this rank.  [default: 0]")
@click.option("--node", metavar="NODE", help="On this node of the job.")
@click.option("--tty", "-t", is_flag=True, help="In a terminal of its own, such as for a shell.")
@click.argument("command", metavar="-- COMMAND [ARGS]...", nargs=-1, required=True)
@state_dir_option
@click.pass_context
def exec_(
    ctx: click.Context,
    job: str,
    rank: int | None,
    node: str | None,
    tty: bool,
    command: tuple[str, ...],
    state_dir: Path | None,
) -> None:
    """Run COMMAND on a node of the running job JOB, in the job's environment.

    It runs as you, in the job's working directory, with its variables, modules, conda or virtual
    environment, or in a new container of its image. Only the job's owner can do this. The command
    ends at the latest when the job leaves the node.

    Standard input is forwarded; add </dev/null if COMMAND must not read it. Ctrl-C interrupts
    COMMAND; the third one ends it. Ends with the exit code of COMMAND; 255: it did not run, or
    was cut off.

    \b
    Examples:
      malletrain exec train -- nvidia-smi
      malletrain exec train --rank 3 -- ls -l /tmp
      malletrain exec train --tty -- bash
    """
    from malletrain.client.errors import ClientError

    if node is not None and rank is not None:
        raise click.UsageError("Give --node or --rank, not both.")
    try:
        with _raw_terminal(tty):
            code = asyncio.run(_run(state_dir, job, command, node or "", rank, tty))
    except ClientError as error:
        if error.code == "usage":
            raise click.UsageError(str(error)) from None
        raise NotRun(str(error)) from None
    ctx.exit(code)


async def _run(
    state_dir: Path | None,
    job: str,
    argv: Sequence[str],
    node: str,
    rank: int | None,
    tty: bool,
) -> int:
    """Return the exit code."""
    from malletrain.client.aio import AsyncConnection, RemoteCommand
    from malletrain.client.errors import ClientError
    from malletrain.client.exchange import find

    connection = AsyncConnection(find(state_dir))
    try:
        terminal = _terminal() if tty else None
        command = await RemoteCommand.start(
            connection, job, argv, node=node, rank=rank, terminal=terminal
        )
        try:
            return await _converse(command, tty)
        finally:
            with contextlib.suppress(ClientError):
                await command.end()
    finally:
        await connection.close()


async def _converse(command: RemoteCommand, tty: bool) -> int:
    """Connect this process's streams and signals to the command. Return the exit code."""
    loop = asyncio.get_running_loop()
    early_exit: asyncio.Future[int] = loop.create_future()
    """Done with an exit code when this process ends before the command."""
    requests: set[asyncio.Task[None]] = set()
    interrupts = 0

    def request(signum: int) -> None:
        nonlocal interrupts
        interrupts += signum == signal.SIGINT
        if signum == signal.SIGWINCH:
            work = command.resize(_terminal())
        elif signum == signal.SIGINT and interrupts < INTERRUPTS_TO_LEAVE:
            work = command.signal(signum)
        else:
            if not early_exit.done():
                early_exit.set_result(INTERRUPTED if signum == signal.SIGINT else 128 + signum)
            return
        task = loop.create_task(work)
        requests.add(task)
        task.add_done_callback(requests.discard)

    watched = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, *([signal.SIGWINCH] if tty else [])]
    for signum in watched:
        loop.add_signal_handler(signum, request, signum)
    output = loop.create_task(command.read(_write))
    inputs = loop.create_task(command.feed(_standard_input()))
    try:
        ends: set[asyncio.Future[Any]] = {output, early_exit}
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        if not output.done():
            return early_exit.result()
        end = output.result()
    finally:
        for signum in watched:
            loop.remove_signal_handler(signum)
        tasks = [output, inputs, *requests]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    if end.code is None:
        raise NotRun(end.sentence)
    return end.code


def _terminal() -> Terminal:
    from malletrain.protocol.commands import Terminal

    size = shutil.get_terminal_size()
    return Terminal(
        min(max(1, size.lines), 10_000),
        min(max(1, size.columns), 10_000),
        os.environ.get("TERM", "")[:64],
    )


@contextlib.contextmanager
def _raw_terminal(tty: bool) -> Iterator[None]:
    """Pass every key to the command while it has a terminal of its own."""
    import termios
    from tty import setraw

    if not (tty and os.isatty(0)):
        yield
        return
    before = termios.tcgetattr(0)
    try:
        setraw(0, termios.TCSADRAIN)  # what was typed already is kept
        yield
    finally:
        termios.tcsetattr(0, termios.TCSADRAIN, before)


async def _standard_input() -> AsyncIterator[bytes]:
    """Yield what this process can read. A thread reads, because an event loop cannot wait for a
    file.
    """
    loop = asyncio.get_running_loop()
    pieces: asyncio.Queue[bytes] = asyncio.Queue(1)

    def read() -> None:
        data = b"-"
        while data:
            try:
                data = os.read(0, _CHUNK)
            except OSError:  # the standard input is closed
                data = b""
            with contextlib.suppress(Exception):  # the loop has ended meanwhile
                asyncio.run_coroutine_threadsafe(pieces.put(data), loop).result()

    threading.Thread(target=read, daemon=True).start()
    while data := await pieces.get():
        yield data


async def _write(part: CommandPart) -> None:
    """Write output in a thread, because its reader may be slow."""
    await asyncio.to_thread(_write_all, 2 if part.error else 1, part.data)


def _write_all(descriptor: int, data: bytes) -> None:
    sys.stdout.flush()
    while data:
        try:
            data = data[os.write(descriptor, data) :]
        except BlockingIOError:  # another process has made the terminal non-blocking
            select.select([], [descriptor], [])
