"""Stands in the launcher's process tree for a worker that is a fork of the fork server. Run by its
path, standard library only:

    python -I -S fork_client.py --parent PID --fork-server SOCKET --chdir DIR --per-rank-log DIR --
    PYTHON -u SCRIPT [ARGS]...

Asks the fork server for the worker, stops it by SIGTERM when it gets SIGINT, and ends as it ends,
by the same code or signal. SIGTERM means nothing to it: a scancel sends that to every process of a
lease. When the fork client is killed the fork server kills the worker. When no fork server answers
it becomes PYTHON itself.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time

sys.path.append(os.path.dirname(os.path.abspath(__file__)))
import supervisor  # type: ignore[import-not-found]
from supervisor import env, rank_log_name

LOOKS, LOOK_S = 40, 0.005
"""How often, and how long apart, it is looked whether the worker has taken a SIGTERM."""


def _stop(worker: int) -> None:
    """SIGTERM, and another one where the first was let pass (malletrain.training.steadfast)."""
    try:
        os.kill(worker, signal.SIGTERM)
        for _ in range(LOOKS):
            time.sleep(LOOK_S)
            pending, caught = _masks(worker)
            if pending:
                continue
            if not caught:
                os.kill(worker, signal.SIGTERM)
            return
    except OSError:
        return  # it has ended


def _masks(pid: int) -> tuple[bool, bool]:
    """Whether a SIGTERM waits for a process, and whether it has a handler (proc_pid_status(5)).
    Raises OSError when it is gone.
    """
    with open(f"/proc/{pid}/status") as file:
        fields = dict(line.split(":", 1) for line in file if line.startswith(("S", "T")))
    bit = 1 << (signal.SIGTERM - 1)
    waits = int(fields["ShdPnd"], 16) | int(fields["SigPnd"], 16)
    return bool(waits & bit), bool(int(fields["SigCgt"], 16) & bit)


def _ask(path: str, request: dict[str, object], output: int) -> socket.socket | None:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
    try:
        connection.connect(path)
        socket.send_fds(connection, [json.dumps(request).encode()], [output])
    except OSError:
        connection.close()
        return None
    return connection


def main(argv: list[str]) -> int:
    """See the module's text."""
    cut = argv.index("--")
    options, command = dict(zip(argv[:cut:2], argv[1:cut:2], strict=True)), argv[cut + 1 :]
    supervisor.die_with_parent(int(options["--parent"]))
    name = rank_log_name(os.environ.get(env.GENERATION, "0"), os.environ.get("RANK", "0"))
    output = os.open(
        os.path.join(options["--per-rank-log"], name), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600
    )
    worker = 0
    waiting: list[int] = []

    def pass_on(number: int, _: object) -> None:
        if worker:
            _stop(worker)
        else:
            waiting.append(number)

    signal.signal(signal.SIGINT, pass_on)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    request: dict[str, object] = {
        "argv": command[2:],
        "env": dict(os.environ),
        "cwd": options["--chdir"],
    }
    connection = _ask(options["--fork-server"], request, output)
    if connection is None:
        os.chdir(options["--chdir"])
        os.dup2(output, 1)
        os.dup2(output, 2)
        for signum in (signal.SIGTERM, signal.SIGINT):
            signal.signal(signum, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        os.execvp(command[0], command)
    while packet := connection.recv(4096):
        said = json.loads(packet)
        if "pid" in said:
            worker = said["pid"]
            if waiting:
                _stop(worker)
        else:
            return _end_as(said["exit"])
    return 1  # the fork server is gone, and the worker with it


def _end_as(code: int) -> int:
    if code < 0:
        signal.signal(-code, signal.SIG_DFL) if -code not in (
            signal.SIGKILL,
            signal.SIGSTOP,
        ) else None
        os.kill(os.getpid(), -code)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
