"""The section of the configuration for the profiling of jobs.

Its defaults are the core's own (:mod:`malletrain.core.settings`).
"""

from __future__ import annotations

from pydantic import ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

from malletrain.config.base import Duration, Section
from malletrain.config.base import key as _key
from malletrain.config.units import format_duration
from malletrain.core.settings import (
    DONOR_QUIET_S,
    MAX_MEASURE_S,
    MAX_PROFILE_S,
    MAX_SIZES,
    MIN_MEASURE_S,
    PATIENCE_S,
    PRECISION,
    RESCALE_TIMEOUT_S,
    ProfilingSettings,
)


class ProfilingSection(Section):
    """How MalleTrain measures a job's scaling curve while it trains: up to the job's largest size
    at once, then down, with a measurement at each size.
    """

    enabled: bool = _key(
        True,
        description="Profile jobs that can use different numbers of nodes and have no scaling "
        "curve.",
    )
    when_worth: bool = _key(
        True,
        description="Profile a job only if the measurement is expected to gain more than it "
        "costs over the time that jobs here last. A job without any measurement runs "
        "at once on at least its smallest size, if that is no more than an even "
        "share of the nodes. false: every job is profiled once, as soon as it has "
        "nodes.",
    )
    layout_time: Duration = _key(
        "1 min",
        gt=0,
        description="Maximum time of the search for the best layout of a job's nodes "
        "(`--nproc-per-node auto`, `--threads auto`, `--loader-workers auto`), without the time "
        "in which the job has no nodes.",
    )
    every_size_up_to: int = _key(
        ProfilingSettings.every_size_up_to,
        ge=1,
        description="A job with at most this many sizes is measured at each of them; other jobs "
        "at a selection.",
    )
    max_sizes: int = _key(
        MAX_SIZES,
        ge=1,
        le=64,
        description="Maximum number of sizes visited in one profile of a job with more sizes "
        "than that.",
    )
    precision: float = _key(
        PRECISION,
        gt=0,
        le=0.5,
        description="A size is measured when its throughput is known this precisely: half-width "
        "of the 95 % interval, relative to the throughput.",
    )
    min_time: Duration = _key(
        format_duration(MIN_MEASURE_S),
        gt=0,
        description="Minimum time for the measurement of one size.",
    )
    max_time: Duration = _key(
        format_duration(MAX_MEASURE_S),
        gt=0,
        description="Maximum time for the measurement of one size; after it, the current "
        "estimate is used.",
    )
    max_profile: Duration = _key(
        format_duration(MAX_PROFILE_S),
        gt=0,
        description="Maximum time of a profile; it then ends with the sizes measured so far.",
    )
    rescale_timeout: Duration = _key(
        format_duration(RESCALE_TIMEOUT_S),
        gt=0,
        description="A rescale that takes longer than this ends the visit to its size.",
    )
    silence: Duration = _key(
        format_duration(ProfilingSettings.silence_s),
        gt=0,
        description="Workers that have started and report nothing for this long are considered "
        "silent.",
    )
    lease_patience: Duration = _key(
        format_duration(ProfilingSettings.lease_patience_s),
        description="How long a profile waits for more nodes when fewer than the job can use "
        "are free.",
    )
    patience: Duration = _key(
        format_duration(PATIENCE_S),
        description="How long a profile waits when less than half of these nodes are available, "
        "even with other jobs' nodes included.",
    )
    donor_quiet: Duration = _key(
        format_duration(DONOR_QUIET_S),
        description="A job that gave nodes to a profile gives none to another one for this long.",
    )
    kappa: float = _key(
        ProfilingSettings.kappa,
        ge=0,
        le=3,
        description="Caution: a profiled job's throughput is taken to be this many standard "
        "deviations lower than estimated.",
    )
    observe_every: Duration = _key(
        format_duration(ProfilingSettings.window_s),
        gt=0,
        description="Length of the windows in which a running job's curve is updated.",
    )

    @field_validator("max_time")
    @classmethod
    def _check_max_time(cls, value: float, info: ValidationInfo) -> float:
        min_s = info.data.get("min_time")
        if min_s is not None and value < min_s:
            raise PydanticCustomError(
                "max_time",
                "{value} is less than min_time, {min_s}; accepted is {min_s} or more",
                {"value": format_duration(value), "min_s": format_duration(min_s)},
            )
        return value
