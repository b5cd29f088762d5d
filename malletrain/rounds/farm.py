"""The membership of a farm: the nodes that take tasks from its queue. A pure state machine like
:mod:`malletrain.rounds.service`, with two differences:

* A member learns nothing of the others, only whether it leaves itself.
* A launcher that ends is started again, because its tasks are not lost. It uses up no try of the
  job, unless none has ever come up. A node on which it ends :data:`MAX_RESTARTS` times is rejected.

A farm is completed when its tasks are: see :mod:`malletrain.core.task_queue`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from malletrain.rounds.actions import Action, SendView
from malletrain.rounds.service import ServiceRounds

MAX_RESTARTS = 3
"""Maximum number of times that the launcher is started again on a node."""


@dataclass
class FarmRounds(ServiceRounds):
    """The members of one farm."""

    _restarts: dict[str, int] = field(default_factory=dict)
    """Node → number of times that its launcher was started again."""

    def _send_view(self, nodes: Iterable[str]) -> list[Action]:
        own = {entry[0]: entry for entry in self.view}
        return [
            SendView(node, self.generation, (own[node],) if node in own else ()) for node in nodes
        ]

    def _process_ended(self, node: str, now: float) -> list[Action]:
        if self.generation == 0:  # it has not come up anywhere
            return super()._process_ended(node, now)
        count = self._restarts[node] = self._restarts.get(node, 0) + 1
        if count > MAX_RESTARTS:
            return self._reject([node], f"the launcher of the farm ended there {count} times")
        self._came_up.discard(node)
        self._awaited, self.deadline = True, now + self.settings.warmup_s
        return self.holdings.assign(node)
