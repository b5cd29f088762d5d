"""Represents, in the launcher's process tree, a worker that is a fork of the fork server. Run by
its path, standard library only:

    python -I -S fork_client.py --parent PID --fork-server SOCKET --chdir DIR --per-rank-log DIR --
    PYTHON -u script.py SCRIPT [ARGS]...

Requests the worker from the fork server, stops it by SIGTERM on SIGINT, and ends with its exit code
or signal. It ignores SIGTERM, because scancel sends that to every process of a lease. If the fork
client is killed, the fork server kills the worker. If no fork server responds, the process becomes
PYTHON itself. ``-m MODULE`` can replace SCRIPT.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import sys

sys.path.append(os.path.dirname(os.path.abspath(__file__)))
import supervisor  # type: ignore[import-not-found]
from supervisor import env, rank_log_name

SCRIPT_INDEX = 3
"""Index in the command of the script, or of ``-m``."""
POLL_S = 0.005
"""Interval in which it is checked whether the worker has handled a SIGTERM, seconds."""


def _stop(worker: int) -> bool:
    """Send SIGTERM to the worker. Return whether the worker existed."""
    try:
        os.kill(worker, signal.SIGTERM)
    except OSError:
        return False  # it has ended
    return True


def _is_sigterm_pending(worker: int) -> bool:
    """Return whether the SIGTERM is still pending; all threads of the worker may wait for a disk
    or a driver. If the worker has ignored the first SIGTERM (malletrain.training.first_sigterm),
    sends another one.
    """
    try:
        pending, caught = _sigterm_state(worker)
        if not pending and not caught:
            os.kill(worker, signal.SIGTERM)
    except OSError:
        return False  # it has ended
    return pending


def _sigterm_state(pid: int) -> tuple[bool, bool]:
    """Return whether a SIGTERM is pending for a process, and whether the process has a handler for
    it (proc_pid_status(5)). Raises OSError if the process has ended.
    """
    with open(f"/proc/{pid}/status") as file:
        fields = dict(line.split(":", 1) for line in file if line.startswith(("S", "T")))
    bit = 1 << (signal.SIGTERM - 1)
    waits = int(fields["ShdPnd"], 16) | int(fields["SigPnd"], 16)
    return bool(waits & bit), bool(int(fields["SigCgt"], 16) & bit)


def _request_worker(path: str, request: dict[str, object], output: int) -> socket.socket | None:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
    try:
        connection.connect(path)
        socket.send_fds(connection, [json.dumps(request).encode()], [output])
    except OSError:
        connection.close()
        return None
    return connection


def main(argv: list[str]) -> int:
    """Run the program; see the module's docstring."""
    cut = argv.index("--")
    options, command = dict(zip(argv[:cut:2], argv[1:cut:2], strict=True)), argv[cut + 1 :]
    supervisor.die_with_parent(int(options["--parent"]))
    name = rank_log_name(os.environ.get(env.GENERATION, "0"), os.environ.get("RANK", "0"))
    output = os.open(
        os.path.join(options["--per-rank-log"], name), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600
    )
    woken, wake = socket.socketpair()
    wake.setblocking(False)
    signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)
    signal.signal(signal.SIGINT, lambda *_: None)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    request: dict[str, object] = {
        "argv": command[SCRIPT_INDEX:],
        "env": dict(os.environ),
        "cwd": options["--chdir"],
    }
    connection = _request_worker(options["--fork-server"], request, output)
    if connection is None:
        os.chdir(options["--chdir"])
        os.dup2(output, 1)
        os.dup2(output, 2)
        for signum in (signal.SIGTERM, signal.SIGINT):
            signal.signal(signum, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        os.execvp(command[0], command)
    return _serve(connection, woken)


def _serve(connection: socket.socket, woken: socket.socket) -> int:
    """Wait for the worker. Return its exit code. ``woken`` becomes readable on SIGINT."""
    worker = 0
    stop_requested = sigterm_pending = False
    while True:
        timeout_s = POLL_S if sigterm_pending else None
        ready = select.select([connection, woken], [], [], timeout_s)[0]
        if connection in ready:
            packet = connection.recv(4096)
            if not packet:
                return 1  # the fork server has ended, and the worker with it
            message = json.loads(packet)
            if "exit" in message:
                return _end_as(message["exit"])
            worker = message["pid"]
        if woken in ready:
            stop_requested = bool(woken.recv(4096))
        if stop_requested and worker:
            stop_requested, sigterm_pending = False, _stop(worker)
        elif sigterm_pending:
            sigterm_pending = _is_sigterm_pending(worker)


def _end_as(code: int) -> int:
    if code < 0:
        if -code not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
