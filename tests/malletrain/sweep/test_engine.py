"""The engine, in a world in which everything dies: which trials there are in the end, and what of
them counts.
"""

from __future__ import annotations

import itertools
import math

import msgspec
import optuna
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from optuna.trial import TrialState

from malletrain.sweep.ledger import Ledger, results
from malletrain.sweep.spec import SweepError
from tests.malletrain.sweep import sweep_world
from tests.malletrain.sweep.sweep_world import STEPS, World, described, loss


def test_bad_trials_are_given_up_and_the_best_comes_to_its_end():
    world = World(described(trials=12, at_once=4))
    world.play()
    world.check_ended(12)
    states = world.states()
    assert states.count("PRUNED") >= 4
    best = min((t.params["x"], t.number) for t in world.trials())
    assert Ledger.open(world.storage, "s").best()[0].number == best[1]
    assert Ledger.open(world.storage, "s").end == "All trials have ended."
    trained = sum(job.step for job in world.jobs.jobs.values())
    assert trained < 12 * 9 * 0.7, "hardly anything was saved"


def test_no_more_trials_at_once_than_asked_for():
    world = World(described(trials=8, at_once=3))
    most = 0
    while not world.turn():
        most = max(most, sum(j.state == "running" for j in world.jobs.jobs.values()))
        world.jobs.train()
    assert most == 3


def points_of(sweep) -> int:
    world = World(sweep)
    world.play()
    return world.points


def test_killed_at_every_point_nothing_is_lost_and_nothing_counts_twice():
    sweep = described(trials=9, at_once=3)
    many = points_of(sweep)
    killed = set()
    assert many > 60
    for n in range(1, many + 1):
        world = World(sweep)
        world.kill_at = {n}
        world.play()
        world.check_ended(9)
        killed.add(world.passed[n - 1])
    assert killed >= {
        *("asked", "values chosen", "submitted", "bound", "pruner said", "ending noted"),
        *("cancelled", "cost noted", "told", "weight noted", "weighed"),
    }


@given(st.sets(st.integers(1, 60), max_size=12))
@settings(deadline=None, max_examples=15)
@example(set(range(3, 60, 7)))  # before and after the values of a trial are drawn
def test_killed_again_and_again(points):
    world = World()
    world.kill_at = points
    world.play()
    world.check_ended(6)


def test_no_values_are_drawn_twice_however_often_the_engine_is_killed():
    """A new sampler that draws as the one before it would repeat a trial."""
    for every in range(2, 14):
        world = World(described(trials=12, at_once=2))
        world.kill_at = set(range(3, 120, every))
        world.play()
        assert len({trial.params["x"] for trial in world.trials()}) == 12, every


@pytest.mark.parametrize("after", [False, True], ids=["not carried out", "answer lost"])
def test_a_daemon_that_dies_in_any_call(after):
    world = World()
    world.play()
    calls = world.jobs.calls
    for n in range(1, calls + 1):
        world = World()
        world.jobs.away_at, world.jobs.after = n, after
        world.play()
        world.check_ended(6)


def test_what_trained_on_without_the_engine_is_taken_as_it_is():
    world = World(described(trials=3, at_once=3))
    world.turn()
    for _ in range(9):
        world.jobs.train()  # nobody attends
    world.engine = world.started()
    world.play()
    world.check_ended(3)
    assert world.states() == ["COMPLETE"] * 3
    assert world.jobs.submissions == 3


def test_steps_reported_again_after_a_loss_stay_as_they_were():
    world = World(described(trials=1, at_once=1, pruner="none"))
    world.turn()
    (job,) = world.jobs.jobs.values()
    for _ in range(5):
        world.jobs.train()
    world.turn()
    job.back_to(2)
    job.reported.append((3, 99.0))
    world.play()
    (trial,) = world.trials()
    assert trial.intermediate_values[3] == pytest.approx(job.x + 0.25)
    world.check_ended(1)


@pytest.mark.parametrize("read_together", [True, False])
def test_of_steps_that_decrease_the_same_points_count_whenever_they_are_read(read_together):
    """Of two epochs whose steps begin again, the pruner sees the first."""
    world = World(described(trials=1, at_once=1, pruner="none"))
    world.turn()
    (job,) = world.jobs.jobs.values()
    for point in [(2, 1.0), (4, 0.9), (1, 0.5), (3, 0.4), (6, 0.3)]:
        job.reported.append(point)
        if not read_together:
            world.turn()
    world.turn()
    (trial,) = world.trials()
    assert trial.intermediate_values == {2: 1.0, 4: 0.9, 6: 0.3}


def test_cancelled_its_jobs_end_and_it_goes_on_when_resumed():
    world = World(described(trials=6, at_once=3))
    world.turn()
    Ledger.open(world.storage, "s").cancel()
    while not world.turn():
        pass
    assert {j.state for j in world.jobs.jobs.values()} == {"cancelled"}
    assert {j.why for j in world.jobs.jobs.values()} == {"its sweep was cancelled"}
    assert world.states() == ["FAIL"] * 3
    assert Ledger.open(world.storage, "s").end == "It was cancelled."
    Ledger.open(world.storage, "s").cancel(False)
    world.engine = world.started()
    world.play()
    assert len(world.trials()) == 6
    assert "RUNNING" not in world.states()


@pytest.mark.parametrize("noted", [False, True], ids=["", "its end was noted already"])
def test_cancelled_after_the_engine_died_what_has_ended_by_itself_counts(noted):
    world = World(described(trials=3, at_once=3, pruner="none"))
    world.turn()
    one, two, three = world.jobs.jobs.values()
    while one.state == "running":
        one.train()
    two.state = "failed"
    ledger = Ledger.open(world.storage, "s")
    if noted:
        for trial in ledger.running():
            ledger.note(trial, "malletrain:ending", "cancelled")
    ledger.cancel()
    world.engine = world.started()
    while not world.turn():
        pass
    assert world.states() == ["COMPLETE", "FAIL", "FAIL"]
    trial = world.trials()[0]
    assert trial.value == loss(one.x, STEPS)
    assert sorted(trial.intermediate_values) == list(range(1, STEPS + 1))
    assert three.state == "cancelled"
    assert "its job j2 failed" in world.trials()[1].user_attrs["malletrain:why"]


def test_a_sweep_of_which_all_trials_failed_has_failed():
    world = World(described(trials=2, at_once=2, pruner="none"))
    world.turn()
    for job in world.jobs.jobs.values():
        job.state = "failed"
    with pytest.raises(
        SweepError, match=r"All trials failed \(2\)\. Trial 1: its job j2 failed.* --name OTHER"
    ):
        world.play()


def test_added_trials_are_done():
    world = World(described(trials=2, at_once=2))
    world.play()
    Ledger.open(world.storage, "s").want(5)
    world.play()
    world.check_ended(5)


def test_a_job_that_somebody_else_cancelled_is_a_failed_trial():
    world = World(described(trials=2, at_once=2, pruner="none"))
    world.turn()
    world.jobs.cancel("j1", "by hand")
    world.play()
    trial = world.trials()[0]
    assert trial.state.name == "FAIL"
    assert trial.user_attrs["malletrain:why"] == "its job j1 was cancelled"


def test_a_job_of_a_daemon_that_is_gone_is_not_begun_anew():
    world = World(described(trials=2, at_once=2, pruner="none"))
    world.turn()
    del world.jobs.jobs["j1"]
    world.play()
    assert world.states() == ["FAIL", "COMPLETE"]
    assert world.jobs.submissions == 2


def fail(world):
    """Play on with jobs that all fail."""
    while True:
        world.turn()
        for job in world.jobs.jobs.values():
            job.state = "failed"


def test_a_sweep_whose_trials_all_fail_stops():
    world = World(described(trials=20, at_once=2, more="most_failed = 3"))
    words = r"failed and none ended well.*j\d failed.* run FILE --name OTHER.*sweep resume s"
    with pytest.raises(SweepError, match=words):
        fail(world)
    assert len(world.trials()) < 7
    world.engine = world.started()  # it was mended
    while not world.turn():
        world.jobs.train()
    assert "COMPLETE" in world.states()


@pytest.mark.parametrize(
    ("others", "value", "reason"),
    [
        ({"accuracy": 0.5}, None, "its job j1 reported no loss; it reported accuracy"),
        ({}, None, "its job j1 reported no loss; it never called malletrain.metric"),
    ],
)
def test_a_trial_without_a_value_says_what_its_job_reported(others, value, reason):
    world = World(described(trials=1, at_once=1, pruner="none"))
    world.turn()
    world.jobs.metrics = {name: lambda x, v=v: v for name, v in others.items()}
    world.jobs.metrics.setdefault("loss", lambda x: value)
    world.jobs.named = list(others)
    world.jobs.jobs["j1"].state = "completed"
    with pytest.raises(SweepError, match="All trials failed"):
        world.play()
    assert world.trials()[0].user_attrs["malletrain:why"] == reason


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("pruner", ["none", "asha", "hyperband", "median", "earlycurve"])
def test_a_trial_that_diverges_is_given_up_and_never_the_best(number, pruner):
    world = World(described(trials=6, at_once=6, pruner=pruner, more="most_failed = 1"))
    world.turn()
    diverged = [world.jobs.jobs[name] for name in ("j1", "j2")]
    for job in diverged:
        job.reported = [(1, -5.0), (2, number)]  # the best by far until then
        job.step, job.value = 2, lambda step: number
    world.play()
    for job, trial in zip(diverged, world.trials(), strict=False):
        assert trial.state == TrialState.PRUNED
        assert str(trial.intermediate_values[2]) == str(number), "it is shown"
        assert (job.state == "completed") == (pruner == "none")
    best = Ledger.open(world.storage, "s").best(6)
    assert all(math.isfinite(trial.value) and trial.number > 1 for trial in best)
    assert best or pruner in ("asha", "hyperband"), "these go by the first value"
    rows = {row["trial"]: row for row in results(Ledger.open(world.storage, "s"))}
    assert str(rows[0]["values"]["loss"]) == str(number)
    assert ("not a number" in rows[0]["note"]) == (pruner == "none")


def test_a_trial_that_ends_in_nan_is_not_the_best_where_its_best_value_counts():
    world = World(described(trials=4, at_once=4, pruner="none", more='value = "best"'))
    world.turn()
    job = world.jobs.jobs["j1"]
    job.reported, job.step = [(1, -5.0), (2, math.nan)], 2
    job.value = lambda step: math.nan
    world.play()
    ledger = Ledger.open(world.storage, "s")
    assert world.trials()[0].state == TrialState.PRUNED
    assert ledger.best()[0].number != 0


@pytest.mark.parametrize("final", [-5.0, 5.0])
def test_a_last_value_without_a_step_counts_where_the_best_value_does(final):
    world = World(described(trials=1, pruner="none", more='value = "best"'))
    world.jobs.metrics = {"loss": lambda x: x + final}
    world.play()
    [trial] = world.trials()
    assert trial.value == min(trial.params["x"] + final, loss(trial.params["x"], STEPS))


def test_with_several_metrics_a_trial_that_diverges_is_not_among_the_best():
    sweep = described(trials=4, at_once=4, pruner="none")
    section = sweep.sweep.model_copy(update={"metric": ["loss", "size"]})
    sampler = sweep.sampler.model_copy(update={"kind": "nsga2"})
    world = World(sweep.model_copy(update={"sweep": section, "sampler": sampler}))
    world.turn()
    worst = max(job.x for job in world.jobs.jobs.values())
    world.jobs.metrics = {"loss": lambda x: math.nan if x == worst else x, "size": lambda x: -x}
    world.play()
    states = sorted(trial.state.name for trial in world.trials())
    assert states == ["COMPLETE"] * 3 + ["PRUNED"]
    assert all(t.state.name == "COMPLETE" for t in Ledger.open(world.storage, "s").best())


def test_a_job_that_is_refused_says_so():
    world = World()
    world.jobs.refuses = "There is no script."
    with pytest.raises(SweepError, match="Trial 0 cannot be submitted: There is no script"):
        world.turn()
    assert world.states() == ["FAIL"]


@pytest.mark.parametrize("quota", [1, 2, 3])
def test_a_trial_waits_while_its_owner_may_have_no_more_jobs(quota):
    """Also where trials are as many as may be: the next one is submitted before one has ended."""
    world = World(described(trials=8, at_once=3))
    world.jobs.quota = quota
    waited, most = set(), 0
    while not world.turn():
        waited.add(world.engine.waits_because)
        most = max(most, sum(j.state == "running" for j in world.jobs.jobs.values()))
        world.jobs.train()
    world.check_ended(8)
    assert "FAIL" not in world.states()
    assert most == quota
    assert waited == {"", f"You have {quota} jobs."}


def test_a_trial_that_waits_for_a_quota_does_not_begin_after_the_sweeps_time():
    world = World(described(trials=8, at_once=3, more='time = "12 s"'))
    world.jobs.quota = 1
    for _ in range(15):  # a second each
        world.turn()
        world.jobs.quota = 0  # other jobs of its owner
    attempts = world.jobs.submissions
    world.jobs.quota = 1
    world.play()
    assert attempts == 1 + 3, "each attempt builds the trial's job, with functions of the owner"
    assert len(world.jobs.jobs) == 1
    assert sorted(world.states()) == ["COMPLETE", "FAIL"]


def test_a_sweep_is_cancelled_although_its_next_trial_waits_for_a_quota():
    world = World(described(trials=8, at_once=3))
    world.jobs.quota = 1
    world.turn()
    assert world.states() == ["RUNNING", "RUNNING"]
    world.jobs.quota = 0  # other jobs of its owner
    world.engine.ledger.cancel()
    while not world.turn():
        pass
    assert world.states() == ["FAIL", "FAIL"]
    assert len(world.jobs.jobs) == 1


def test_no_trial_begins_after_its_time_or_its_node_hours():
    world = World(described(trials=50, at_once=2, pruner="none", more='time = "12 s"'))
    world.play()
    assert 2 <= len(world.trials()) < 10
    assert "time is over" in Ledger.open(world.storage, "s").end
    world = World(described(trials=50, at_once=2, pruner="none", more="node_hours = 0.08"))
    world.play()  # 90 node-seconds a trial, 288 in all
    assert len(world.trials()) == 4
    assert "node-hours are used up" in Ledger.open(world.storage, "s").end


def test_the_farther_a_trial_has_come_the_more_its_job_counts():
    world = World(described(trials=12, at_once=3))
    heavier = set()
    while not world.turn():
        world.jobs.train()
        running = [j for j in world.jobs.jobs.values() if j.state == "running"]
        by_step = sorted(running, key=lambda j: j.step)
        weights = [j.weights[-1] for j in by_step]
        heavier |= {b / a for a, b in itertools.pairwise(weights)}
        assert max(weights, default=1.0) <= 1.0
    assert max(heavier) > 1.0


@pytest.mark.parametrize("pruner", ["none", "asha"])
def test_a_sweep_that_is_weighed_anew_counts_so_at_once(pruner):
    world = World(described(trials=4, at_once=2, pruner=pruner))
    world.turn()
    for highest in (4.0, 1.0, 0.5):
        Ledger.open(world.storage, "s").weigh(highest)
        world.engine = world.started()
        world.turn()
        running = [j for j in world.jobs.jobs.values() if j.state == "running"]
        assert {j.weights[-1] for j in running} == {highest}
    world.jobs.cancel("j1", "by hand")
    world.turn()  # another begins
    assert world.jobs.jobs["j3"].weights[-1] == 0.5


def test_several_objectives_leave_the_trials_that_no_other_is_better_than():
    text = """
[sweep]
metric = ["loss", "size"]
direction = ["minimize", "maximize"]
trials = 24
at_once = 4
[job]
script = "train.py"
[space]
x = {{ low = 0.0, high = 1.0 }}
[sampler]
kind = "nsga2"
population = 6
"""
    world = World(described(text=text))
    # The best are those with 0.4 and less: beyond, both get worse.
    world.jobs.metrics["size"] = lambda x: x if x <= 0.4 else 0.8 - x
    world.play()
    assert world.states() == ["COMPLETE"] * 24
    ledger = Ledger.open(world.storage, "s")
    best = {t.number for t in ledger.best()}
    values = {t.number: t.values for t in world.trials()}
    for number, (low, high) in values.items():
        x = world.trials()[number].params["x"]
        assert (low, high) == (loss(x, STEPS), world.jobs.metrics["size"](x))
        beaten = any(a <= low and b >= high and (a, b) != (low, high) for a, b in values.values())
        assert beaten == (number not in best)
    assert all(world.trials()[number].params["x"] <= 0.4 for number in best)
    assert 2 <= len(best) < 24
    shown = [row["trial"] for row in results(ledger) if row["best"]]
    assert sorted(shown) == sorted(best)


def test_a_grid_is_done_once():
    text = """
[sweep]
metric = "loss"
at_once = 3
[job]
script = "train.py"
[space]
x = [0.1, 0.2, 0.3, 0.4]
[sampler]
kind = "grid"
"""
    world = World(described(text=text))
    world.play()
    world.check_ended(4)
    assert sorted(t.params["x"] for t in world.trials()) == [0.1, 0.2, 0.3, 0.4]


def test_a_grid_is_done_whole_whatever_another_program_has_queued():
    """optuna issue 6073: a queued trial takes no combination off the grid."""
    text = sweep_world.TEXT.replace("{{ low = 0.0, high = 1.0 }}", "[0.1, 0.2]\ny = [1, 2]")
    text = text.replace('kind = "random"', 'kind = "grid"')
    world = World(described(trials=4, at_once=2, pruner="none", text=text))
    in_the_study(world).enqueue_trial({"x": 0.2, "y": 1})
    in_the_study(world).enqueue_trial({"x": 0.1})
    world.play()
    assert world.states() == ["COMPLETE", "FAIL", *["COMPLETE"] * 4]
    assert "All parameters must be" in world.trials()[1].user_attrs["malletrain:why"]
    whole = {(trial.params["x"], trial.params["y"]) for trial in world.trials()[2:]}
    assert whole == {(0.1, 1), (0.1, 2), (0.2, 1), (0.2, 2)}
    in_the_study(world).enqueue_trial({"x": 0.1, "y": 1})
    world.play()
    assert world.states()[6:] == ["COMPLETE"]


@pytest.mark.parametrize(
    ("trials", "done"), [("", 120), ("trials = 50", 50), ("trials = 999", 120)]
)
def test_a_grid_of_more_than_a_hundred_is_done_whole_unless_fewer_are_wanted(trials, done):
    text = f"""
[sweep]
metric = "loss"
at_once = 40
{trials}
[job]
script = "train.py"
[space]
x = {[k / 100 for k in range(30)]}
width = [1, 2, 3, 4]
[sampler]
kind = "grid"
"""
    world = World(described(text=text))
    world.kill_at = {50, 200}
    world.play()
    world.check_ended(done)
    assert len({(t.params["x"], t.params["width"]) for t in world.trials()}) == done


@pytest.mark.parametrize("kind", ["tpe", "cmaes", "random"])
def test_samplers_of_optuna(kind):
    sweep = described(trials=16, at_once=4, pruner="median")
    sampler = sweep.sampler.model_copy(update={"kind": kind, "startup": 4})
    world = World(sweep.model_copy(update={"sampler": sampler}))
    world.play()
    world.check_ended(16)


def test_its_study_is_an_ordinary_one():
    world = World()
    world.play()
    study = optuna.load_study(storage=world.storage, study_name="s")
    assert study.best_value == min(t.value for t in world.trials() if t.state.name == "COMPLETE")


def test_at_another_daemon_nothing_is_taken_from_its_jobs():
    """Its j1 is another job: the sweep's database was copied, or the daemon's was replaced."""
    world = World(described(trials=4, at_once=3, pruner="none", more="most_failed = 9"))
    world.turn()
    theirs, world.jobs.jobs = world.jobs.jobs, {}
    world.jobs.name = "d2"
    for job in theirs.values():
        job.spec = msgspec.structs.replace(job.spec, key="other")
        job.reported = [(1, -5.0)]
        world.jobs.jobs[job.id] = job
    world.engine = world.started()
    world.turn()
    assert world.states()[:3] == ["FAIL"] * 3
    assert {job.state for job in theirs.values()} == {"running"}
    assert not any(t.intermediate_values for t in world.trials()[:3])
    why = world.trials()[0].user_attrs["malletrain:why"]
    assert why == "its job j1 is that of another daemon, d1"


def in_the_study(world):
    """The study, as another program opens it."""
    return optuna.load_study(study_name="s", storage=world.storage)


@pytest.mark.parametrize("engine", ["runs", "is started later"])
@pytest.mark.parametrize("state", [TrialState.FAIL, TrialState.COMPLETE])
def test_the_job_of_a_trial_that_another_program_ends_is_cancelled(engine, state):
    """As optuna-dashboard does; the job would train on without anybody who ends it."""
    world = World(described(trials=3, at_once=2, pruner="none"))
    world.turn()
    in_the_study(world).tell(0, None if state == TrialState.FAIL else 0.5, state)
    if engine == "is started later":
        world.engine = world.started()
    world.turn()
    assert world.jobs.jobs["j1"].state == "cancelled"
    assert world.jobs.jobs["j1"].why == "another program ended its trial in the study"
    world.jobs.cancel = pytest.fail  # nor is it cancelled again and again
    world.play()
    assert world.states() == [state.name, "COMPLETE", "COMPLETE"]


def test_trials_that_another_program_has_queued_are_run_and_none_is_forgotten():
    world = World(described(trials=3, at_once=2, pruner="none"))
    world.turn()
    for x in (0.1, 0.2):
        in_the_study(world).enqueue_trial({"x": x})
    world.play()
    assert world.states() == ["COMPLETE", "COMPLETE", "COMPLETE", "WAITING"]
    assert world.trials()[2].params == {"x": 0.1}
    ledger = Ledger.open(world.storage, "s")
    assert ledger.end.endswith("1 more wait in the study: malletrain sweep add-trials s 1.")
    ledger.want(4)
    world.play()
    assert world.trials()[3].params == {"x": 0.2}


def test_a_queued_trial_whose_values_are_not_of_the_space_fails_and_stops_no_other():
    text = sweep_world.TEXT.replace("[sampler]", 'kind = ["a", "b"]\n[sampler]')
    world = World(described(trials=2, at_once=1, pruner="none", text=text))
    in_the_study(world).enqueue_trial({"x": 0.5, "kind": "c"})
    world.play()
    assert world.states() == ["FAIL", "COMPLETE"]
    assert "its values are not of the space" in world.trials()[0].user_attrs["malletrain:why"]


@pytest.mark.parametrize("queued", [{}, {"kind": "a"}])
def test_an_error_of_the_sampler_is_no_error_of_the_values(queued):
    """A sampler of the user's own can have one; the trial is good and is made again."""

    class Broken(optuna.samplers.RandomSampler):
        def sample_independent(self, *arguments):
            raise ValueError("cannot reshape array")

    text = sweep_world.TEXT.replace("[sampler]", 'kind = ["a", "b"]\n[sampler]')
    world = World(described(trials=1, at_once=1, pruner="none", text=text))
    if queued:
        in_the_study(world).enqueue_trial(queued)
    whole, world.engine.ledger.study.sampler = world.engine.ledger.study.sampler, Broken()
    with pytest.raises(ValueError, match="cannot reshape array"):
        world.turn()
    assert world.states() == ["RUNNING"]
    world.engine.ledger.study.sampler = whole
    world.play()
    assert world.states() == ["COMPLETE"]
