"""The training of benchmarks/sharded.py in every mode: a transformer, its samples, and the records
of each rank beside :class:`benchmarks.peers_training.Log`. Imports torch and nothing of MalleTrain.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard

from benchmarks.sharded_account import Tensor, rows_of

BATCH, LENGTH, WORDS = 24, 16, 4096
"""Samples per step over all ranks, tokens per sample, size of the vocabulary."""
SAMPLES = 2_400_000
LR = 1e-4
"""Learning rate. With ten times as much, two undisturbed runs on 1 and 4 ranks, which differ by
rounding, are 1e-5 apart after 25 steps and a tenth after 60, so that the effect of a change of
ranks would not be visible.
"""
HEAD = 64
"""Width of one attention head."""


def arguments(description: str | None) -> argparse.Namespace:
    """Add the arguments of every variant of the script."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("folder", help="of the logs")
    parser.add_argument("--width", type=int, required=True)
    parser.add_argument("--layers", type=int, required=True)
    parser.add_argument("--step-s", type=float, default=0.0, help="sleep in every step")
    parser.add_argument("--checkpoint", required=True)
    parser.add_argument("--checkpoint-every-s", type=float, default=60.0)
    parser.add_argument("--max-ranks", type=int, default=8)
    parser.add_argument("--replicate-every", type=int, default=0)
    parser.add_argument("--memory", action="store_true", help="snapshots in the nodes' memory")
    return parser.parse_args()


class Block(nn.Module):
    """Attention and a network of four times the width, after norms."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = max(1, width // HEAD)
        self.before = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.between = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        parts = self.qkv(self.before(x)).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(nn.functional.gelu(self.up(self.between(x))))


class Decoder(nn.Module):
    """A transformer that predicts the next word; 12·layers·width² parameters and the words."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, width), nn.Embedding(LENGTH, width)
        self.layers = nn.ModuleList(Block(width) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, WORDS, bias=False)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.words(words) + self.places.weight[: words.shape[1]]
        for layer in self.layers:
            x = layer(x)
        guess: torch.Tensor = self.head(self.norm(x))
        return guess


def build(width: int, layers: int) -> Decoder:
    """Return the model without memory."""
    with torch.device("meta"):
        return Decoder(width, layers)


def shard(model: Decoder, mesh: DeviceMesh) -> Decoder:
    """Shard the model over the mesh, layer by layer."""
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def fill(model: nn.Module) -> None:
    """Initialise the values, the same at any number of ranks, one full tensor at a time."""
    for number, (name, parameter) in enumerate(model.named_parameters()):
        whole = torch.zeros(parameter.shape)
        if "norm" in name or "before" in name or "between" in name:
            whole.fill_(float(name.endswith("weight")))
        elif name.endswith("weight"):
            whole.normal_(0.0, 0.02, generator=torch.Generator().manual_seed(number))
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        first, end = 0, parameter.shape[0]
        if isinstance(parameter, DTensor) and isinstance(parameter.placements[0], Shard):
            mesh = parameter.device_mesh
            first, end = rows_of(parameter.shape[0], mesh.get_local_rank(), mesh.size())
        with torch.no_grad():
            local.copy_(whole[first:end])


def tensors_of(width: int, layers: int) -> list[Tensor]:
    """Return the state of the model and of AdamW: each parameter and its two moments."""
    model = build(width, layers)
    return [
        Tensor(p.shape[0], p.element_size() * p.numel() // p.shape[0])
        for p in model.parameters()
        for _ in range(3)
    ]


def loss_of(net: nn.Module, samples: list[int]) -> torch.Tensor:
    """Return the mean loss over these samples, whose words are derived from their numbers."""
    numbers, places = torch.tensor(samples)[:, None], torch.arange(LENGTH + 1)
    words = (numbers * 7 + places * places * (1 + numbers % 5)) % WORDS
    guess = net(words[:, :-1])
    return nn.functional.cross_entropy(guess.flatten(0, 1), words[:, 1:].flatten())


def memory(key: str) -> int:
    """Return VmRSS or VmHWM of this process, bytes."""
    match = re.search(rf"^{key}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert match is not None
    return int(match[1]) * 1024


def forget_peak() -> None:
    """Reset VmHWM to VmRSS (proc(5), clear_refs)."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def read_so_far() -> int:
    """Return the bytes that this process has read from files; sockets that are read like files
    count too.
    """
    match = re.search(r"^rchar: (\d+)", Path("/proc/self/io").read_text(), re.MULTILINE)
    assert match is not None
    return int(match[1])


class Facts:
    """The records of a process about changes, a JSON object per line in a file of its own."""

    def __init__(self, folder: str) -> None:
        path = os.path.join(folder, f"facts-{os.getpid()}-{time.time_ns()}")
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

    def write(self, kind: str, **facts: Any) -> None:
        """Write one line."""
        line = {"kind": kind, "time": time.time(), **facts}
        os.write(self._file, json.dumps(line).encode() + b"\n")


def facts(folder: Path) -> list[dict[str, Any]]:
    """Return all complete lines of all processes, in the order of time."""
    rows = []
    for path in folder.glob("facts-*"):
        for line in path.read_text().splitlines():
            with contextlib.suppress(ValueError):  # cut by SIGKILL
                rows.append(json.loads(line))
    return sorted(rows, key=lambda fact: float(fact["time"]))
