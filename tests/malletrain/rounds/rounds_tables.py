"""Helpers of the tables of a job's rounds: messages of agents, and a job whose first round runs."""

from __future__ import annotations

from malletrain.protocol.messages import Assignment, Failure
from malletrain.protocol.phases import OF_NO_ROUND, AssignmentPhase
from malletrain.rounds.interface import RoundSettings, RoundStage
from malletrain.rounds.restart import RestartRounds

SETTINGS = RoundSettings(
    warmup_s=60.0, warmup_blocking_s=15.0, drain_s=10.0, join_s=60.0, failure_grace_s=2.0
)
STORE = ("a", 29500)
CLOSED = "RuntimeError: Connection closed by peer [10.0.0.1]:4242"


def says(r, now, phase, *nodes, generation=None, failures=()):
    """The agents on ``nodes`` report ``phase``; what follows from all of them."""
    if generation is None:
        generation = 0 if AssignmentPhase(phase) in OF_NO_ROUND else r.generation
    return [
        action
        for node in nodes
        for action in r.phase(
            node, Assignment("j", AssignmentPhase(phase), generation, failures), now
        )
    ]


def fails(r, now, node, *, rank=0, code=1, tail="ValueError: oops", time=None):
    failure = Failure(rank, code, now if time is None else time, tail)
    return says(r, now, "failed", node, failures=(failure,))


def running(*nodes, low=1, now=100.0):
    """A job whose first round runs on ``nodes``."""
    r = RestartRounds(SETTINGS, min_nodes=low)
    r.move(nodes, now)
    says(r, now + 1, "ready", *nodes)
    r.store_up(nodes[0], 1, *STORE)
    says(r, now + 2, "running", *nodes)
    assert (r.stage, r.generation, r.members) == (RoundStage.RUNNING, 1, nodes)
    return r


def settle(r, now, *nodes):
    """The round that is being formed comes up on ``nodes``."""
    r.store_up(r.members[0], r.generation, *STORE)
    says(r, now, "running", *nodes)
    return r
