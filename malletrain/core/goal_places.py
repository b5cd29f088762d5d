"""Decides for which class of nodes a job's forecasts are made, and which jobs are assumed to
compete.

A job without nodes is forecast on the most frequent class that its trainer may use. The parts of
trainers are ignored, because each plan divides the nodes again.
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
        """Return the class of its nodes, or the class that it is likely to get."""
        nodes = self._state.nodes
        own_classes = (nodes[n].info.node_class for n in job.nodes if n in nodes)
        trainer = self._trainers.of(job.submitted.trainer)
        return next(own_classes, None) or self._history.usual_class(
            trainer.may_use if trainer else None
        )

    def rivals(self, node_class: str) -> list[int]:
        """Return the maximum size of every unfinished job that may use the class, ascending."""
        may_use = {}
        for trainer in self._trainers:
            if trainer is not None:
                may_use[trainer.name] = trainer.may_use(node_class)
        jobs = self._state.unfinished.values()
        return sorted(
            job.submitted.max_nodes
            for job in jobs
            if (trainer := self._trainers.of(job.submitted.trainer)) is None
            or may_use[trainer.name]
        )
