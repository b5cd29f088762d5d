"""Decides how many nodes each malleable job gets, and which ones. Bids and nodes go in, a plan
comes out. Pure functions over HiGHS.

Nodes are interchangeable within a *pool*, and a job runs on nodes of one pool at a time. What a
pool is, the caller decides: the types are generic over it (:data:`~allocator.bids.PoolT`), and the
allocator only hashes pools and compares them for equality.
"""

from allocator.baselines import equal_share, fcfs
from allocator.bids import (
    Allocation,
    Bid,
    BidError,
    ExtrapolationPolicy,
    Goal,
    RescaleCost,
    SizeValues,
    multiples,
    powers_of_two,
)
from allocator.curves import CurveError, ScalingCurve
from allocator.milp import MonotonicClock, no_clock, solve
from allocator.placement import NodeInfo, PlacementError, place
from allocator.valuation import BidRequest, JobTerms, make_bid, make_bids

__all__ = [
    "Allocation",
    "Bid",
    "BidError",
    "BidRequest",
    "CurveError",
    "ExtrapolationPolicy",
    "Goal",
    "JobTerms",
    "MonotonicClock",
    "NodeInfo",
    "PlacementError",
    "RescaleCost",
    "ScalingCurve",
    "SizeValues",
    "equal_share",
    "fcfs",
    "make_bid",
    "make_bids",
    "multiples",
    "no_clock",
    "place",
    "powers_of_two",
    "solve",
]
