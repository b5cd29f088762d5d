"""What the core has in its memory of each job and node.

Only :class:`malletrain.core.state.ControllerState` writes a record; other modules read it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from allocator import RescaleCost, ScalingCurve
from malletrain.core.change_costs import StartCost
from malletrain.core.events import JobState, JobSubmitted
from malletrain.core.goodput import BatchState
from malletrain.core.planning import smallest_size
from malletrain.core.pools import Pool, PoolNode
from malletrain.core.scaling_model import ScalingModel


@dataclass
class JobRecord:
    """The controller's record of a job. Only :class:`ControllerState` writes it."""

    submitted: JobSubmitted
    order: int
    """Its number in order of submission."""
    place: int
    """Number of its entry in the queue. The jobs of a sweep share the number of the first one."""
    state: JobState
    nodes: tuple[str, ...] = ()
    tries: int = 0
    """Number of its tries: times that its workers failed by themselves."""
    last_failure_at: float | None = None
    """Time of the last such failure; None if there was none."""
    rescaling: bool = False
    """Whether its newest round has not processed a sample yet."""
    forced: bool = False
    """Whether no plan chose that round: a node was lost or leaves, or workers failed."""
    rescaled_at: float = -math.inf
    """Time at which the last round that a plan chose began to process samples."""
    planned: int = 0
    """Number of the plan that chose its newest round."""
    broken: bool = False
    """Whether its workers must be restarted."""
    idle_since: float | None = None
    """Time since which it is admitted without nodes; None if it was never admitted."""
    starving: bool = False
    """Whether it has been admitted without nodes for too long."""
    sweep_served: bool = False
    """Whether another job of its sweep had nodes while it waited."""
    guaranteed_until: float = 0.0
    """Time until which it keeps its minimum of nodes; 0 if it has no guarantee."""
    turn_left_s: float = 0.0
    """Remaining time of its last turn when it lost its nodes, seconds."""
    curve: ScalingCurve | None = None
    """Curve of its bids; None for the neutral prior."""
    cost: RescaleCost | None = None
    """Rescale cost in its bids; None for that of the settings."""
    batch: BatchState | None = None
    """What its script reports of its global batch; None if nothing is known."""
    goodput: ScalingCurve | None = None
    """What its bids value instead of ``curve``, if its batch follows the gradient noise."""
    advised_batch: int | None = None
    """The global batch that was advised to it last, samples; None if none was."""
    scaling: ScalingModel = field(default_factory=ScalingModel)
    """Measurements of its scaling."""
    interrupted_at: float | None = None
    """Time at which it last gave nodes to a profile; None if never."""
    halted: bool = False
    """Whether its budget is spent, so that it gets no nodes."""
    seeks_layout: bool = False
    """Whether the best layout of its nodes is being looked for. It is not profiled meanwhile."""
    worthless: bool = False
    """Whether nodes are worth nothing to it now, so that it gets none."""
    useful: int | None = None
    """Number of nodes beyond which further ones are of no use to it; None if all within its limits
    may be.
    """
    start: StartCost | None = None
    """Time until a process of a service is ready; None if ``cost`` has all its pauses."""
    pressing: bool = False
    """Whether its deadline moves it to the head of the queue."""

    @property
    def sizes(self) -> tuple[int, ...] | None:
        """The sizes that it can use: those that it accepts, without those at which its script
        crashed. None for every size within its limits.
        """
        spec, unusable = self.submitted, self.scaling.curve.unusable
        if not unusable:
            return spec.sizes
        accepted = spec.sizes or range(spec.min_nodes, spec.max_nodes + 1)
        usable = (k for k in accepted if k not in unusable)
        return tuple(k for k in usable if spec.min_nodes <= k <= spec.max_nodes) or spec.sizes

    @property
    def smallest(self) -> float:
        """Minimum number of nodes on which it can run; infinite if its sizes, limits or budget
        allow none, or nodes are worth nothing to it.
        """
        smallest_ = smallest_size(self.submitted.min_nodes, self.submitted.max_nodes, self.sizes)
        return math.inf if smallest_ is None or self.halted or self.worthless else smallest_

    @property
    def largest_useful(self) -> int:
        """Maximum number of nodes for which it bids."""
        spec = self.submitted
        if self.useful is None:
            return spec.max_nodes
        return min(spec.max_nodes, max(spec.min_nodes, self.useful))

    def accepts(self, size: int) -> bool:
        """Return whether it may run on ``size`` nodes."""
        spec, sizes = self.submitted, self.sizes
        within_limits = spec.min_nodes <= size <= spec.max_nodes
        may_run = not self.halted and not self.worthless
        return within_limits and may_run and (sizes is None or size in sizes)


@dataclass
class NodeRecord:
    """The controller's record of a leased node. Only :class:`ControllerState` writes it."""

    info: PoolNode
    """Its properties, in the pool of its owner."""
    ownerless_info: PoolNode
    """The same in the pool of its class with the empty owner, for plans in which every owner can
    get every node; the same object if its owner is empty.
    """
    job: str | None = None
    gone_at: float | None = None
    """Time at which the main scheduler takes it; None if it is not leaving."""
    review_at: float = 0.0
    """Time at which to check whether it is still needed, while no job has it."""
    due_until: float = -math.inf
    """Time before which releasing its lease saves no charge."""

    @property
    def pool(self) -> Pool:
        """Its pool."""
        return self.info.pool

    @property
    def owner(self) -> str:
        """User whose lease it is."""
        return self.info.pool.owner
