"""Job profiling advisor: scaling curves measured while a job trains, from the largest size down.
Pure: no I/O, no clock, no threads.

:class:`Advisor` is the door for the controller; :class:`MeasuredCurve`, :class:`RescaleCosts` and
:class:`Monitor` go on learning after the profile; :mod:`jpa.reuse` carries curves to other jobs.
"""

from jpa.advisor import Advisor
from jpa.costs import RescaleCosts
from jpa.curve import CurveChange, CurveConfig, MeasuredCurve, phase_name
from jpa.donors import Donor, Offer, choose_nodes
from jpa.measure import MeasureConfig, Measurement, MeasurementState, Monitor, ThroughputMeter
from jpa.messages import (
    AdvisorAnswer,
    AdvisorEvent,
    AdvisorTick,
    Crashed,
    JobGone,
    NodesChanged,
    PointMeasured,
    ProfileFinished,
    ProfileResult,
    ProfileWanted,
    ProgressSeen,
    Scaled,
    SetSize,
    Suggested,
    Waiting,
)
from jpa.phase import Prior
from jpa.plan import PlanConfig, ProfilePlan, ladder, new_plan, next_size
from jpa.profile import AdvisorConfig
from jpa.reuse import ModelSize, Stored, inherited, prior_from, profile_key

__all__ = [
    "Advisor",
    "AdvisorAnswer",
    "AdvisorConfig",
    "AdvisorEvent",
    "AdvisorTick",
    "Crashed",
    "CurveChange",
    "CurveConfig",
    "Donor",
    "JobGone",
    "MeasureConfig",
    "MeasuredCurve",
    "Measurement",
    "MeasurementState",
    "ModelSize",
    "Monitor",
    "NodesChanged",
    "Offer",
    "PlanConfig",
    "PointMeasured",
    "Prior",
    "ProfileFinished",
    "ProfilePlan",
    "ProfileResult",
    "ProfileWanted",
    "ProgressSeen",
    "RescaleCosts",
    "Scaled",
    "SetSize",
    "Stored",
    "Suggested",
    "ThroughputMeter",
    "Waiting",
    "choose_nodes",
    "inherited",
    "ladder",
    "new_plan",
    "next_size",
    "phase_name",
    "prior_from",
    "profile_key",
]
