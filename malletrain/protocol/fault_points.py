"""Fault points, at which a test may kill a process of MalleTrain: one before and one after each
action that is visible to another process, the store or the disk.

Decides nothing of the product. If ``MALLETRAIN_FAULTS`` is not set when this module is imported,
:func:`reached` checks one variable and returns. If it names a folder that belongs to this user and
that no other user can write to, a file with the name of a point arms that point: the first process
that reaches it removes the file and executes its content. Standard library only, because the
supervisor, which runs by its path, has fault points too.
"""

from __future__ import annotations

import errno
import os
import signal
from enum import Enum

if __package__:
    from malletrain.protocol import env
else:
    import env  # type: ignore[import-not-found,no-redef]


class FaultPoint(Enum):
    """Every point, with the state when a process reaches it."""

    DAEMON_BOUND = "The daemon listens, and has not read its stored state."
    DAEMON_RESTORED = "A new daemon has read its stored state, and no agent has reported."
    DAEMON_ADOPTS = "The agents have reported, and no job is adopted yet."
    DAEMON_ADOPTED = "The jobs are adopted."
    DAEMON_SUBMITTED = "A job is stored, and the client that submitted it has no answer."
    DAEMON_DECIDED = "A step is decided, and nothing of it is stored."
    DAEMON_SAVED = "The steps of a turn are stored, and no message about them is sent."
    DAEMON_SENDING = "One of the messages of a turn's steps is sent."
    DAEMON_SENT = "All messages of a turn's steps are sent."
    DAEMON_KEYED = "A lease has a key, and is not stored yet."
    DAEMON_TAKES = "Leases are stored, and not requested yet."
    DAEMON_TOOK = "The main scheduler has granted leases, which is not stored yet."
    DAEMON_RELEASES = "Leases are stored as leaving, and their end is not requested yet."
    DAEMON_RELEASED = "The main scheduler was asked to end leases."
    DAEMON_POLLED = "The main scheduler has answered a poll, and nothing of the answer is stored."
    DAEMON_LOGGED = "A piece of a log is written, and its agent has no acknowledgement."

    DAEMON_HANDS_OUT = "Tasks are handed out in a transaction that is not stored."
    DAEMON_COUNTS = "Results of tasks are part of a transaction that is not stored."
    DAEMON_ENDS_FARM = "The last result of a farm is in a transaction that is not stored."

    AGENT_STARTED = "An agent runs, and has reported to nobody."
    AGENT_GREETS = "An agent is about to send Hello."
    AGENT_WELCOMED = "An agent has its Welcome."
    AGENT_LAUNCHES = "An agent has got a job, and started nothing."
    AGENT_LAUNCHED = "An agent has started a launcher."
    AGENT_TELLS = "An agent is about to send a message to its launcher."
    AGENT_TOLD = "An agent has sent a message to its launcher."
    AGENT_SAYS = "An agent is about to report the state or the end of its job to the daemon."
    AGENT_SAID = "An agent has reported to the daemon."
    AGENT_NOTICED = (
        "An agent has the notice of a preemption, and has not reported it to the daemon."
    )
    AGENT_DRAINED = "The workers of a node have served a drain, and the daemon does not know it."
    AGENT_LEAVES = "An agent has nothing left to do, and is about to end."

    LAUNCHER_STARTED = "A launcher has read its order."
    LAUNCHER_FORKED = "A launcher has started a process of its job."
    LAUNCHER_SAYS = "A launcher is about to send a message to the agent."
    LAUNCHER_SAID = "A launcher has sent a message to the agent."
    LAUNCHER_STOPS = "A launcher is about to stop its processes."
    LAUNCHER_STOPPED = "A launcher has stopped its processes."
    LAUNCHER_JOINS = "A launcher in restart mode has reached a round's store, and no worker runs."
    LAUNCHER_INVITES = "A launcher in live mode is about to send a round to a worker."

    SUPERVISOR_FORKED = "A supervisor has started its process."
    SUPERVISOR_SWEEPS = "A supervisor is about to kill the remaining processes."
    FORK_SERVER_WARM = "A fork server has finished its imports, and its agent does not know it."
    FORK_SERVER_FORKED = "A fork server has forked the fork server of a job."
    JOB_SERVER_FORKED = "The fork server of a job has forked a worker."

    TASK_ENDED = "A task has ended with code 0, and its result file has its temporary name."
    TASK_RENAMED = "A task's result file has its final name, and the daemon does not know it."

    SERVICE_JOINS = "A service's process is about to join."
    SERVICE_JOINED = "A service's process has joined, and has no view yet."
    SERVICE_DRAINS = "A service's process has handed over its state, and has not reported it."
    WORKER_REPORTS = "A worker has made steps that are not reported to the agent."
    WORKER_REPORTED = "A worker has reported its steps."
    WORKER_WRITTEN = "A snapshot is written, and not moved to its final path."
    WORKER_KEPT = "A snapshot is at its final path."
    WORKER_SAVED = "A worker has saved for a drain, and not reported it."
    WORKER_DRAINED = "A worker has reported that it saved, and waits for its end."
    WORKER_SHARES = "A live worker is in a new group, and does not have the state."
    WORKER_SHARED = "A live worker has the state, and its launcher does not know it."
    WORKER_ENTERED = "A live worker has reported that it is in the new round."
    WORKER_COMMITS = "A step's updates are done on a live worker, and are not committed."
    WORKER_COMMITTED = "A step is committed on a live worker, and its peers do not know it."

    SHARDS_LEAVE = "A live worker is about to send or receive the shards that only leavers have."
    SHARDS_LEFT = "A live worker has sent or received them, and its peers do not know it."
    SHARDS_ARRIVED = "A live worker has received shards, and not copied them into its parameters."
    SHARDS_FILLED = (
        "A live worker has its new shards and the old ones, and its peers do not know it."
    )
    SHARDS_DROPPED = "A live worker knows that all have their new shards, and its peers may not."
    SHARDS_COPY = "A live worker is about to exchange copies of its shards with its neighbours."
    SHARDS_KEPT = "A live worker has copies of another step, and its neighbours may not."
    MEMORY_WRITTEN = "A rank's shards are in its node's memory, and no snapshot names them."
    MEMORY_KEPT = "A snapshot is in the memory of the nodes, and no other node has a copy."
    MEMORY_GIVES = "Another node has a part of its copy, and no snapshot that names it."
    MEMORY_GAVE = "Another node has all of its copy, and no other node knows it."
    MEMORY_SETTLES = "All copies of a snapshot are complete, and older snapshots still exist."
    KEEPER_TAKES = (
        "Another node's keeper has received a whole file, and not moved it to its final path."
    )


STRUCK = ".struck"
"""Suffix of the file that is written when a process reaches the point; it holds the pid."""
_FOLDER = os.environ.get(env.FAULTS, "")
_PASSED: dict[FaultPoint, int] = {}


class FaultRaised(OSError):
    """Raised at a point that is armed with ``raise``: no space is left on the device."""


def read_environment() -> None:
    """Use the folder that the environment names now. A fork may have another than its parent."""
    global _FOLDER
    _FOLDER = os.environ.get(env.FAULTS, "")
    _PASSED.clear()


def reached(point: FaultPoint) -> None:
    """Report that this process is at ``point``; a test may have armed it."""
    if _FOLDER:
        _execute(point)


def _execute(point: FaultPoint) -> None:
    """Execute the file with the name of the point: ``kill``, ``stop`` or ``raise``, optionally
    followed by a space and the number of the visit at which it takes effect (default 1).
    """
    armed_file = os.path.join(_FOLDER, point.name)
    try:
        folder = os.stat(_FOLDER)
        if folder.st_uid != os.geteuid() or folder.st_mode & 0o022:
            return
        with open(armed_file) as file:
            action, _, visits = file.read().strip().partition(" ")
        _PASSED[point] = _PASSED.get(point, 0) + 1
        if _PASSED[point] < int(visits or 1):
            return
        claimed = f"{armed_file}.{os.getpid()}"
        os.rename(armed_file, claimed)  # one process only
        with open(claimed, "w") as file:
            file.write(str(os.getpid()))
        os.rename(claimed, armed_file + STRUCK)
    except (OSError, ValueError):
        return
    _PASSED.clear()
    if action == "raise":
        raise FaultRaised(errno.ENOSPC, os.strerror(errno.ENOSPC))
    os.kill(os.getpid(), signal.SIGSTOP if action == "stop" else signal.SIGKILL)
