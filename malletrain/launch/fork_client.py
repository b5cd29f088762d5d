"""Stands in the launcher's process tree for a worker that is a fork of the fork server. Run by its
path, standard library only:

    python -I -S fork_client.py --parent PID --fork-server SOCKET --chdir DIR --per-rank-log DIR --
    PYTHON -u SCRIPT [ARGS]...

Asks the fork server for the worker, passes SIGTERM and SIGINT on to it, and ends as it ends, by the
same code or signal. When the fork client is killed the fork server kills the worker. When no fork
server answers it becomes PYTHON itself.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys

sys.path.append(os.path.dirname(os.path.abspath(__file__)))
import supervisor  # type: ignore[import-not-found]
from supervisor import env, rank_log_name


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
            os.kill(worker, number)
        else:
            waiting.append(number)

    for signum in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signum, pass_on)
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
        os.execvp(command[0], command)
    while packet := connection.recv(4096):
        said = json.loads(packet)
        if "pid" in said:
            worker = said["pid"]
            for early in waiting:
                os.kill(worker, early)
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
