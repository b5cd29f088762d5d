"""An upgrade in place while a job of each mode runs: restart, live, service, farm. Each goes on
with its agents of the version before, changes nodes under the new daemon, and ends as if nothing
had happened.

The version before is this one under another number; with MALLETRAIN_BEFORE=COMMIT that commit of
the repository.
"""

from __future__ import annotations

import os
import shutil
import signal
import site as python_site
import subprocess
import venv
from collections import Counter
from pathlib import Path

import msgspec
import pytest

from malletrain import __version__
from malletrain.submission.spec import build
from tests.integration import farms
from tests.integration.embedded import Site, gone
from tests.integration.test_service import SERVICE

ROOT = Path(__file__).parents[2]
BEFORE = os.environ.get("MALLETRAIN_BEFORE", "")
"""A commit; empty: this version under the number VERSION."""
VERSION = "0.0.9"
PARTS = ("allocator", "jobscripts", "jpa", "malletrain", "scavenger", "site-configs")
SAMPLES = 2000

RESTART = f"""
import os, time, torch, malletrain
sampler = malletrain.ElasticSampler({SAMPLES}, global_batch_size=10, seed=1)
snapshot = malletrain.Snapshot("restart.snap", model=torch.nn.Linear(1, 1), sampler=sampler)
snapshot.restore()
for epoch in sampler.epochs(1):
    for batch in sampler:
        for _ in range(1 if os.path.exists("go") else 20):
            time.sleep(0.01)
        with open(f"restart-{{os.getpid()}}", "a") as file:
            file.write("".join(f"{{i}}\\n" for i in batch))
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
        for _ in range(1 if os.path.exists("go") else 20):
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


class Installed(Site):
    """A site whose daemon and agents have a virtual environment of their own."""

    def __init__(self, root: Path, nodes: int) -> None:
        super().__init__(root, nodes=nodes)
        self.code = root / "code"
        self.install(BEFORE or VERSION)
        venv.create(root / "venv", symlinks=True, with_pip=False)
        [packages] = (root / "venv" / "lib").glob("python*/site-packages")
        paths = [self.code, *python_site.getsitepackages()]
        (packages / "malletrain.pth").write_text("".join(f"{path}\n" for path in paths))
        self.python = str(root / "venv" / "bin" / "python")

    def install(self, version: str) -> None:
        """Put a version in the place of the one that is installed: this one, this one under another
        number, or a commit.
        """
        new = self.root / "code.new"
        if version in (__version__, VERSION):
            for part in PARTS:
                shutil.copytree(ROOT / part, new / part, symlinks=True)
        else:
            new.mkdir()
            archive = ["git", "-C", str(ROOT), "archive", version, *PARTS]
            with subprocess.Popen(archive, stdout=subprocess.PIPE) as git:
                subprocess.run(["tar", "-x", "-C", str(new)], stdin=git.stdout, check=True)
        if version == VERSION:
            init = new / "malletrain" / "__init__.py"
            text = init.read_text()
            assert f'"{__version__}"' in text
            init.write_text(text.replace(f'"{__version__}"', f'"{VERSION}"'))
        shutil.rmtree(self.code, ignore_errors=True)
        new.rename(self.code)

    def launch_daemon(self) -> None:
        argv = [self.python, "-m", "malletrain", "daemon", "--config", str(self.config)]
        with (self.root / "daemon.log").open("ab") as log:
            self.daemon = subprocess.Popen(argv, stdout=log, stderr=log, cwd=self.root)

    def train(self, name: str, text: str, **spec: object) -> str:
        """Submit a script of one or two nodes; returns the job's id."""
        made = build(
            str(self.script(f"{name}.py", text)),
            (),
            name=name,
            nodes="1:2",
            workdir=str(self.work),
            profile=False,
            **spec,
        )
        with self.client() as client:
            return client.submit(msgspec.structs.replace(made, python=self.python)).id


def samples_of(site: Site, name: str) -> Counter[int]:
    """How often each sample was trained on."""
    lines = (path.read_text().split() for path in site.work.glob(f"{name}-*"))
    return Counter(int(word) for words in lines for word in words)


@pytest.mark.thorough  # four jobs at once, two of them with torch
def test_jobs_of_all_modes_go_on_over_an_upgrade_in_place(tmp_path):
    site = Installed(tmp_path, nodes=8)
    try:
        site.start_daemon()
        jobs = {
            "restart": site.train("restart", RESTART),
            "live": site.train("live", LIVE, live=True),
            "service": site.train("service", SERVICE, service=True),
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
            assert BEFORE or client.status().version == VERSION
        rounds = {job: len(site.events("round-formed", job)) for job in jobs.values()}
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
        assert {job: len(site.events("round-formed", job)) for job in jobs.values()} == rounds
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
            assert done.tries == 0, site.events(job=job)
        assert site.job(jobs["service"]).state == "running"
        assert site.job(jobs["service"]).tries == 0
        once = Counter(range(SAMPLES))
        for name in ("restart", "live"):
            assert samples_of(site, name) == once, name
        assert farms.runs(site) == Counter(range(TASKS))

        # Agents of before that have no job any more are replaced, and no others.
        def replaced() -> bool:
            site.until(all_settled, "the nodes are given back or leased anew")
            return set(site.agents().values()).isdisjoint(before - kept)

        def all_settled() -> bool:
            return all(gone(agent) for agent in before - kept)

        kept = {site.agents()[node] for node in site.job(jobs["service"]).nodes} & before
        site.until(replaced, "they are replaced")
        assert not any(gone(agent) for agent in kept)
        why = {event.sentence for event in site.events("lease-released")}
        assert BEFORE or any(f"agent is of malletrain {VERSION}" in sentence for sentence in why)
        with site.client() as client:
            client.cancel([jobs["service"]])
        site.until_state(jobs["service"], "cancelled")
    finally:
        site.stop()
