"""The network that a cell makes, in torch: as NAS-Bench-101 builds it, in sizes for CPUs too.

Decides nothing: which channels a vertex has is :func:`malletrain.sim.nas.channels`'s rule. The
number of its parameters is that of :func:`malletrain.sim.nas.network`.
"""

from __future__ import annotations

import torch
from torch import nn

from malletrain.sim.nas import STACKS, Cell, Op, channels
from nas.sizes import NetworkSize


class ConvBnRelu(nn.Sequential):
    """A convolution without bias, normalised."""

    def __init__(self, before: int, after: int, kernel: int) -> None:
        super().__init__(
            nn.Conv2d(before, after, kernel, padding=kernel // 2, bias=False),
            nn.BatchNorm2d(after),
            nn.ReLU(),
        )


class CellModule(nn.Module):
    """One cell: images of ``before`` channels in, of ``after`` channels out."""

    def __init__(self, cell: Cell, before: int, after: int) -> None:
        super().__init__()
        self.cell = cell
        self.width = width = channels(cell, before, after)
        last = cell.vertices - 1
        self.projections = nn.ModuleDict(
            {
                str(b): ConvBnRelu(before, after if b == last else width[b], 1)
                for a, b in cell.edges
                if a == 0
            }
        )
        self.ops = nn.ModuleList(
            nn.MaxPool2d(3, 1, 1)
            if op is Op.MAXPOOL3X3
            else ConvBnRelu(width[v], width[v], 3 if op is Op.CONV3X3 else 1)
            for v, op in enumerate(cell.ops, 1)
        )

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        """What the output vertex has: what reaches it side by side, plus the input's projection."""
        last = self.cell.vertices - 1
        outputs: dict[int, torch.Tensor] = {}
        for v in range(1, last):
            inputs = [
                outputs[a][:, : self.width[v]] for a, b in self.cell.edges if b == v and a != 0
            ]
            if (0, v) in self.cell.edges:
                inputs.append(self.projections[str(v)](image))
            outputs[v] = self.ops[v - 1](torch.stack(inputs).sum(0))
        ends = [outputs[a] for a, b in sorted(self.cell.edges) if b == last and a != 0]
        out = torch.cat(ends, 1) if ends else None
        if (0, last) in self.cell.edges:
            through: torch.Tensor = self.projections[str(last)](image)
            out = through if out is None else out + through
        assert out is not None  # a path leads there
        return out


class CellNetwork(nn.Module):
    """Three stacks of cells between a convolution and a dense layer."""

    def __init__(self, cell: Cell, size: NetworkSize, planes: int = 1, classes: int = 10) -> None:
        super().__init__()
        cell = cell.pruned()
        layers: list[nn.Module] = [ConvBnRelu(planes, size.stem, 3)]
        before = width = size.stem
        for stack in range(STACKS):
            if stack:
                layers.append(nn.MaxPool2d(2, 2, ceil_mode=True))
                width *= 2
            for _ in range(size.per_stack):
                layers.append(CellModule(cell, before, width))
                before = width
        self.body = nn.Sequential(*layers)
        self.head = nn.Linear(width, classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Scores of the classes for images [n, planes, height, width]."""
        scores: torch.Tensor = self.head(self.body(images).mean((2, 3)))
        return scores
