"""Live mode end to end without a daemon: groups change under real workers, and the training must
not notice.
"""

from __future__ import annotations

import json
import shutil
import signal
from collections import Counter, defaultdict
from pathlib import Path

import pytest

from malletrain.elastic import step_exchange
from tests.malletrain.elastic import scripts
from tests.malletrain.elastic.conductor import Conductor, conducted


def records(folder: Path) -> list[dict]:
    return [
        json.loads(line)
        for path in folder.glob("steps-*")
        for line in path.read_text().splitlines(keepends=True)
        if line.endswith("\n")  # the last one may be under way, or for ever in pieces
    ]


def steps(folder: Path) -> int:
    return max((r["step"] + 1 for r in records(folder)), default=0)


def losses(folder: Path) -> list[float]:
    """Global loss by step: the mean of what the ranks of that step computed."""
    by_step = defaultdict(dict)
    for record in records(folder):
        by_step[record["step"]][record["rank"]] = record
    assert sorted(by_step) == list(range(len(by_step)))
    for step, ranks in by_step.items():
        sizes = {r["size"] for r in ranks.values()}
        assert sizes == {len(ranks)}, (step, ranks)
    return [sum(r["loss"] for r in by_step[s].values()) / len(by_step[s]) for s in sorted(by_step)]


def seen(folder: Path) -> Counter:
    return Counter((r["epoch"], n) for r in records(folder) for n in r["seen"])


def change_at(c: Conductor, folder: Path, step: int) -> None:
    c.until(lambda: steps(folder) >= step, f"{step} steps are done")


def run_through(
    folder: Path, options: dict, plan: list[tuple[int, int]], script=scripts.train, **of_workers
) -> None:
    """Train with ``plan``: (from step, number of workers). The training waits for each change.
    ``of_workers``: see ``conducted``.
    """
    folder.mkdir()
    options = {**options, "gates": [step for step, _ in plan[1:]]}
    with conducted(folder, script, str(folder), options, **of_workers) as c:
        members = c.start(plan[0][1])
        c.round(members)
        for step, size in plan[1:]:
            more = c.start(size - len(members)) if size > len(members) else []
            change_at(c, folder, step)
            members = [*members[:size], *more]
            c.round(members, wait=False)
            (folder / f"go-{step}").touch()
            c.run()
        c.finish()


@pytest.mark.check
def test_a_training_with_rescales_equals_one_without(tmp_path):
    options = {"samples": 1600, "batch": 16, "epochs": 2, "sleep": 0.005}
    run_through(tmp_path / "one", options, [(0, 1)])
    run_through(tmp_path / "many", options, [(0, 1), (20, 4), (60, 2), (100, 3)])
    alone, changing = losses(tmp_path / "one"), losses(tmp_path / "many")
    assert len(alone) == len(changing) == 200
    assert {r["size"] for r in records(tmp_path / "many")} == {1, 4, 2, 3}
    for a, b in zip(alone, changing, strict=True):
        assert b == pytest.approx(a, rel=1e-5)
    assert set(seen(tmp_path / "many").values()) == {1}
    assert len(seen(tmp_path / "many")) == 3200


def train_newer(folder: str, options: dict, newer: bool = False) -> None:
    """``newer``: with the code of a version whose ranks exchange one number more."""
    if newer:
        before = step_exchange.EXCHANGES[-1]
        after = before._replace(compared=(*before.compared, "another"))
        step_exchange.EXCHANGES = (*step_exchange.EXCHANGES, after)
    scripts.train(folder, options)


@pytest.mark.check
def test_workers_of_two_versions_train_together(tmp_path):
    """As after an upgrade: newer workers join those that were there, and take their place."""
    options = {"samples": 200000, "sleep": 0.01, "digest": True}
    with conducted(tmp_path, train_newer, str(tmp_path), options) as c:
        older = c.start(2)
        c.round(older)
        change_at(c, tmp_path, 10)
        newer = c.start(2, True)
        for members in ([*older, newer[0]], [older[1], *newer], [*newer, older[1]], newer):
            c.round(members)
            change_at(c, tmp_path, steps(tmp_path) + 10)
        (tmp_path / "stop").touch()
        c.finish()
        messages = [m["say"] for w in c.workers for m in w.messages]
    assert "lost" not in messages, "no collective has failed"
    by_step = defaultdict(set)
    for record in records(tmp_path):
        by_step[record["step"]].add(record["digest"])
    assert all(len(digests) == 1 for digests in by_step.values())
    assert set(seen(tmp_path).values()) == {1}


def test_leavers_finish_their_step_and_survivors_are_identical(tmp_path):
    with conducted(
        tmp_path, scripts.train, str(tmp_path), {"samples": 200000, "sleep": 0.01, "digest": True}
    ) as c:
        members = c.start(3)
        c.round(members)
        change_at(c, tmp_path, 10)
        c.round([members[2], members[0]])  # rank 0 leaves its place to another, and one leaves
        now = steps(tmp_path)
        change_at(c, tmp_path, now + 10)
        assert members[1].alive, "who has left waits to be released"
        (tmp_path / "stop").touch()
        c.finish()
    by_step = defaultdict(set)
    for record in records(tmp_path):
        by_step[record["step"]].add(record["digest"])
    assert all(len(digests) == 1 for digests in by_step.values())
    assert set(seen(tmp_path).values()) == {1}


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "frozen"])
def test_a_peer_lost_in_the_middle_costs_at_most_one_step(tmp_path, how):
    """SIGKILL closes its connections at once. A frozen worker looks like a machine without power:
    nothing comes any more.
    """
    with conducted(
        tmp_path,
        scripts.train,
        str(tmp_path),
        {"samples": 200000, "epochs": 100, "digest": True, "kind": "dropout"},
    ) as c:
        members = c.start(3)
        c.round(members)
        for lost in (members[1], members[0]):
            now = steps(tmp_path)
            change_at(c, tmp_path, now + 20)
            survivors = c.lose(lost, signum=how)
            c.round(survivors)
        now = steps(tmp_path)
        change_at(c, tmp_path, now + 20)
        (tmp_path / "stop").touch()
        c.finish()
    all_records = records(tmp_path)
    by_step = defaultdict(lambda: defaultdict(set))
    for record in all_records:
        by_step[record["step"]][record["generation"]].add(record["digest"])
    assert sorted(by_step) == list(range(len(by_step))), "no step is lost"
    for generations in by_step.values():
        for digests in generations.values():
            assert len(digests) == 1, "all that finished a step hold the same numbers"
    # The others do a step again that only the lost worker had finished. Its record of that step
    # does not count.
    counts = Counter(
        (r["epoch"], n)
        for r in all_records
        if r["generation"] == max(by_step[r["step"]])
        for n in r["seen"]
    )
    assert max(counts.values()) == 1


def test_a_step_that_only_some_had_finished_counts_for_all(tmp_path):
    with conducted(tmp_path, scripts.behind, str(tmp_path)) as c:
        members = c.start(3)
        c.round(members)
        c.until(
            lambda: any(w.heard("lost") for w in members),
            "rank 1 has given up a step that the others finished",
        )
        c.abort()  # as the daemon does: gloo may lose track of what the others wait for
        c.round(
            [members[1], members[0], members[2]]
        )  # the one that is behind comes first, and must not win
        c.finish()
    ends = [json.loads(path.read_text()) for path in tmp_path.glob("end-*")]
    assert len(ends) == 3
    assert len({r["digest"] for r in ends}) == 1
    assert {r["steps"] for r in ends} == {30}
    assert {r["updates"] for r in ends} == {30.0}, "every update was made exactly once"
    assert {r["received"] for r in ends} == {0, 1}


def test_a_step_whose_first_update_is_made_is_finished_though_a_peer_is_lost(tmp_path):
    with conducted(tmp_path, scripts.between, str(tmp_path)) as c:
        members = c.start(2)
        c.round(members)
        c.until(
            lambda: len(list(tmp_path.glob("between-*"))) == 2, "both are between the two updates"
        )
        c.round(c.lose(members[1]))
        c.finish()
    assert json.loads((tmp_path / "end").read_text()) == {"steps": 30, "updates": [30.0, 30.0]}


def test_a_state_that_is_behind_is_brought_up_to_the_one_ahead(tmp_path):
    """Kill a worker many times in a tight loop: now and then it dies between the exchange on one
    survivor and on the other.
    """
    options = {"samples": 100000, "epochs": 100, "batch": 24, "digest": True}
    with conducted(tmp_path, scripts.train, str(tmp_path), options) as c:
        members = c.start(3)
        c.round(members)
        for _ in range(6):
            now = steps(tmp_path)
            change_at(c, tmp_path, now + 3)
            joiner = c.start(1)
            survivors = c.lose(members[-1])
            c.round(survivors)
            c.round([*survivors, *joiner])
            members = c.members
        now = steps(tmp_path)
        change_at(c, tmp_path, now + 3)
        (tmp_path / "stop").touch()
        c.finish()
    by_step = defaultdict(lambda: defaultdict(set))
    for record in records(tmp_path):
        by_step[record["step"]][record["generation"]].add(record["digest"])
    assert sorted(by_step) == list(range(len(by_step)))
    # A worker may be killed after a step that the others have to repeat without it.
    assert all(len(digests[max(digests)]) == 1 for digests in by_step.values())


def test_members_lost_while_a_round_is_formed(tmp_path):
    with conducted(
        tmp_path, scripts.train, str(tmp_path), {"samples": 200000, "sleep": 0.02, "digest": True}
    ) as c:
        members = c.start(2)
        c.round(members)
        joiners = c.start(2)
        change_at(c, tmp_path, 5)
        c.round([*members, *joiners], wait=False)
        joiners[1].kill()
        members[1].kill()
        c.abort()
        c.round([members[0], joiners[0]])
        now = steps(tmp_path)
        change_at(c, tmp_path, now + 5)
        (tmp_path / "stop").touch()
        c.finish()
    assert sorted({r["step"] for r in records(tmp_path)}) == list(range(steps(tmp_path)))


def test_accumulated_gradients_equal_one_large_batch(tmp_path):
    one = {"samples": 640, "batch": 32}
    run_through(tmp_path / "one", one, [(0, 1)])
    run_through(
        tmp_path / "many",
        {"samples": 640, "batch": 8, "accumulate": 4, "sleep": 0.01},
        [(0, 2), (8, 3)],
    )
    for a, b in zip(losses(tmp_path / "one"), losses(tmp_path / "many"), strict=True):
        assert b == pytest.approx(a, rel=1e-4)
    assert set(seen(tmp_path / "many").values()) == {1}


def test_mixed_precision_compiled_models_and_a_batch_that_grows(tmp_path):
    with conducted(tmp_path, scripts.precise, str(tmp_path)) as c:
        members = c.start(1)
        c.round(members)
        members += c.start(2)
        c.round(members)
        c.round(members[:2])
        c.lose(members[1])
        c.round(members[:1])
        c.round([members[0], *c.start(1)])
        (tmp_path / "stop").touch()
        c.finish()
    ends = [json.loads(path.read_text()) for path in tmp_path.glob("end-*")]
    assert len(ends) == 2
    assert len({(r["sum"], r["scale"], r["steps"]) for r in ends}) == 1
    longest = max((r["rates"] for r in ends), key=len)
    assert longest == pytest.approx([0.1, 0.3, 0.2, 0.1, 0.2])


@pytest.mark.thorough
@pytest.mark.skipif(
    shutil.which("c++") is None, reason="torch.compile needs a C++ compiler on this machine"
)
def test_a_compiled_model(tmp_path):
    environment = {
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache"),
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
    }
    with conducted(tmp_path, scripts.compiled, str(tmp_path), environment=environment) as c:
        members = c.start(1)
        c.until(lambda: members[0].heard("ready"), "the model is compiled")
        c.round(members)
        members += c.start(1)
        c.until(lambda: members[1].heard("ready"), "the newcomer has compiled it too")
        c.round(members)
        (tmp_path / "stop").touch()
        c.finish()
    ends = [json.loads(path.read_text()) for path in tmp_path.glob("end-*")]
    assert len(ends) == 2
    assert len({(r["digest"], r["steps"]) for r in ends}) == 1
    assert {r["size"] for r in ends} == {2}


def test_a_job_that_lost_all_its_nodes_goes_on_from_its_snapshot(tmp_path):
    options = {"samples": 200000, "sleep": 0.002, "snapshot": "run.snap", "every_s": 0.1}
    with conducted(tmp_path, scripts.train, str(tmp_path), options) as c:
        members = c.start(2)
        c.round(members)
        c.until(
            lambda: (tmp_path / "run.snap").exists() and steps(tmp_path) > 100,
            "a snapshot was written in the background",
        )
        c.lose(*members)
        done = steps(tmp_path)
        others = c.start(3)
        c.round(others)
        (tmp_path / "stop").touch()
        c.finish()
    again = [r["step"] for r in records(tmp_path) if r["size"] == 3]
    assert 0 < min(again) <= done


def test_a_joiner_with_another_model_says_so_and_disturbs_nobody(tmp_path):
    with conducted(tmp_path, scripts.differing, str(tmp_path)) as c:
        members = c.start(2, 3)
        c.round(members)
        odd = c.start(1, 5)[0]
        c.round([*members, odd], wait=False)
        c.until(lambda: not odd.alive, "the joiner has given up")
        assert "other parameters, shapes or types than its peers'" in odd.output.read_text()
        assert odd.process.exitcode == 1
        c.round(members)
        assert all(w.alive for w in members)


def test_state_that_cannot_be_sent_is_named(tmp_path):
    with conducted(tmp_path, scripts.unsendable, str(tmp_path)) as c:
        members = c.start(1)
        c.round(members)
        joiner = c.start(1)
        c.round([*members, *joiner], wait=False)
        c.until(lambda: not members[0].alive, "the run says what is wrong")
        assert (
            "The state of 'odd' cannot be sent to another process" in members[0].output.read_text()
        )
