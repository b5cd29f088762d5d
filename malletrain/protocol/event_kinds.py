"""Tables of the kinds of events in the audit log and of the states of a lease, with their meanings.

Decides the words that are stored, shown by ``malletrain events`` and documented. The daemon decides
when an event is written. ``python -m malletrain.protocol.event_kinds`` prints ``docs/events.md``.
"""

from __future__ import annotations

import sys
from enum import Enum


class Word(str, Enum):
    """A word that is stored as text, with its meaning."""

    meaning: str
    """One or two sentences for readers of a log."""

    def __new__(cls, word: str, meaning: str) -> Word:
        member = str.__new__(cls, word)
        member._value_ = word
        member.meaning = meaning
        return member

    def __str__(self) -> str:
        return str(self.value)


class EventKind(Word):
    """The kinds of events of the audit log."""

    DAEMON_STARTED = (
        "daemon-started",
        "The daemon runs; it has read the stored jobs and leases.",
    )
    DAEMON_STOPPED = (
        "daemon-stopped",
        "The daemon was asked to stop. Its jobs continue without it.",
    )
    DAEMON_PARTITIONED = (
        "daemon-partitioned",
        "The daemon was paused, or lost the connection to most agents at the same time. No agent "
        "is declared lost and nothing is planned until they report again; the jobs continue.",
    )
    CLOCK_SET = (
        "clock-set",
        "The clock of the daemon's host was changed by a minute or more. The daemon has adopted "
        "its jobs and leases again, as after a restart; the jobs continued meanwhile. The time "
        "that the clock skipped is neither charged nor counted.",
    )
    MESSAGE_FAILED = (
        "message-failed",
        "The daemon could not handle a message, which is a defect of the daemon. The message has "
        "no effect. If memory and database differed after it, the daemon has adopted its jobs and "
        "leases again, as after a restart; the jobs continued meanwhile.",
    )
    SCHEDULER_BUSY = (
        "scheduler-busy",
        "The main scheduler reported that it is overloaded, did not answer in time, or could not "
        "be reached. It is asked less and less often, and for no leases, until "
        "scheduler-answers.",
    )
    SCHEDULER_ANSWERS = (
        "scheduler-answers",
        "The main scheduler, which was overloaded or could not be reached, answers normally again.",
    )
    LEASE_REQUESTED = (
        "lease-requested",
        "A lease on an idle node is requested: a one-node job is submitted to the main scheduler.",
    )
    LEASE_RELEASED = (
        "lease-released",
        "MalleTrain gives the node back: no job needs it, or another user's jobs need it more.",
    )
    LEASE_UNHEARD = (
        "lease-unheard",
        "The one-node job runs, but its agent has not reported within `lease_wait`. It is "
        "cancelled, and the node is not leased for some minutes; the sentence names a probable "
        "cause.",
    )
    LEASE_ENDED = (
        "lease-ended",
        "The one-node job of the main scheduler ended or never started; the sentence says why.",
    )
    LEASING_PAUSED = (
        "leasing-paused",
        "An operator paused the daemon: no new leases are requested until leasing-resumed. The "
        "sentence says whether the leases are given back too.",
    )
    LEASING_RESUMED = ("leasing-resumed", "An operator ended the pause.")
    CONFIGURATION_RELOADED = (
        "configuration-reloaded",
        "The configuration was read again: which changes were applied, and which wait for a "
        "restart.",
    )
    NODE_DRAINED = (
        "node-drained",
        "An operator drained the node: its job leaves it, the lease is released, and the node is "
        "not leased until node-resumed.",
    )
    NODE_EXCLUDED = (
        "node-excluded",
        "An operator excluded the node: no lease is requested there; an existing lease stays.",
    )
    NODE_RESUMED = (
        "node-resumed",
        "The node may be leased again: an operator resumed it, or the time of its drain is over.",
    )
    NODE_JOINED = (
        "node-joined",
        "The agent on a leased node has reported; the node can be given to a job.",
    )
    NODE_LEAVING = (
        "node-leaving",
        "The node will leave: the main scheduler has given notice of a preemption. Its job moves "
        "off.",
    )
    NODE_EXPIRING = (
        "node-expiring",
        "The node will leave: the time limit of its lease is reached. Its job moves off. No "
        "preemption.",
    )
    NODE_RECLAIMED = (
        "node-reclaimed",
        "MalleTrain will give the node back: another user's jobs have more use for it, an operator "
        "wants it back, or it is not fit for jobs. Its job moves off first. No preemption.",
    )
    NODE_VANISHED = (
        "node-vanished",
        "The node left without notice: preempted at once, crashed, or disconnected. Always "
        "followed by node-lost.",
    )
    NODE_LOST = ("node-lost", "The node is no longer held, with or without notice.")
    NODE_REJECTED = (
        "node-rejected",
        "A job could not start on the node, but could on others; or its launcher ended there again "
        "and again; or tasks of a farm failed on it that succeeded on others. The node gets no job "
        "for some minutes.",
    )
    NODE_SICK = (
        "node-sick",
        "The site's health check or the GPU check found the node unfit for jobs; or three "
        "jobs whose scripts work on other nodes failed there within a day, and none completed. "
        "Its job leaves it, the lease is released, and the node is not leased for a while, longer "
        "each time, or until node-resumed.",
    )
    NODE_SLOW = (
        "node-slow",
        "In a job on several nodes this node persistently took longer for its part of each step "
        "than the others, which waited for it; or its link is much slower than theirs (`mbit`: its "
        "bandwidth, `usual_mbit`: theirs, in Mbit/s). The node is remembered as slow, and swapped "
        "out if that pays.",
    )
    NODE_NOT_SLOW = (
        "node-not-slow",
        "The node no longer counts as slow: the job's rank there has more work than the "
        "others on any node; or a new measurement of its link is good (the data then have "
        "`usual_mbit`).",
    )
    JOB_SUBMITTED = ("job-submitted", "A user submitted a job; it waits in the admission queue.")
    JOB_STARTED = ("job-started", "A job without nodes gets nodes.")
    JOB_RESCALED = ("job-rescaled", "A running job gets more, fewer or other nodes.")
    LAYOUT_CHANGED = (
        "layout-changed",
        "The processes of a job are started again on the same nodes, with other numbers of "
        "processes, threads or loader workers (`layout`).",
    )
    LAYOUT_FOUND = (
        "layout-found",
        "The search for the best layout of a job's nodes has ended, or an earlier job had found "
        "it; the sentence says why this one. The data have the layout, the default, the seconds of "
        "the search, and the throughput in each layout that was measured (`rates`: processes, "
        "threads, loader workers, samples/s).",
    )
    LAYOUT_FAILED = (
        "layout-failed",
        "The processes of a job failed in a layout other than the default. The layout is not tried "
        "again, and the failure does not count.",
    )
    JOB_SUSPENDED = (
        "job-suspended",
        "The job has fewer nodes than its minimum. It keeps its place and continues later.",
    )
    COMMAND_RUN = (
        "command-run",
        "The owner of a job runs a command on one of its nodes (`malletrain exec`). The event has "
        "the user and the first word of the command.",
    )
    JOB_ADOPTED = (
        "job-adopted",
        "A restarted daemon has found the job running without interruption.",
    )
    ROUND_FORMED = (
        "round-formed",
        "The members of the job's next process group are fixed, with their ranks.",
    )
    NETWORK_CHOSEN = (
        "network-chosen",
        "The network that the job's rounds use from now on, and why; only if the site names "
        "one (`interface` in `[nodes]`).",
    )
    BANDWIDTH_MEASURED = (
        "bandwidth-measured",
        "The bandwidth of one connection between two leased nodes of a class, in the network "
        "that the site names.",
    )
    JOB_HUNG = (
        "job-hung",
        "Live workers have reported nothing for much longer than ever before. The event has "
        "their stacks; with --on-hang restart they are restarted.",
    )
    ROUND_STUCK = (
        "round-stuck",
        "The job's newest round has made no step within `warmup_timeout`. The sentence says which "
        "connections between its nodes are blocked, if any, and what is done.",
    )
    RESCALE_FINISHED = (
        "rescale-finished",
        "The first sample after a rescale was processed; the length of the pause is known.",
    )
    DRAIN_WITHOUT_SNAPSHOT = (
        "drain-without-snapshot",
        "The workers did not save a snapshot at a step boundary before a rescale; the "
        "job continues from an older one. (Not related to the drain state of a node.)",
    )
    WORKERS_FAILED = (
        "workers-failed",
        "Workers of the job ended with an error although no node was lost. The job is restarted, "
        "up to `max_tries` times.",
    )
    TASKS_FAILING = (
        "tasks-failing",
        "Tasks of a farm in a row failed on the node, and it gets one of them from time to time.",
    )
    JOB_NOTICE = ("job-notice", "A message to the job's owner.")
    JOB_COMPLETED = ("job-completed", "The job's script ended with exit code 0 on every rank.")
    JOB_FAILED = ("job-failed", "The job's workers failed too often; it is not restarted.")
    JOB_LIMITED = (
        "job-limited",
        "The job's owner or an operator changed its minimum or maximum number of nodes.",
    )
    NODES_VALUED = (
        "nodes-valued",
        "The owner of the service set what numbers of nodes are worth to it.",
    )
    VALUES_LAPSED = (
        "values-lapsed",
        "What numbers of nodes are worth to the service had a limit and was not renewed; the last "
        "values without a limit apply again.",
    )
    MEMBER_READY = (
        "member-ready",
        "A process of the service is ready; the sentence and `start_s` say how long after its "
        "start.",
    )
    JOB_CANCELLED = ("job-cancelled", "The job's owner or an operator cancelled it.")
    JOB_EXTENDED = (
        "job-extended",
        "The job's owner or an operator changed its deadline, budget or work.",
    )
    GOAL_STANDING = (
        "goal-standing",
        "The standing of the job's deadline or budget changed: on_track, at_risk, "
        "infeasible, met or missed. The data hold the forecast of the job's end (tenth, "
        "fiftieth and ninetieth percentile), and its first forecast (`first`: the time at which "
        "it was made, and the three percentiles).",
    )
    BUDGET_SPENT = (
        "budget-spent",
        "The job has used up its budget. It is suspended and keeps its place; `malletrain extend` "
        "lets it continue.",
    )
    PROFILE_WAITING = (
        "profile-waiting",
        "The job's scaling is to be measured, which is not possible yet; the sentence says why.",
    )
    PROFILE_STARTED = (
        "profile-started",
        "The job grows to the largest size of its profile; its throughput is measured on the way "
        "down.",
    )
    NODES_DONATED = ("nodes-donated", "The job gave nodes to the profile of another job.")
    PROFILE_POINT = ("profile-point", "The throughput of one size was measured.")
    PROFILE_FINISHED = (
        "profile-finished",
        "The profile is over; the sentence and the data hold its result.",
    )
    CURVE_CHANGED = (
        "curve-changed",
        "A running job's throughput differs from its curve; the curve is corrected.",
    )


class LeaseStatus(Word):
    """The states of a lease in the daemon's store."""

    REQUESTED = ("requested", "Stored; its request to the main scheduler is in progress.")
    PENDING = (
        "pending",
        "The main scheduler has accepted the request; the one-node job does not run yet.",
    )
    RUNNING = ("running", "The one-node job runs.")
    LEAVING = ("leaving", "It is about to end: preempted with notice, released or reclaimed.")
    ENDED = ("ended", "It has ended. Every other state counts as active.")


def event_reference() -> str:
    """Return every kind of event and every state of a lease with its meaning, as Markdown."""
    return "\n".join(
        [
            "# Events",
            "",
            "<!-- Made by `python -m malletrain.protocol.event_kinds`; edit its tables. -->",
            "",
            "`malletrain events` prints the audit log: every decision and every occurrence,",
            "one event per line. Events are added and never changed or removed; the database "
            "refuses such changes.",
            "`--json` prints the number, time, kind, job, node, lease, sentence and data of each "
            "for programs.",
            "",
            *_table("kind", EventKind),
            "",
            "## States of a lease",
            "",
            "A lease is stored before it is requested from the main scheduler, so that no crash "
            "can leave an unknown lease behind.",
            "",
            *_table("state", LeaseStatus),
            "",
        ]
    )


def _table(head: str, words: type[Word]) -> list[str]:
    rows = [f"| `{word}` | {word.meaning} |" for word in words]
    return [f"| {head} | meaning |", "|---|---|", *rows]


if __name__ == "__main__":
    sys.stdout.write(event_reference())
