"""Updates that pass through the group more than once: with a closure, with weights that are moved
between two passes, and two in a step. They are those of one process, whatever the number of ranks,
and a peer that is lost in the middle leaves nothing behind.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from malletrain.protocol.phases import RESTART_CODE
from tests.malletrain.elastic import update_scripts
from tests.malletrain.elastic.conductor import conducted


def results(folder: Path) -> list[dict]:
    return [json.loads(path.read_text()) for path in folder.glob("end-*")]


def weights_of(folder: Path, size: int) -> list[float]:
    ends = results(folder)
    assert [r["size"] for r in ends] == [size] * size
    assert all(r["steps"] == 12 for r in ends)
    assert len({tuple(r["weights"]) for r in ends}) == 1
    return ends[0]["weights"]


def trained(folder: Path, ranks: int, **options) -> list[float]:
    with conducted(folder, update_scripts.train, str(folder), options) as c:
        c.round(c.start(ranks))
        c.finish()
    return weights_of(folder, ranks)


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    weights_by_kind: dict[str, list[float]] = {}

    def weights(kind: str) -> list[float]:
        if kind not in weights_by_kind:
            weights_by_kind[kind] = trained(tmp_path_factory.mktemp(kind), 1, kind=kind)
        return weights_by_kind[kind]

    return weights


@pytest.mark.parametrize("kind", ["sgd", "lbfgs", "sam", "twice", "overflow"])
def test_two_ranks_train_as_one(tmp_path, alone, kind):
    assert trained(tmp_path, 2, kind=kind) == pytest.approx(alone(kind), rel=1e-9)


@pytest.mark.parametrize(
    ("kind", "dies_at"),
    [
        ("sgd", [5, 0]),
        ("noise", [4, 0]),  # of an epoch's first step: its batches are iterated again
        ("noise", [5, 0]),
        ("lbfgs", [5, 0]),
        ("lbfgs", [0, 2]),
        ("lbfgs", [6, 2]),
        ("sam", [5, 1]),
        ("twice", [5, 0]),
        ("twice", [5, 1]),
        ("overflow", [5, 0]),
        ("overflow", [6, 0]),
    ],
)
def test_a_peer_lost_within_an_update_leaves_nothing_behind(tmp_path, alone, kind, dies_at):
    options = {"kind": kind, "dies_at": dies_at, "notices": kind == "twice"}
    check_loss(tmp_path, options, alone(kind))


@pytest.mark.parametrize("step", [5, 6])
def test_a_scale_is_changed_once_when_a_peer_is_lost_before_the_step_ends(tmp_path, alone, step):
    """Also in step 5, whose gradients overflow, so that no update is made."""
    check_loss(tmp_path, {"kind": "overflow", "dies_after": step}, alone("overflow"))


@pytest.mark.parametrize("by_data", [False, True])
def test_weights_that_were_moved_are_put_back(tmp_path, alone, by_data):
    options = {"kind": "sam", "dies_at": [5, 1], "by_data": by_data, "notices": True}
    check_loss(tmp_path, options, alone("sam"))


def check_loss(folder: Path, options: dict, undisturbed: list[float]) -> None:
    with conducted(folder, update_scripts.train, str(folder), options) as c:
        members = c.start(2)
        c.round(members)
        c.until(lambda: not members[1].alive, "rank 1 is dead")
        c.round(c.lose(members[1]))
        c.finish()
    assert weights_of(folder, 1) == pytest.approx(undisturbed, rel=1e-9)


@pytest.mark.parametrize("kind", ["sam", "twice"])
def test_a_process_that_cannot_undo_its_first_such_step_starts_again(tmp_path, kind):
    options = {"kind": kind, "dies_at": [0, 1], "notices": True}
    with conducted(tmp_path, update_scripts.train, str(tmp_path), options) as c:
        members = c.start(2)
        c.round(members)
        c.until(lambda: not members[1].alive, "rank 1 is dead")
        c.lose(members[1])
        c.until(lambda: not members[0].alive, "rank 0 has ended")
        assert members[0].process.exitcode == RESTART_CODE
        c.until(lambda: members[0].heard("restart"), "it has asked to be started again")
        assert "it starts again" in members[0].output.read_text()


def test_a_second_update_in_a_step_of_a_sharded_model_is_refused(tmp_path):
    with conducted(tmp_path, update_scripts.updates_twice_sharded, str(tmp_path)) as c:
        c.round(c.start(1))
        c.finish()
    assert "Make each update a step of its own" in (tmp_path / "refused").read_text()


def test_a_scheduler_in_place_of_the_runs_is_refused_at_its_second_update(tmp_path):
    with conducted(tmp_path, update_scripts.scheduler_replaced, str(tmp_path)) as c:
        c.round(c.start(2))
        c.finish()
    sentence = (tmp_path / "refused").read_text()
    assert sentence.startswith("4: elastic.Run was not given the scheduler ExponentialLR")
