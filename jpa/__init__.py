"""Job profiling advisor: scaling curves measured while a job trains, from the largest size down.
Pure: no I/O, no clock, no threads.

:class:`Advisor` is the door for the controller; :class:`MeasuredCurve`, :class:`RescaleCosts` and
:class:`Monitor` go on learning after the profile; :mod:`jpa.reuse` carries curves to other jobs.
"""

from jpa.advisor import Advisor, AdvisorConfig
from jpa.costs import RescaleCosts
from jpa.curve import Change, CurveConfig, MeasuredCurve, phase_name
from jpa.donors import Donor, Offer, choose_nodes
from jpa.measure import MeasureConfig, Measurement, Monitor, Outcome, ThroughputMeter
from jpa.messages import (
    AdvisorEvent,
    Answer,
    Crashed,
    Finished,
    JobGone,
    NodesChanged,
    PointMeasured,
    ProfileWanted,
    Progress,
    Result,
    Scaled,
    SetSize,
    Suggested,
    Tick,
    Waiting,
)
from jpa.phase import Prior
from jpa.plan import PlanConfig, ProfilePlan, ladder, new_plan, next_size
from jpa.reuse import ModelSize, Stored, inherited, prior_from, profile_key

__all__ = [
    "Advisor",
    "AdvisorConfig",
    "AdvisorEvent",
    "Answer",
    "Change",
    "Crashed",
    "CurveConfig",
    "Donor",
    "Finished",
    "JobGone",
    "MeasureConfig",
    "MeasuredCurve",
    "Measurement",
    "ModelSize",
    "Monitor",
    "NodesChanged",
    "Offer",
    "Outcome",
    "PlanConfig",
    "PointMeasured",
    "Prior",
    "ProfilePlan",
    "ProfileWanted",
    "Progress",
    "RescaleCosts",
    "Result",
    "Scaled",
    "SetSize",
    "Stored",
    "Suggested",
    "ThroughputMeter",
    "Tick",
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
