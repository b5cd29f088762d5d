"""Shares and quotas in a running daemon: what users are told and refused, and what outlives it."""

from __future__ import annotations

import contextlib
import sqlite3

import pytest

from malletrain.client import ClientError
from malletrain.core.shares import PartyService
from tests.malletrain.daemon.forged import Agent, Imagined, RunningDaemon, until

pytestmark = pytest.mark.slow

HOUR = 3600.0
SECTIONS = """
[shares]
by = "account"
weights = ["physics 3"]
accounts = ["physics ann", "arts bob olga"]
[quotas]
user_nodes = 8
account_jobs = 2
own = ["user ann 4 3", "account physics 0 0"]
"""


@pytest.fixture
def start(tmp_path):
    """Start a daemon; one that runs already is killed first."""
    running: list[RunningDaemon] = []

    def begin(*nodes):
        if running:
            running.pop().stop()
        running.append(RunningDaemon(tmp_path, Imagined(*nodes), allocation=SECTIONS))
        return running[-1]

    yield begin
    for daemon in running:
        daemon.stop()


def refusal(daemon, user, code="quota", **fields):
    with pytest.raises(ClientError) as refused:
        daemon.submit(user, **fields)
    assert refused.value.code == code
    return str(refused.value)


def test_quotas_at_submission_and_in_plans(start):
    daemon = start()
    assert refusal(daemon, "ann", "refused", min_nodes=5, max_nodes=9) == (
        "The job needs 5 nodes at least, and user ann may have 4 at once; ask for fewer, or an "
        "operator for more (quotas)."
    )
    first = daemon.submit("ann", min_nodes=2, max_nodes=9)
    assert daemon.components.state.controller.jobs[first].submitted.max_nodes == 4
    daemon.submit("ann")
    daemon.submit("ann")
    assert "user ann has 3 jobs that have not ended, and 3 is the most" in refusal(daemon, "ann")
    bobs = daemon.submit("bob")
    daemon.submit("olga")
    assert "account arts has 2 jobs" in refusal(daemon, "bob")
    with daemon.client("bob") as client:
        client.cancel([bobs])
    daemon.submit("bob")


def test_shares_cut_no_job_that_has_a_deadline(start):
    daemon = start()
    plain, promised = daemon.submit("bob"), daemon.submit("olga", deadline=4e9)
    jobs = daemon.components.state.controller.jobs
    assert [jobs[job].submitted.exempt_from_shares for job in (plain, promised)] == [False, True]


def test_everybody_sees_the_own_share_and_operators_all(start):
    daemon = start()
    job = daemon.submit("bob")
    shares = daemon.components.state.controller.shares

    def behind():
        with daemon.components.transactions.begin() as now:
            due = 100 * HOUR
            shares.restore(
                {
                    "physics": PartyService(due / 2, due, due),
                    "arts": PartyService(due * 1.1, due, due),
                },
                now,
            )

    daemon.call(behind)
    until(lambda: shares.factor("arts") < 1, "the counters are there")
    with daemon.client("bob") as client:
        [mine] = client.status().shares
        detail = client.job(job)
    assert (mine.party, mine.weight) == ("arts", 1.0)
    assert mine.due_nh == pytest.approx(100, rel=0.01)
    assert mine.factor == pytest.approx(2 ** (-10 / 4), rel=0.01)
    assert detail.share is not None
    assert detail.share.party == "arts"
    assert "arts got 110.0 of the 100.0 node-hours due to it of late" in detail.job.reason
    with daemon.client("ann") as client:
        assert client.job(job).share is None
        assert [share.party for share in client.status().shares] == ["physics"]
    with daemon.client("olga") as client:
        assert [share.party for share in client.status().shares] == ["arts", "physics"]


def test_what_was_served_is_known_after_a_restart(start):
    daemon = start("n0", "n1")
    job = daemon.submit("bob", max_nodes=1)
    [lease] = until(lambda: daemon.machine.of("bob"), "bob has a lease")
    agent = Agent(daemon, lease)
    agent.hello()
    agent.work(job)
    shares = daemon.components.state.controller.shares
    until(lambda: "arts" in shares.services(), "a second of service is counted")
    daemon.call(lambda: _keep(daemon))
    served = until(lambda: stored(daemon).get("arts"), "it is in the database")
    agent.close()
    again = start()
    service = until(
        lambda: again.components.state.controller.shares.services().get("arts"), "it is restored"
    )
    assert service.served >= 0.99 * served
    assert again.components.state.controller.shares.standing("arts").factor == pytest.approx(1.0)


def stored(daemon):
    """Party → node-seconds that it was served, from the database. The connection is not the
    daemon's, which only its thread may use.
    """
    path = daemon.config.state_dir / "malletrain.db"
    with contextlib.closing(sqlite3.connect(path)) as connection:
        return dict(connection.execute("SELECT party, served FROM service"))


def _keep(daemon):
    with daemon.components.transactions.begin() as now:
        daemon.components.state.shares.keep(now, at_once=True)
