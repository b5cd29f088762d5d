"""What the ranks of ``many_ranks`` run: small sharded training scripts."""

import math

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import malletrain
from malletrain import Snapshot

WORDS, WIDTH, LENGTH = 13, 12, 6


class Transformer(nn.Module):
    """Two layers; sizes that no number of ranks divides."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 2, 17, dropout=0.0, batch_first=True)
            for _ in range(2)
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

    def __init__(self, path, kind="fsdp", freeze=False, schedule=True, seed=0, **options):
        torch.manual_seed(seed)
        self.model = Transformer()
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
        """This rank's words of the next global batch, drawn from the indices of the samples."""
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
        found = {}
        for name, tensor in self.model.state_dict().items():
            found[name] = whole(tensor)
        labels = [n for n, p in self.model.named_parameters() if p.requires_grad]
        for number, entry in self.optimizer.state_dict()["state"].items():
            for key, value in entry.items():
                found[f"{labels[number]} {key}"] = whole(value)
        return found


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
