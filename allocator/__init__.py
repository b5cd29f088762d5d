"""How many nodes each malleable job gets, and which: bids and nodes in, plan out. Pure functions
over HiGHS.
"""

from allocator.allocation import Allocation
from allocator.baselines import equal_share, fcfs
from allocator.bids import Bid, BidError, SizeValues
from allocator.curves import CurveError, ScalingCurve
from allocator.milp import MonotonicClock, no_clock, solve
from allocator.objectives import Beyond, Goal, RescaleCost, multiples, powers_of_two
from allocator.outlook import Cohort, Outlook, expected_s, survivals
from allocator.placement import NodeInfo, PlacementError, place
from allocator.valuation import BidRequest, make_bid, make_bids

__all__ = [
    "Allocation",
    "Beyond",
    "Bid",
    "BidError",
    "BidRequest",
    "Cohort",
    "CurveError",
    "Goal",
    "MonotonicClock",
    "NodeInfo",
    "Outlook",
    "PlacementError",
    "RescaleCost",
    "ScalingCurve",
    "SizeValues",
    "equal_share",
    "expected_s",
    "fcfs",
    "make_bid",
    "make_bids",
    "multiples",
    "no_clock",
    "place",
    "powers_of_two",
    "solve",
    "survivals",
]
