"""The host's clock is set while the daemon runs: it goes by the new time at once, the jobs go on,
and nothing is charged or counted that the clock only leapt over.
"""

from __future__ import annotations

import contextlib
import time
from types import SimpleNamespace

import pytest

from malletrain.client import ClientError
from malletrain.core.shares import PartyService
from malletrain.daemon import main
from malletrain.daemon.engine.parties import ShareKeeper
from malletrain.daemon.jobs.repository import Retention
from malletrain.daemon.site import clock
from malletrain.daemon.site.clock import MIN_CHANGE_S
from malletrain.protocol import messages
from tests.malletrain.daemon.forged import Agent, Imagined, RunningDaemon, until

pytestmark = pytest.mark.slow

HOUR_S = 3600.0


class Wall:
    """The host's clock, as the daemon sees it. It can be set."""

    def __init__(self, monkeypatch):
        self.by_s = self.asleep_s = 0.0
        hands = SimpleNamespace(
            time=self.time,
            monotonic=time.monotonic,
            clock_gettime=lambda which: time.monotonic() + self.asleep_s,
            CLOCK_BOOTTIME=time.CLOCK_BOOTTIME,
        )
        monkeypatch.setattr(clock, "time", hands)

    def time(self):
        return time.time() + self.by_s


@pytest.fixture
def wall(monkeypatch):
    return Wall(monkeypatch)


@pytest.fixture
def training(tmp_path, wall):
    """A daemon, its machine, and a job with a budget that trains on a node."""
    machine = Imagined("n0")
    daemon = RunningDaemon(tmp_path, machine)
    job = daemon.submit("ann", budget_nh=1.0)
    [lease] = until(lambda: machine.of("ann"), "ann has a lease")
    agent = Agent(daemon, lease)
    agent.hello()
    agent.work(job)
    until(lambda: daemon.job(job).state == "running", "it runs")
    yield daemon, machine, job, agent
    agent.close()
    daemon.stop()


def events_of(daemon, kind="clock-set"):
    with contextlib.suppress(ClientError):  # it is beginning anew
        return [e for e in daemon.events() if e.kind == kind]


def test_of_the_time_in_which_the_host_was_suspended_nothing_is_taken_off(training, wall):
    """The leases ran on meanwhile, and are charged for."""
    daemon, *_, agent = training
    before = daemon.components.state.lease_rows.active[agent.lease]
    wall.asleep_s = wall.by_s = 3 * HOUR_S
    [event] = until(lambda: events_of(daemon), "it is noticed")
    assert "host was suspended for 3 h. It has taken over 1 unfinished job" in event.sentence
    after = until(
        lambda: daemon.components.state.lease_rows.active.get(agent.lease),
        "the lease is known again",
    )
    assert after.requested - before.requested == pytest.approx(0.0, abs=1.0)
    agent.hear(messages.WhoAreYou)


@pytest.mark.parametrize("hours", [3, -5])
def test_the_daemon_goes_by_the_new_time_and_the_job_goes_on(training, wall, hours):
    daemon, machine, job, agent = training
    before = daemon.components.state.lease_rows.active[agent.lease]
    wall.by_s = hours * HOUR_S
    [event] = until(lambda: events_of(daemon), "it is noticed")
    way = "forward by 3 h" if hours > 0 else "back by 5 h"
    assert f"was set {way}. It has taken over 1 unfinished job and 1 lease" in event.sentence
    assert abs(event.time - wall.time()) < HOUR_S
    agent.hear(messages.WhoAreYou)
    agent.hello(assignment=messages.Assignment(job, "running", 1))
    agent.hear(messages.Welcome)
    until(lambda: events_of(daemon, "job-adopted"), "the job is adopted")
    state = daemon.components.state
    after = state.lease_rows.active[agent.lease]
    assert after.requested - before.requested == pytest.approx(wall.by_s, abs=MIN_CHANGE_S)
    until(lambda: state.controller.plans, "a plan is made")
    view = daemon.job(job)
    assert 0.0 <= view.goal.charged_nh < 0.5, "as if no hours had passed"
    assert (view.state, view.nodes, view.tries) == ("running", (agent.node,), 0)
    assert machine.of("ann") == [agent.lease]
    assert not events_of(daemon, "message-failed")
    assert not daemon.daemon.handler_failures.count


def test_a_clock_over_which_two_services_fight_is_followed_for_some_times_only(
    training, wall, monkeypatch
):
    daemon, *_ = training
    monkeypatch.setattr(main, "MAX_CHANGES", 2)
    for number in (1, 2):
        wall.by_s = HOUR_S * (number % 2)
        events = until(
            lambda number=number: (events_of(daemon) or [])[number - 1 :],
            "the daemon goes by the new time",
        )
    assert "That was 2 times within 1 h: something keeps" in events[-1].sentence
    wall.by_s = 0.0
    components = daemon.components
    looks = counted(components)
    until(lambda: len(looks) > 3, "it has looked")
    assert daemon.components is components
    assert len(events_of(daemon)) == 2


def test_a_host_that_is_suspended_now_and_then_is_none_whose_clock_is_set(wall):
    hands = clock.Clock()
    for number in range(1, 2 * clock.MAX_CHANGES):
        wall.asleep_s = wall.by_s = number * HOUR_S
        hands.set()
        assert hands.sets() == 0
    wall.by_s -= HOUR_S
    hands.set()
    assert hands.sets() == 1


def counted(components):
    """Grows with every look at the clock."""
    looks, watch = [], components.agent_handlers.watch

    def watched():
        looks.append(watch)
        watch()

    components.agent_handlers.watch = watched
    return looks


def test_a_clock_that_is_only_corrected_is_none_that_was_set(training, wall):
    daemon, *_ = training
    wall.by_s = 0.9 * MIN_CHANGE_S
    components = daemon.components
    looks = counted(components)
    until(lambda: len(looks) > 3, "it has looked")
    assert daemon.components is components
    assert not events_of(daemon)


def test_a_daemon_that_starts_after_the_clock_was_set_back_counts_shares_from_then_on():
    rows = [SimpleNamespace(party="ann", served=5.0, due=4.0, seconds=3.0, updated=9000.0)]
    restore_calls = []
    shares = SimpleNamespace(
        settings=SimpleNamespace(half_life_s=3600.0),
        restore=lambda services, at: restore_calls.append((services, at)),
    )
    store = SimpleNamespace(services=SimpleNamespace(all=lambda: rows))
    ShareKeeper(SimpleNamespace(shares=shares), store).restore(1000.0)
    assert restore_calls == [({"ann": PartyService(5.0, 4.0, 3.0)}, 1000.0)]


def test_what_is_too_old_is_looked_for_also_after_the_clock_was_set_back(tmp_path):
    looks = []
    store = SimpleNamespace(
        forget=lambda before: looks.append(before) or 0, list_jobs=lambda states: []
    )
    retention = Retention(store, tmp_path, 60.0, 0.0)
    for now in (9000.0, 9010.0, 1000.0, 1010.0):
        retention.delete_old(now)
    assert looks == [8940.0, 940.0]
