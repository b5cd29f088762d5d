"""Snapshots of sharded models, on real ranks: the state of one number of ranks is the state of any
other, bit for bit.
"""

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from malletrain.training import snapshot_file
from malletrain.training.export import read_weights
from tests.malletrain.training.many_ranks import Ranks
from tests.malletrain.training.test_snapshot_file import small_disk
from tests.torch_versions import trains_shards

pytestmark = [pytest.mark.slow, trains_shards]


@pytest.fixture(scope="module")
def ranks():
    ranks = Ranks("sharded_scripts")
    yield ranks
    ranks.close()


def bytes_of(tensor):
    return tensor.reshape(-1).view(torch.uint8).numpy().tobytes()


@pytest.mark.thorough
def test_the_loss_over_2_4_and_3_ranks_is_that_of_an_undisturbed_run(ranks, tmp_path):
    undisturbed = ranks.run(
        1, "run", path=str(tmp_path / "none"), steps=12, kind="whole", layers=1
    )[0]
    path, losses = str(tmp_path / "x.pt"), []
    after = None
    for world in (2, 4, 3):
        records = ranks.run(
            world, "run", path=path, steps=4, save=True, seed=world * bool(after), layers=1
        )
        assert all(each["saved"] for each in records)
        assert all(each["restored"] == (after is not None) for each in records)
        if after is not None:
            assert all(each["before"] == after for each in records)
        after = records[0]["after"]
        losses += records[0]["losses"]
    assert losses == pytest.approx(undisturbed["losses"], rel=1e-5)


@pytest.mark.parametrize(
    "layouts",
    [
        pytest.param(((3, "fsdp"), (1, "whole")), id="few"),
        pytest.param(((2, "fsdp"), (5, "fsdp")), id="more", marks=pytest.mark.thorough),
    ],
)
def test_one_state_in_every_layout(ranks, tmp_path, layouts):
    """HSDP on 4 ranks, FSDP on 3, one rank with the whole model, FSDP on 2, more ranks than some
    tensors have rows.
    """
    path = str(tmp_path / "x.pt")
    state = ranks.run(4, "run", path=path, kind="hsdp", steps=2, save=True, layers=1)[0]["after"]
    for world, kind in layouts:
        records = ranks.run(world, "run", path=path, kind=kind, save=True, seed=5, layers=1)
        assert all(each["restored"] and each["saved"] for each in records)
        assert all(each["before"] == state for each in records), (world, kind)
    weights = read_weights(path)
    assert weights.name == "model"
    tensors = {key: bytes_of(tensor) for key, tensor in weights.tensors.items()}
    assert tensors == {key: state[key] for key in tensors}
    assert len(tensors) == sum(" " not in key for key in state)


def test_tensor_parallelism_within_a_node(ranks, tmp_path):
    path = str(tmp_path / "x.pt")
    _, state = ranks.run(4, "tensor_parallel", path=path, nodes=2, save=True)[0]
    for world, nodes in ((2, 1), (1, 0)):
        results = ranks.run(world, "tensor_parallel", path=path, nodes=nodes, save=False)
        assert results == [(True, state)] * world


def test_an_optimizer_before_its_first_step(ranks, tmp_path):
    path = str(tmp_path / "x.pt")
    saved = ranks.run(2, "run", path=path, save=True)[0]
    assert saved["state"] == 0  # looking at it has not made one
    began_anew = ranks.run(3, "run", path=path, steps=2, seed=4)[0]
    assert began_anew["before"] == saved["after"]
    undisturbed = ranks.run(2, "run", path=str(tmp_path / "none"), steps=2)[0]
    assert began_anew["losses"] == pytest.approx(undisturbed["losses"], rel=1e-5)


def test_parameters_frozen_later_and_trained_again(ranks, tmp_path):
    path = str(tmp_path / "x.pt")
    before = ranks.run(2, "run", path=path, steps=2, save=True)[0]["after"]
    frozen = ranks.run(3, "run", path=path, freeze=True, steps=1, save=True)[0]
    gone = {name for name in before if name.startswith("embed.weight ")}
    assert len(gone) == 3
    assert frozen["before"] == {name: value for name, value in before.items() if name not in gone}
    assert frozen["after"]["embed.weight"] == before["embed.weight"]
    thawed = ranks.run(2, "run", path=path, steps=1)[0]
    assert thawed["before"] == frozen["after"]
    assert gone <= set(thawed["after"])


def test_a_scheduler_that_comes_and_goes(ranks, tmp_path):
    path = str(tmp_path / "x.pt")
    ranks.run(2, "run", path=path, steps=1, schedule=False, save=True)
    with_one = ranks.run(1, "run", path=path, steps=4, save=True)[0]
    assert with_one["lr"] == [0.005]
    assert "initial_lr" in with_one["groups"][0]
    without = ranks.run(2, "run", path=path, schedule=False)[0]
    assert without["lr"] == [0.005]
    assert ranks.run(2, "run", path=path, steps=2)[0]["lr"] == [0.0025]


def test_a_loss_between_save_and_scheduler_skips_no_rate(ranks, tmp_path):
    path = str(tmp_path / "x.pt")
    ranks.run(2, "saves_before_its_scheduler", path=path, lost_in=1)
    began, rate = ranks.run(3, "saves_before_its_scheduler", path=path)[0]
    assert (began, rate) == (1, 0.0125)


def test_ranks_without_random_numbers_of_their_own(ranks, tmp_path):
    path = str(tmp_path / "x.pt")
    ranks.run(2, "run", path=path, seed=7, save=True)  # draws once before it saves, ranks alike
    two = ranks.run(2, "run", path=path)
    five = ranks.run(5, "run", path=path, seed=3)
    assert [each["drawn"] for each in five] == [two[rank % 2]["drawn"] for rank in range(5)]


SHAPES = st.lists(
    st.tuples(st.lists(st.integers(1, 7), min_size=1, max_size=3), st.sampled_from([None, 0, -1])),
    min_size=1,
    max_size=3,
)
LAYOUTS = st.lists(
    st.tuples(st.integers(1, 5), st.integers(1, 5), SHAPES), min_size=12, max_size=12
)


@settings(max_examples=2)
@given(examples=LAYOUTS)
@example(examples=[(1, 5, [([1], 0), ([5, 1], 0)]), (5, 2, [([2, 3], 0), ([4], None)])])
def test_any_layout_is_read_in_any_other_bit_for_bit(ranks, tmp_path_factory, examples):
    examples = [(o, n, [(s, d if d is None else d % len(s)) for s, d in t]) for o, n, t in examples]
    wrong = ranks.run(5, "layouts", path=str(tmp_path_factory.mktemp("layouts")), examples=examples)
    assert wrong == [[]] * 5


def test_a_damaged_shard_is_passed_over_for_the_snapshot_before(ranks, tmp_path):
    path = tmp_path / "x.pt"
    first = ranks.run(2, "run", path=str(path), steps=1, save=True)[0]["after"]
    before = set(tmp_path.glob("x.pt.shards/*/__1_*"))
    ranks.run(2, "run", path=str(path), steps=1, save=True)
    (newest,) = set(tmp_path.glob("x.pt.shards/*/__1_*")) - before
    damaged = bytearray(newest.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    newest.write_bytes(damaged)
    records = ranks.run(3, "run", path=str(path))
    assert all(each["before"] == first for each in records)
    (older,) = before
    older.unlink()
    for state, why in ranks.outcomes(2, "run", path=str(path)):
        assert state == "raised"
        assert f"the check sum of {newest} is wrong" in why
        assert f"has lost its shards: {older}" in why
        assert "No good snapshot is left" in why


def test_nothing_is_changed_before_all_of_it_was_read_and_checked(ranks, tmp_path):
    path = tmp_path / "x.pt"
    ranks.run(2, "run", path=str(path), steps=1, save=True)
    for shard in tmp_path.glob("x.pt.shards/*/__1_*"):
        damaged = bytearray(shard.read_bytes())
        damaged[-1] ^= 1  # what is read last
        damaged[len(damaged) // 2] ^= 1
        shard.write_bytes(damaged)
        for why, unchanged in ranks.run(3, "spoiled", path=str(path)):
            assert f"the check sum of {shard} is wrong" in why
            assert unchanged


def test_a_snapshot_without_sums_of_blocks_is_checked_as_a_whole(ranks, tmp_path):
    """As earlier versions wrote them."""
    path = tmp_path / "x.pt"
    state = ranks.run(2, "run", path=str(path), steps=1, save=True)[0]["after"]
    payload = snapshot_file.read(str(path))
    assert payload["shards"].pop("sums")
    path.unlink()
    snapshot_file.write(str(path), payload, 1)
    assert ranks.run(3, "run", path=str(path))[0]["before"] == state
    (shard,) = tmp_path.glob("x.pt.shards/*/__1_*")
    damaged = bytearray(shard.read_bytes())
    damaged[-1] ^= 1
    shard.write_bytes(damaged)
    for why, unchanged in ranks.run(2, "spoiled", path=str(path)):
        assert f"the check sum of {shard} is wrong" in why
        assert unchanged


def test_damaged_metadata_is_never_unpickled(ranks, tmp_path):
    path = tmp_path / "x.pt"
    ranks.run(2, "run", path=str(path), save=True)
    (metadata,) = tmp_path.glob("x.pt.shards/*/.metadata")
    code = b"cposix\n_exit\n(I3\ntR."
    metadata.write_bytes(code + bytes(metadata.stat().st_size - len(code)))
    for why, unchanged in ranks.run(2, "spoiled", path=str(path)):
        assert f"the check sum of {metadata} is wrong" in why
        assert unchanged


def test_all_ranks_save_for_a_drain_and_go_on_when_it_is_taken_back(ranks, tmp_path):
    path = str(tmp_path / "x.pt")
    results = ranks.run(2, "drained", path=path)
    heard = results[0][1]
    assert {(m.saved, m.steps) for m in heard if hasattr(m, "path")} == {(True, 0)}
    assert {(m.number, m.saved) for m in heard if hasattr(m, "number")} == {(5, True)}
    # asked before the third step, agreed upon in it, saved after the fourth
    assert ranks.run(3, "steps_on_disk", path=path)[0][:2] == (4, 48)


def test_what_cannot_be_saved_leaves_what_is_there_on_all_ranks(ranks, tmp_path):
    path, small = str(tmp_path / "x.pt"), tmp_path / "small"
    state = ranks.run(2, "run", path=path, steps=1, save=True)[0]["after"]
    small.mkdir()
    with small_disk(small):
        full = str(small / "y.pt")
        results = ranks.run(2, "not_saved", path=path, job="job-2", full=full)
        assert results == [(True, False, "refused")] * 2
        assert len(list(small.glob("y.pt.shards/*"))) == 1
        assert ranks.run(2, "run", path=full)[0]["restored"]
    assert ranks.run(2, "run", path=path)[0]["before"] == state
    assert len(list(tmp_path.glob("x.pt.shards/*"))) == 1


def test_killed_at_any_point_of_a_save_the_run_has_one_whole_snapshot(ranks, tmp_path):
    (results,) = ranks.run(1, "killed", path=str(tmp_path / "run" / "x.pt"))
    steps = [steps for steps, _, _ in results]
    assert steps == sorted(steps)
    assert set(steps) == {1, 2}
    assert steps.count(1) > 10
    assert all(position == 12 * steps and whole for steps, position, whole in results)


def test_a_rank_killed_while_all_save_leaves_the_snapshot_of_before(ranks, tmp_path):
    for at in (1, 3):
        path = str(tmp_path / str(at) / "x.pt")
        assert ranks.outcomes(2, "rank_1_killed", path=path, at=at)[1] == ("died", -9)
        assert ranks.run(2, "steps_on_disk", path=path)[0][:2] == (1, 12)
