"""The nodes of a trial that ends have the next one: it is in the queue by then."""

from __future__ import annotations

from datetime import datetime

import pytest

from malletrain.protocol.messages import JobSpec
from malletrain.sweep import process
from malletrain.sweep.ledger import Ledger
from tests.malletrain.sweep.sweep_world import STEPS, World, described, job_spec
from tests.waiting import NEVER_S


def with_sampler(sweep, kind):
    sampler = sweep.sampler.model_copy(update={"kind": kind})
    return sweep.model_copy(update={"sampler": sampler})


def ends_with_another_waiting(world, at_once):
    """At which of the ends of jobs as many others were there as may be at one time."""
    return [others == at_once for others in world.jobs.under_way_at_ends]


@pytest.mark.parametrize("kind", ["random", "tpe"])
def test_the_next_trial_is_in_the_queue_when_one_is_given_up(kind):
    world = World(with_sampler(described(trials=12, at_once=3), kind))
    world.play()
    world.check_ended(12)
    given_up = world.states().count("PRUNED")
    assert given_up >= 4
    waiting = ends_with_another_waiting(world, 3)
    assert sum(waiting) >= given_up - 3, "but for the last ones, after which none comes"


def test_the_next_trial_is_in_the_queue_when_one_comes_to_its_end():
    world = World(described(trials=9, at_once=3, pruner="none"))
    world.jobs.lingers = True
    world.play()
    world.check_ended(9)
    # Three have ended when the last three begin; from then on fewer and fewer are left.
    assert len(world.jobs.under_way_at_ends) == 9
    assert max(len(j.reported) for j in world.jobs.jobs.values()) == 9
    assert min(world.jobs.under_way_at_ends[:6]) >= 3


def test_where_trials_end_is_learnt_where_the_sweep_does_not_say():
    sweep = described(trials=9, at_once=3, pruner="none")
    pruner = sweep.pruner.model_copy(update={"max_steps": None})
    world = World(sweep.model_copy(update={"pruner": pruner}))
    world.jobs.lingers = True
    world.play()
    world.check_ended(9)
    first, then = world.jobs.under_way_at_ends[:3], world.jobs.under_way_at_ends[3:6]
    assert min(first) < 3 <= min(then)


def test_trials_that_report_their_last_step_long_before_their_end_are_not_all_started():
    """A script whose steps count within an epoch has the same last step from its first epoch on."""
    world = World(described(trials=24, at_once=3, pruner="none"))
    world.turn()
    for number, job in enumerate(world.jobs.jobs.values()):
        job.reported.append((STEPS, 1.0))
        job.state = "completed" if number == 0 else "running"
    most = 0
    for _ in range(12):
        assert not world.turn()
        under_way = [job for job in world.jobs.jobs.values() if job.state == "running"]
        most = max(most, len(under_way))
        for job in under_way:
            if not job.reported:
                job.reported.append((STEPS, 1.0))
    assert most == 6


def test_one_trial_at_a_time_is_asked_for_once_the_one_before_is_known():
    world = World(with_sampler(described(trials=6, at_once=1), "tpe"))
    world.jobs.lingers = True
    world.play()
    world.check_ended(6)
    assert set(world.jobs.under_way_at_ends) == {0}
    ended = [t.datetime_complete for t in world.trials()]
    begun = [t.datetime_start for t in world.trials()]
    for end, begin in zip(ended[:-1], begun[1:], strict=True):
        assert isinstance(end, datetime)
        assert isinstance(begin, datetime)
        assert end <= begin


def test_a_job_counts_from_its_beginning_as_its_trial_does():
    world = World(described(trials=12, at_once=3))
    submitted: list[JobSpec] = []
    submit = world.jobs.submit
    world.jobs.submit = lambda spec: (submitted.append(spec), submit(spec))[1]
    world.play()
    assert len(submitted) == 12
    for spec in submitted[3:]:
        job = next(j for j in world.jobs.jobs.values() if j.spec.key == spec.key)
        assert job.weights[1:] == [] or job.weights[1] != spec.weight
    assert min(spec.weight for spec in submitted) < 1.0


def test_a_turn_comes_when_something_happens_however_long_it_is_to_the_next_look(monkeypatch):
    world = World(described(trials=6, at_once=3, more=f'every = "{NEVER_S:g} s"'))
    monkeypatch.setattr(process, "job_of", job_spec)
    over = process.run(Ledger.open(world.storage, "s"), world.jobs, lambda line: None)
    world.check_ended(6)
    assert over == "All trials have ended."
    assert world.jobs.waits >= 9, "steps of a trial"
