"""The fork server: one warm interpreter per job and node, from which the launcher and all workers
are forked.

Importing torch takes seconds at every start of every worker in every round. The fork server imports
it once. A worker is then a fork of it, which takes milliseconds. It has its own environment,
directory and output, and runs the script as ``python script`` would
(:mod:`malletrain.launch.script`). The fork server stays single-threaded and runs nothing itself, so
forking is safe; importing torch does not initialise CUDA. It imports the modules that every
training script needs. ``MALLETRAIN_PRELOAD=module,module`` in a job's environment adds modules;
``MALLETRAIN_PRELOAD=0`` starts every worker as a new Python. A script that imports malletrain gets
the modules of the fork server, if its own import would find the same files (:class:`_Package`).

    agent → supervisor → fork server ─┬ launcher (requests workers through clients on a Unix socket)
                                      └ workers

If a Python is already warm on the node, the fork server is a fork of that
(:mod:`malletrain.launch.warm_server`).

Every process dies with its parent (PR_SET_PDEATHSIG), a worker also with its fork client. The fork
server ends with the launcher, with its exit code.
"""

from __future__ import annotations

import copy
import gc
import importlib
import json
import mmap
import os
import selectors
import signal
import socket
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from malletrain.launch import script
from malletrain.launch.cores import apply_threads
from malletrain.launch.supervisor import die_with_parent, is_meant, set_name
from malletrain.protocol import env, fault_points
from malletrain.protocol.fault_points import FaultPoint, reached
from malletrain.training import loader_workers

PRELOADED = (
    *("torch", "torch.distributed", "torch.nn.parallel", "torch._dynamo"),
    *("malletrain.training.snapshot", "malletrain.training.step_hooks"),
)
"""Modules that are imported in advance. (Constructing any optimizer imports torch._dynamo.)"""
_PACKAGE = "malletrain"
_FORWARDED = (signal.SIGTERM, signal.SIGINT)
"""Signals that the fork server forwards to the launcher."""
_CLOCK_TICK_NS = 10_000_000
"""Longest time by which the clock of a file system is late, nanoseconds: one tick of the kernel."""


@dataclass
class _Worker:
    """A worker that runs."""

    pid: int
    """Its process id."""
    connection: socket.socket
    """Connection to its fork client."""
    mark: _EndMark
    """Exit code of its script, once that has ended."""


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
        for number in _FORWARDED:
            signal.signal(number, self._stop)
        self._selector.register(listener, selectors.EVENT_READ)
        self._selector.register(self._wake, selectors.EVENT_READ)

    def serve(self) -> int:
        """Serve requests until the launcher has ended. Return its exit code (128 + signal if it
        was killed).
        """
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
                    self._read_connection(key.fileobj)  # type: ignore[arg-type]

    def _stop(self, number: int, _: object) -> None:
        """Make the launcher stop its workers and end, by SIGINT. It ignores SIGTERM, because
        scancel sends that to every process.
        """
        if is_meant(os.getppid()):
            _signal(self._launcher, signal.SIGINT)

    def _read_connection(self, connection: socket.socket) -> None:
        """Read a connection: a new one has a request, and that of a worker the end of its fork
        client.
        """
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
        # A signal for the worker must wait until the worker has its own handlers: those of the fork
        # server would forward it to the launcher.
        signal.pthread_sigmask(signal.SIG_BLOCK, _FORWARDED)
        mark = _EndMark()
        pid = os.fork()
        if pid:
            reached(FaultPoint.JOB_SERVER_FORKED)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _FORWARDED)
            return _Worker(pid, connection, mark)
        code = 1
        try:
            signal.set_wakeup_fd(-1)
            for number in (signal.SIGCHLD, signal.SIGTERM):
                signal.signal(number, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _FORWARDED)
            die_with_parent(server)
            _set_up_worker(request, output)
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
        """Send the exit codes of ended workers to their fork clients. Return the launcher's exit
        code; None while it runs.
        """
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
        pass  # the fork client has ended, which is noticed on the connection


def _signal(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        pass


def drain(fd: int) -> None:
    """Read all wake-up bytes from ``fd``."""
    try:
        while os.read(fd, 4096):
            pass
    except BlockingIOError:
        pass


def _set_up_worker(request: dict[str, Any], output: int) -> None:
    """Give this fork the environment, directory, output, threads and name of its worker."""
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ.clear()
    os.environ.update(request["env"])
    try:
        os.chdir(request["cwd"])
    except OSError as error:
        print(
            f"malletrain: The working directory {request['cwd']} cannot be entered: "
            f"{error.strerror}.",
            file=sys.stderr,
            flush=True,
        )
        raise
    apply_threads(os.environ, sys.modules.get("torch"))
    loader_workers.install()
    set_name(script.process_name(request["argv"]))


def _run_script(argv: Sequence[str]) -> int:
    """Run ``argv`` (see :func:`malletrain.launch.script.run`) as in a new process. Return its exit
    code.
    """
    _package.offer()
    # Otherwise all forks would draw the same numbers. The module random reseeds itself.
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    if "torch" in sys.modules:
        sys.modules["torch"].default_generator.seed()  # a GPU's is made, and seeded, by the fork
    return script.run(argv)


class _Package(MetaPathFinder):
    """The modules of malletrain that this process has imported, for the scripts of its forks.

    A script's import of malletrain finds what it would find in a new Python, such as a package in
    the script's own directory, or a version that was installed since. If that is what this process
    has, the import takes these modules over: to define their classes once more is most of what
    malletrain costs a worker before its first step. The package itself is executed again, in the
    environment of the fork, because a worker reports its import.
    """

    def __init__(self) -> None:
        self._began_ns = time.time_ns() - _CLOCK_TICK_NS
        """A file that was changed at this time or later may have been changed after its import."""
        self._modules: dict[str, ModuleType] = {}
        """Imported modules by name."""
        self._files: dict[str, tuple[int, ...] | None] = {}
        """File of an imported module → its version when it was imported; empty if it may have been
        changed since, between its import and its record.
        """
        self._count = 0
        """Number of all modules at the last record."""
        self._is_offered = False
        """Whether this is a fork whose script has not imported malletrain."""

    def record(self) -> None:
        """Record the modules that were imported since the last call. If there are none, as in the
        fork of a warm server, look at no module: that copies its memory.
        """
        if len(sys.modules) == self._count:
            return
        self._count = len(sys.modules)
        for name, module in sys.modules.items():
            if name == _PACKAGE or name.startswith(f"{_PACKAGE}."):
                self._modules[name] = module
                path = getattr(module, "__file__", None)
                if path and path not in self._files:
                    version = _file_version(path)
                    is_recent = version is not None and version[0] >= self._began_ns
                    self._files[path] = () if is_recent else version

    def offer(self) -> None:
        """Forget the modules in this fork until its script imports malletrain."""
        for name in self._modules:
            sys.modules.pop(name, None)
        self._is_offered = True
        sys.meta_path.insert(0, self)

    def find_spec(
        self, fullname: str, path: Any = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return what the other finders find for malletrain, with a loader that takes the modules
        over if they are the same; None for everything else, and for a script that has modules of
        malletrain of its own. Nothing else is changed: a script may look without importing.
        """
        if fullname != _PACKAGE or not self._is_offered:
            return None
        if not sys.modules.keys().isdisjoint(self._modules):
            return None
        for finder in sys.meta_path:
            find = None if finder is self else getattr(finder, "find_spec", None)
            spec: ModuleSpec | None = find and find(fullname, path, target)
            if spec is not None:
                return self._with_modules(spec)
        return None

    def _with_modules(self, spec: ModuleSpec) -> ModuleSpec:
        """Return a spec that takes the modules over; ``spec`` itself if it is of other files."""
        package = self._modules[_PACKAGE]
        is_same = spec.origin == package.__file__ and all(
            _file_version(path) == version for path, version in self._files.items()
        )
        if spec.loader is None or not is_same:
            return spec
        taking_over = copy.copy(spec)
        taking_over.loader = _PackageLoader(spec.loader, self)
        return taking_over

    def offered(self) -> ModuleType | None:
        """Return the package, whose attributes are the modules; None if it is not offered."""
        return self._modules[_PACKAGE] if self._is_offered else None

    def take_over(self) -> None:
        """Give the script of this fork the modules, unless it has them."""
        if self._is_offered:
            self._is_offered = False
            fault_points.read_environment()
            sys.modules.update(self._modules)


class _PackageLoader(Loader):
    """Loads the package, and takes its modules over. Everything that a script asks a loader for,
    such as its source, is that of the package's own loader.
    """

    def __init__(self, own: Loader, package: _Package) -> None:
        self._own = own
        self._package = package

    def __getattr__(self, name: str) -> Any:
        return getattr(object.__getattribute__(self, "_own"), name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """Return the package as it is; None, for a new one, if it is not offered any more."""
        return self._package.offered()

    def exec_module(self, module: ModuleType) -> None:
        """Execute the package."""
        module.__loader__ = self._own
        if module.__spec__ is not None:
            module.__spec__.loader = self._own
        self._package.take_over()
        self._own.exec_module(module)


_package = _Package()


def _file_version(path: str) -> tuple[int, ...] | None:
    """Return what another version of a file would have different: time of change (ns), inode, time
    of modification (ns) and size (bytes); None if there is no file.
    """
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_ctime_ns, status.st_ino, status.st_mtime_ns, status.st_size


class _EndMark:
    """Records the end of a worker's script, in memory that the worker and the fork server share."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, 2)

    def set(self, code: int) -> None:
        """Record that the script and its threads have ended with ``code``."""
        self._memory[:] = bytes((1, code & 0xFF))

    def code(self, status: int) -> int:
        """Return the exit code of a worker that has ended with ``status`` (negative: a signal). If
        it crashed after the end of its script, that is the code of the script.
        """
        ended, code = self._memory[0], self._memory[1]
        self._memory.close()
        if not ended or -status not in script.CRASHES:
            return status
        print(
            f"malletrain fork server: a worker was killed by signal {-status} after its script had "
            f"ended with code {code}; the script's code counts.",
            flush=True,
        )
        return code


def preload() -> None:
    """Import the modules that workers need, and exclude them from garbage collection. A collection
    during the imports would take a sixth of the time, and a later one would copy the memory pages
    in every fork.
    """
    gc.disable()
    try:
        for name in PRELOADED:
            if name.startswith(f"{_PACKAGE}."):
                _import_tolerantly([name], "the fork server preloads")
            else:
                importlib.import_module(name)
        _import_tolerantly(os.environ.get(env.PRELOAD, "").split(","), f"{env.PRELOAD} names")
    finally:
        gc.enable()
    _package.record()
    gc.collect()
    gc.freeze()


def _import_tolerantly(names: Iterable[str], subject: str) -> None:
    """Import modules. If one cannot be imported, this is reported, and the script's own import
    shows the error in full.

    Args:
        names: names of modules; empty ones are skipped.
        subject: who asks for them, the beginning of the report.
    """
    for name in filter(None, map(str.strip, names)):
        try:
            importlib.import_module(name)
        except Exception as error:
            print(
                f"malletrain: {subject} {name!r}, which cannot be imported: {error}",
                file=sys.stderr,
                flush=True,
            )


def main() -> int:
    """Warm up, fork the launcher, serve it (arguments: the launcher's)."""
    from malletrain.launch import restart

    if os.environ.get(env.PRELOAD) == "0":
        return restart.main()
    server = os.getpid()
    # A path in the agent's private directory, so that no other user can run code here.
    path = f"{os.path.dirname(os.environ[env.AGENT].removeprefix('ipc://'))}/t{server}"
    # SOCK_SEQPACKET, so that a request arrives as a whole.
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
    listener.bind(path)
    listener.listen(64)
    # Import before the launcher reports that this node is ready: until then the other nodes train,
    # and the imports here cost them nothing.
    preload()
    pid = os.fork()
    if pid == 0:
        listener.close()
        die_with_parent(server)
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # see ForkServer._stop
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # end at once, even within a system call
        os.environ[env.FORK_SERVER] = path
        os._exit(restart.main())
    return ForkServer(listener, pid).serve()
