"""The fork server: one warm interpreter per job and node, from which the launcher and all workers
are forked.

Importing torch takes seconds at every start of every worker in every round. The fork server imports
it once; a worker is then a fork of it, milliseconds old, with its own environment, directory and
output, and runs the script as ``python script`` would (:mod:`malletrain.launch.script`). The fork
server stays single-threaded and runs nothing itself, so forking is safe; importing torch does not
initialise CUDA. It imports what every training script needs. ``MALLETRAIN_PRELOAD=module,module``
in a job's environment adds modules; ``MALLETRAIN_PRELOAD=0`` starts every worker afresh.

    agent → supervisor → fork server ─┬ launcher (requests workers through clients on a Unix socket)
                                      └ workers

If a Python is already warm on the node, the fork server is a fork of that
(:mod:`malletrain.launch.warm_server`).

Every process dies with its parent (PR_SET_PDEATHSIG), a worker also with its fork client. The fork
server ends with the launcher, with its exit code.
"""

from __future__ import annotations

import gc
import importlib
import json
import mmap
import os
import selectors
import signal
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from malletrain.launch import script
from malletrain.launch.supervisor import die_with_parent, is_meant, set_name
from malletrain.protocol import env
from malletrain.protocol.fault_points import FaultPoint, reached

PRELOADED = ("torch", "torch.distributed", "torch.nn.parallel", "torch._dynamo")
"""Constructing any optimizer imports torch._dynamo."""
_PASSED_ON = (signal.SIGTERM, signal.SIGINT)
"""Signals that are meant for the launcher when the fork server gets them."""
_CRASHES = (signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE)
"""Signals that a process gets by its own doing."""


@dataclass
class _Worker:
    pid: int
    connection: socket.socket
    mark: _EndMark


class ForkServer:
    """Forks workers on request until the launcher ends."""

    def __init__(self, listener: socket.socket, launcher: int) -> None:
        self._listener = listener
        self._launcher = launcher
        self._workers: dict[int, _Worker] = {}
        self._selector = selectors.DefaultSelector()
        self._wake, self._woken = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(self._woken)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        for number in _PASSED_ON:
            signal.signal(number, self._stop)
        self._selector.register(listener, selectors.EVENT_READ)
        self._selector.register(self._wake, selectors.EVENT_READ)

    def serve(self) -> int:
        """Until the launcher has ended; returns its exit code (128 + signal when it was killed)."""
        while True:
            code = self._reap()
            if code is not None:
                return code
            for key, _ in self._selector.select():
                if key.fileobj is self._listener:
                    connection, _ = self._listener.accept()
                    self._selector.register(connection, selectors.EVENT_READ)
                elif key.fileobj == self._wake:
                    drain(self._wake)
                else:
                    self._heard(key.fileobj)  # type: ignore[arg-type]

    def _stop(self, number: int, _: object) -> None:
        """The launcher ends in order. SIGTERM means nothing to it: a scancel sends that to all."""
        if is_meant(os.getppid()):
            _signal(self._launcher, signal.SIGINT)

    def _heard(self, connection: socket.socket) -> None:
        """A request on a new connection; on that of a worker, the end of its fork client."""
        worker = next((w for w in self._workers.values() if w.connection is connection), None)
        try:
            data, fds, _, _ = socket.recv_fds(connection, 1 << 20, 1)
        except OSError:
            data, fds = b"", []
        if worker is not None or not data or not fds:
            self._selector.unregister(connection)
            connection.close()
            if worker is not None:
                _signal(worker.pid, signal.SIGKILL)
            return
        worker = self._fork(json.loads(data), fds[0], connection)
        os.close(fds[0])
        self._workers[worker.pid] = worker
        _send(connection, {"pid": worker.pid})

    def _fork(self, request: dict[str, Any], output: int, connection: socket.socket) -> _Worker:
        server = os.getpid()
        # A signal for the worker must wait until the worker is itself: the fork server's handlers
        # would pass it on to the launcher.
        signal.pthread_sigmask(signal.SIG_BLOCK, _PASSED_ON)
        mark = _EndMark()
        pid = os.fork()
        if pid:
            reached(FaultPoint.JOB_SERVER_FORKED)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _PASSED_ON)
            return _Worker(pid, connection, mark)
        code = 1
        try:
            signal.set_wakeup_fd(-1)
            for number in (signal.SIGCHLD, signal.SIGTERM):
                signal.signal(number, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _PASSED_ON)
            die_with_parent(server)
            _dress(request, output)
            self._selector.close()
            self._listener.close()
            for worker in self._workers.values():
                worker.connection.close()
            os.close(self._wake)
            os.close(self._woken)
            code = _run_script(request["argv"])
        finally:
            script.leave(code, mark.set)

    def _reap(self) -> int | None:
        """Tell fork clients how their workers ended; the launcher's exit code once it has ended."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return 1
            if not pid:
                return None
            code = os.waitstatus_to_exitcode(status)
            if pid == self._launcher:
                return code if code >= 0 else 128 - code
            worker = self._workers.pop(pid, None)
            if worker is not None:
                code = worker.mark.code(code)
            if worker is not None and worker.connection.fileno() >= 0:
                _send(worker.connection, {"exit": code})
                self._selector.unregister(worker.connection)
                worker.connection.close()


def _send(connection: socket.socket, message: dict[str, int]) -> None:
    try:
        connection.send(json.dumps(message).encode())
    except OSError:
        pass  # the fork client is gone; its end is noticed on the connection


def _signal(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        pass


def drain(fd: int) -> None:
    """Read what wakes were written to ``fd``."""
    try:
        while os.read(fd, 4096):
            pass
    except BlockingIOError:
        pass


def _dress(request: dict[str, Any], output: int) -> None:
    """Give this fork the environment, directory, output and name of the worker it is to be."""
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ.clear()
    os.environ.update(request["env"])
    os.chdir(request["cwd"])
    set_name(script.process_name(request["argv"]))


def _run_script(argv: Sequence[str]) -> int:
    """Run ``argv`` (see :func:`malletrain.launch.script.run`) as in a process of its own; returns
    its exit code.
    """
    # The training-side library reads its environment when it is imported, and this fork has another
    # one than the fork server.
    for name in [
        name for name in sys.modules if name == "malletrain" or name.startswith("malletrain.")
    ]:
        del sys.modules[name]
    if "numpy" in sys.modules:
        sys.modules[
            "numpy"
        ].random.seed()  # every fork would draw the same numbers; ``random`` sees to it by itself
    return script.run(argv)


class _EndMark:
    """Says to the fork server that a worker's script is over, in memory that both see."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, 2)

    def set(self, code: int) -> None:
        """The script has ended with ``code``, and its threads with it."""
        self._memory[:] = bytes((1, code & 0xFF))

    def code(self, status: int) -> int:
        """The exit code of a worker that has ended with ``status`` (negative: a signal): its
        script's own, where a crash came after the end of the script.
        """
        over, code = self._memory[0], self._memory[1]
        self._memory.close()
        if not over or -status not in _CRASHES:
            return status
        print(
            f"malletrain fork server: a worker was killed by signal {-status} after its script had "
            f"ended with code {code}; the script's code counts.",
            flush=True,
        )
        return code


def preload() -> None:
    """Import what workers need, and have no collection of garbage walk through it: not meanwhile,
    which would be a sixth of the time, and not later, which would copy its pages in every fork.
    """
    gc.disable()
    try:
        for name in PRELOADED:
            importlib.import_module(name)
        _preload_more(os.environ.get(env.PRELOAD, ""))
    finally:
        gc.enable()
    gc.collect()
    gc.freeze()


def _preload_more(names: str) -> None:
    """Import what the job asks for. A module that cannot be imported is told and left to the
    script, which will say more.
    """
    for name in filter(None, (part.strip() for part in names.split(","))):
        try:
            importlib.import_module(name)
        except Exception as error:
            print(
                f"malletrain: {env.PRELOAD} names {name!r}, which cannot be imported: {error}",
                file=sys.stderr,
                flush=True,
            )


def main() -> int:
    """Warm up, fork the launcher, serve it (arguments: the launcher's)."""
    from malletrain.launch import restart

    if os.environ.get(env.PRELOAD) == "0":
        return restart.main()
    server, path = (
        os.getpid(),
        f"{os.path.dirname(os.environ[env.AGENT].removeprefix('ipc://'))}/t{os.getpid()}",
    )
    # A path in the agent's private directory: nobody else may have code run here. Packets, so that
    # a request comes whole.
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
    listener.bind(path)
    listener.listen(64)
    # Before the launcher says that this node is ready: until then the others train on and lose
    # nothing by the imports here.
    preload()
    pid = os.fork()
    if pid == 0:
        listener.close()
        die_with_parent(server)
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # see ForkServer._stop
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # at once, whatever it waits for
        os.environ[env.FORK_SERVER] = path
        os._exit(restart.main())
    return ForkServer(listener, pid).serve()
