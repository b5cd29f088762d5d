"""Which jobs may share a scaling curve, and what a job believes from the curve of another.

Decides the profile key (two jobs with the same key have the same curve) and the prior taken from a
stored curve: of the same key, or of a model of similar size. It does not store curves (the daemon
does) and does not decide what is measured in spite of the prior (:mod:`jpa.plan`).
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

# Options of a training script that change what is learnt, or where it is written, but not how fast
# samples are processed.
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

# Trust in another job's curve: relative standard deviations of level and (per √octave) shape. With
# FLOPs of both models known the level follows them; with parameters alone, training times of 30,001
# NAS-Bench-101 cells go with params^0.42 and scatter by 26 % between cells of equal size, 30 % with
# the exponent 0.5 up to four octaves apart (docs/profiling.md).
_LEVEL_STD = {"same key": 0.35, "flops": 0.2, "parameters": 0.3}
_LEVEL_STD_PER_OCTAVE = 0.1
_SHAPE_STD = 0.02
_SHAPE_STD_PER_OCTAVE = 0.02
_PARAMETER_EXPONENT = 0.5
_AGE_STD = 0.022
"""No size of an earlier run of the same script is known better than this: two runs differ by 2 % on
top of a measurement's 1 %.
"""


@dataclass(frozen=True)
class ModelSize:
    """What the training library reports of a model. ``flops``: per sample, forward and backward;
    None when unknown.
    """

    parameters: float | None = None
    flops: float | None = None


@dataclass(frozen=True)
class Stored:
    """A curve of an earlier or sibling job. ``key``: its profile key; ``owner_job``: for the user's
    information.
    """

    key: str
    curve: MeasuredCurve
    size: ModelSize = ModelSize()
    owner_job: str = ""


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
    """The name under which a job's curve is stored: 32 hexadecimal digits.

    Args:
        script: content of the script, not its path.
        arguments: the script's arguments; ``ignored`` options and their values do not count, nor
            does the order of options.
        node_class, nproc_per_node: another kind of node, or another number of processes on it, has
            another curve.
        software: names of the environment that it runs in (an image, modules), where it has one.
        user_key: what the user gave as ``--profile-key``: takes the place of script, arguments and
            software.
    """
    if user_key is not None:
        content = [b"user", user_key.encode()]
    else:
        content = [
            b"script",
            hashlib.sha256(script).digest(),
            *(a.encode() for a in matters(arguments, ignored)),
            *(b"software " + name.encode() for name in software),
        ]
    digest = hashlib.sha256()
    for part in (*content, node_class.encode(), str(nproc_per_node).encode()):
        digest.update(
            len(part).to_bytes(8, "big")
        )  # lengths keep ("ab", "c") apart from ("a", "bc")
        digest.update(part)
    return digest.hexdigest()[:32]


def matters(arguments: Sequence[str], ignored: Iterable[str] = IGNORED_OPTIONS) -> list[str]:
    """The arguments that may change the throughput: options with their values sorted, then the
    positional ones in order.
    """
    skip = frozenset(ignored)
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
        if name not in skip:
            options.append(f"{name}={value}")
    return sorted(options) + positional


def inherited(stored: MeasuredCurve) -> MeasuredCurve:
    """The curve a resubmitted job starts with: the stored points, a little less sure. What they
    cover is not measured again.

    Passed on from job to job a point does not become less sure each time.
    """
    phases = tuple(
        (
            name,
            replace(
                c,
                points=tuple(
                    replace(p, variance=max(p.variance, (_AGE_STD * p.rate) ** 2)) for p in c.points
                ),
            ),
        )
        for name, c in stored.phases
    )
    return replace(stored, phases=phases)


def prior_from(
    candidates: Iterable[Stored], key: str, size: ModelSize = ModelSize(), *, farthest: float = 3.0
) -> Prior | None:
    """What a job of ``key`` and ``size`` may believe from the curves of other jobs; None when
    nobody is near.

    The nearest candidate counts: the one whose model differs least, in octaves of FLOPs (or
    parameters), by at most ``farthest``; where sizes are unknown, one of the same key (a user-given
    key shared by a sweep). Compute is scaled by FLOPs (or parameters^0.5) and communication by
    parameters, in the α-β law of the candidate's curve; uncertainty grows with the distance.
    """
    best: tuple[float, Stored, str] | None = None
    for candidate in candidates:
        if not any(p.rate > 0 for p in candidate.curve.current.points):
            continue
        distance, basis = _distance(candidate, key, size)
        if distance <= farthest and (best is None or distance < best[0]):
            best = (distance, candidate, basis)
    if best is None:
        return None
    distance, candidate, basis = best
    return _scaled(candidate, size, distance, basis)


def _distance(candidate: Stored, key: str, size: ModelSize) -> tuple[float, str]:
    """(octaves, what they are counted in); infinite when nothing can be compared."""
    flops, parameters = (
        _octaves(candidate.size.flops, size.flops),
        _octaves(candidate.size.parameters, size.parameters),
    )
    if flops is not None:
        return max(abs(flops), abs(parameters or 0.0)), "flops"
    if parameters is not None:
        return abs(parameters), "parameters"
    return (0.0, "same key") if candidate.key == key else (math.inf, "")


def _scaled(candidate: Stored, size: ModelSize, distance: float, basis: str) -> Prior:
    points = [p for p in candidate.curve.current.points if p.rate > 0]
    law = fit([(p.nodes, p.rate, p.relative_std) for p in points])
    flops = _octaves(candidate.size.flops, size.flops)
    parameters = _octaves(candidate.size.parameters, size.parameters) or 0.0
    compute = 2.0 ** (flops if flops is not None else _PARAMETER_EXPONENT * parameters)
    scaled = law.scaled(compute, 2.0**parameters)
    rates = tuple((p.nodes, p.rate * scaled.rate(p.nodes) / law.rate(p.nodes)) for p in points)
    who = f"job {candidate.owner_job}" if candidate.owner_job else "an earlier job"
    far = "" if basis == "same key" else f" (a model {distance:.1f} octaves away in {basis})"
    return Prior(
        rates,
        _LEVEL_STD[basis] + _LEVEL_STD_PER_OCTAVE * distance,
        _SHAPE_STD + _SHAPE_STD_PER_OCTAVE * distance,
        f"{who}{far}",
    )


def _octaves(old: float | None, new: float | None) -> float | None:
    return math.log2(new / old) if old and new and old > 0 and new > 0 else None


def _is_option(word: str) -> bool:
    return word.startswith("-") and not re.fullmatch(r"-\.?\d.*", word) and word != "-"
