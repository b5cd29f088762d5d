"""Snapshots of sharded models, on real ranks: the state of one number of ranks is the state of any
other, bit for bit.
"""

import pytest

from tests.malletrain.training.many_ranks import Ranks


@pytest.fixture(scope="module")
def ranks():
    ranks = Ranks()
    yield ranks
    ranks.close()


def test_the_loss_over_2_4_and_3_ranks_is_that_of_an_undisturbed_run(ranks, tmp_path):
    undisturbed = ranks.run(1, "run", path=str(tmp_path / "none"), steps=12, kind="whole")[0]
    path, losses = str(tmp_path / "x.pt"), []
    after = None
    for world in (2, 4, 3):
        said = ranks.run(
            world, "run", path=path, steps=4, save=True, seed=0 if after is None else world
        )
        assert all(each["saved"] for each in said)
        assert all(each["restored"] == (after is not None) for each in said)
        if after is not None:
            assert all(each["before"] == after for each in said)
        after = said[0]["after"]
        losses += said[0]["losses"]
    assert losses == pytest.approx(undisturbed["losses"], rel=1e-5)
