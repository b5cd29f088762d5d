"""The soak in short: a fixed number of changes, a fixed seed, on the embedded cluster; and the
account must notice what is wrong.
"""

from __future__ import annotations

import copy

import pytest

from benchmarks import soak
from benchmarks.soak_account import BATCH, SAMPLES, SEED, examine
from malletrain import ElasticSampler
from tests.waiting import PATIENCE_S


@pytest.mark.thorough
@pytest.mark.timeout(1800)  # its own limit first: it says more
def test_changes_at_random_moments_break_no_promise(tmp_path, any_seed):
    try:
        account = soak.run(
            tmp_path, changes=14, nodes=3, seed=any_seed(3), limit_s=1.8 * PATIENCE_S, every_s=0.6
        )
    except soak.SoakError as error:
        raise AssertionError(f"{error}\n{soak.last_words(tmp_path)}") from error
    assert account["broken"] == {}
    assert account["rounds_trained"] >= 14
    assert len(account["world_sizes"]) > 1


def walked(steps, size, generation, digest="same"):
    """What ``size`` workers write down of ``steps`` when all is well."""
    rows = []
    for rank in range(size):
        sampler = ElasticSampler(
            SAMPLES,
            global_batch_size=BATCH,
            seed=SEED,
            rank=rank,
            world_size=size,
            max_world_size=8,
        )
        for step in steps:
            sampler.set_position(0, (step - 1) * BATCH)
            record = {
                "step": step,
                "generation": generation,
                "rank": rank,
                "size": size,
                "epoch": 0,
                "digest": digest,
            }
            rows.append(
                {
                    **record,
                    "seen": next(iter(sampler)),
                    "samples": step * BATCH,
                    "worker": f"w{rank}",
                }
            )
    return rows


def test_the_account_of_a_good_run_is_clean():
    rows = [*walked(range(1, 6), 2, 1), *walked(range(6, 9), 3, 2), *walked(range(9, 12), 1, 3)]
    account = examine(rows)
    assert account["broken"] == {}
    assert (account["steps"], account["rounds_trained"], account["world_sizes"]) == (
        11,
        3,
        [1, 2, 3],
    )


@pytest.mark.parametrize(
    ("invariant", "change"),
    [
        ("states drifted apart", lambda rows: rows[0].update(digest="other")),
        ("samples other than the step's", lambda rows: rows[0]["seen"].reverse()),
        (
            "steps missing",
            lambda rows: (
                rows.__delitem__(slice(None, None))
                or rows.extend([*walked([1], 1, 1), *walked([3], 1, 1)])
            ),
        ),
        ("survivors that went back", lambda rows: rows.extend(walked([5], 2, 2))),
        (
            "survivors that skipped more than the step in progress",
            lambda rows: rows.extend(walked([9], 2, 2)),
        ),
        (
            "steps counted in two rounds",
            lambda rows: rows.append({**copy.deepcopy(rows[0]), "worker": "w9"}),
        ),
    ],
)
def test_the_account_notices_what_is_wrong(invariant, change):
    rows = walked(range(1, 6), 2, 1)
    change(rows)
    assert invariant in examine(rows)["broken"]
