"""The job profiling advisor: measures scaling curves while jobs train, from the largest size down.
Pure: no I/O, no clock, no threads.

The controller uses :class:`Advisor`. :class:`MeasuredCurve`, :class:`RescaleCosts` and
:class:`Monitor` continue to learn after the profile; :mod:`jpa.reuse` transfers curves to other
jobs.
"""

from jpa.advisor import Advisor
from jpa.costs import RescaleCosts
from jpa.curve import CurveChange, CurveConfig, MeasuredCurve
from jpa.donors import Donor, Offer, choose_nodes
from jpa.measure import MeasureConfig, Measurement, MeasurementState, Monitor, ThroughputMeter
from jpa.messages import (
    AdvisorAnswer,
    AdvisorEvent,
    AdvisorTick,
    JobEnded,
    NodesChanged,
    PointMeasured,
    PriorReceived,
    ProfileFinished,
    ProfileRequested,
    ProfileResult,
    ProfileWaiting,
    ProgressReported,
    ScaleReached,
    ScriptCrashed,
    SetSize,
)
from jpa.phase import Prior
from jpa.profile import AdvisorConfig, PlanConfig, ProfilePlan, ladder, new_plan, next_size
from jpa.reuse import ModelSize, StoredCurve, inherit_curve, prior_from, profile_key

__all__ = [
    "Advisor",
    "AdvisorAnswer",
    "AdvisorConfig",
    "AdvisorEvent",
    "AdvisorTick",
    "CurveChange",
    "CurveConfig",
    "Donor",
    "JobEnded",
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
    "PriorReceived",
    "ProfileFinished",
    "ProfilePlan",
    "ProfileRequested",
    "ProfileResult",
    "ProfileWaiting",
    "ProgressReported",
    "RescaleCosts",
    "ScaleReached",
    "ScriptCrashed",
    "SetSize",
    "StoredCurve",
    "ThroughputMeter",
    "choose_nodes",
    "inherit_curve",
    "ladder",
    "new_plan",
    "next_size",
    "prior_from",
    "profile_key",
]
