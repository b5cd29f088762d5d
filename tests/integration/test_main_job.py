"""The main job on real processes: train, grow, shrink, survive the loss of nodes and of the
daemon.
"""

from __future__ import annotations

import contextlib
import signal
from collections import Counter
from pathlib import Path

import pytest

from tests.integration.embedded import gone, site

STEADY = """
import os, time, malletrain
limit = float(os.environ.get("SECONDS", "3600"))
end = time.monotonic() + limit
print("rank", os.environ["RANK"], "of", os.environ["WORLD_SIZE"], flush=True)
while time.monotonic() < end and not os.path.exists("stop"):
    time.sleep(0.02)
    malletrain.report(8)
malletrain.metric("accuracy", 0.5)
"""
"""Trains nothing, step by step, until told to stop: what MalleTrain sees of it is a real job."""

SAMPLES, BATCH = 2000, 10
COUNTING = f"""
import os, sys, time, torch, torch.distributed as dist, malletrain
dist.init_process_group("gloo")
rank = dist.get_rank()
sampler = malletrain.ElasticSampler({SAMPLES}, global_batch_size={BATCH}, seed=1)
weight = torch.nn.Linear(1, 1)
snapshot = malletrain.Snapshot("count.snap", model=weight, sampler=sampler, every_s=3600)
snapshot.restore()
for epoch in sampler.epochs(1):
    for batch in sampler:
        time.sleep(0.03)
        for _ in range(200 if sampler.state_dict()["position"] > 300 else 0):
            if not os.path.exists("go"):
                time.sleep(0.02)
        dist.all_reduce(torch.ones(1))
        with open(f"seen-{{os.getpid()}}", "a") as f:
            f.write("".join(f"{{i}}\\n" for i in batch))
        sampler.advance()
        malletrain.report(len(batch))
        snapshot.step()
snapshot.save()
dist.destroy_process_group()
"""
"""Writes down every sample it has trained on, step by step. It crawls after 300 of 2000 until it
may go on, so that it still runs when the test acts on it.
"""


@pytest.fixture(scope="module")
def standing(tmp_path_factory):
    """Two nodes: each one that is lost comes back with another agent and warm interpreter."""
    with site(tmp_path_factory.mktemp("standing"), nodes=2, light=True) as made:
        yield made


def seen_once(embedded, job):
    """The job has trained on every sample, and on none again but in the first step of a round that
    ended before a worker had said that it saves on request. Returns how many may be repeated.
    """
    repeats = BATCH * len(embedded.events("drain-without-snapshot", job))
    seen = Counter(
        line for path in embedded.work.glob("seen-*") for line in path.read_text().split()
    )
    assert len(seen) == SAMPLES
    assert sum(seen.values()) <= SAMPLES + repeats
    return repeats


def trained_once(embedded, job):
    """As seen_once, and the daemon has counted every sample."""
    repeats = seen_once(embedded, job)
    # The last reports of those that were stopped count, too.
    assert SAMPLES <= embedded.job(job).samples <= SAMPLES + repeats


@pytest.mark.check
def test_a_job_trains_and_completes(shared):
    script = shared.script("steady.py", STEADY)
    job = shared.submit(script, nodes=(2, 2))
    shared.until_samples(job, 2 * 8 * 20)
    (shared.work / "stop").touch()
    done = shared.until_state(job, "completed", "failed")
    assert done.state == "completed", shared.show(job).failure
    assert done.metrics == {"accuracy": 0.5}
    assert done.samples >= 2 * 8 * 20
    with shared.client() as client:
        text = client.logs(job, stream="rank0").text
    assert "rank 0 of 2" in text
    kinds = [e.kind for e in shared.events(job=job)]
    assert kinds[0] == "job-submitted"
    assert kinds[-1] == "job-completed"
    assert "round-formed" in kinds
    show = shared.show(job)
    assert show.rescales[0].kind == "start"
    assert show.rescales[0].cost_s is None or show.rescales[0].cost_s >= 0


def test_a_node_taken_without_notice_costs_no_job(shared):
    script = shared.script("steady.py", STEADY)
    job = shared.submit(script, nodes=(1, 2))
    shared.until(lambda: len(shared.job(job).nodes) == 2, "the job runs on 2 nodes")
    shared.until_samples(job, 100)
    victim = shared.job(job).nodes[0]
    shared.agents()[victim].send_signal(signal.SIGKILL)
    shared.until(lambda: shared.events("node-lost"), "the loss is noticed")
    # The node comes back as a new gap, and the job grows onto it again.
    shared.until(
        lambda: len(shared.events("round-formed", job)) >= 2 and len(shared.job(job).nodes) == 2,
        "the job is whole again",
    )
    before = shared.job(job).samples
    shared.until_samples(job, before + 100)
    (shared.work / "stop").touch()
    done = shared.until_state(job, "completed", "failed")
    assert done.state == "completed"
    assert done.tries == 0


def test_the_daemon_is_killed_and_the_job_does_not_notice(shared):
    script = shared.script("steady.py", STEADY)
    job = shared.submit(script, nodes=(1, 2))
    shared.until(lambda: len(shared.job(job).nodes) == 2, "the job runs on 2 nodes")
    shared.until_samples(job, 100)
    shared.until(lambda: len(shared.workers(script)) == 2, "both workers run")
    workers = {p.pid for p in shared.workers(script)}
    rounds = len(shared.events("round-formed", job))  # two where one lease was up before the other
    shared.kill_daemon(signal.SIGKILL)
    shared.start_daemon()
    shared.until(lambda: shared.events("job-adopted", job), "the job is adopted")
    samples = shared.job(job).samples
    shared.until_samples(job, samples + 200)
    assert {p.pid for p in shared.workers(script)} == workers, "the same workers train on"
    assert len(shared.events("round-formed", job)) == rounds
    assert len(shared.events("job-started", job)) == 1
    (shared.work / "stop").touch()
    assert shared.until_state(job, "completed", "failed").state == "completed"


def test_a_job_that_ends_while_no_daemon_runs_is_completed_by_the_next(shared):
    script = shared.script("steady.py", STEADY)
    job = shared.submit(script)
    shared.until_samples(job, 50)
    worker = shared.workers(script)[0]
    shared.kill_daemon(signal.SIGKILL)
    (shared.work / "stop").touch()
    shared.until(lambda: gone(worker), "the worker has ended")
    shared.start_daemon()
    done = shared.until_state(job, "completed", "failed")
    assert done.state == "completed"
    assert done.metrics == {"accuracy": 0.5}


def test_a_clean_stop_leaves_the_job_running_and_says_so(shared):
    script = shared.script("steady.py", STEADY)
    job = shared.submit(script)
    shared.until_samples(job, 50)
    worker = shared.workers(script)[0]
    assert shared.kill_daemon(signal.SIGTERM) == 0
    assert shared.has_logged("1 jobs continue without it")
    assert worker.is_running()
    shared.start_daemon()
    assert shared.until_state(job, "running").samples >= 50


def test_orderly_rescales_process_every_sample_exactly_once(shared):
    script = shared.script("counting.py", COUNTING)
    first = shared.submit(script, nodes=(1, 2), name="count")
    shared.until(lambda: len(shared.job(first).nodes) == 2, "the job runs on 2 nodes")
    shared.until_samples(first, 100)
    # A second job takes a node away and gives it back: the first shrinks and grows in order.
    steady = shared.script("steady.py", STEADY)
    second = shared.submit(steady, nodes=(1, 1), weight=50.0)
    shared.until(lambda: len(shared.job(second).nodes) == 1, "the second job has its node")
    shared.until_samples(second, 8)
    (shared.work / "stop").touch()
    shared.until_state(second, "completed", "failed")
    (shared.work / "go").touch()
    done = shared.until_state(first, "completed", "failed")
    assert done.state == "completed", shared.show(first).failure
    assert len(shared.events("round-formed", first)) >= 2
    trained_once(shared, first)


def test_preemption_with_notice_is_answered_within_the_grace_time(shared):
    script = shared.script("counting.py", COUNTING)
    job = shared.submit(script, nodes=(1, 2), name="count")
    shared.until(lambda: len(shared.job(job).nodes) == 2, "the job runs on 2 nodes")
    shared.until_samples(job, 100)
    victim = shared.job(job).nodes[0]
    agent = shared.agents()[victim]
    agent.send_signal(signal.SIGTERM)
    shared.until(lambda: gone(agent), "the agent has left")
    (shared.work / "go").touch()
    done = shared.until_state(job, "completed", "failed")
    assert done.state == "completed", shared.show(job).failure
    trained_once(shared, job)


@pytest.mark.thorough
def test_a_job_under_its_minimum_is_suspended_and_comes_back(shared):
    script = shared.script("steady.py", STEADY)
    job = shared.submit(script, nodes=(2, 2))
    shared.until_samples(job, 50)
    victim = shared.agents()[shared.job(job).nodes[1]]
    victim.send_signal(signal.SIGKILL)
    shared.until(lambda: shared.events("job-suspended"), "it has too few nodes")
    shared.until_state(job, "running")
    samples = shared.job(job).samples
    shared.until_samples(job, samples + 50)
    assert shared.job(job).tries == 0


def test_two_jobs_share_the_machine_and_a_node_belongs_to_one(shared):
    script = shared.script("steady.py", STEADY)
    # One that has all nodes when the other comes may keep them for as long as `starvation` says:
    # both wait until a third has ended, so that one plan is for both.
    third = shared.submit(script, nodes=(2, 2))
    shared.until_samples(third, 1)
    jobs = [shared.submit(script, nodes=(1, 2), name=f"job{i}") for i in range(2)]
    assert all(not shared.job(j).nodes for j in jobs)
    with shared.client() as client:
        assert all(r["ok"] for r in client.cancel([third]))
    shared.until(lambda: all(shared.job(j).samples > 20 for j in jobs), "both train")
    with shared.client() as client:
        views = [view for view in client.jobs() if view.id in jobs]  # of one moment
        nodes = [n for view in views for n in view.nodes]
        assert len(nodes) == len(set(nodes)) <= 2
        results = client.cancel(jobs)
    assert all(r["ok"] for r in results)
    for job in jobs:
        shared.until_state(job, "cancelled")
    shared.until(lambda: not shared.workers(script), "their workers are gone")


def test_the_daemon_and_its_agents_stay_small(shared, monkeypatch):
    monkeypatch.setattr(shared, "forks_daemon", False)
    shared.kill_daemon(signal.SIGTERM)
    shared.start_daemon()
    script = shared.script("steady.py", STEADY)
    job = shared.submit(script, nodes=(1, 2))
    shared.until_samples(job, 200)
    import psutil

    daemon = psutil.Process(shared.daemon.pid)
    assert daemon.memory_info().rss < 150e6
    for agent in shared.agents().values():
        with contextlib.suppress(psutil.NoSuchProcess):  # of the test before
            assert agent.memory_info().rss < 60e6
    maps = Path(f"/proc/{daemon.pid}/maps").read_text()
    assert "libtorch" not in maps
