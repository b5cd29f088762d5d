"""What MalleTrain would harvest: a few simulations of the same jobs on the same idle nodes. Decides
which ones are worth comparing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from malletrain.sim.engine import Simulation
from malletrain.sim.policies import POLICIES
from malletrain.sim.report import Result
from malletrain.sim.settings import SimSettings
from malletrain.sim.workloads import SimJob
from scavenger.trace.trace import Trace

SAMPLES = 600
"""Points of the curve of nodes in use over time."""


@dataclass(frozen=True)
class Case:
    """One simulation: ``name`` and ``what`` say what is different from the first. ``series``:
    (hour, idle nodes, nodes with a job).
    """

    name: str
    what: str
    result: Result
    series: tuple[tuple[float, int, int], ...]


def cases(
    trace: Trace,
    jobs: Sequence[SimJob],
    settings: SimSettings,
    said: Callable[[str], None] = lambda what: None,
) -> list[Case]:
    """The settings asked for, and what each of a few changes would bring. ``said`` is told the name
    of each before it is simulated.

    Raises WorkloadError when there is nothing to simulate.
    """
    costs = settings.costs
    variants = [("as asked for", "the settings of this report", settings)]
    if settings.policy.name != "equal":
        equal = replace(settings, policy=POLICIES["equal"])
        variants.append(
            ("equal shares", "nodes shared equally, whatever the scaling curves say", equal)
        )
    if costs.semantics == "real" and costs.notice_s < 30:
        with_notice = replace(settings, costs=replace(costs, notice_s=30.0))
        variants.append(
            (
                "30 s of notice",
                "a grace time of 30 s between the notice of a preemption and its end",
                with_notice,
            )
        )
    if costs.semantics == "real" and costs.mode == "restart":
        live = replace(costs, mode="live", up_s=costs.up_s / 4, down_s=costs.down_s / 4)
        what = (
            f"workers that stay alive: pauses of {live.up_s:g} and {live.down_s:g} s, one step lost"
        )
        variants.append(("live mode", what, replace(settings, costs=live)))
    found = []
    for name, what, each in variants:
        said(name)
        until = (
            trace.duration_s if each.hours is None else min(trace.duration_s, each.hours * 3600.0)
        )
        simulation = Simulation(trace, jobs, replace(each, sample_s=until / SAMPLES))
        result = simulation.run()
        found.append(
            Case(
                name,
                what,
                result,
                tuple((at / 3600.0, idle, held) for at, idle, held in simulation.series),
            )
        )
    return found
