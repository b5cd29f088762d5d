"""What the core stores of each job and node.

Only :class:`malletrain.core.state.ControllerState` writes a record; everybody else reads it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from allocator import NodeInfo, RescaleCost, ScalingCurve
from malletrain.core.events import JobState, JobSubmitted
from malletrain.core.planning import smallest_size
from malletrain.core.pools import pool
from malletrain.core.scaling_model import ScalingModel


@dataclass
class JobRecord:
    """What the controller remembers of a job. Only :class:`ControllerState` writes it."""

    submitted: JobSubmitted
    order: int
    """Its number in order of submission."""
    place: int
    """The number of its entry in the queue: of a sweep's jobs that of the first."""
    state: JobState
    nodes: tuple[str, ...] = ()
    tries: int = 0
    """How often its workers failed by themselves."""
    last_broke: float | None = None
    """When they last did."""
    rescaling: bool = False
    """Its newest round has not processed a sample yet."""
    forced: bool = False
    """Nobody chose that round: a node was lost or leaves, or workers failed."""
    rescaled_at: float = -math.inf
    """When the last round that was chosen began to process samples."""
    planned: int = 0
    """The number of the plan that its newest round is from."""
    broken: bool = False
    """Its workers must be started again."""
    idle_since: float | None = None
    """Since when it has had a place but no nodes; None: it never had a place."""
    starving: bool = False
    """It has had a place and no nodes for too long."""
    sweep_served: bool = False
    """Another job of its sweep has had nodes while it waited."""
    guaranteed_until: float = 0.0
    """It keeps its minimum until then; 0: it has no guarantee."""
    turn_left_s: float = 0.0
    """What it had not had yet of its last turn when it lost its nodes."""
    curve: ScalingCurve | None = None
    """What its bids are made from; None: the neutral prior."""
    cost: RescaleCost | None = None
    """What its bids take a change of scale to cost; None: what the settings say."""
    scaling: ScalingModel = field(default_factory=ScalingModel)
    """What was measured of its scaling."""
    interrupted_at: float | None = None
    """When it last gave nodes to a profile."""
    halted: bool = False
    """Its budget is spent: it gets no nodes."""
    pressing: bool = False
    """Its deadline sends it to the head of the queue."""

    @property
    def sizes(self) -> tuple[int, ...] | None:
        """The sizes it can use: those it accepts, without those at which its script crashed; None
        for every one within its limits.
        """
        spec, unusable = self.submitted, self.scaling.curve.unusable
        if not unusable:
            return spec.sizes
        accepted = spec.sizes or range(spec.min_nodes, spec.max_nodes + 1)
        usable = (k for k in accepted if k not in unusable)
        return tuple(k for k in usable if spec.min_nodes <= k <= spec.max_nodes) or spec.sizes

    @property
    def smallest(self) -> float:
        """The fewest nodes it can run on; infinite when its sizes, limits or budget leave none."""
        smallest_ = smallest_size(self.submitted.min_nodes, self.submitted.max_nodes, self.sizes)
        return math.inf if smallest_ is None or self.halted else smallest_

    def accepts(self, size: int) -> bool:
        """Whether it may run on ``size`` nodes."""
        spec, sizes = self.submitted, self.sizes
        within = spec.min_nodes <= size <= spec.max_nodes and not self.halted
        return within and (sizes is None or size in sizes)


@dataclass
class NodeRecord:
    """What the controller remembers of a leased node. Only :class:`ControllerState` writes it."""

    info: NodeInfo
    owner: str = ""
    """Whose lease it is."""
    job: str | None = None
    gone_at: float | None = None
    """When the main scheduler takes it; None: it is not leaving."""
    review_at: float = 0.0
    """When to ask whether it is still of use, while no job has it."""
    due_until: float = -math.inf
    """Until then its lease costs no less if it is given back."""

    @property
    def pool(self) -> str:
        """The pool it is in."""
        return pool(self.info.node_class, self.owner)
