"""The policies of the dispatcher: whose request is next, and which are refused. Pure."""

from llmserve.policies.fairserve import Application, FairServe, FairServeSettings
from llmserve.policies.fcfs import Fcfs
from llmserve.policies.interface import Load, SchedulingPolicy
from llmserve.policies.rpm import RequestsPerMinute
from llmserve.policies.throttle import Throttle, ThrottleLimits
from llmserve.policies.vtc import VirtualTokenCounter

__all__ = [
    "Application",
    "FairServe",
    "FairServeSettings",
    "Fcfs",
    "Load",
    "RequestsPerMinute",
    "SchedulingPolicy",
    "Throttle",
    "ThrottleLimits",
    "VirtualTokenCounter",
]
