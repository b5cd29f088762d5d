"""Reuse of scaling curves: the profile key of a job, and priors from the curves of other jobs.

Decides which jobs share a curve (those with the same key) and which prior a stored curve gives: one
with the same key, or one of a model of similar size. It does not store curves (the daemon does) and
does not decide what is measured despite the prior (:mod:`jpa.profile`).
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from jpa.curve import MeasuredCurve
from jpa.fit import fit
from jpa.phase import Prior

# Options of a training script that change the result, or where it is written, but not the
# throughput.
IGNORED_OPTIONS = frozenset(
    (
        *(
            "--seed",
            "--lr",
            "--learning-rate",
            "--momentum",
            "--weight-decay",
            "--wd",
            "--dropout",
            "--epochs",
            "--steps",
            "--max-steps",
        ),
        *(
            "--output",
            "--out",
            "--output-dir",
            "--out-dir",
            "--log-dir",
            "--logdir",
            "--checkpoint",
            "--checkpoint-dir",
            "--snapshot",
        ),
        *("--name", "--run-name", "--trial", "--trial-id", "--resume"),
    )
)

# Uncertainty of another job's curve: relative standard deviations of level and (per √octave) shape.
# If the FLOPs of both models are known, the level is proportional to them. With parameters alone:
# training times of 30,001 NAS-Bench-101 cells are proportional to params^0.42, with a scatter of
# 26 % between cells of equal size, and 30 % with the exponent 0.5 up to four octaves apart
# (docs/profiling.md).
_LEVEL_STD = {"same key": 0.35, "flops": 0.2, "parameters": 0.3}
_LEVEL_STD_PER_OCTAVE = 0.1
_SHAPE_STD = 0.02
_SHAPE_STD_PER_OCTAVE = 0.02
_PARAMETER_EXPONENT = 0.5
_INHERITED_STD = 0.022
"""Lower bound on the relative standard deviation of a size from an earlier run of the same script:
two runs differ by 2 %, in addition to the 1 % of a measurement.
"""


@dataclass(frozen=True)
class ModelSize:
    """The size of a model, as the training library reports it."""

    parameters: float | None = None
    """Number of parameters; None if unknown."""
    flops: float | None = None
    """Floating-point operations per sample, forward and backward; None if unknown."""


@dataclass(frozen=True)
class StoredCurve:
    """The curve of an earlier or sibling job."""

    key: str
    """The job's profile key."""
    curve: MeasuredCurve
    """Its curve."""
    size: ModelSize = ModelSize()
    """The size of its model."""
    owner_job: str = ""
    """Its name, for the user."""


def profile_key(
    script: bytes,
    arguments: Sequence[str],
    node_class: str,
    nproc_per_node: int,
    *,
    user_key: str | None = None,
    software: Sequence[str] = (),
    ignored: Iterable[str] = IGNORED_OPTIONS,
) -> str:
    """Return the name under which a job's curve is stored: 32 hexadecimal digits.

    Args:
        script: content of the script, not its path.
        arguments: the script's arguments. The order of options does not matter.
        node_class: class of the nodes.
        nproc_per_node: processes on each node.
        user_key: the user's ``--profile-key``; it replaces script, arguments and software.
        software: names of the job's environment (an image, modules).
        ignored: options that do not count, with their values.
    """
    if user_key is not None:
        content = [b"user", user_key.encode()]
    else:
        content = [
            b"script",
            hashlib.sha256(script).digest(),
            *(a.encode() for a in relevant_arguments(arguments, ignored)),
            *(b"software " + name.encode() for name in software),
        ]
    digest = hashlib.sha256()
    for part in (*content, node_class.encode(), str(nproc_per_node).encode()):
        digest.update(len(part).to_bytes(8, "big"))  # so that ("ab", "c") differs from ("a", "bc")
        digest.update(part)
    return digest.hexdigest()[:32]


def relevant_arguments(
    arguments: Sequence[str], ignored: Iterable[str] = IGNORED_OPTIONS
) -> list[str]:
    """Return the arguments that may change the throughput: options with their values, sorted, then
    the positional ones in order; ``ignored`` options are left out.
    """
    ignored_options = frozenset(ignored)
    options: list[str] = []
    positional: list[str] = []
    i = 0
    while i < len(arguments):
        word = arguments[i]
        i += 1
        if not _is_option(word):
            positional.append(word)
            continue
        name, equals, value = word.partition("=")
        if not equals and i < len(arguments) and not _is_option(arguments[i]):
            value = arguments[i]
            i += 1
        if name not in ignored_options:
            options.append(f"{name}={value}")
    return sorted(options) + positional


def inherit_curve(stored: MeasuredCurve) -> MeasuredCurve:
    """Return the first curve of a resubmitted job: the stored points, with a lower bound on their
    uncertainty. Sizes that they determine are not measured again.

    The bound does not accumulate when a curve is passed on from job to job.
    """
    phases = tuple(
        (
            name,
            replace(
                c,
                points=tuple(
                    replace(p, variance=max(p.variance, (_INHERITED_STD * p.rate) ** 2))
                    for p in c.points
                ),
            ),
        )
        for name, c in stored.phases
    )
    return replace(stored, phases=phases)


def prior_from(
    candidates: Iterable[StoredCurve],
    key: str,
    size: ModelSize = ModelSize(),
    *,
    max_octaves: float = 3.0,
) -> Prior | None:
    """Return the prior for a job from the curve of the most similar other job.

    The distance of two models is counted in octaves of FLOPs (or parameters). If sizes are unknown,
    only a curve with the same key qualifies (a key that the user gives to a sweep). In the α-β law
    of the candidate's curve, compute is scaled by FLOPs (or parameters^0.5) and communication by
    parameters. The uncertainty grows with the distance.

    Args:
        candidates: curves of other jobs.
        key: the job's profile key.
        size: the size of its model.
        max_octaves: the largest distance of a candidate.

    Returns:
        The prior; None if no candidate is close enough.
    """
    best: tuple[float, StoredCurve, str] | None = None
    for candidate in candidates:
        if not any(p.rate > 0 for p in candidate.curve.current.points):
            continue
        distance, basis = _distance(candidate, key, size)
        if distance <= max_octaves and (best is None or distance < best[0]):
            best = (distance, candidate, basis)
    if best is None:
        return None
    distance, candidate, basis = best
    return _scaled(candidate, size, distance, basis)


def _distance(candidate: StoredCurve, key: str, size: ModelSize) -> tuple[float, str]:
    """Return (distance in octaves, the quantity it is measured in); infinite if nothing is
    comparable.
    """
    flops = _octaves(candidate.size.flops, size.flops)
    parameters = _octaves(candidate.size.parameters, size.parameters)
    if flops is not None:
        return max(abs(flops), abs(parameters or 0.0)), "flops"
    if parameters is not None:
        return abs(parameters), "parameters"
    return (0.0, "same key") if candidate.key == key else (math.inf, "")


def _scaled(candidate: StoredCurve, size: ModelSize, distance: float, basis: str) -> Prior:
    """Return the candidate's curve, scaled to a model of ``size``."""
    points = [p for p in candidate.curve.current.points if p.rate > 0]
    law = fit([(p.nodes, p.rate, p.relative_std) for p in points])
    flops = _octaves(candidate.size.flops, size.flops)
    parameters = _octaves(candidate.size.parameters, size.parameters) or 0.0
    compute = 2.0 ** (flops if flops is not None else _PARAMETER_EXPONENT * parameters)
    scaled = law.scaled(compute, 2.0**parameters)
    rates = tuple((p.nodes, p.rate * scaled.rate(p.nodes) / law.rate(p.nodes)) for p in points)
    source = f"job {candidate.owner_job}" if candidate.owner_job else "an earlier job"
    difference = "" if basis == "same key" else f" (a model {distance:.1f} octaves away in {basis})"
    return Prior(
        rates,
        _LEVEL_STD[basis] + _LEVEL_STD_PER_OCTAVE * distance,
        _SHAPE_STD + _SHAPE_STD_PER_OCTAVE * distance,
        f"{source}{difference}",
    )


def _octaves(old: float | None, new: float | None) -> float | None:
    """Return log2(new / old); None if one of them is unknown."""
    return math.log2(new / old) if old and new and old > 0 and new > 0 else None


def _is_option(word: str) -> bool:
    return word.startswith("-") and not re.fullmatch(r"-\.?\d.*", word) and word != "-"
