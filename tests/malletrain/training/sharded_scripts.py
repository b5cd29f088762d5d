"""The code of the ranks of ``many_ranks``: small sharded training scripts."""

import contextlib
import math
import os
import shutil
import signal
import sys
import threading

import torch
import torch._dynamo  # what torch imports when it is first used, once for all ranks
import torch.distributed as dist
import torch.distributed.checkpoint.state_dict
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import malletrain
from malletrain import Snapshot, SnapshotError
from malletrain.protocol.worker_channel import DrainDone, SnapshotTaken
from malletrain.training import report, shard_files, torch_private
from malletrain.training.shard_reader import RowReader
from malletrain.training.side_group import Team
from tests.malletrain.training.worker_side import FakeAgent
from tests.waiting import until

CHANGES = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.chmod", "os.listdir"}
"""Audit events of what touches the file system."""

WORDS, WIDTH, LENGTH = 13, 12, 6


class Transformer(nn.Module):
    """Sizes that no number of ranks divides."""

    def __init__(self, layers):
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 2, 17, dropout=0.0, batch_first=True)
            for _ in range(layers)
        )
        self.head = nn.Linear(WIDTH, WORDS)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, words):
        hidden = self.embed(words)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(hidden).clone()


def mesh_of(kind):
    world = dist.get_world_size()
    if kind == "hsdp":
        return init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicate", "shard"))
    return init_device_mesh("cpu", (world,))


class Training:
    """A run of the transformer: everything a snapshot carries."""

    def __init__(self, path, kind="fsdp", freeze=False, schedule=True, seed=0, layers=0, **options):
        torch.manual_seed(seed)
        self.model = Transformer(layers)
        if kind != "whole":
            mesh = mesh_of(kind)
            for layer in self.model.layers:
                fully_shard(layer, mesh=mesh)
            fully_shard(self.model, mesh=mesh)
        if freeze:
            self.model.embed.requires_grad_(False)
        trained = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=0.01)
        objects = {"model": self.model, "optimizer": self.optimizer}
        if schedule:
            self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 3, gamma=0.5)
            objects["scheduler"] = self.scheduler
        self.sampler = malletrain.ElasticSampler(240, global_batch_size=12, seed=1)
        self.snapshot = Snapshot(path, sampler=self.sampler, **objects, **options)

    def batch(self):
        """Return this rank's words of the next global batch, drawn from the indices of the
        samples.
        """
        return torch.tensor(
            [[(i * 7 + j * j) % WORDS for j in range(LENGTH + 1)] for i in next(iter(self.sampler))]
        )

    def train(self, steps):
        losses = []
        for _ in range(steps):
            words = self.batch()
            self.optimizer.zero_grad()
            guess = self.model(words[:, :-1]).flatten(0, 1)
            mean = nn.functional.cross_entropy(guess, words[:, 1:].flatten())
            loss = mean * self.sampler.loss_weight
            loss.backward()
            self.optimizer.step()
            if hasattr(self, "scheduler"):
                self.scheduler.step()
            self.model.seen += 1
            total = loss.detach().clone()
            dist.all_reduce(total)
            losses.append(float(total) / dist.get_world_size())
            self.sampler.advance()
            self.snapshot.step()
        return losses

    def whole(self):
        """The state of all ranks together, by name, as bytes."""
        state = {}
        for name, tensor in self.model.state_dict().items():
            state[name] = whole(tensor)
        labels = [n for n, p in self.model.named_parameters() if p.requires_grad]
        for number, entry in self.optimizer.state_dict()["state"].items():
            for key, value in entry.items():
                state[f"{labels[number]} {key}"] = whole(value)
        return state


class Perceptron(nn.Module):
    """A model for tensor parallelism within a node."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, values):
        return self.down(self.up(values).relu())


def tensor_parallel(path, nodes, save):
    """A model spread over ``nodes`` and, within each, over two ranks; 0 nodes: on one rank."""
    torch.manual_seed(nodes)
    model = Perceptron()
    if nodes:
        mesh = init_device_mesh("cpu", (nodes, 2), mesh_dim_names=("nodes", "within"))
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        parallelize_module(model, mesh["within"], plan)
        fully_shard(model, mesh=mesh["nodes"])
    optimizer = torch.optim.AdamW(model.parameters())
    snapshot = Snapshot(path, every_s=math.inf, model=model, optimizer=optimizer)
    restored = snapshot.restore()
    state = [{n: whole(t) for n, t in model.state_dict().items()}, moments(optimizer)]
    if save:
        model(torch.ones(3, 8)).square().sum().backward()
        optimizer.step()
        state = [{n: whole(t) for n, t in model.state_dict().items()}, moments(optimizer)]
        assert snapshot.save()
    return restored, state


def moments(optimizer):
    return [
        {key: whole(value) for key, value in entry.items()}
        for entry in optimizer.state_dict()["state"].values()
    ]


def layouts(path, examples):
    """For each (old ranks, new ranks, shapes): tensors written in one layout and read in another;
    those that differ.
    """
    world = dist.get_world_size()
    sizes = range(1, world + 1)
    meshes = {n: DeviceMesh("cpu", list(range(n))) for n in sizes}
    teams = {n: dist.new_group(list(range(n)), backend="gloo") for n in sizes}
    wrong = []
    for number, (old, new, shapes) in enumerate(examples):
        numbers = torch.Generator().manual_seed(number)
        expected = {
            f"t{i}": torch.rand(shape, generator=numbers) for i, (shape, _) in enumerate(shapes)
        }
        layout = {f"t{i}": dim for i, (_, dim) in enumerate(shapes)}
        folder = f"{path}/{number}"
        if dist.get_rank() < old:
            shards = {k: spread(t, meshes[old], layout[k]) for k, t in expected.items()}
            shard_files.write(folder, shards, Team(teams[old]))
        dist.barrier()
        if dist.get_rank() < new:
            tensors = {k: spread(t * 0 - 1, meshes[new], layout[k]) for k, t in expected.items()}
            shard_files.read(RowReader(folder), tensors, Team(teams[new]))
            wrong += [(number, k) for k in tensors if whole(tensors[k]) != whole(expected[k])]
    return wrong


def spread(full, mesh, dim):
    return distribute_tensor(full, mesh, [Replicate() if dim is None else Shard(dim)])


def whole(tensor):
    full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return full.detach().clone().reshape(-1).view(torch.uint8).numpy().tobytes()


def run(path, steps=0, save=False, **options):
    """Restore, train, save. What a rank says of it."""
    training = Training(path, every_s=math.inf, **options)
    restored = training.snapshot.restore()
    before = training.whole()
    drawn = torch.rand(1).item()
    losses = training.train(steps)
    return {
        "restored": restored,
        "before": before,
        "drawn": drawn,
        "losses": losses,
        "saved": training.snapshot.save() if save else None,
        "after": training.whole(),
        "next_draw": torch.rand(1).item(),
        "lr": [group["lr"] for group in training.optimizer.param_groups],
        "groups": [sorted(group) for group in training.optimizer.param_groups],
        "state": len(training.optimizer.state),
    }


def spoiled(path):
    """Restore a damaged snapshot. Return the error, and whether the state is as it was before."""
    training = Training(path, every_s=math.inf, seed=3)
    training.train(1)
    before = training.whole()
    try:
        training.snapshot.restore()
    except SnapshotError as error:
        return str(error), training.whole() == before
    return "", False


def drained(path):
    """Rank 0's agent asks for a drain before the third step. The steps at which each rank's files
    say they were saved, and what the agent heard.
    """
    agent = FakeAgent() if dist.get_rank() == 0 else None
    if agent is not None:
        os.environ.update(MALLETRAIN_SOCKET=agent.path, MALLETRAIN_FLAGS=agent.flags.path)
        report.forget()
    training = Training(path, every_s=math.inf)
    training.snapshot.restore()
    training.train(2)
    heard = []
    if agent is not None:
        agent.flags.request_drain(5)
        watcher = threading.Thread(target=_take_back, args=(agent, heard))
        watcher.start()
    losses = training.train(2)
    if agent is not None:
        watcher.join()
    return losses, heard


def _take_back(agent, heard):
    """Cancel the drain, as the daemon does when its plan changes: training continues."""

    def answered():
        heard.extend(agent.received((DrainDone, SnapshotTaken)))
        return any(isinstance(message, DrainDone) for message in heard)

    until(answered, "the drain to be served")
    agent.flags.request_drain(0)


def not_saved(path, job, full):
    """Save what cannot be: where the disk is ``full``, and where another job has saved. Whether
    each was saved.
    """
    training = Training(full, every_s=math.inf)
    fits = training.snapshot.save()
    if dist.get_rank() == 0:
        with contextlib.suppress(OSError), open(f"{os.path.dirname(full)}/filler", "wb") as file:
            while file.write(bytes(4096)):
                file.flush()
    dist.barrier()
    training.train(1)
    os.environ["MALLETRAIN_JOB"] = job
    full = training.snapshot.save()
    with contextlib.suppress(SnapshotError):
        return fits, full, Training(path, every_s=math.inf).snapshot.save()
    return fits, full, "refused"


def killed(path):
    """Save once, train on, and save again: once for each thing that a save does to the file system,
    killed at it. (steps, position, whether the state is that of these steps) on disk after each.

    The files are put back as links: the process knows its newest snapshot by its inode, and reads
    one that it does not know (more changes before the same one) to see whose it is.
    """
    training = Training(path, every_s=math.inf)
    states = {}
    for steps in (1, 2):
        training.train(1)
        states[steps] = training.whole()
        if steps == 1:
            assert training.snapshot.save()
    home = os.path.dirname(path)
    shutil.copytree(home, f"{home}.spare", copy_function=os.link)
    results, code = [], -9
    while code:
        child = os.fork()
        if child == 0:
            sys.addaudithook(killer(path, len(results) + 1))
            os._exit(not training.snapshot.save())
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        assert code in (0, -9)
        steps, position, state = steps_on_disk(path)
        results.append((steps, position, state == states[steps]))
        shutil.rmtree(home)
        shutil.copytree(f"{home}.spare", home, copy_function=os.link)
    return results


def killer(path, at):
    """An audit hook that kills this process at the ``at``-th change below ``path``."""
    done = []

    def watch(event, arguments):
        if event in CHANGES and path in str(arguments[0]):
            done.append(event)
            if len(done) == at:
                os.kill(os.getpid(), signal.SIGKILL)

    return watch


def rank_1_killed(path, at):
    """Rank 1 dies in its second save."""
    training = Training(path, every_s=math.inf)
    training.train(1)
    assert training.snapshot.save()
    training.train(1)
    if dist.get_rank() == 1:
        sys.addaudithook(killer(path, at))
    training.snapshot.save()


def steps_on_disk(path):
    """The steps of the newest snapshot, after looking at all of it."""
    training = Training(path, every_s=math.inf, seed=9)
    assert training.snapshot.restore()
    return int(training.model.seen), training.sampler.position, training.whole()


def saves_before_its_scheduler(path, lost_in=None):
    """A training of three epochs; return (epoch that it began with, learning rate at its end)."""
    model = nn.Linear(4, 4)
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    sampler = malletrain.ElasticSampler(12, global_batch_size=6)
    snapshot = Snapshot(
        path, model=model, optimizer=optimizer, scheduler=scheduler, sampler=sampler
    )
    snapshot.restore()
    began = sampler.epoch
    for epoch in sampler.epochs(3):
        for batch in sampler:
            model(torch.ones(len(batch), 4)).sum().backward()
            optimizer.step()
            sampler.advance()
            snapshot.step()
        snapshot.save()
        if epoch == lost_in:
            break
        scheduler.step()
    return began, scheduler.get_last_lr()[0]


def gradient(dtype="float32", shards=2, force_sum=False, frozen=False):
    """(the gradient of a weight whose gradient is 1 + rank, on average 1.5 over two ranks, what
    MalleTrain says of the model). None for a gradient if torch raises.
    """
    model = nn.Linear(1, 3, bias=False, dtype=getattr(torch, dtype))
    model.weight.requires_grad_(not frozen)
    mesh = (
        mesh_of("fsdp")
        if shards == 2
        else init_device_mesh("cpu", (2, 1), mesh_dim_names=("a", "b"))
    )
    fully_shard(model, mesh=mesh)
    if force_sum:
        model.set_force_sum_reduction_for_comms(True)
    says = torch_private.wrong_gradients(model)
    inputs = torch.ones(1, 1, dtype=getattr(torch, dtype)) * (1 + dist.get_rank())
    try:
        answer = model(inputs).sum()
        if frozen:
            return None, says
        answer.backward()
    except RuntimeError:  # torch 2.7 averages over no replicas on CPUs
        return None, says
    return float(model.weight.grad.full_tensor()[0, 0]), says


def steps_of_a_sharded_model(path):
    """What the first step of a snapshot raises."""
    training = Training(path)
    training.snapshot.restore()
    try:
        training.train(1)
    except SnapshotError as error:
        return str(error)
    return ""
