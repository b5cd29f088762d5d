"""The code after the steps of an epoch, in live mode: it runs exactly once an epoch, on every rank
of the group that made the epoch's last step, whenever the nodes change.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path

import pytest

from tests.malletrain.elastic import epoch_scripts
from tests.malletrain.elastic.conductor import Conductor, conducted
from tests.malletrain.elastic.epoch_scripts import BATCH, EPOCHS, LOOKS, STEPS
from tests.selection import every_change


def events(folder: Path, kind: str) -> list[dict]:
    return [
        event
        for path in folder.glob("events-*")
        for line in path.read_text().splitlines(keepends=True)
        if line.endswith("\n") and (event := json.loads(line))["kind"] == kind
    ]


def at_gate(c: Conductor, folder: Path, number: int, ranks: int) -> None:
    c.until(
        lambda: sum(e["number"] == number for e in events(folder, "gate")) == ranks,
        f"all ranks are before step {number}",
    )


def weights_of(folder: Path) -> list[float]:
    ends = events(folder, "end")
    assert len({tuple(e["weights"]) for e in ends}) == 1
    return ends[0]["weights"]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> list[float]:
    folder = tmp_path_factory.mktemp("undisturbed")
    with conducted(folder, epoch_scripts.train, str(folder), {}) as c:
        c.round(c.start(1))
        c.finish()
    return weights_of(folder)


def check(folder: Path, undisturbed: list[float]) -> None:
    """Equal to the undisturbed run, and the code after each epoch was run once on each rank."""
    assert weights_of(folder) == pytest.approx(undisturbed, rel=1e-5)
    steps = events(folder, "step")
    for epoch in range(EPOCHS):
        of_epoch = [e for e in steps if e["epoch"] == epoch]
        assert {e["rate"] for e in of_epoch} == {0.1 * 0.5**epoch}
        samples = Counter(n for e in of_epoch for n in e["samples"])
        assert set(samples.values()) == {1}
        ends = [e for e in events(folder, "evaluated") if e["epoch"] == epoch]
        size = ends[0]["size"]
        assert sorted(e["rank"] for e in ends) == list(range(size))
        assert {tuple(e["sums"]) for e in ends} == {(float(size),) * 9}


@pytest.mark.parametrize(
    ("number", "before", "after"),
    every_change(
        [(n, *c) for n in (STEPS - 1, STEPS, STEPS + 1) for c in ((1, 2), (2, 1), (2, 3))],
        (STEPS - 1, 1, 2),
        (STEPS, 2, 1),
        (STEPS + 1, 2, 3),
    ),
)
def test_a_planned_change_around_the_end_of_an_epoch(tmp_path, undisturbed, number, before, after):
    """All are checked in before step ``number``, so that this step is the last of its group."""
    with conducted(tmp_path, epoch_scripts.train, str(tmp_path), {"gates": [number]}) as c:
        members = c.start(before)
        c.round(members)
        at_gate(c, tmp_path, number, before)
        members = [*members[:after], *c.start(max(0, after - before))]
        c.round(members, wait=False)
        c.until(c.all_checked_in, "all are there")
        (tmp_path / f"go-{number}").touch()
        c.run()
        c.finish()
    check(tmp_path, undisturbed)
    sizes = {e["size"] for e in events(tmp_path, "step") if e["epoch"] == 2}
    assert sizes == {after}


def test_a_change_in_the_last_step_of_all_is_not_needed_any_more(tmp_path, undisturbed):
    """The code after the training runs where it trained, and does not wait for the change."""
    last = STEPS * EPOCHS - 1
    with conducted(tmp_path, epoch_scripts.train, str(tmp_path), {"gates": [last]}) as c:
        members = c.start(2)
        c.round(members)
        at_gate(c, tmp_path, last, 2)
        joiner = c.start(1)
        c.round([*members, *joiner], wait=False)
        c.until(c.all_checked_in, "all are there")
        (tmp_path / f"go-{last}").touch()
        c.members = members
        c.finish()
        assert joiner[0].alive, "it waits to be released"
    check(tmp_path, undisturbed)


def test_an_evaluation_outlives_the_loss_of_a_peer(tmp_path, undisturbed):
    """It waits for no other rank, so that it is not taken for a hang, however long it takes."""
    options = {"evaluates_until": "go", "alone": True, "last_resort_s": 0.05}
    with conducted(tmp_path, epoch_scripts.train, str(tmp_path), options) as c:
        members = c.start(2)
        c.round(members)
        c.until(
            lambda: {e["rank"] for e in events(tmp_path, "evaluates")} == {0, 1},
            "both are in the code after the epoch",
        )
        survivors = c.lose(members[1])
        c.until(lambda: len(events(tmp_path, "watched")) >= LOOKS, "rank 0 was suspected of a hang")
        c.round(survivors, wait=False)
        (tmp_path / "go").touch()
        c.run()
        c.finish()
    assert weights_of(tmp_path) == pytest.approx(undisturbed, rel=1e-5)
    evaluated = Counter(e["epoch"] for e in events(tmp_path, "evaluated") if e["rank"] == 0)
    assert evaluated == {0: 2, 1: 1, 2: 1}, "rank 1 was lost before the end of epoch 0"


@pytest.mark.parametrize(
    ("lost", "replaced"),
    every_change(
        [(epoch, replaced) for epoch in range(EPOCHS) for replaced in (False, True)],
        (0, True),
        (EPOCHS - 1, False),
    ),
)
def test_what_rank_0_had_to_do_after_an_epoch_is_done_when_it_is_lost(
    tmp_path, undisturbed, lost, replaced
):
    """The other rank has run that code as rank 1, and runs it again as rank 0."""
    with conducted(tmp_path, epoch_scripts.train, str(tmp_path), {"lost_before_row": lost}) as c:
        members = c.start(2)
        c.round(members)
        c.until(lambda: not members[0].alive, "rank 0 is lost")
        survivors = c.lose(members[0])
        joiners = c.start(1) if replaced else []
        c.round([*survivors, *joiners], wait=False)
        c.finish()
    assert weights_of(tmp_path) == pytest.approx(undisturbed, rel=1e-5)
    rows = Counter(e["epoch"] for e in events(tmp_path, "evaluated") if e["rank"] == 0)
    assert rows == {0: 1, 1: 1, 2: 1}
    steps = [e for e in events(tmp_path, "step") if e["epoch"] == lost]
    samples = Counter(number for e in steps for number in e["samples"])
    assert sum(samples.values()) == STEPS * BATCH + BATCH, "the last step comes again"


@pytest.mark.parametrize(
    "collective", every_change(epoch_scripts.COLLECTIVES, next(iter(epoch_scripts.COLLECTIVES)))
)
def test_a_collective_that_only_a_joiner_calls_never_meets_a_step(tmp_path, collective):
    """The error of each rank says where both are."""
    script = epoch_scripts.own_collective
    with conducted(tmp_path, script, str(tmp_path), {"collective": collective}) as c:
        members = c.start(1)
        c.round(members)
        c.until((tmp_path / "trains").exists, "rank 0 trains")
        members += c.start(1)
        c.round(members)
        c.until(lambda: not any(member.alive for member in members), "the training ends")
        assert [member.process.exitcode for member in members] == [1, 1]
    sentence = r"MismatchError: Rank 1 calls .* outside of a training step, while rank 0 is in one"
    for member in members:
        assert re.search(sentence, member.output.read_text())
