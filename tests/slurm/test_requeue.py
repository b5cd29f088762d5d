"""The contenders of benchmarks/requeue.py that Slurm requeues, on a real Slurm: a main job takes
their nodes, and they go on where they were.
"""

from __future__ import annotations

from functools import partial

import pytest

from benchmarks.peers_environments import cache
from benchmarks.requeue_account import outcome, records_of
from benchmarks.requeue_contenders import CONTENDERS, Field, rigid
from benchmarks.requeue_training import write_digits

ENOUGH = 5
"""Steps before the main job, and at least as many after it."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("contender", "processes", "repeats", "grace"),
    [
        pytest.param(
            partial(rigid, nodes=2), 2, False, 3600, id="rigid", marks=pytest.mark.thorough
        ),
        # Its processes may have the signal in different steps, and then each waits for the other
        # in another collective until Slurm kills them.
        pytest.param(
            CONTENDERS["lightning"], 2, True, 20, id="lightning", marks=pytest.mark.thorough
        ),
        pytest.param(CONTENDERS["array"], 1, False, 3600, id="array"),
        pytest.param(CONTENDERS["submitit"], 2, True, 3600, id="submitit"),
    ],
)
def test_a_preempted_training_goes_on_where_it_was(
    cluster, root, contender, processes, repeats, grace
):
    if contender is CONTENDERS["submitit"] and not (cache() / "submitit" / "made").exists():
        pytest.skip("submitit is not installed; benchmarks.requeue --contenders submitit does it")
    slurm = cluster(2, lease_mode="PreemptMode=REQUEUE", cred_expire=5, grace=grace)
    work = root / "work"
    for part in ("steps", "checkpoints", "contender"):
        (work / part).mkdir(parents=True)
    write_digits(work)
    arguments = (str(work), "--checkpoints", str(work / "checkpoints"), "--step-s", "0.1")
    field = Field(slurm, work / "contender", 1, arguments, 0.1, 2)

    def steps():
        return [record for record in records_of(work / "steps") if record.total]

    with contender(field) as submit:
        submit()
        slurm.until(lambda: len(steps()) >= ENOUGH * processes, "it trains")
        main = slurm.submit("true", "--nodes=2", "--exclusive")
        slurm.until(lambda: slurm.jobs()[main][0] == "COMPLETED", "the main job had the nodes")
        before = len(steps())
        slurm.until(lambda: len(steps()) >= before + ENOUGH * processes, "it trains again")
    counted, thrown_away = outcome(steps())
    positions = [step.records[0].position for step in counted]
    assert positions == [32 * processes * number for number in range(len(counted))]
    # Lightning trains on after it has saved, until Slurm ends it; so do submitit's other tasks.
    assert repeats or not thrown_away
