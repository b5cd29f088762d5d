"""What a profile costs on the embedded cluster, and whether the allocation made from it is the
right one.

    python -m benchmarks.profiling_embedded [--nodes 6] [--seconds 75] [--donor] [--json FILE]

For each model job (its step sleeps ``serial + parallel / workers``, so that it scales as Amdahl's
law says although all virtual nodes share one machine):

* a run with a profile and one without, as long as ``--seconds``: the samples that the first lacks,
  and what share that is of a run of ten minutes, in which nothing more is lost (an extrapolation:
  only the beginning is run);
* each size by itself, without a profile: the exhaustively measured curve, in two halves;
* the plans that the product makes for one and for two such jobs on 1..2n nodes, from the profile's
  curve and from the exhaustive one; and, to see what the measurement itself leaves open, from the
  two halves of the exhaustive one. Plans that differ are printed.

With ``--donor`` instead: one job trains on all nodes when a second comes, once to be profiled (the
first gives nodes to that), once not: what the first and both together process from then on for
``--seconds``.

Needs nothing but this machine. Other load on it makes rescales slower and the loss larger; the load
is printed.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from allocator import NodeInfo, RescaleCost, ScalingCurve
from jpa import MeasuredCurve
from malletrain.core.planning import Candidate, make_plan
from malletrain.core.pools import Pool
from malletrain.core.settings import PlanningSettings, ProfilingSettings
from malletrain.protocol.views import JobDetail
from tests.integration.embedded import Site, site

RUN_S = 600.0
MODELS = {"straight": (0.0, 0.06), "bent": (0.012, 0.06)}
"""Seconds of a step that do not shrink with workers, and that do."""
BATCH = 24
SCRIPT = """
import os, sys, time, malletrain
serial, parallel = float(sys.argv[1]), float(sys.argv[2])
world = int(os.environ["WORLD_SIZE"])
while not os.path.exists("stop"):
    time.sleep(serial + parallel / world)
    malletrain.report({batch} / world)
"""


@dataclass(frozen=True)
class Difference:
    """A plan for ``jobs`` jobs on ``machine`` nodes that differs: sizes by the profile and by the
    exhaustive curve, and the relative loss of the first by the law of the model job.
    """

    jobs: int
    machine: int
    profile: list[int]
    exhaustive: list[int]
    loss: float


@dataclass(frozen=True)
class Outcome:
    """The results for one model job. ``lost``: samples that the profiled run lacks; ``share``: as a
    share of a run of RUN_S seconds without a profile. ``same``: equal plans from the profile's
    curve and the exhaustive one; ``same_again``: from the two halves of the exhaustive one;
    ``same_law``: from the profile's curve and the law of the model job.
    """

    model: str
    visited: list[int]
    scale_ups: int
    seconds: float
    lost: float
    share: float
    worst_error: float
    plans: int
    same: int
    same_again: int
    same_law: int
    differences: list[Difference]
    profile: dict[int, float]
    exhaustive: dict[int, float]
    load: float


def run(nodes: int, seconds: float, model: str) -> Outcome:
    """Measure one model job on a cluster of ``nodes``."""
    serial, parallel = MODELS[model]
    words = (str(serial), str(parallel))
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as directory, _site(Path(directory), nodes) as one:
        detail, with_profile = _train(one, words, nodes, seconds, profile=True)
        (finished,) = one.events("profile-finished", detail.job.id)
        assert detail.profile is not None
        curve = {p.nodes: p.rate for p in detail.profile.points}
        bids = {p.nodes: p.bid for p in detail.profile.points}
    with tempfile.TemporaryDirectory() as directory, _site(Path(directory), nodes) as other:
        _, without = _train(other, words, nodes, seconds, profile=False)
        halves = {k: _rates(other, words, k) for k in range(1, nodes + 1)}
    exhaustive = {k: (first + second) / 2 for k, (first, second) in halves.items()}
    lost = without - with_profile
    total = without + exhaustive[nodes] * (RUN_S - seconds)
    serial, parallel = MODELS[model]
    law = ScalingCurve.of((k, BATCH / (serial + parallel / k)) for k in exhaustive)
    plans, differences = _compare(ScalingCurve.of(bids), _bids(exhaustive), law, nodes)
    _, wrong = _compare(ScalingCurve.of(bids), law, law, nodes)
    early, late = (_bids({k: both[i] for k, both in halves.items()}) for i in (0, 1))
    _, noise = _compare(early, late, law, nodes)
    return Outcome(
        model,
        list(finished.data["visited"]),
        int(finished.data["scale_ups"]),
        float(finished.data["seconds"]),
        lost,
        lost / total,
        max(abs(curve[k] / exhaustive[k] - 1) for k in exhaustive),
        plans,
        plans - len(differences),
        plans - len(noise),
        plans - len(wrong),
        differences,
        curve,
        exhaustive,
        load,
    )


def donor(nodes: int, seconds: float) -> dict[str, Any]:
    """Measure what the profile of a second job costs the first, which has all nodes when the second
    arrives.
    """
    result: dict[str, Any] = {"nodes": nodes, "seconds": seconds, "load": os.getloadavg()[0]}
    words = [str(x) for x in MODELS["straight"]]
    for case in ("profiled", "not"):
        with tempfile.TemporaryDirectory() as directory, _site(Path(directory), nodes) as made:
            script = made.script("train.py", SCRIPT.format(batch=BATCH))
            first = made.submit(script, *words, nodes=(1, nodes), profile=False)
            _until_on(made, first, nodes)
            before, second = (
                made.job(first).samples,
                made.submit(script, *words, nodes=(1, nodes), profile=case == "profiled"),
            )
            began = time.time()
            time.sleep(seconds)
            result[case] = {
                "first": made.job(first).samples - before,
                "second": made.job(second).samples,
                "after_s": time.time() - began,
            }
            result[case]["interruptions"] = len(made.events("nodes-donated", first))
            result[case]["profile_over"] = bool(made.events("profile-finished", second))
            (made.work / "stop").touch()
            made.until_state(first, "completed", "failed")
            made.until_state(second, "completed", "failed")
    with_profile, without = result["profiled"], result["not"]
    result["donor_loss"] = 1 - with_profile["first"] / without["first"]
    result["loss"] = 1 - (with_profile["first"] + with_profile["second"]) / (
        without["first"] + without["second"]
    )
    return result


def _until_on(made: Site, job: str, nodes: int) -> None:
    made.until(
        lambda: len(made.job(job).nodes) == nodes and made.job(job).rate > 0,
        f"the job trains on {nodes} nodes",
    )


def _site(root: Path, nodes: int) -> Any:
    config = 'rescale_up = "1.5 s"\nrescale_down = "1.5 s"\nstart = "3 s"\n'
    return site(
        root, nodes=nodes, config=config, profiling='when_worth = false\nlease_patience = "20 s"'
    )


def _train(
    made: Site, words: tuple[str, ...], nodes: int, seconds: float, *, profile: bool
) -> tuple[JobDetail, float]:
    """Train for ``seconds`` after the first sample. Return (details, samples)."""
    script = made.script("train.py", SCRIPT.format(batch=BATCH))
    job = made.submit(script, *words, nodes=(1, nodes), profile=profile)
    made.until(lambda: made.job(job).samples > 0, "the job trains")
    began = made.show(job).rescales[0].ended or time.time()
    time.sleep(max(0.0, began + seconds - time.time()))
    detail = made.show(job)
    if profile and not made.events("profile-finished", job):
        raise SystemExit(f"The profile was not over after {seconds:g} s; give more with --seconds.")
    _stop(made, job)
    return detail, detail.job.samples


def _rates(
    made: Site, words: tuple[str, ...], nodes: int, seconds: float = 5.0
) -> tuple[float, float]:
    """Return samples/s on exactly ``nodes``, in two intervals of ``seconds``, from one second after
    the first sample.
    """
    job = made.submit(made.work / "train.py", *words, nodes=(nodes, nodes), profile=False)
    made.until(lambda: made.job(job).samples > 0, "the job trains")
    time.sleep(1.0)
    counts = []
    for k in range(3):
        time.sleep(seconds if k else 0.0)
        counts.append((made.job(job).samples, time.time()))
    _stop(made, job)
    first, second = ((b[0] - a[0]) / (b[1] - a[1]) for a, b in itertools.pairwise(counts))
    return first, second


def _stop(made: Site, job: str) -> None:
    (made.work / "stop").touch()
    made.until_state(job, "completed", "failed")
    (made.work / "stop").unlink()


def _bids(measured: dict[int, float]) -> ScalingCurve:
    """Return the curve with which the product bids after it has measured these throughputs."""
    curve = MeasuredCurve()
    for size, rate in measured.items():
        curve = curve.with_measurement(size, rate, 0.0, 0.0)
    return curve.conservative(measured, ProfilingSettings().kappa)


def _compare(
    one: ScalingCurve, other: ScalingCurve, law: ScalingCurve, nodes: int
) -> tuple[int, list[Difference]]:
    """Return how many plans were made from each of two curves, and those that differ."""
    plans, differences = 0, []
    for jobs in (1, 2):
        for machine in range(1, jobs * nodes + 1):
            mine, theirs = (_sizes(curve, jobs, machine, nodes) for curve in (one, other))
            plans += 1
            if mine != theirs:
                loss = 1 - sum(map(law.at, mine)) / sum(map(law.at, theirs))
                differences.append(Difference(jobs, machine, mine, theirs, loss))
    return plans, differences


def _sizes(curve: ScalingCurve, jobs: int, machine: int, nodes: int) -> list[int]:
    bidders = [Candidate(f"j{i}", 1, nodes, (), curve=curve) for i in range(jobs)]
    usable = {f"n{k}": NodeInfo(Pool("default")) for k in range(machine)}
    plan = make_plan(bidders, usable, PlanningSettings(cost=RescaleCost(1.5, 1.5, 3.0)))
    return sorted(len(names) for names in plan.nodes.values())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nodes", type=int, default=6)
    parser.add_argument(
        "--seconds",
        type=float,
        default=75.0,
        help="length of each of the two runs, from the first sample on",
    )
    parser.add_argument("--model", choices=[*MODELS], action="append", help="default: all")
    parser.add_argument(
        "--donor", action="store_true", help="what the profile of a second job costs the first"
    )
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    if options.donor:
        print(json.dumps(donor(options.nodes, options.seconds), indent=1))
        return
    outcomes = [run(options.nodes, options.seconds, model) for model in options.model or MODELS]
    head = (
        "model     visited            scale-ups  profile   lost samples  of ten minutes  "
        "worst error  same plans  twice exhaustive"
    )
    print(f"{head}  true plans  load")
    for o in outcomes:
        visited = ",".join(map(str, o.visited))
        print(
            f"{o.model:9} {visited:18} {o.scale_ups:9}  {o.seconds:5.1f} s  {o.lost:13,.0f}  "
            f"{o.share:13.1%}  {o.worst_error:11.1%}"
            f"  {o.same:>4} of {o.plans}  {o.same_again:>10} of {o.plans}"
            f"  {o.same_law:>4} of {o.plans}  {o.load:.1f}"
        )
        for d in o.differences:
            sizes = f"{d.profile} by the profile, {d.exhaustive} exhaustively"
            print(f"          {d.jobs} jobs on {d.machine} nodes: {sizes}; loss {d.loss:.2%}")
    if options.json:
        options.json.write_text(json.dumps([asdict(o) for o in outcomes], indent=1) + "\n")


if __name__ == "__main__":
    main()
