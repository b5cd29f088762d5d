"""Throughput by scale from first principles, for unmeasured jobs.

Decides how compute, communication and a serial part determine a scaling curve. The slower of two
laws applies:

* **compute + ring allreduce**: a step of ``b`` samples per node takes ``(b·f/F) · (1 + j·√(2 ln n))
  + (1 - overlap) · C(n)``, with f the operations of training one sample and F the sustained
  operations/s of a node. ``C(n) = 2(n-1)·α + 2·(n-1)/n · M/β`` is the ring's time for M bytes of
  gradients (Hockney's α-β model; Thakur, Rabenseifner and Gropp, IJHPCA 19(1), 2005, section 4).
  The factor with the root is the expected maximum of n normal step times with relative standard
  deviation j, because all ranks wait for the slowest. Throughput is ``n·b`` divided by that time.
* **Amdahl**: a fraction s of one node's work does not shrink with more nodes (input from one file
  server): ``O(1)·n / (1 + s·(n-1))``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from allocator import ScalingCurve

TRAINING_COST = 3.0
"""Ratio of the operations of a training step to those of its forward pass: the backward pass costs
twice the forward pass.
"""


@dataclass(frozen=True)
class Cluster:
    """The performance of the nodes.

    The defaults are a node of six V100 (15.7 Tflop/s peak each in single precision, 30 % of it
    sustained) with two EDR links (12.5 GB/s each, 60 % of it usable by an allreduce). Batch,
    overlap and jitter are assumptions.

    Attributes:
        flops: operations/s that a node sustains in training.
        alpha_s: latency of a message, seconds.
        beta: bandwidth between two nodes, bytes/s.
        overlap: fraction of the communication hidden behind the backward pass.
        batch: samples per step and node.
        jitter: relative standard deviation of a node's step time.
    """

    flops: float = 6 * 15.7e12 * 0.30
    alpha_s: float = 30e-6
    beta: float = 2 * 12.5e9 * 0.60
    overlap: float = 0.5
    batch: int = 6 * 32
    jitter: float = 0.03

    def rate(self, flops: float, parameters: float, nodes: int) -> float:
        """Return samples/s on ``nodes`` nodes.

        Args:
            flops: operations of training one sample.
            parameters: number of parameters, with gradients of 4 bytes each.
            nodes: number of nodes.
        """
        compute = (
            self.batch * flops / self.flops * (1 + self.jitter * math.sqrt(2 * math.log(nodes)))
        )
        ring = (
            2 * (nodes - 1) * self.alpha_s + 2 * (nodes - 1) / nodes * 4.0 * parameters / self.beta
        )
        return nodes * self.batch / (compute + (1 - self.overlap) * ring)

    def curve(
        self, flops: float, parameters: float, sizes: Iterable[int], serial: float = 0.0
    ) -> ScalingCurve:
        """Return samples/s at each of ``sizes``: the slower of the two laws.

        Args:
            flops: operations of training one sample.
            parameters: number of parameters.
            sizes: numbers of nodes.
            serial: Amdahl's serial fraction, 0 to 1.
        """
        rate_one = self.rate(flops, parameters, 1)
        return ScalingCurve.of(
            {n: min(self.rate(flops, parameters, n), amdahl(rate_one, serial, n)) for n in sizes}
        )


NODE = Cluster()
"""The node of the defaults."""


def amdahl(rate_one: float, serial: float, nodes: int) -> float:
    """Return samples/s on ``nodes`` nodes if a fraction ``serial`` of one node's work stays serial.

    Args:
        rate_one: samples/s on one node.
        serial: fraction from 0 to 1.
        nodes: number of nodes.
    """
    return rate_one * nodes / (1 + serial * (nodes - 1))


@dataclass(frozen=True)
class Model:
    """A model of the built-in family.

    Attributes:
        flops: operations of one forward pass at 224×224×3; a multiply-add counts as two.
        parameters: number of parameters.
        serial: Amdahl's serial fraction.
    """

    flops: float
    parameters: float
    serial: float = 0.0


FAMILY = {
    "alexnet": Model(1.43e9, 61.1e6, 0.012),
    "vgg16": Model(31.0e9, 138.4e6),
    "resnet18": Model(3.64e9, 11.7e6, 0.002),
    "resnet50": Model(8.2e9, 25.6e6),
    "densenet121": Model(5.7e9, 8.0e6, 0.001),
    "mnasnet": Model(0.66e9, 4.4e6, 0.006),
    "mobilenet_v2": Model(0.61e9, 3.5e6, 0.008),
}
"""Operations and parameters as published with the models; the serial fractions are assumptions
(light models are hard to feed).
"""


def built_in(largest: int = 64, cluster: Cluster = NODE) -> dict[str, ScalingCurve]:
    """Return the curves of the built-in family at 1, 2, 4, … ``largest`` nodes."""
    sizes = sorted({1 << p for p in range(largest.bit_length())} | {largest})
    return {
        name: cluster.curve(TRAINING_COST * m.flops, m.parameters, sizes, m.serial)
        for name, m in FAMILY.items()
    }
