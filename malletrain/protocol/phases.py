"""The phases of a job on a node, in one table. Decides nothing."""

from __future__ import annotations

from enum import Enum


class AssignmentPhase(str, Enum):
    """Phase of a job on one node; :data:`PHASES` has the meaning of each."""

    STARTING = "starting"
    READY = "ready"
    RUNNING = "running"
    BETWEEN_EPOCHS = "between-epochs"
    FINISHING = "finishing"
    LOST = "lost"
    FAILED = "failed"
    EXITED = "exited"
    SUCCEEDED = "succeeded"

    __str__ = str.__str__  # its value, in sentences too


PHASES: dict[AssignmentPhase, str] = {
    AssignmentPhase.STARTING: "The launcher was started and has not reported yet.",
    AssignmentPhase.READY: "The launcher is up and waits for a round.",
    AssignmentPhase.RUNNING: "The workers are in the round of this generation.",
    AssignmentPhase.BETWEEN_EPOCHS: "The script is in the code after the steps of an epoch: a "
    "planned change of nodes waits until it has left it.",
    AssignmentPhase.FINISHING: "A worker has ended with code 0, or the script is in the code after "
    "its training: a change of nodes waits until the script ends.",
    AssignmentPhase.LOST: "The workers live, but their group broke: they wait for the next round "
    "(live mode).",
    AssignmentPhase.FAILED: "A worker failed; the launcher waits for the next round.",
    AssignmentPhase.EXITED: "The launcher is gone; the job has to be assigned again.",
    AssignmentPhase.SUCCEEDED: "Every worker on the node ended with code 0.",
}
RESTART_CODE = 75
"""Exit code with which a worker in live mode asks its launcher to start it again (EX_TEMPFAIL of
sysexits.h). It says so on its socket, too, since a script may use any exit code.
"""
TRAINS = (AssignmentPhase.RUNNING, AssignmentPhase.BETWEEN_EPOCHS)
"""Phases in which the workers can save their state on request."""
HOLDING = (*TRAINS, AssignmentPhase.FINISHING, AssignmentPhase.LOST)
"""Phases in which the workers of a live job hold its state."""
UP = (AssignmentPhase.READY, AssignmentPhase.RUNNING)
"""Phases in which the process of a service exists."""
TAKES_ROUND = (
    AssignmentPhase.READY,
    *TRAINS,
    AssignmentPhase.FINISHING,
    AssignmentPhase.FAILED,
    AssignmentPhase.SUCCEEDED,
)
"""Phases in which the launcher can take a round: it waits for one, or its workers run and will be
stopped.
"""
AT_WORK = (*TRAINS, AssignmentPhase.FINISHING, AssignmentPhase.SUCCEEDED)
"""Phases in which the workers run or have succeeded."""
BROKEN = (AssignmentPhase.FAILED, AssignmentPhase.EXITED)
"""Phases that have a failure cause."""
OF_NO_ROUND = (AssignmentPhase.STARTING, AssignmentPhase.READY, AssignmentPhase.EXITED)
"""Phases that are valid with any generation."""
