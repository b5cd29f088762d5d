"""The jobs of benchmarks/chaos.py, and the exact check of their samples.

A training has a parameter for each sample, from which each step subtracts the same amount: the
final model shows how often each sample was trained on (tests/hosts/exact.py).
"""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from malletrain import ElasticSampler
from tests.hosts import exact
from tests.integration.embedded import gone

SAMPLES = 400_000
"""Samples of a training: more than it trains in the two hours that 1,000 faults take on a busy
machine, before it is told to end."""
KINDS = ("restart", "live", "sharded", "service")
SERVICE = """
import os, threading, time
from malletrain import membership

group = membership.join(str(os.getpid()))

def listen():
    for change in group.changes():
        if change.kind == "leaving" and change.member == group.me:
            group.report_drained()

threading.Thread(target=listen, daemon=True).start()
with open(f"alive-{os.getpid()}", "w") as file:
    while not os.path.exists("enough"):
        time.sleep(0.05)
"""
_SHARDED_HEAD = """
from malletrain import elastic
from torch.distributed.fsdp import fully_shard
"""
_SHARDED_LOOP = """
def made():
    return Tally()

def shard(model, mesh):
    fully_shard(model, mesh=mesh)

run = elastic.Run(
    build=made, parallelize=shard,
    optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=1.0),
    sampler=sampler, snapshot="run.pt", snapshot_every_s=2, replicate_every=2,
)
loader = torch.utils.data.DataLoader(range(SAMPLES), batch_sampler=sampler)
for epoch in sampler.epochs(1):
    for numbers in run.batches(loader):
        with run.step() as step:
            run.optimizer.zero_grad()
            (run.model(numbers) * run.loss_weight).backward()
            run.optimizer.step()
            time.sleep(0.05)
        if step.aborted:
            continue
        trace(run.rank, run.world_size)
        if os.path.exists("enough"):
            run.request_stop()
    break
whole = next(iter(run.model.parameters())).full_tensor()
class model:
    parameter = whole
tell(run.rank)
"""
_MEMORY = (
    (
        "model = Tally()\n",
        "from torch.distributed.device_mesh import init_device_mesh\n"
        "from torch.distributed.fsdp import fully_shard\n"
        "model = Tally()\n"
        'fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))\n',
    ),
    ("every_s=2)", "every_s=2, memory=True, replicate_every=EVERY)"),
    ("torch.nn.parallel.DistributedDataParallel(model)", "model"),
    (
        "snapshot.save()\ntell",
        "snapshot.save()\nwhole = model.parameter.full_tensor()\n"
        "class model:\n    parameter = whole\ntell",
    ),
)
"""Turns a training in restart mode into one with its shards in the memory of the nodes."""

HANG = """
def hang():
    try:
        os.rename("hang", f"hung-{os.getpid()}")
    except OSError:
        return
    wait_for_ever(os.path.getsize(f"hung-{os.getpid()}"))

def wait_for_ever(on_disk):
    if on_disk:
        os.mkfifo(f"stuck-{os.getpid()}")
        os.open(f"stuck-{os.getpid()}", os.O_RDONLY)
    while True:
        time.sleep(1.0)

def where():"""
"""The first worker that finds a file ``hang`` waits for ever in its step, and the other workers
wait for it. If the file is not empty, it waits in a system call.
"""


def script(kind: str) -> str:
    """Return the script of a job of one of :data:`KINDS`, or of ``memory`` or ``memory,
    replicas``.
    """
    if kind == "service":
        return SERVICE
    if kind == "restart":
        text = exact.RESTART
    elif kind.startswith("memory"):
        text = exact.RESTART
        for old, new in _MEMORY:
            text = text.replace(old, new)
        text = text.replace("EVERY", "2" if kind == "memory, replicas" else "0")
    elif kind == "live":
        text = exact.LIVE.replace('if os.path.exists("enough"):\n    tell', "if True:\n    tell")
    else:
        common = exact.LIVE[: exact.LIVE.index("path = os.environ")]
        common = common.replace("model = Tally()\n", "").replace(
            "optimizer = torch.optim.SGD(model.parameters(), lr=1.0)\n", ""
        )
        text = _SHARDED_HEAD + common + _SHARDED_LOOP
    text = text.replace("time.sleep(0.02)", "time.sleep(0.05)")
    text = text.replace("def where():", HANG).replace(
        "time.sleep(0.05)", "hang(); time.sleep(0.05)"
    )
    text = text.replace(str(exact.SAMPLES), str(SAMPLES)).replace(
        "range(SAMPLES)", f"range({SAMPLES})"
    )
    return "import torch\ntorch.set_num_threads(1)\n" + text


def _lives(pid: int) -> bool:
    try:
        return not gone(psutil.Process(pid))
    except psutil.NoSuchProcess:
        return False


@dataclass(frozen=True)
class ChaosJob:
    """One job. ``folder``: its working directory."""

    id: str
    kind: str
    folder: Path

    def end(self) -> None:
        """Tell it to end."""
        (self.folder / "enough").touch()

    @property
    def asked_to_end(self) -> bool:
        """Whether it was told to end."""
        return (self.folder / "enough").exists()

    @property
    def hangs(self) -> bool:
        """Whether a worker hangs, or is about to."""
        pids = [int(path.name.removeprefix("hung-")) for path in self.folder.glob("hung-*")]
        return (self.folder / "hang").exists() or any(map(_lives, pids))

    def account(self) -> dict[str, Any]:
        """Return the numbers of samples that were trained on more than once, and never although the
        position counts them; and the number of repeated steps.
        """
        if self.kind == "service":
            return {"twice": 0, "never": 0, "replayed": 0, "samples": 0}
        record = json.loads((self.folder / "said").read_text())
        order = ElasticSampler(
            SAMPLES,
            global_batch_size=exact.BATCH,
            seed=exact.SEED,
            rank=0,
            world_size=1,
            max_world_size=1,
        )
        due = set(itertools.islice(itertools.chain.from_iterable(order), record["where"]))
        once, more = set(record["once"]), set(record["more"])
        lines = (self.folder / "trace").read_text().splitlines()
        places = [int(line.split()[0]) for line in lines if len(line.split()) == 3]
        back = sum(
            max(0, old - new + exact.BATCH) // exact.BATCH
            for old, new in itertools.pairwise(places)
            if new <= old
        )
        return {
            "twice": len(more) + len(once - due),
            "never": len(due - once - more),
            "replayed": back,
            "samples": record["where"],
        }
