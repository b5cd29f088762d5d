"""Trainings that can be checked to the sample: each sample of the data has a parameter of its own,
whose change says how often that sample was trained on. The loss is the mean of the batch's
parameters and the learning rate 1, so a step subtracts 1/(global batch) from the parameter of every
sample in it. The check uses no record of the script and no count of the daemon.
"""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass
from typing import Any

from malletrain import ElasticSampler
from tests.hosts.site import HostsSite

SAMPLES, BATCH, SEED = 200_000, 10, 1
_COMMON = f"""
import json, os, time
import torch
import malletrain

class Tally(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.parameter = torch.nn.Parameter(torch.zeros({SAMPLES}))

    def forward(self, numbers):
        return self.parameter[numbers].mean()

def where():
    return sampler.epoch * {SAMPLES} + sampler.state_dict()["position"]

def trace(rank, size):
    if rank == 0:
        line = f"{{where()}} {{size}} {{os.uname().nodename}}\\n"
        with open("trace", "a") as file:
            file.write(line)

def tell(rank):
    if rank == 0:
        times = torch.round(-model.parameter.detach() * {BATCH}).to(torch.int64)
        off = (model.parameter.detach() * {BATCH} + times).abs().max().item()
        once, more = (times == 1).nonzero().flatten(), (times > 1).nonzero().flatten()
        record = dict(where=where(), once=once.tolist(), more=more.tolist(), off=off)
        with open("said.new", "w") as file:
            json.dump(record, file)
        os.rename("said.new", "said")

model = Tally()
optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
sampler = malletrain.ElasticSampler({SAMPLES}, global_batch_size={BATCH}, seed={SEED})
"""
RESTART = (
    """
import torch.distributed as dist
dist.init_process_group("gloo")
"""
    + _COMMON
    + """
rank, size = dist.get_rank(), dist.get_world_size()
path = os.environ.get("SNAPSHOT", "run.pt")
snapshot = malletrain.Snapshot(path, model=model, sampler=sampler, every_s=2)
snapshot.restore()
net = torch.nn.parallel.DistributedDataParallel(model)
stop = torch.zeros(1)
for epoch in sampler.epochs(1):
    for numbers in torch.utils.data.DataLoader(range(200000), batch_sampler=sampler):
        optimizer.zero_grad()
        (net(numbers) * sampler.loss_weight).backward()
        optimizer.step()
        time.sleep(0.02)
        sampler.advance()
        malletrain.report(len(numbers))
        snapshot.step()
        trace(rank, size)
        stop.fill_(os.path.exists("enough"))
        dist.all_reduce(stop)
        if stop.item():
            break
    break
snapshot.save()
tell(rank)
"""
)
LIVE = (
    """
from malletrain import elastic
"""
    + _COMMON
    + """
path = os.environ.get("SNAPSHOT", "run.pt")
run = elastic.Run(
    model=model, optimizer=optimizer, sampler=sampler, snapshot=path, snapshot_every_s=2
)
net = run.ddp(model)
loader = torch.utils.data.DataLoader(range(200000), batch_sampler=sampler)
for epoch in sampler.epochs(1):
    for numbers in run.batches(loader):
        with run.step() as step:
            optimizer.zero_grad()
            (net(numbers) * run.loss_weight).backward()
            optimizer.step()
            time.sleep(0.02)
        if step.aborted:
            continue
        trace(run.rank, run.world_size)
        if os.path.exists("enough"):
            run.request_stop()
    break
if os.path.exists("enough"):
    tell(run.rank)
"""
)


@dataclass(frozen=True)
class Step:
    """A step that rank 0 made."""

    position: int
    """Samples of the data that came before the next one."""
    size: int
    """Ranks that made it together."""
    node: str
    """Node of rank 0."""


class Training:
    """A job of ``site``, on ``nodes`` (as in submit) in ``mode``: restart or live."""

    def __init__(self, site: HostsSite, mode: str, nodes: str, *options: str) -> None:
        self.site, self.mode = site, mode
        live = ["--live"] if mode == "live" else []
        text = LIVE if live else RESTART
        self.id = site.submit("train.py", text, nodes, *live, *options)

    def trace(self) -> list[Step]:
        """Return the steps that rank 0 recorded, in order."""
        path = self.site.work / "trace"
        lines = path.read_text().splitlines() if path.exists() else []
        return [Step(int(at), int(size), node) for at, size, node in map(str.split, lines)]

    def trains(self, size: int) -> None:
        """Wait until ``size`` ranks have made new steps."""
        begun = len(self.trace())

        def done() -> bool:
            assert "job-failed" not in self.site.bed.head.log("malletraind.log")
            new = self.trace()[begun:]
            return len(new) > 10 and all(step.size == size for step in new[-10:])

        self.site.until(done, f"{size} ranks make steps")

    def back(self) -> list[tuple[Step, Step]]:
        """Return the pairs of consecutive steps between which the position did not grow."""
        pairs = itertools.pairwise(self.trace())
        return [(old, new) for old, new in pairs if new.position <= old.position]

    def finish(self) -> Any:
        """Let it end, and hold it to what it promises: every sample of the order up to its
        position was trained on once, and no other. Return the job.
        """
        (self.site.work / "enough").touch()
        ended = ("completed", "failed", "cancelled")
        self.site.until(lambda: self.site.job(self.id)["state"] in ended, "the job ends")
        job = self.site.job(self.id)
        assert job["state"] == "completed", self.site.bed.head.log("malletraind.log")
        record = json.loads((self.site.work / "said").read_text())
        order = ElasticSampler(
            SAMPLES, global_batch_size=BATCH, seed=SEED, rank=0, world_size=1, max_world_size=1
        )
        due = list(itertools.islice(itertools.chain.from_iterable(order), record["where"]))
        assert record["where"] == self.trace()[-1].position
        assert record["more"] == [], "these were trained on twice"
        assert record["once"] == sorted(due)
        assert record["off"] < 1e-3
        return job
