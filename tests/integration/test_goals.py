"""Budgets and deadlines on real processes: a job whose budget is spent waits, and goes on when it
is extended; what it was charged survives the daemon.
"""

from __future__ import annotations

import time

import pytest

from malletrain.client import ClientError
from tests.integration.embedded import site

COUNTED = """
import os, time, malletrain
sampler = malletrain.ElasticSampler(1000, global_batch_size=10, shuffle=False)
for epoch in sampler.epochs(4000):
    for batch in sampler:
        time.sleep(0.02)
        malletrain.report(len(batch))
        sampler.advance()
        if os.path.exists("stop"):
            sampler.end()
            break
"""
QUICK = 't_fwd = "2 s"\nstart = "0 s"\nrescale_up = "0 s"\nrescale_down = "0 s"'


@pytest.fixture
def quick(tmp_path):
    with site(tmp_path, nodes=2, config=QUICK) as made:
        yield made


def holders(site, job):
    with site.client() as client:
        return [node.node for node in client.nodes() if node.job == job]


def test_a_job_costs_no_more_than_its_budget_and_goes_on_when_it_is_extended(quick):
    script = quick.script("counted.py", COUNTED)
    hours = 4.0 / 3600.0
    job = quick.submit(script, nodes=(1, 1), deadline=time.time() + 1e6)
    quick.until(lambda: quick.job(job).goal.work is not None, "the sampler has said how much work")
    assert quick.job(job).goal.work == pytest.approx(4e6, rel=0.01)
    with quick.client() as client:
        client.extend(job, budget_nh=hours)
    quick.until(lambda: quick.events("budget-spent", job), "the budget is spent")
    view = quick.until_state(job, "suspended")
    assert view.reason == "its budget is spent"
    # A node that holds the job when the daemon is killed is charged until the next one sees it.
    quick.until(lambda: holders(quick, job) == [], "its node has released the job")
    spent = quick.job(job).goal
    assert hours <= spent.charged_nh < 100 * hours

    quick.kill_daemon()
    quick.start_daemon()
    again = quick.job(job).goal
    assert (again.charged_nh, again.budget_nh) == (spent.charged_nh, spent.budget_nh)
    with quick.client() as client:
        with pytest.raises(ClientError, match="no number of node-hours"):
            client.extend(job, budget_nh=-1.0)
        client.extend(job, more_nh=1.0)
    quick.until_state(job, "running")
    (quick.work / "stop").touch()
    ended = quick.until_state(job, "completed")
    assert ended.goal.standing == "met"
    assert spent.charged_nh < ended.goal.charged_nh < 1.0 + hours
    extended = [e.data["budget_nh"] for e in quick.events("job-extended", job)]
    assert extended == [hours, 1.0 + hours]
