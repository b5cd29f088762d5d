"""Sharded models in live mode end to end, without a daemon: groups change under real workers."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
import torch

from malletrain.elastic import step_exchange
from malletrain.elastic.sharded import sharing
from malletrain.elastic.sharded.assignment import StatePart, overlap
from tests.malletrain.elastic.conductor import conducted
from tests.malletrain.elastic.sharded import scripts
from tests.malletrain.elastic.test_run import change_at, losses, records, seen
from tests.torch_versions import trains_shards

pytestmark = trains_shards


def ends(folder: Path) -> list[dict]:
    return [json.loads(path.read_text()) for path in folder.glob("end-*")]


def that_count(folder: Path) -> list[dict]:
    """The records of each step in the last round that did it."""
    all_records = records(folder)
    last: dict[int, int] = {}
    for record in all_records:
        last[record["step"]] = max(last.get(record["step"], 0), record["generation"])
    return [record for record in all_records if record["generation"] == last[record["step"]]]


def counts_as_if_undisturbed(
    folder: Path, options: dict, cut: int | None = None, all_changes_came: bool = True
) -> None:
    """Every step has the loss of an undisturbed run, and every sample counts once.

    A killed worker may not have recorded its last step. One that gave up step ``cut``, which
    counts, has not recorded it. The others then have all the rest.
    """
    by_step: dict[int, list[dict]] = {}
    for record in that_count(folder):
        by_step.setdefault(record["step"], []).append(record)
    expected = scripts.alone(options)
    assert sorted(by_step) == list(range(len(expected)))
    partial = [step for step, ranks in by_step.items() if len(ranks) < ranks[0]["size"]]
    assert len(partial) <= 1 if cut is None else partial == [cut]
    for step, ranks in by_step.items():
        if step not in partial:
            loss = sum(record["loss"] for record in ranks) / len(ranks)
            assert loss == pytest.approx(expected[step], rel=1e-5)
    counted = Counter(number for r in that_count(folder) for number in r["seen"])
    assert set(counted.values()) == {1}
    assert 12 * (len(expected) - len(partial)) <= len(counted) <= options["samples"]
    totals = [(end["steps"], end["facts"]) for end in ends(folder)]
    assert set(totals) == {(len(expected), options["samples"])}
    assert len({end["digest"] for end in ends(folder)}) == 1
    assert all(end["has_center"] for end in ends(folder)), "a variable for a tensor stays valid"
    if all_changes_came:  # what one that was given up had made, the interpreter collects
        assert {end["old_bytes"] for end in ends(folder)} == {0}, "old shards are given back"


def test_fsdp_over_2_4_and_3_ranks_equals_an_undisturbed_run(tmp_path):
    """Grown before its first step, too, when the optimizer has no state yet."""
    options = {"samples": 480, "gates": [10, 20, 30]}
    with conducted(tmp_path, scripts.train, str(tmp_path), options) as c:
        members = c.start(2)
        c.round(members)
        for step, size in ((10, 4), (20, 3), (30, 1)):
            more = c.start(size - len(members)) if size > len(members) else []
            change_at(c, tmp_path, step)
            members = [*members[:size], *more] if size != 3 else members[1:]  # rank 0 leaves
            c.round(members, wait=False)
            c.until(c.all_checked_in, "all have checked in")
            (tmp_path / f"go-{step}").touch()
            c.run()
        c.finish()
    counts_as_if_undisturbed(tmp_path, options)
    assert len(losses(tmp_path)) == 40
    assert {r["size"] for r in records(tmp_path)} == {2, 4, 3, 1}
    assert set(seen(tmp_path).values()) == {1}
    assert len(seen(tmp_path)) == 480
    each_got_what_it_lacked(tmp_path)


PARAMETERS = ((13, 32), (13, 4), (1, 52), (1, 4))
"""(rows, bytes of a row) of the network; Adam keeps two more numbers of each."""


def lacking(old: tuple[int, int] | None, new: tuple[int, int]) -> int:
    """Bytes of ``new``, (part, parts), that ``old`` has not."""
    one = StatePart(*new, PARAMETERS)
    common = overlap(StatePart(*old, PARAMETERS), *new) if old is not None else 0
    return 3 * (overlap(one, *new) - common)


def each_got_what_it_lacked(folder: Path) -> None:
    """``change_bytes`` of every process at every change."""
    checked = 0
    for path in folder.glob("steps-*"):
        before: tuple[int, int] | None = None
        places = {
            r["generation"]: (r["rank"], r["size"], r["moved"])
            for r in map(json.loads, path.read_text().splitlines())
        }
        for generation, (rank, size, moved) in sorted(places.items()):
            if generation > 1:
                assert moved == lacking(before, (rank, size)), (generation, rank, before)
                checked += 1
            before = rank, size
    assert checked == 4 + 3 + 1


def train_older(folder: str, options: dict, older: bool = False) -> None:
    """``older``: as a version that knows the first exchange only, and reads nothing else."""
    if older:
        step_exchange.EXCHANGES = step_exchange.EXCHANGES[:1]
        received = sharing.broadcast

        def broadcast(group, source, data):
            state = received(group, source, data)
            assert source == group.place.rank or b"rebuilt" not in state
            return state

        sharing.broadcast = broadcast
    scripts.train(folder, options)


def test_workers_of_two_versions_train_a_sharded_model_together(tmp_path):
    """As after an upgrade: newer workers join those that were there, and take their place. The
    older ones hand over their shards, and a lost one leaves copies.
    """
    options = {"samples": 480, "gates": [10, 20], "run": {"replicate_every": 3}, "holds": (3, 30)}
    with conducted(tmp_path, train_older, str(tmp_path), options) as c:
        older = c.start(2, True)
        c.round(older)
        newer = c.start(2)
        for step, members in ((10, [*older, newer[0]]), (20, [older[1], *newer])):
            change_at(c, tmp_path, step)
            c.round(members, wait=False)
            c.until(c.all_checked_in, "all have checked in")
            (tmp_path / f"go-{step}").touch()
            c.run()
        change_at(c, tmp_path, 30)
        c.round(c.lose(older[1]))
        c.finish()
    counts_as_if_undisturbed(tmp_path, options)


@pytest.mark.thorough
def test_another_rank_in_a_group_of_a_size_that_was_there_before(tmp_path):
    """Torch takes the meshes of both groups for the same one. 3 ranks, 2 of them, 3 again."""
    options = {"samples": 240, "gates": [5, 10], "run": {"replicate_every": 2}}
    with conducted(tmp_path, scripts.train, str(tmp_path), options) as c:
        members = c.start(3)
        c.round(members)
        new = c.start(1)
        for step, next_ones in ((5, members[1:]), (10, [*members[1:], *new])):
            change_at(c, tmp_path, step)
            c.round(next_ones, wait=False)
            c.until(c.all_checked_in, "all have checked in")
            (tmp_path / f"go-{step}").touch()
            c.run()
        c.finish()
    counts_as_if_undisturbed(tmp_path, options)


@pytest.mark.thorough
def test_a_leaver_knows_only_of_a_round_that_came_to_nothing(tmp_path):
    """A joiner died before it came to it, and the next round is one without the leaver."""
    options = {"samples": 120, "gates": [5]}
    with conducted(tmp_path, scripts.train, str(tmp_path), options) as c:
        stays, leaves = members = c.start(2)
        c.round(members)
        (joiner,) = c.start(1)
        c.until(lambda: joiner.heard("ready"), "the joiner is ready")
        change_at(c, tmp_path, 5)
        joiner.kill()
        c.round([*members, joiner], wait=False)
        c.until(lambda: c.has_come(0) and c.has_come(1), "both know of the round")
        c.round([stays], wait=False)
        c.until(c.all_checked_in, "the one that stays has checked in")
        (tmp_path / "go-5").touch()
        c.run()
        c.finish()
        assert leaves.alive
    counts_as_if_undisturbed(tmp_path, options)
    assert {r["generation"] for r in records(tmp_path)} == {1, 3}


@pytest.mark.thorough
def test_a_joiner_that_saves_before_its_loop_is_heard_by_those_in_theirs(tmp_path):
    """It is at the top of the script and they are in the middle; all save after the step that comes
    first. A hash cannot come later: it is refused.
    """
    options = {"samples": 120, "gates": [5], "snapshot": True, "asks": True}
    with conducted(tmp_path, scripts.train, str(tmp_path), options) as c:
        members, new = c.start(2), c.start(1)
        c.round(members)
        change_at(c, tmp_path, 5)
        c.round([*members, *new], wait=False)
        c.until(c.all_checked_in, "all have checked in")
        (tmp_path / "go-5").touch()
        c.finish()
    counts_as_if_undisturbed(tmp_path, options)
    saved, last = (
        torch.load(tmp_path / name, weights_only=False) for name in ("run.pt.prev", "run.pt")
    )
    joined = min(r["step"] for r in records(tmp_path) if r["generation"] == 2)
    assert saved["objects"]["run"]["steps"] == joined + 1
    assert saved["world_size"] == 3
    assert last["objects"]["run"]["steps"] == 10, "rank 0 alone asked for it"
    early = sorted((end["early"] for end in ends(tmp_path)), key=len)
    assert early[:2] == [[True], [True]]
    assert early[2][0] is False
    assert "run.digest()" in early[2][1]


NODES_OF_2 = {"environment": {"LOCAL_WORLD_SIZE": "2"}}


@pytest.mark.thorough
def test_hsdp_grows_by_a_node_and_loses_one_without_notice(tmp_path):
    """Nothing but the step in progress is done again, and every sample counts once."""
    options = {"samples": 480, "gates": [10], "run": {"shard": "node"}, "holds": (2, 20)}
    with conducted(tmp_path, scripts.train, str(tmp_path), options, **NODES_OF_2) as c:
        members = c.start(2)
        c.round(members)
        members += c.start(2)
        change_at(c, tmp_path, 10)
        c.round(members, wait=False)
        c.until(c.all_checked_in, "all have checked in")
        (tmp_path / "go-10").touch()
        c.run()
        change_at(c, tmp_path, 20)
        c.round(c.lose(*members[:2]))
        c.finish()
    counts_as_if_undisturbed(tmp_path, options)
    moved = {r["rank"]: r["moved"] for r in records(tmp_path) if r["size"] == 4}
    assert moved[0] == moved[1] == 0, "who holds its shard gets nothing"
    by_step = Counter((r["step"], r["generation"]) for r in records(tmp_path))
    again = [step for step, generation in by_step if generation == 3 and (step, 2) in by_step]
    assert len(again) <= 1


@pytest.mark.thorough
def test_a_replica_to_which_the_word_did_not_come_makes_the_update_too(tmp_path):
    """One rank learns that all have their gradients and updates its shard; the other one of its
    node does not. No replica of either state is whole.
    """
    options = {"samples": 240, "run": {"shard": "node"}, "late": [1, 5], "slow": 0.02}
    with conducted(tmp_path, scripts.train, str(tmp_path), options, **NODES_OF_2) as c:
        members = c.start(4)
        c.round(members)
        c.until(lambda: any(w.heard("lost") for w in members), "rank 1 has given up the step")
        c.until(lambda: (4, 0) in {(r["step"], r["rank"]) for r in records(tmp_path)}, "rank 0 not")
        c.round(c.lose(*members[2:]))
        c.finish()
    counts_as_if_undisturbed(tmp_path, options, cut=4)


@pytest.mark.parametrize(
    "every",
    [pytest.param(3, id="copies"), pytest.param(0, id="snapshot", marks=pytest.mark.thorough)],
)
def test_fsdp_goes_on_after_a_loss_without_notice(tmp_path, every):
    """From the neighbours' copies, at most ``every`` steps back; without, from the snapshot."""
    options = {
        "samples": 240,
        "run": {"replicate_every": every},
        "snapshot": True,
        "holds": (1, 10),
    }
    with conducted(tmp_path, scripts.train, str(tmp_path), options) as c:
        *members, joiner = c.start(4)
        c.round(members)
        change_at(c, tmp_path, 10)
        c.round([*c.lose(members[1]), joiner])
        c.finish()
        output = "".join(worker.output.read_text() for worker in members)
    counts_as_if_undisturbed(tmp_path, options)
    before = max(r["step"] for r in records(tmp_path) if r["generation"] == 1)
    after = min(r["step"] for r in records(tmp_path) if r["generation"] == 2)
    if every:
        assert 0 <= before + 1 - after <= 3 + 1, output
        assert "The run continues from the copies of step" in output
    else:
        assert after == 0
        assert "no copies of them are left" in output
        assert "continues from its snapshot, step 0." in output


def test_one_that_is_an_update_behind_has_the_only_copies_of_what_was_lost(tmp_path):
    """What it trains is what was copied last; the others are a step ahead, and have dropped the
    copies before.
    """
    options = {
        "samples": 120,
        "run": {"replicate_every": 3},
        "snapshot": True,
        "behind": (2, 6),
    }
    with conducted(tmp_path, scripts.train, str(tmp_path), options) as c:
        members = c.start(3)
        c.round(members)
        ahead = members[:2]
        c.until(
            lambda: len([r for r in records(tmp_path) if r["step"] == 6]) == len(ahead),
            "the others are ahead",
        )
        c.round(c.lose(members[1]))
        c.finish()
        output = members[0].output.read_text() + members[2].output.read_text()
    counts_as_if_undisturbed(tmp_path, options)
    assert min(r["step"] for r in records(tmp_path) if r["generation"] == 2) == 6
    assert "The run continues from the copies of step 6, 1 step back" in output


@pytest.mark.parametrize(
    ("who", "point"),
    [
        pytest.param("leaver", "when leavers hand over", marks=pytest.mark.thorough),
        pytest.param("joiner", "before pieces move", marks=pytest.mark.thorough),
        pytest.param("peer", "before pieces move", marks=pytest.mark.thorough),
        ("peer", "before all have theirs"),
        pytest.param("peer", "before copies are renewed", marks=pytest.mark.thorough),
    ],
)
def test_killed_at_any_point_of_a_change_the_others_go_on_from_one_step(tmp_path, who, point):
    """A joiner's death costs nothing. For the others' shards there are the neighbours' copies."""
    options = {"samples": 120, "gates": [5], "run": {"replicate_every": 2}}
    with conducted(tmp_path, scripts.train, str(tmp_path), options) as c:
        joins = c.start(1, point, True) if who == "joiner" else c.start(1) if who == "peer" else []
        members = c.start(2)
        (victim,) = joins if who == "joiner" else c.start(1, point)
        stays = [w for w in [*members, *joins] if w is not victim]
        if who != "joiner":
            members.append(victim)
        c.round(members)
        change_at(c, tmp_path, 5)
        c.round([*members, *joins] if who != "leaver" else stays, wait=False)
        c.until(c.all_checked_in, "all have checked in")
        (tmp_path / "go-5").touch()
        c.until(lambda: not victim.alive, "it has died")
        c.abort()
        c.round(stays)
        c.finish()
    counts_as_if_undisturbed(tmp_path, options, all_changes_came=False)
    steps = Counter((r["step"], r["rank"], r["size"]) for r in records(tmp_path))
    again = {r["step"] for r in records(tmp_path) if r["generation"] == 3}
    first = {r["step"] for r in records(tmp_path) if r["generation"] == 1}
    assert len(again & first) <= (0 if who == "joiner" else 2), steps


def test_who_was_alone_keeps_everything_until_there_are_copies(tmp_path):
    """Nobody had any of it: a joiner that dies with its shards takes no step along."""
    options = {"samples": 120, "gates": [5], "run": {"replicate_every": 2}}
    with conducted(tmp_path, scripts.train, str(tmp_path), options) as c:
        members, (joiner,) = c.start(1), c.start(1, "before copies are renewed", True)
        c.round(members)
        change_at(c, tmp_path, 5)
        c.round([*members, joiner], wait=False)
        c.until(c.all_checked_in, "all have checked in")
        (tmp_path / "go-5").touch()
        c.until(lambda: not joiner.alive, "it has died")
        c.abort()
        c.round(members)
        c.finish()
    counts_as_if_undisturbed(tmp_path, options, all_changes_came=False)
    assert set(Counter(r["step"] for r in records(tmp_path)).values()) == {1}
