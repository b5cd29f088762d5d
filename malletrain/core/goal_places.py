"""For which class of nodes a job's forecasts are made, and which other jobs are assumed to compete.

A job without nodes is forecast on the most usual class among those that its trainer may use. The
proportions in which trainers share a class are left out, because each plan divides it anew.
"""

from __future__ import annotations

from malletrain.core.node_history import NodeHistory
from malletrain.core.records import JobRecord
from malletrain.core.state import ControllerState
from malletrain.core.trainers import Trainers


class GoalPlaces:
    """The classes of one controller's jobs."""

    def __init__(self, state: ControllerState, history: NodeHistory, trainers: Trainers) -> None:
        self._state = state
        self._history = history
        self._trainers = trainers

    def class_of(self, job: JobRecord) -> str:
        """That of its nodes, else the one it is likely to have."""
        nodes = self._state.nodes
        own_classes = (nodes[n].info.node_class for n in job.nodes if n in nodes)
        trainer = self._trainers.of(job.submitted.trainer)
        return next(own_classes, None) or self._history.usual_class(
            trainer.may_use if trainer else None
        )

    def rivals(self, node_class: str) -> list[int]:
        """The most nodes of every unfinished job that may use the class, ascending."""
        able = {}
        for trainer in self._trainers:
            if trainer is not None:
                able[trainer.name] = trainer.may_use(node_class)
        jobs = self._state.unfinished.values()
        return sorted(
            job.submitted.max_nodes
            for job in jobs
            if (trainer := self._trainers.of(job.submitted.trainer)) is None or able[trainer.name]
        )
