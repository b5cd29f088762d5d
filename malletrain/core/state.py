"""What the controller is told once (its settings) and what it remembers of jobs and nodes. Decides
nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from allocator import NodeInfo, RescaleCost, ScalingCurve
from malletrain.core.events import JobState, JobSubmitted
from malletrain.core.planning import PlanningSettings, smallest_size
from malletrain.core.pools import pool
from malletrain.core.profiling import ProfilingSettings
from malletrain.core.scaling_model import ScalingModel


@dataclass(frozen=True)
class ControllerSettings:
    """How patient the controller is; times in seconds.

    ``settle_s``: node events this close together are one plan; ``notice_settle_s``: the same for
    notices of preemptions, for whose nodes the main scheduler's jobs wait. ``min_interval_s``: a
    job that nothing forces is rescaled no more often than this. ``starvation_s``: an admitted job
    without nodes for so long gets its minimum, and keeps it for as long. ``max_tries``: the job has
    failed when its workers broke so many times, each within ``retry_window_s`` of the last.
    ``give_back_after_s``: a lease nobody uses is given back. ``min_horizon_s``: shorter gaps are
    not worth a lease. ``lease_wait_s``: a lease asked for that has not come up by then is
    forgotten. ``unfit_s``: a node on which no launcher comes up is left alone for so long.
    ``recall_s``: a job may take so long to move off a node that another owner's job has more use
    for; ``recall_every_s``: nodes are taken from one owner for another no more often than this.
    ``profiling``: how jobs are profiled; None: they are not.
    """

    planning: PlanningSettings = field(default_factory=PlanningSettings)
    settle_s: float = 1.0
    notice_settle_s: float = 1.0
    min_interval_s: float = 0.0
    starvation_s: float = 600.0
    max_tries: int = 3
    retry_window_s: float = 3600.0
    give_back_after_s: float = 30.0
    min_horizon_s: float = 0.0
    lease_wait_s: float = 120.0
    unfit_s: float = 300.0
    recall_s: float = 30.0
    recall_every_s: float = 60.0
    profiling: ProfilingSettings | None = None


@dataclass
class JobRecord:
    """What the controller remembers of a job. Read it from outside, only the controller changes it.

    ``idle_since``: since when it has had a place but no nodes (None: never had a place).
    ``turn_until``: it keeps its minimum until then. ``broken``: its workers must be restarted.
    ``planned``: the number of the plan that its newest round is from. ``rescaling``: that round has
    not processed a sample yet; ``forced``: nobody chose it; ``rescaled_at``: when the last one that
    was chosen had. ``curve``, ``cost``: what the bids are made from. ``learned``: what was
    measured; ``interrupted_at``: when it last gave nodes to a profile.
    """

    submitted: JobSubmitted
    order: int
    state: JobState
    nodes: tuple[str, ...] = ()
    tries: int = 0
    last_broke: float | None = None
    rescaling: bool = False
    forced: bool = False
    rescaled_at: float = -math.inf
    planned: int = 0
    broken: bool = False
    idle_since: float | None = None
    starving: bool = False
    turn_until: float = 0.0
    curve: ScalingCurve | None = None
    cost: RescaleCost | None = None
    learned: ScalingModel = field(default_factory=ScalingModel)
    interrupted_at: float | None = None

    @property
    def sizes(self) -> tuple[int, ...] | None:
        """The sizes it can use: those it accepts, without those at which its script crashed; None
        for every one within its limits.
        """
        spec, unusable = self.submitted, self.learned.curve.unusable
        if not unusable:
            return spec.sizes
        accepted = spec.sizes or range(spec.min_nodes, spec.max_nodes + 1)
        return (
            tuple(
                k for k in accepted if k not in unusable and spec.min_nodes <= k <= spec.max_nodes
            )
            or spec.sizes
        )

    @property
    def smallest(self) -> float:
        """The fewest nodes it can run on; infinite when its sizes and limits leave none."""
        found = smallest_size(self.submitted.min_nodes, self.submitted.max_nodes, self.sizes)
        return math.inf if found is None else found

    def accepts(self, size: int) -> bool:
        """Whether it may run on ``size`` nodes."""
        spec, sizes = self.submitted, self.sizes
        return spec.min_nodes <= size <= spec.max_nodes and (sizes is None or size in sizes)


@dataclass
class NodeRecord:
    """What the controller remembers of a leased node. ``owner``: whose lease it is. ``review_at``:
    when to ask whether it is still of use, while no job has it.
    """

    info: NodeInfo
    owner: str = ""
    job: str | None = None
    gone_at: float | None = None
    review_at: float = 0.0

    @property
    def pool(self) -> str:
        """The pool it is in."""
        return pool(self.info.node_class, self.owner)
