"""The points at which a test may have a process of MalleTrain killed: one before and one after each
thing that another process, the store or the disk hears of.

Decides nothing of the product. Where ``MALLETRAIN_FAULTS`` is not in a process's own environment
when this is imported, :func:`reached` looks at one name and returns. Where it names a folder that
is this user's own and that nobody else can write to, a file there of a point's name arms it: the
first process that comes there removes the file and does what is in it. Standard library only, for
the supervisor, which is run by its path, has a point too.
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
    """Every point, with what is so when a process is there."""

    DAEMON_BOUND = "The daemon listens, and knows nothing yet of what was."
    DAEMON_RESTORED = "A new daemon has read what is stored, and heard of no agent."
    DAEMON_ADOPTS = "The agents have reported, and no job is adopted."
    DAEMON_ADOPTED = "The jobs are adopted."
    DAEMON_SUBMITTED = "A job is stored, and whoever submitted it has no answer."
    DAEMON_DECIDED = "A step is decided, and nothing of it is stored."
    DAEMON_SAVED = "The steps of a turn are stored, and nobody has heard of them."
    DAEMON_SENDING = "One of the messages of a turn's steps is sent."
    DAEMON_SENT = "All messages of a turn's steps are sent."
    DAEMON_KEYED = "A lease has a key, and is not stored."
    DAEMON_TAKES = "Leases are stored, and not asked for."
    DAEMON_TOOK = "The main scheduler has given leases, which is not stored."
    DAEMON_RELEASES = "Leases are stored as leaving, and their end is not asked for."
    DAEMON_RELEASED = "The main scheduler was asked for the end of leases."
    DAEMON_POLLED = "The main scheduler has said what there is, and nothing of it is stored."
    DAEMON_LOGGED = "A piece of a log is written, and its agent has no acknowledgement."

    AGENT_STARTED = "An agent runs, and has told nobody."
    AGENT_GREETS = "An agent is about to say Hello."
    AGENT_WELCOMED = "An agent has its Welcome."
    AGENT_LAUNCHES = "An agent has been given a job, and started nothing."
    AGENT_LAUNCHED = "An agent has started a launcher."
    AGENT_TELLS = "An agent knows what its launcher does not."
    AGENT_TOLD = "An agent has told its launcher."
    AGENT_SAYS = "An agent knows what the daemon does not: how its job stands, or that it is gone."
    AGENT_SAID = "An agent has told the daemon."
    AGENT_NOTICED = "An agent was told that its node is wanted, and has not told the daemon."
    AGENT_DRAINED = "The workers of a node have served a drain, and the daemon does not know."
    AGENT_LEAVES = "An agent has nothing to do any more, and is about to end."

    LAUNCHER_STARTED = "A launcher has read its order."
    LAUNCHER_FORKED = "A launcher has started a process of its job."
    LAUNCHER_SAYS = "A launcher knows what the agent does not."
    LAUNCHER_SAID = "A launcher has told the agent."
    LAUNCHER_STOPS = "A launcher is about to stop its processes."
    LAUNCHER_STOPPED = "A launcher has stopped its processes."
    LAUNCHER_JOINS = "A launcher in restart mode has reached a round's store, and no worker runs."
    LAUNCHER_INVITES = "A launcher in live mode is about to tell a worker of a round."

    SUPERVISOR_FORKED = "A supervisor has started what it looks after."
    SUPERVISOR_SWEEPS = "A supervisor is about to kill what is left."
    FORK_SERVER_WARM = "A fork server has its imports, and its agent does not know."
    FORK_SERVER_FORKED = "A fork server has forked that of a job."
    JOB_SERVER_FORKED = "The fork server of a job has forked a worker."

    SERVICE_JOINS = "A service's process is about to join."
    SERVICE_JOINED = "A service's process has joined, and knows no view."
    SERVICE_DRAINS = "A service's process has handed over what it held, and has not told."
    WORKER_REPORTS = "A worker has made steps that the agent does not know."
    WORKER_REPORTED = "A worker has reported its steps."
    WORKER_WRITTEN = "A snapshot is written, and not in its place."
    WORKER_KEPT = "A snapshot is in its place."
    WORKER_SAVED = "A worker has saved for a drain, and not told."
    WORKER_DRAINED = "A worker has told that it saved, and waits for its end."
    WORKER_SHARES = "A live worker is in a new group, and has not the state."
    WORKER_SHARED = "A live worker has the state, and its launcher does not know."
    WORKER_ENTERED = "A live worker has told that it is of the new round."
    WORKER_COMMITS = "A step's updates are done on a live worker, and do not count yet."
    WORKER_COMMITTED = "A step counts on a live worker, and its peers do not know."

    SHARDS_LEAVE = "A live worker is about to give or take what only leavers have of the shards."
    SHARDS_LEFT = "A live worker has given or taken it, and its peers do not know."
    SHARDS_ARRIVED = "Shards have come to a live worker, and are not where they belong."
    SHARDS_FILLED = "A live worker has its new shards and the old ones, and its peers do not know."
    SHARDS_DROPPED = "A live worker knows that all have their new shards, and its peers may not."
    SHARDS_COPY = "A live worker is about to exchange copies of its shards with its neighbours."
    SHARDS_KEPT = "A live worker has copies of another step, and its neighbours may not."
    MEMORY_WRITTEN = "A rank's shards are in its node's memory, and no snapshot names them."
    MEMORY_KEPT = "A snapshot is in the memory of the nodes, and no other node has a copy."
    MEMORY_GIVES = "Another node has a part of what it was to get, and no snapshot that names it."
    MEMORY_GAVE = "Another node has all that it was to get, and nobody else knows."
    MEMORY_SETTLES = "A snapshot is wherever it has to be, and older ones are still there."
    KEEPER_TAKES = "All of a file has come to another node's keeper, and is not in its place."


STRUCK = ".struck"
"""Added to a point's name: the file that says that a process came there; it holds the pid."""
_FOLDER = os.environ.get(env.FAULTS, "")
_PASSED: dict[FaultPoint, int] = {}


class FaultRaised(OSError):
    """What a point armed with ``raise`` raises: no space is left on the device."""


def reached(point: FaultPoint) -> None:
    """This process is at ``point``."""
    if _FOLDER:
        _strike(point)


def _strike(point: FaultPoint) -> None:
    """Do what the file of this name says: ``kill``, ``stop`` or ``raise``, and after a space how
    often a process comes here until then (1).
    """
    order = os.path.join(_FOLDER, point.name)
    try:
        folder = os.stat(_FOLDER)
        if folder.st_uid != os.geteuid() or folder.st_mode & 0o022:
            return
        with open(order) as file:
            action, _, times = file.read().strip().partition(" ")
        _PASSED[point] = _PASSED.get(point, 0) + 1
        if _PASSED[point] < int(times or 1):
            return
        claimed = f"{order}.{os.getpid()}"
        os.rename(order, claimed)  # one process only
        with open(claimed, "w") as file:
            file.write(str(os.getpid()))
        os.rename(claimed, order + STRUCK)
    except (OSError, ValueError):
        return
    _PASSED.clear()
    if action == "raise":
        raise FaultRaised(errno.ENOSPC, os.strerror(errno.ENOSPC))
    os.kill(os.getpid(), signal.SIGSTOP if action == "stop" else signal.SIGKILL)
