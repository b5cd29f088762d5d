"""The section of a configuration that says when and how jobs are profiled.

Its defaults are the core's own (:mod:`malletrain.core.defaults`).
"""

from __future__ import annotations

from pydantic import ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

from malletrain.config.base import Duration, Section
from malletrain.config.base import key as _key
from malletrain.config.units import format_duration
from malletrain.core import defaults


class ProfilingSection(Section):
    """How MalleTrain finds out how a job scales: one step up to its largest size, then down,
    measuring at each size while it trains.
    """

    enabled: bool = _key(
        True,
        description="Profile jobs that can use different numbers of nodes and say nothing else "
        "about themselves.",
    )
    when_worth: bool = _key(
        True,
        description="Profile a job only when what that tells is expected to be worth more than it "
        "costs over the time that jobs here last. A job of which nothing is known runs at once on "
        "its smallest size at least, where that is no more than an even share of the nodes. "
        "false: every job is profiled once, as soon as it has nodes.",
    )
    every_size_up_to: int = _key(
        defaults.EVERY_SIZE_UP_TO,
        ge=1,
        description="A job with so many sizes or fewer is measured at each; else at a selection.",
    )
    max_sizes: int = _key(
        defaults.MAX_SIZES,
        ge=1,
        le=64,
        description="Sizes visited at most in one profile of a job with more sizes than that.",
    )
    precision: float = _key(
        defaults.PRECISION,
        gt=0,
        le=0.5,
        description="A size is measured when its throughput is known this well: half-width of "
        "the 95 % interval as a share of it.",
    )
    min_time: Duration = _key(
        format_duration(defaults.MIN_MEASURE_S),
        gt=0,
        description="Shortest time in which one size is measured.",
    )
    max_time: Duration = _key(
        format_duration(defaults.MAX_MEASURE_S),
        gt=0,
        description="Longest time in which one size is measured; then what is known counts.",
    )
    max_profile: Duration = _key(
        format_duration(defaults.MAX_PROFILE_S),
        gt=0,
        description="A profile ends after this long, with what was measured.",
    )
    rescale_timeout: Duration = _key(
        format_duration(defaults.RESCALE_TIMEOUT_S),
        gt=0,
        description="A rescale that takes longer than this ends the visit to its size.",
    )
    silence: Duration = _key(
        format_duration(defaults.SILENCE_S),
        gt=0,
        description="Workers that have started and report nothing for this long are taken for "
        "silent ones.",
    )
    lease_patience: Duration = _key(
        format_duration(defaults.LEASE_PATIENCE_S),
        description="How long a profile waits for more nodes when fewer than the job can use "
        "are free.",
    )
    patience: Duration = _key(
        format_duration(defaults.PATIENCE_S),
        description="How long it waits when less than half of them can be had, other jobs' "
        "nodes included.",
    )
    donor_quiet: Duration = _key(
        format_duration(defaults.DONOR_QUIET_S),
        description="A job that gave nodes to a profile is left alone for this long.",
    )
    kappa: float = _key(
        defaults.KAPPA,
        ge=0,
        le=3,
        description="Caution: a profiled job's throughput is taken to be this many standard "
        "deviations lower than estimated.",
    )
    observe_every: Duration = _key(
        format_duration(defaults.OBSERVE_EVERY_S),
        gt=0,
        description="Length of the windows in which a running job's curve is kept up to date.",
    )

    @field_validator("max_time")
    @classmethod
    def _longer_than_the_shortest(cls, value: float, info: ValidationInfo) -> float:
        least = info.data.get("min_time")
        if least is not None and value < least:
            raise PydanticCustomError(
                "max_time",
                "{value} is less than min_time, {least}; accepted is {least} or more",
                {"value": format_duration(value), "least": format_duration(least)},
            )
        return value
