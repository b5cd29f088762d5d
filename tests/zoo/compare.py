"""Whether a disturbed run did what the undisturbed one did. Pure.

Samples are compared as multisets by step over all ranks; what every rank does once is done once by
each rank of one round, what rank 0 does once is done once; weights and other numbers of the
training agree to 1e-5; everything else agrees exactly. After an unannounced loss records may
repeat, with the same values, and the records of the rank that is lost may be missing in its round.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.zoo.trace import POINT, SAMPLE, STEP, WEIGHTS, Record

TOLERANCE = 1e-5
_NUMBER = re.compile(r"-?\d+\.\d+(?:e[-+]?\d+)?")


@dataclass(frozen=True)
class Run:
    """The records of one run of a script."""

    trace: Sequence[Record]
    files: dict[str, str] = field(default_factory=dict)
    """Text of each file of results, by name."""
    quiet: frozenset[int] = frozenset()
    """Points of the watched process that are one with the point before (:mod:`tests.zoo.quiet`)."""


def differences(
    expected: Run, actual: Run, repeats: bool = False, lost: Sequence[Record] = ()
) -> list[str]:
    """Sentences that say how ``actual`` differs; none when the runs are equal.

    Args:
        expected: an undisturbed run on more than one rank.
        actual: the disturbed run.
        repeats: whether records may repeat, as after an unannounced loss in round 1.
        lost: records that may be missing, each with a line of a file.
    """
    reference, disturbed = _by_key(expected.trace), _by_key(actual.trace)
    spared = {(record.kind, record.key) for record in lost}
    missing = [key for key in reference if key not in disturbed and key not in spared]
    problems = [f"{_name(key)} is missing" for key in missing]
    problems += [
        f"{_name(key)} is not in the undisturbed run" for key in _extra(disturbed, reference)
    ]
    for key, records in disturbed.items():
        if key in reference:
            compare = {STEP: _steps, SAMPLE: _sample}.get(key[0], _notes)
            problems += compare(_name(key), reference[key], records, repeats)
    if not problems and not repeats:
        problems += _order(_sequence(expected.trace), _sequence(actual.trace))
    gone = sum((record.kind, record.key) not in disturbed for record in lost)
    return problems + _files(expected.files, actual.files, repeats, gone)


def _by_key(trace: Sequence[Record]) -> dict[tuple[str, str], list[Record]]:
    groups: dict[tuple[str, str], list[Record]] = defaultdict(list)
    for record in trace:
        if record.kind != POINT:
            groups[record.kind, record.key].append(record)
    return groups


def _extra(disturbed: dict[Any, Any], reference: dict[Any, Any]) -> list[Any]:
    return [key for key in disturbed if key not in reference]


def _name(key: tuple[str, str]) -> str:
    return " ".join(key)


def _by_round(records: list[Record]) -> dict[int, list[Record]]:
    rounds: dict[int, list[Record]] = defaultdict(list)
    for record in records:
        rounds[record.round].append(record)
    return rounds


def _times(name: str, records: list[Record], ranks: set[int]) -> list[str]:
    """How the records of one round are not one of each of ``ranks``."""
    own = sorted(record.rank for record in records)
    if own == sorted(ranks):
        return []
    return [f"{name} is recorded by ranks {own} of round {records[0].round}, not {sorted(ranks)}"]


def _samples(records: list[Record]) -> list[int]:
    return sorted(sample for record in records for sample in record.values["samples"])


def _steps(name: str, reference: list[Record], records: list[Record], repeats: bool) -> list[str]:
    whole = _samples(reference)
    rounds = _by_round(records)
    problems = []
    if len(rounds) > 1 and not repeats:
        problems.append(f"{name} is trained on again, in rounds {sorted(rounds)}")
    for number, own in rounds.items():
        partial = repeats and number == 1
        if not partial:
            problems += _times(name, own, set(range(own[0].world_size)))
        samples = _samples(own)
        surplus = list(samples)
        for sample in whole:
            if sample in surplus:
                surplus.remove(sample)
        if surplus or (not partial and samples != whole):
            problems.append(f"{name} trains on samples {samples}, not {whole}")
        for record in own:
            problems += _values(name, reference[0].values, record.values, without="samples")
    return problems


def _sample(name: str, reference: list[Record], records: list[Record], repeats: bool) -> list[str]:
    if len(records) == 1 or (repeats and len({record.round for record in records}) > 1):
        return []
    return [f"{name} is trained on {len(records)} times"]


def _notes(name: str, reference: list[Record], records: list[Record], repeats: bool) -> list[str]:
    everybody = len({record.rank for record in reference}) > 1
    rounds = _by_round(records)
    problems = []
    if len(rounds) > 1 and not repeats:
        problems.append(f"{name} is recorded again, in rounds {sorted(rounds)}")
    for number, own in rounds.items():
        if not repeats or number > 1:
            problems += _times(name, own, set(range(own[0].world_size)) if everybody else {0})
        for record in own:
            problems += _values(name, reference[0].values, record.values)
    return problems


def _values(
    name: str, expected: dict[str, Any], actual: dict[str, Any], without: str = ""
) -> list[str]:
    problems = []
    for key in sorted(expected.keys() | actual.keys()):
        if key == without or _equal(expected.get(key), actual.get(key), exact=key == "lr"):
            continue
        there, here = _short(expected.get(key)), _short(actual.get(key))
        problems.append(f"{name} has {key} {here}, not {there}")
    return problems


def _equal(expected: Any, actual: Any, exact: bool = False) -> bool:
    if isinstance(expected, list) and isinstance(actual, list):
        return len(expected) == len(actual) and all(map(_equal, expected, actual))
    if isinstance(expected, float) and isinstance(actual, int | float):
        tolerance = 1e-12 if exact else TOLERANCE
        both_nan = math.isnan(expected) and math.isnan(actual)
        return both_nan or math.isclose(expected, actual, rel_tol=tolerance, abs_tol=tolerance)
    return bool(expected == actual)


def _short(value: Any) -> str:
    text = f"{value}"
    return text if len(text) <= 70 else text[:67] + "..."


def _sequence(trace: Sequence[Record]) -> list[tuple[str, str]]:
    """Return the records of rank 0, in order."""
    # In live mode rank 0 may be another process in the next round, and writes beside the first one.
    ordered = sorted(trace, key=lambda record: record.round)
    return [(r.kind, r.key) for r in ordered if r.rank == 0 and r.kind not in (POINT, SAMPLE)]


def _order(expected: list[tuple[str, str]], actual: list[tuple[str, str]]) -> list[str]:
    for there, here in zip(expected, actual, strict=False):
        if there != here:
            return [f"{_name(here)} comes where {_name(there)} is due"]
    return []


def _files(expected: dict[str, str], actual: dict[str, str], repeats: bool, lost: int) -> list[str]:
    """How files differ, of which ``lost`` lines in all may be missing."""
    problems = [f"file {name} is not in the undisturbed run" for name in actual.keys() - expected]
    for name in sorted(expected):
        if name not in actual and not lost:
            problems.append(f"file {name} is missing")
            continue
        there, here = _rounded(expected[name]), _rounded(actual.get(name, ""))
        if repeats:
            there, here = list(dict.fromkeys(there)), list(dict.fromkeys(here))
            there, here = sorted(there), sorted(here)
        more = [line for line in here if here.count(line) > there.count(line)]
        less = [line for line in there if there.count(line) > here.count(line)]
        if more or len(less) > lost or (there != here and not less):
            problems.append(
                f"file {name} has {len(here)} lines, not {len(there)}; too many: {more[:2]}, "
                f"missing: {less[:2]}"
            )
        lost = max(0, lost - len(less))
    return problems


def _rounded(text: str) -> list[str]:
    return _NUMBER.sub(lambda match: f"{float(match[0]):.4g}", text).splitlines()


def in_the_hands_of(leader: Sequence[Record], point: int) -> list[Record]:
    """What rank 0 alone records between the steps around its ``point``: lost with it in a live
    script with a loop of its own, where the others have passed that code. After the last step
    nothing is.

    Args:
        leader: the undisturbed records of rank 0.
        point: number at which rank 0 is lost.
    """
    steps = [record.number for record in leader if record.kind == STEP]
    done = [number for number in steps if number < point]
    due = [number for number in steps if number > point]
    # A loss in the last step of an epoch is noticed in the first one of the next.
    begin = done[-1] if done else -1
    end = due[:2][-1] if due else begin
    return [
        record
        for record in leader
        if begin < record.number < end and record.kind not in (STEP, POINT, SAMPLE, WEIGHTS)
    ]


def samples_of_step_at(own: Sequence[Record], point: int) -> list[Record]:
    """The samples of the step that a rank is lost in, if its gradients were averaged before: the
    others finish that step, and rank 0 may save it.

    Args:
        own: the undisturbed records of the rank, with those of samples.
        point: number at which it is lost.
    """
    samples: list[Record] = []
    begin = next(index for index, record in enumerate(own) if record.number == point)
    for record in own[begin + 1 :]:
        if record.names_step or record.key.startswith("before an update"):
            break
        if record.kind == SAMPLE:
            samples.append(record)
    return samples
