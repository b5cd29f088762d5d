"""The code of the ranks of tests/malletrain/training/test_memory.py. Each rank is a node of its
own: it has a folder in memory, a keeper, and a folder for the disk that no other rank sees.
"""

import math
import os
import shutil
import sys
import threading

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

from malletrain import ElasticSampler, Snapshot, SnapshotError
from malletrain.protocol.worker_channel import DrainDone
from malletrain.training import memory_snapshots, report
from tests.malletrain.training.sharded_scripts import WORDS, Transformer, killer, mesh_of, whole
from tests.malletrain.training.worker_side import FakeAgent
from tests.waiting import NEVER_S, until

# An heir may stand still for as long as the machine likes.
memory_snapshots.HEIR_SILENCE_S = NEVER_S


class Training:
    """A model, whole on every rank or sharded, and its snapshot in memory."""

    def __init__(
        self, nodes, kind="whole", generation=1, seed=0, lacking=(), hand_over=0, **options
    ):
        rank = dist.get_rank()
        node = nodes[rank]
        os.environ.update(
            MALLETRAIN_KEEPER=node["address"],
            MALLETRAIN_MEMORY=node["memory"],
            MALLETRAIN_MEMORY_LIMIT=str(node.get("limit", 1 << 30)),
            MALLETRAIN_JOB_KEY="5e" * 32,
            MALLETRAIN_GENERATION=str(generation),
            LOCAL_RANK="0",
            LOCAL_WORLD_SIZE="1",
        )
        os.environ["MALLETRAIN_HAND_OVER"] = str(hand_over)
        if rank in lacking:
            del os.environ["MALLETRAIN_MEMORY"], os.environ["MALLETRAIN_KEEPER"]
        torch.manual_seed(seed)
        self.kind = kind
        self.model = Transformer(layers=1)
        if kind == "sharded":
            for part in (*self.model.layers, self.model):
                fully_shard(part, mesh=mesh_of(kind))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.sampler = ElasticSampler(240, global_batch_size=12, seed=1)
        self.snapshot = Snapshot(
            node["disk"] + "/x.pt",
            **{"every_s": math.inf, "memory": True, **options},
            model=self.model,
            optimizer=self.optimizer,
            sampler=self.sampler,
        )

    def train(self, steps):
        """The loss of each step over all ranks, and the state after each."""
        losses, states = [], []
        for _ in range(steps):
            positions = next(iter(self.sampler))
            losses.append(self._step(torch.tensor(positions)))
            states.append(self.whole())
            self.sampler.advance()
            self.snapshot.step()
        return losses, states

    def one_more(self):
        """Make another step, up to its end. Return the state."""
        self._step(torch.tensor(next(iter(self.sampler))))
        return self.whole()

    def _step(self, positions):
        words = (positions[:, None] + torch.arange(5)) % WORDS
        guess = self.model(words[:, :-1]).flatten(0, 1)
        mean = torch.nn.functional.cross_entropy(guess, words[:, 1:].flatten())
        self.optimizer.zero_grad()
        (mean * self.sampler.loss_weight).backward()
        if self.kind == "whole":
            for parameter in self.model.parameters():
                dist.all_reduce(parameter.grad)
                parameter.grad /= dist.get_world_size()
        self.optimizer.step()
        total = (mean * self.sampler.loss_weight).detach().clone()
        dist.all_reduce(total)
        return float(total) / dist.get_world_size()

    def whole(self):
        """The model and the optimizer, gathered, as bytes by name."""
        state = {name: whole(tensor) for name, tensor in self.model.state_dict().items()}
        for number, entry in self.optimizer.state_dict()["state"].items():
            state.update({f"{number} {key}": whole(value) for key, value in entry.items()})
        return state


def rounds(nodes, steps, heirs=None, **options):
    """One round: restore, train, and be drained in the last step where ``heirs`` are named.

    Return the record of a rank: whether it restored, its state before, losses, and the state
    after each step.
    """
    agent = None
    if heirs is not None and dist.get_rank() == 0:
        agent = FakeAgent()
        os.environ.update(MALLETRAIN_SOCKET=agent.path, MALLETRAIN_FLAGS=agent.flags.path)
        report.forget()
    training = Training(nodes, **options)
    restored = training.snapshot.restore()
    record = {
        "restored": restored,
        "before": training.whole(),
        "position": training.sampler.position,
    }
    sharded = training.kind == "sharded"  # they agree in one step, and save in the next
    record["losses"], record["states"] = training.train(steps - 1 - sharded)
    if agent is not None:
        agent.flags.request_drain(5, tuple(heirs))
        heard = []
        watcher = threading.Thread(target=_take_back, args=(agent, heard))
        watcher.start()
    losses, states = training.train(1 + sharded)
    record["losses"] += losses
    record["states"] += states
    if agent is not None:
        watcher.join()
        record["drained"] = sorted({m.saved for m in heard})
        agent.close()
    record["after"] = training.whole()
    if "every_s" in options:
        training.snapshot.save()
    record["on disk"] = sorted(os.listdir(nodes[dist.get_rank()]["disk"]))
    return record


def _take_back(agent, heard):
    def answered():
        heard.extend(agent.received(DrainDone))
        return heard

    until(answered, "the drain to be served")
    agent.flags.request_drain(0)


def refused(nodes, **options):
    """Why restoring was refused."""
    try:
        return Training(nodes, **options).snapshot.restore()
    except SnapshotError as error:
        return str(error)


def killed(nodes, kind):
    """Save in memory, train on, and save again: once for each thing that a save does to the file
    system, killed at it. (steps, whether the state is that of these steps) in memory after each.
    """
    training = Training(nodes, kind, replicate_every=1)
    training.snapshot.restore()
    _, states = training.train(1)
    home = nodes[0]["memory"]
    shutil.copytree(home, f"{home}.spare")
    training.snapshot.replicas.every = 0
    states.append(training.one_more())
    results, code = [], -9
    while code:
        child = os.fork()
        if child == 0:
            sys.addaudithook(killer(home, len(results) + 1))
            training.snapshot.replicas.every = 2
            training.sampler.advance()
            training.snapshot.step()
            os._exit(0)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        assert code in (0, -9)
        after = Training(nodes, kind, generation=2, seed=9)
        assert after.snapshot.restore()
        steps = after.sampler.position // 12
        results.append((steps, after.whole() == states[steps - 1]))
        files = [name for _, _, names in os.walk(home) for name in names]
        assert not [name for name in files if name.startswith(".arriving")], files
        for name in os.listdir(home):
            shutil.rmtree(os.path.join(home, name))
        shutil.copytree(f"{home}.spare", home, dirs_exist_ok=True)
    return results


def renamed(nodes, path):
    """Have the snapshot at ``path`` be another job's, and restore."""
    payload = torch.load(path)
    payload["owner"]["job"] = "job-2"
    torch.save(payload, path)
    return refused(nodes)
