"""An upgrade in place while a job of each mode runs: restart, live, service, farm. Each goes on
with its agents of the version before, changes nodes under the new daemon, and ends as if nothing
had happened.

A job in live mode is an exception if the version before is another commit, whose processes may not
be able to train with those of this version: it may be started again once from its last snapshot.
"""

from __future__ import annotations

import signal
from collections import Counter

import msgspec
import pytest

from malletrain import __version__
from malletrain.submission.options import ScriptOptions
from malletrain.submission.spec import build
from tests.integration import farms
from tests.integration.embedded import Site, gone
from tests.integration.installed import BEFORE, VERSION, Installed, missing
from tests.integration.test_service import SERVICE

SAMPLES = 4000

RESTART = f"""
import os, time, torch, malletrain
import torch.distributed as dist
dist.init_process_group("gloo")
sampler = malletrain.ElasticSampler({SAMPLES}, global_batch_size=10, seed=1)
snapshot = malletrain.Snapshot("restart.snap", model=torch.nn.Linear(1, 1), sampler=sampler)
snapshot.restore()
for epoch in sampler.epochs(1):
    for batch in sampler:
        for _ in range(1 if os.path.exists("go") else 80):
            time.sleep(0.01)
        with open(f"restart-{{os.getpid()}}", "a") as file:
            file.write("".join(f"{{i}}\\n" for i in batch))
        dist.barrier()  # a snapshot of rank 0 is not a step ahead of another rank
        sampler.advance()
        malletrain.report(len(batch))
        snapshot.step()
"""
LIVE = f"""
import os, time, torch, malletrain
from malletrain import elastic
model = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
sampler = malletrain.ElasticSampler({SAMPLES}, global_batch_size=10, seed=1)
run = elastic.Run(model=model, optimizer=optimizer, sampler=sampler)
net = run.ddp(model)
data = torch.arange({SAMPLES}, dtype=torch.float32).reshape(-1, 1)
for epoch in sampler.epochs(1):
    for batch in run.batches(torch.utils.data.DataLoader(data, batch_sampler=sampler)):
        for _ in range(1 if os.path.exists("go") else 80):
            time.sleep(0.01)
        with run.step():
            optimizer.zero_grad()
            (net(batch / {SAMPLES}).mean() * run.loss_weight).backward()
            optimizer.step()
        with open(f"live-{{os.getpid()}}", "a") as file:
            file.write("".join(f"{{int(i)}}\\n" for i in batch))
"""
TASK = "while ! test -e go; do sleep 0.05; done; " + farms.APPEND
TASKS = 12


def train(site: Installed, name: str, text: str, **spec: object) -> str:
    """Submit a script of one or two nodes; return the job's id."""
    made = build(
        str(site.script(f"{name}.py", text)),
        (),
        ScriptOptions(name=name, nodes="1:2", workdir=str(site.work), profile=False, **spec),
    )
    with site.client() as client:
        return client.submit(msgspec.structs.replace(made, python=site.python)).id


def samples_of(site: Site, name: str) -> Counter[int]:
    """How often each sample was trained on."""
    lines = (path.read_text().split() for path in site.work.glob(f"{name}-*"))
    return Counter(int(word) for words in lines for word in words)


@pytest.mark.thorough  # four jobs at once, two of them with torch
@pytest.mark.skipif(bool(missing()), reason=missing())
def test_jobs_of_all_modes_go_on_over_an_upgrade_in_place(tmp_path):
    site = Installed(tmp_path, nodes=8)
    try:
        site.start_daemon()
        value = site.root / "value.csv"
        value.write_text("nodes,value\n1,10\n2,20\n")
        jobs = {
            "restart": train(site, "restart", RESTART),
            "live": train(site, "live", LIVE, live=True),
            "service": train(site, "service", SERVICE, service=True, value=value),
            "farm": farms.submit(site, TASK, [[str(k)] for k in range(TASKS)], "1:2"),
        }
        trainings = [jobs["restart"], jobs["live"]]

        def all_run() -> bool:
            return all(len(site.job(job).nodes) == 2 for job in jobs.values())

        def go_on() -> None:
            for job in trainings:
                site.until_samples(job, site.job(job).samples + 30)

        site.until(all_run, "each job runs on two nodes")
        go_on()
        with site.client() as client:
            assert client.status().version == VERSION
        rounds = {job: len(site.events("round-formed", job)) for job in trainings}
        members = {path.name for path in site.work.glob("news-*")}
        assert len(members) == 2, "of the service"
        nodes = {job: site.job(job).nodes for job in jobs.values()}
        before = set(site.agents().values())
        assert len(before) == 8

        # The upgrade: nothing happens to the jobs.
        assert site.kill_daemon(signal.SIGTERM) == 0
        site.install(__version__)
        site.start_daemon()
        with site.client() as client:
            assert client.status().version == __version__
        go_on()
        site.until(all_run, "each job has its nodes")
        assert {job: site.job(job).nodes for job in jobs.values()} == nodes
        assert {job: len(site.events("round-formed", job)) for job in trainings} == rounds
        assert {path.name for path in site.work.glob("news-*")} == members, "no process is new"
        assert set(site.agents().values()) == before

        # A node of each is wanted by the main scheduler; an agent of this version comes instead.
        for job in jobs.values():
            agent = site.agents()[site.job(job).nodes[0]]
            agent.send_signal(signal.SIGTERM)
            site.until(lambda agent=agent: gone(agent), "the agent leaves in order")
            site.until(all_run, "the job has another node")
            go_on()
        assert len(set(site.agents().values()) - before) == len(jobs)

        (site.work / "go").touch()
        for job in (*trainings, jobs["farm"]):
            done = site.until_state(job, "completed", "failed")
            assert done.state == "completed", site.show(job).failure
            may_restart = bool(BEFORE) and job == jobs["live"]
            assert done.tries <= may_restart, site.events(job=job)
        assert site.job(jobs["service"]).state == "running"
        assert site.job(jobs["service"]).tries == 0
        once = Counter(range(SAMPLES))
        assert samples_of(site, "restart") == once
        assert samples_of(site, "live") == once or (BEFORE and samples_of(site, "live") >= once)
        assert farms.runs(site) == Counter(range(TASKS))

        # Agents of before that have no job any more are replaced, and no others.
        of_service = {site.agents()[node] for node in site.job(jobs["service"]).nodes} & before
        site.until(lambda: all(gone(agent) for agent in before - of_service), "they are replaced")
        assert not any(gone(agent) for agent in of_service)
        why = {event.sentence for event in site.events("lease-released")}
        earlier = (f"malletrain {VERSION}", "an earlier malletrain")  # that does not say which
        assert any(f"agent is of {one}," in sentence for sentence in why for one in earlier)
        with site.client() as client:
            client.cancel([jobs["service"]])
        site.until_state(jobs["service"], "cancelled")
    finally:
        site.stop()
