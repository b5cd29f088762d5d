"""What can happen to jobs, nodes and leases, and what each of it means: one table for the events of
the audit log, one for the states of a lease.

Decides the words that are stored, shown by ``malletrain events`` and documented. When an event is
written is the daemon's decision. ``python -m malletrain.protocol.event_kinds`` prints what
``docs/events.md`` holds.
"""

from __future__ import annotations

import sys
from enum import Enum


class Word(str, Enum):
    """A word that is stored as text, with the sentence of what it means."""

    meaning: str
    """For people who meet the word in a log: a sentence or two."""

    def __new__(cls, word: str, meaning: str) -> Word:
        made = str.__new__(cls, word)
        made._value_ = word
        made.meaning = meaning
        return made

    def __str__(self) -> str:
        return str(self.value)


class EventKind(Word):
    """The kinds of events of the audit log."""

    DAEMON_STARTED = (
        "daemon-started",
        "The daemon runs; it has read which jobs and leases there were.",
    )
    DAEMON_STOPPED = ("daemon-stopped", "The daemon was told to stop. Its jobs go on without it.")
    DAEMON_PARTITIONED = (
        "daemon-partitioned",
        "The daemon stood still, or was cut off from most agents at one moment. No agent is "
        "declared lost and nothing is planned until they report again; the jobs go on.",
    )
    CLOCK_SET = (
        "clock-set",
        "The clock of the daemon's host was set, by a minute or more. The daemon has taken its "
        "jobs and leases in hand anew, as after a restart; the jobs went on meanwhile. What the "
        "clock leapt over is neither charged nor counted.",
    )
    MESSAGE_FAILED = (
        "message-failed",
        "The daemon could not handle a message, which is a defect of it. The message counts for "
        "nothing. If memory and database were apart after it, the daemon has taken its jobs and "
        "leases in hand anew, as after a restart; the jobs went on meanwhile.",
    )
    SCHEDULER_BUSY = (
        "scheduler-busy",
        "The main scheduler said that it has too much to do, gave no answer in time, or could not "
        "be asked. It is asked more and more rarely, and for no leases, until scheduler-answers.",
    )
    SCHEDULER_ANSWERS = (
        "scheduler-answers",
        "The main scheduler, which had too much to do or could not be asked, answers as it should.",
    )
    LEASE_REQUESTED = (
        "lease-requested",
        "The main scheduler is asked for an idle node: a one-node job is submitted.",
    )
    LEASE_RELEASED = (
        "lease-released",
        "MalleTrain gives the node up: no job needs it, or another user's jobs need it more.",
    )
    LEASE_UNHEARD = (
        "lease-unheard",
        "The one-node job runs, but its agent has not reported for too long. It is cancelled, and "
        "the node is left alone for some minutes; the sentence guesses the cause.",
    )
    LEASE_ENDED = (
        "lease-ended",
        "The one-node job of the main scheduler is over, or never came up; the sentence says why.",
    )
    LEASING_PAUSED = (
        "leasing-paused",
        "An operator paused the daemon: nothing new is leased until leasing-resumed. The sentence "
        "says whether the leases are given back too.",
    )
    LEASING_RESUMED = ("leasing-resumed", "An operator ended the pause.")
    CONFIGURATION_RELOADED = (
        "configuration-reloaded",
        "The configuration was read again: what was taken over, and what waits for a restart.",
    )
    NODE_DRAINED = (
        "node-drained",
        "An operator drained the node: its job moves off, it is given back and left alone until "
        "node-resumed.",
    )
    NODE_EXCLUDED = (
        "node-excluded",
        "An operator excluded the node: no lease is taken there any more; one that is held stays.",
    )
    NODE_RESUMED = (
        "node-resumed",
        "The node may be leased again: an operator said so, or its drain was until now.",
    )
    NODE_JOINED = (
        "node-joined",
        "The agent on a leased node has reported; the node can be given to a job.",
    )
    NODE_LEAVING = (
        "node-leaving",
        "The node will go: the main scheduler has given notice of a preemption. Its job moves off.",
    )
    NODE_RECLAIMED = (
        "node-reclaimed",
        "MalleTrain will give the node back: another user's jobs have more use for it, an operator "
        "wants it back, or it is not fit for jobs. Its job moves off first. No preemption.",
    )
    NODE_VANISHED = (
        "node-vanished",
        "The node went without notice: preempted at once, crashed, or cut off. Always followed by "
        "node-lost.",
    )
    NODE_LOST = ("node-lost", "The node is no longer held, with or without notice.")
    NODE_REJECTED = (
        "node-rejected",
        "A job could not begin on the node, while it could elsewhere. The node gets no job for "
        "some minutes.",
    )
    NODE_SICK = (
        "node-sick",
        "The site's health check, or its GPUs, say that the node is not fit for jobs; or three "
        "jobs whose scripts work on other nodes failed there within a day, and none was done. Its "
        "job moves off, the node is given back and left alone for a while, longer each time, or "
        "until node-resumed.",
    )
    NODE_SLOW = (
        "node-slow",
        "In a job on several nodes this one took lastingly longer for its part of each step than "
        "the others, which waited for it; or its link carries far less than theirs (usual_mbit). "
        "It is remembered, and swapped out where that pays.",
    )
    NODE_NOT_SLOW = (
        "node-not-slow",
        "What was said of a slow node is taken back: the job's rank there has more to do than the "
        "others, whatever node it is on; or its link was measured well again (usual_mbit).",
    )
    JOB_SUBMITTED = ("job-submitted", "A user submitted a job; it waits in the admission queue.")
    JOB_STARTED = ("job-started", "A job without nodes is given some.")
    JOB_RESCALED = ("job-rescaled", "A running job is given more, fewer or other nodes.")
    JOB_SUSPENDED = (
        "job-suspended",
        "The job has fewer nodes than its minimum. It keeps its place and goes on later.",
    )
    JOB_ADOPTED = (
        "job-adopted",
        "A daemon that was started again has found the job running and undisturbed.",
    )
    ROUND_FORMED = (
        "round-formed",
        "The members of the job's next process group are fixed, with their ranks.",
    )
    NETWORK_CHOSEN = (
        "network-chosen",
        "By which network the rounds of the job go from now on, and why; only where the site names "
        "one (`interface` in `[nodes]`).",
    )
    BANDWIDTH_MEASURED = (
        "bandwidth-measured",
        "How much goes through one connection between two leased nodes of a class, in the network "
        "that the site names.",
    )
    JOB_HUNG = (
        "job-hung",
        "Workers that live have reported nothing for much longer than ever before. The event has "
        "their stacks; with --on-hang restart they are started again.",
    )
    ROUND_STUCK = (
        "round-stuck",
        "The job's newest round has made no step within `warmup_timeout`. The sentence says which "
        "ways between its nodes are blocked, if any, and what is done.",
    )
    RESCALE_FINISHED = (
        "rescale-finished",
        "The first sample after a change of scale was processed; the pause is known.",
    )
    DRAIN_WITHOUT_SNAPSHOT = (
        "drain-without-snapshot",
        "The workers were to save a snapshot at a step boundary before a rescale and did not; the "
        "job goes on from an older one. (Has nothing to do with the drain state of a node.)",
    )
    WORKERS_FAILED = (
        "workers-failed",
        "Workers of the job ended with an error although no node was lost. It is started again, a "
        "limited number of times.",
    )
    JOB_NOTICE = ("job-notice", "A message to the job's owner.")
    JOB_COMPLETED = ("job-completed", "The job's script ended well on every rank.")
    JOB_FAILED = ("job-failed", "The job's workers failed too often; it is not started again.")
    JOB_LIMITED = (
        "job-limited",
        "The job's owner or an operator gave it other limits of its scale.",
    )
    JOB_CANCELLED = ("job-cancelled", "The job's owner or an operator cancelled it.")
    JOB_EXTENDED = (
        "job-extended",
        "The job's deadline, budget or work is another from now on; its owner or an operator said "
        "so.",
    )
    GOAL_STANDING = (
        "goal-standing",
        "It stands otherwise than before with the job's deadline or budget: on_track, at_risk, "
        "infeasible, met or missed. The data say when the job ends by the forecast (tenth, "
        "fiftieth and ninetieth percentile), and when its first forecast was made and what its "
        "model said then (`first`: that time, and the three percentiles).",
    )
    BUDGET_SPENT = (
        "budget-spent",
        "The job has used up its budget. It is suspended and keeps its place; `malletrain extend` "
        "lets it go on.",
    )
    PROFILE_WAITING = (
        "profile-waiting",
        "The job's scaling is to be measured and cannot be yet; the sentence says why.",
    )
    PROFILE_STARTED = (
        "profile-started",
        "The job grows to the largest size wanted; its throughput is measured on the way down.",
    )
    NODES_DONATED = ("nodes-donated", "The job gave nodes to the profile of another job.")
    PROFILE_POINT = ("profile-point", "The throughput of one size was measured.")
    PROFILE_FINISHED = (
        "profile-finished",
        "The profile is over; the sentence and the data say what came of it.",
    )
    CURVE_CHANGED = (
        "curve-changed",
        "A running job's throughput is not what its curve says any more; the curve is corrected.",
    )


class LeaseStatus(Word):
    """The states of a lease in the daemon's store."""

    REQUESTED = ("requested", "Stored, and the main scheduler is being asked.")
    PENDING = ("pending", "The main scheduler has taken the request; the node is not ours yet.")
    RUNNING = ("running", "The one-node job runs.")
    LEAVING = ("leaving", "It is about to end: preempted with notice, released or reclaimed.")
    ENDED = ("ended", "Over. Every other state counts as active.")


def event_reference() -> str:
    """Every event and every state of a lease with what it means, as Markdown."""
    return "\n".join(
        [
            "# Events",
            "",
            "<!-- Made by `python -m malletrain.protocol.event_kinds`; edit its tables. -->",
            "",
            "`malletrain events` prints the audit log: everything that was decided and everything "
            "that happened,",
            "one event a line. Events are added and never changed or removed; the database itself "
            "refuses that.",
            "`--json` gives a program the number, time, kind, job, node, lease, sentence and data "
            "of each.",
            "",
            *_table("kind", EventKind),
            "",
            "## States of a lease",
            "",
            "A lease is stored before the main scheduler is asked for it, so that no crash can "
            "leave one behind unknown.",
            "",
            *_table("state", LeaseStatus),
            "",
        ]
    )


def _table(head: str, words: type[Word]) -> list[str]:
    rows = [f"| `{word}` | {word.meaning} |" for word in words]
    return [f"| {head} | what it means |", "|---|---|", *rows]


if __name__ == "__main__":
    sys.stdout.write(event_reference())
