"""A global batch that follows the gradient noise, with a learning rate that follows the batch.

Decides what is measured at each update, how the noise of gradients is estimated from norms
(McCandlish et al. 2018, "An Empirical Model of Large-Batch Training", appendix A.1), by which
factor a learning rate grows with the batch (Johnson et al. 2020, "AdaScale SGD"), and when the
sampler gets another size: by the batch that the daemon advises for the job's nodes, else by the
noise alone.

Notation: G is the gradient of the whole data, Σ the covariance of the gradient of one sample. The
squared norm of a gradient over b samples has the expectation |G|² + tr Σ / b. The noise scale
tr Σ / |G|² is a number of samples: a batch well below it wastes steps, one well above it samples.

On several ranks, or with gradient accumulation, the gradients of the ranks' portions are compared
with the averaged gradient. A hook sees the gradient of a parameter before it is averaged. One rank
without accumulation compares the gradients of successive updates, and keeps a copy of the gradient.

Between the backward pass and the update a script may scale all gradients, to clip their norm. The
factor is found from a sample of gradient elements, of which the average before it is known as well.
"""

from __future__ import annotations

import functools
import math
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from malletrain.training.objects import SCRIPT_RATE
from malletrain.training.report import open_flags, tell, tell_batch
from malletrain.training.sampler import ElasticSampler

DECAY = 0.99
"""Factor by which an estimate loses weight per base batch of samples."""
ESTIMATES_BETWEEN_CHANGES = 20
"""Number of estimates with a batch before the next change."""
_SAMPLED_PARAMETERS, _SAMPLED_ELEMENTS = 8, 64
"""Number of parameters, and of elements of each, from which the scaling of gradients is found."""
_UNIFORM = 1e-3
"""Maximum squared relative error of the sample if all gradients were scaled by one factor."""


@dataclass(frozen=True)
class Estimate:
    """Unbiased estimates from one update. Both may be negative by chance."""

    squared_gradient: float
    """|G|²."""
    noise: float
    """tr Σ, for one sample."""


def from_parts(part: float, inverse_size: float, whole: float, size: float) -> Estimate | None:
    """Return the estimate from gradients of parts of a batch; None if there is one part only.

    Args:
        part: mean squared norm of the gradients of the parts.
        inverse_size: mean of 1 / (samples of a part).
        whole: squared norm of the gradient of the whole batch.
        size: samples of the whole batch.
    """
    difference = inverse_size - 1 / size
    if difference <= 1e-9 * inverse_size:
        return None
    noise = (part - whole) / difference
    return Estimate(whole - noise / size, noise)


def from_successive(product: float, difference: float, size: float, before: float) -> Estimate:
    """Return the estimate from the gradients of two successive batches, as if the parameters were
    the same.

    Args:
        product: scalar product of the two gradients.
        difference: squared norm of their difference.
        size: samples of the second batch.
        before: samples of the first batch.
    """
    return Estimate(product, difference / (1 / size + 1 / before))


def gain(estimate: Estimate, base: float, size: float) -> float:
    """Return AdaScale's gain: the number of steps with ``base`` samples that one step with ``size``
    samples is worth. 1 without noise, ``size / base`` if there is only noise.

    Args:
        estimate: estimate of the gradient noise.
        base: samples of a base step.
        size: samples of the larger step.
    """
    noise, squared = max(0.0, estimate.noise), max(0.0, estimate.squared_gradient)
    if size <= base or noise + squared == 0:
        return 1.0
    return (noise / base + squared) / (noise / size + squared)


def next_size(size: int, base: int, most: int, noise_scale: float) -> int:
    """Return the next batch size. It doubles if the noise scale is at least twice the size, and
    halves if the noise scale is below half of it.

    Args:
        size: current size, samples.
        base: smallest size.
        most: largest size.
        noise_scale: tr Σ / |G|², samples.
    """
    if noise_scale >= 2 * size:
        return min(2 * size, most)
    if noise_scale < size / 2:
        size = min(size, max(size // 2, base))
    return min(size, most)


def next_towards(size: int, target: int) -> int:
    """Return the next batch size on the way to ``target``: at most twice and at least half of
    ``size``. All in samples.
    """
    return min(2 * size, target) if target > size else max(size // 2, target)


class NoiseAverage:
    """Exponential averages of estimates, over equally many samples at any batch size.

    Numerator and denominator are averaged separately, because their ratio is not unbiased.
    """

    def __init__(self) -> None:
        self._squared_gradient = self._noise = self._weight = 0.0

    def add(self, estimate: Estimate, batches: float) -> None:
        """Add an estimate of an update with ``batches`` times the samples of the base batch."""
        if not (math.isfinite(estimate.squared_gradient) and math.isfinite(estimate.noise)):
            return
        keep = DECAY**batches
        self._squared_gradient = (
            keep * self._squared_gradient + (1 - keep) * estimate.squared_gradient
        )
        self._noise = keep * self._noise + (1 - keep) * estimate.noise
        self._weight = keep * self._weight + (1 - keep)

    @property
    def mean(self) -> Estimate:
        """The averages; zeros without an estimate."""
        weight = self._weight or 1.0
        return Estimate(self._squared_gradient / weight, self._noise / weight)

    @property
    def scale(self) -> float:
        """The noise scale, samples; 0 without noise, infinite if there is only noise."""
        mean = self.mean
        if mean.noise <= 0:
            return 0.0
        return mean.noise / mean.squared_gradient if mean.squared_gradient > 0 else math.inf

    def state(self) -> dict[str, float]:
        """Return the averages as plain numbers."""
        return {
            "squared_gradient": self._squared_gradient,
            "noise": self._noise,
            "weight": self._weight,
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Continue from :meth:`state`."""
        self._squared_gradient = float(state["squared_gradient"])
        self._noise = float(state["noise"])
        self._weight = float(state["weight"])


FACTORS: dict[str, Callable[[Estimate, float, float], float]] = {
    "adascale": gain,
    "sqrt": lambda _, base, size: max(1.0, size / base) ** 0.5,
    "none": lambda *_: 1.0,
}
"""Factor of the learning rate by rule, from (estimate, base size, size)."""


class AdaptiveBatch:
    """Doubles the global batch while the gradients are noisy enough for it, and halves it again.

    In a job of MalleTrain the batch is the one with the highest goodput on the job's nodes, once
    the daemon knows their throughput at other batches (:mod:`malletrain.core.goodput`).

    Pass it to :class:`malletrain.Snapshot` or :class:`malletrain.elastic.Run` with the sampler. The
    base batch is the ``global_batch_size`` with which the sampler was created; the script's
    learning rate and its schedule are those of the base batch. During ``optimizer.step()`` the rate
    is multiplied by the factor of ``lr``.

    It assumes one backward pass for each batch of the loader, and a mean loss times the loss
    weight. Parameters that the optimizer gets later, or that are trained later, are not measured.
    The first update raises ValueError if the models of ``Snapshot`` or ``elastic.Run`` do not suit
    the base batch, as :meth:`malletrain.ElasticSampler.set_global_batch_size` does.

    Args:
        sampler: the sampler of the training, with a ``global_batch_size``.
        optimizer: the optimizer that makes the one update of each step, as it was created: without
            the wrapper of ``accelerator.prepare()``.
        most: largest global batch, samples.
        lr: rule of the learning rate: ``"adascale"`` for SGD, ``"sqrt"`` for Adam (square root of
            the ratio of batch and base), ``"none"``.
        scaler: the GradScaler of the training, if it has one.

    Raises:
        TypeError: a parameter is sharded, or the optimizer is wrapped.
        ValueError: ``most`` is below the base batch, the sampler has a ``batch_size`` per rank or,
            with ``drop_last``, fewer samples than ``most``; or there is no such rule.
    """

    def __init__(
        self,
        sampler: ElasticSampler,
        optimizer: torch.optim.Optimizer,
        most: int = 4096,
        lr: str = "adascale",
        scaler: torch.amp.GradScaler | None = None,
    ) -> None:
        base = sampler.script_batch_size
        if base is None:
            raise ValueError(
                "AdaptiveBatch changes the batch of all ranks, but the sampler has batch_size (per "
                "rank). Create it with global_batch_size."
            )
        if most < base:
            raise ValueError(
                f"AdaptiveBatch: most is {most}, but the sampler begins with a global batch of "
                f"{base} samples; most is the largest global batch."
            )
        if sampler.drop_last and most > sampler.num_samples:
            raise ValueError(
                f"AdaptiveBatch: with drop_last an epoch of {sampler.num_samples} samples has no "
                f"full global batch of {most} samples. Lower most, or use drop_last=False."
            )
        if lr not in FACTORS:
            raise ValueError(f"AdaptiveBatch: lr must be one of {', '.join(FACTORS)}, not {lr!r}.")
        if type(optimizer).__name__ == "AcceleratedOptimizer":
            raise TypeError(
                "AdaptiveBatch replaces the step() of an optimizer, but accelerator.prepare() has "
                "wrapped this one. Create AdaptiveBatch before prepare()."
            )
        self.base, self.most = base, most
        self.noise = NoiseAverage()
        self.scale_invariant_steps = 0.0
        """Number of updates, each counted with the factor of its learning rate. With ``adascale``
        a schedule that is a function of it follows the progress of the base batch.
        """
        self._estimates = 0
        """Number of estimates with this batch."""
        self._flags = open_flags()
        self._advised = 0
        """The batch that suits the job's nodes, as the daemon advises, samples; 0: unknown."""
        self._untold = 0
        """Number of estimates since the noise scale was reported."""
        self._base_checked = False
        """Whether the models suit the base batch, to which the batch may return."""
        self._factor = FACTORS[lr]
        self._scaler = scaler
        self._sampler = sampler
        self._optimizer = optimizer
        self._parameters = [p for group in optimizer.param_groups for p in group["params"]]
        if any(type(p).__name__ == "DTensor" for p in self._parameters):
            raise TypeError(
                "AdaptiveBatch compares whole gradients, but the optimizer has sharded parameters "
                "(DTensor). Set the batch yourself, by sampler.set_global_batch_size()."
            )
        self._passes: dict[int, list[torch.Tensor]] = {}
        """Squared norms of a parameter's own gradients by backward pass, by its index."""
        self._sums: dict[int, torch.Tensor] = {}
        """Sum of the first elements of these gradients, of some parameters."""
        trained = [i for i, p in enumerate(self._parameters) if p.requires_grad]
        self._sampled = trained[:_SAMPLED_PARAMETERS]
        """Indices of the parameters from which the scaling of gradients is found."""
        self._before: tuple[list[torch.Tensor], int] | None = None
        """Gradient of the update before, and its samples; only on one rank."""
        for index in trained:
            self._parameters[index].register_hook(functools.partial(self._note, index))
        self._wrap_step()

    # --- what a snapshot needs ---

    def state_dict(self) -> dict[str, Any]:
        """Return the averages as plain numbers, the same on every rank."""
        return {
            **self.noise.state(),
            "estimates": self._estimates,
            "scale_invariant_steps": self.scale_invariant_steps,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state of :meth:`state_dict`."""
        self.noise.load(state)
        self._estimates = int(state["estimates"])
        self.scale_invariant_steps = float(state["scale_invariant_steps"])
        self._before = None

    # --- measurement ---

    def _note(self, index: int, gradient: torch.Tensor) -> None:
        """Note the gradient of one parameter in one backward pass, before ranks exchange it."""
        value = gradient.detach()
        if self._parameters[index].grad is None or index not in self._passes:
            self._passes[index] = []
            self._sums.pop(index, None)
        self._passes[index].append(_squared_norm(value))
        if index in self._sampled:
            elements = value.reshape(-1)[:_SAMPLED_ELEMENTS].to(torch.float64, copy=True)
            self._sums[index] = self._sums[index] + elements if index in self._sums else elements

    def _measure(self) -> tuple[Estimate | None, int, int]:
        """Return the estimate of this update, its samples over all ranks, and its number of
        micro-batches. Collective on several ranks.
        """
        passes, sums = self._passes, self._sums
        self._passes, self._sums = {}, {}
        world = self._sampler.world_size
        count = max(map(len, passes.values()), default=1)
        sizes = self._sampler.upcoming(count)
        size = sum(whole for _, whole in sizes) or self.base
        gradients = [p.grad.detach() for p in self._parameters if p.grad is not None]
        numbers = torch.full((4,), torch.nan, dtype=torch.float64)
        numbers[3] = self._advised_here()
        if passes and len(sizes) == count:
            own = 0.0
            for k, (part, _) in enumerate(sizes):
                norms = [norm[k] for norm in passes.values() if k < len(norm)]
                own += float(torch.stack(norms).sum()) * (size / (part * world)) ** 2
            inverse = sum(1 / part for part, _ in sizes)
            whole = float(torch.stack([_squared_norm(g) for g in gradients]).sum())
            numbers[:3] = torch.tensor([own / count, inverse / count, whole], dtype=torch.float64)
        totals = self._mean(
            torch.cat([numbers, *(self._elements(i, sums.get(i)) for i in self._sampled)])
        )
        part, inverse, whole, advised = totals[:4].tolist()
        self._advised = round(advised * world)
        scaled = torch.cat([self._elements(i, self._parameters[i].grad) for i in self._sampled])
        loss_scale = 1.0 if self._scaler is None else self._scaler.get_scale()
        factor = _scaling(totals[4:] / loss_scale, scaled)
        before, self._before = self._before, None
        # by what all ranks know, so that all have an estimate or none
        if factor is None or not math.isfinite(part + whole):
            return None, size, count
        estimate = from_parts(part / loss_scale**2, inverse, whole / factor**2, size)
        if estimate is None and world == 1:
            self._before = [g / factor for g in gradients], size
            estimate = _from_successive(self._before, before)
        return estimate, size, count

    def _advised_here(self) -> int:
        """Return the batch that the daemon advises, which rank 0 reads; 0 without one, and on the
        other ranks.
        """
        if self._sampler.rank or self._flags is None:
            return 0
        return self._flags.advised_batch()

    def _elements(self, index: int, values: torch.Tensor | None) -> torch.Tensor:
        """Return the first elements of a parameter's gradient, in host memory; zeros if it has
        none.
        """
        if values is None:
            length = min(_SAMPLED_ELEMENTS, self._parameters[index].numel())
            return torch.zeros(length, dtype=torch.float64)
        return values.detach().reshape(-1)[:_SAMPLED_ELEMENTS].to("cpu", torch.float64)

    def _mean(self, numbers: torch.Tensor) -> torch.Tensor:
        """Return the mean over the ranks of a tensor in host memory."""
        world = self._sampler.world_size
        if world == 1:
            return numbers
        if not dist.is_initialized() or dist.get_world_size() != world:
            raise RuntimeError(
                f"AdaptiveBatch compares the gradients of the {world} ranks of the sampler, but "
                "torch.distributed is not initialised with so many. Call init_process_group() on "
                "all of them."
            )
        device = self._parameters[0].device  # a group with NCCL may have no backend for the host
        total = numbers.to(device)
        dist.all_reduce(total)
        return total.cpu() / world

    # --- the update ---

    def _wrap_step(self) -> None:
        update = self._optimizer.step

        @functools.wraps(update)
        def step(_: Any, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
            if closure is not None:
                raise RuntimeError(
                    "AdaptiveBatch measures one gradient for each update, and does not work with "
                    "optimizer.step(closure)."
                )
            return self._update(update, kwargs)

        self._optimizer.step = types.MethodType(step, self._optimizer)  # type: ignore[method-assign]

    def _update(self, update: Callable[..., Any], kwargs: dict[str, Any]) -> Any:
        if not self._base_checked:
            self._sampler.check_global_batch_size(self.base)
            self._base_checked = True
        estimate, size, count = self._measure()
        noise = NoiseAverage()
        noise.load(self.noise.state())
        base = count * self.base
        if estimate is not None:
            noise.add(estimate, size / base)
        factor = self._factor(noise.mean, base, size)
        groups = [(group, group["lr"]) for group in self._optimizer.param_groups]
        try:
            for group, rate in groups:
                group[SCRIPT_RATE], group["lr"] = rate, rate * factor
            answer = update(**kwargs)
        finally:
            for group, rate in groups:
                group["lr"] = rate
                group.pop(SCRIPT_RATE, None)
        # only now does the update count: before it, the loss of a peer discards the step
        self.noise = noise
        self.scale_invariant_steps += factor
        requested = self._sampler.requested_batch_size
        assert requested is not None
        changing = requested != self._sampler.global_batch_size
        self._estimates = 0 if changing else self._estimates + (estimate is not None)
        # a run may resume with a lower ``most``
        if self._estimates >= ESTIMATES_BETWEEN_CHANGES or requested > self.most:
            self._change(requested, count)
        self._tell_noise(estimate is not None, count)
        return answer

    def _tell_noise(self, measured: bool, count: int) -> None:
        """Report the noise scale of a batch of the loader to the daemon, which values nodes by it.
        ``measured``: whether this update has an estimate; ``count``: its micro-batches.
        """
        self._untold += measured
        if self._untold >= ESTIMATES_BETWEEN_CHANGES:
            self._untold = 0
            size, scale = self._sampler.global_batch_size, self.noise.scale / count
            tell_batch(self._sampler.rank, size, self.base, self.most, scale)

    def _change(self, size: int, count: int) -> None:
        scale = self.noise.scale / count
        if self._advised:
            target = max(self.base, min(self._advised, self.most))
            new, reason = next_towards(size, target), "it suits the job's nodes"
        else:
            new = next_size(size, self.base, self.most, scale)
            reason = "the gradient noise leads there"
        if new == size:
            return
        self._estimates = 0
        self._sampler.set_global_batch_size(new)
        if self._sampler.rank == 0:
            tell(
                f"The global batch becomes {new} samples, after {size}, because {reason}. The "
                f"gradient noise scale is {scale:.0f} samples."
            )


def _squared_norm(values: torch.Tensor) -> torch.Tensor:
    norm: torch.Tensor = torch.linalg.vector_norm(values, dtype=torch.float64)
    return norm.square()


def _from_successive(
    now: tuple[list[torch.Tensor], int], before: tuple[list[torch.Tensor], int] | None
) -> Estimate | None:
    """Return the estimate from the (gradients, samples) of two updates; None if they do not fit."""
    if before is None or [g.shape for g in before[0]] != [g.shape for g in now[0]]:
        return None
    pairs = [(a.double(), b.double()) for a, b in zip(now[0], before[0], strict=True)]
    product = sum(float((a * b).sum()) for a, b in pairs)
    difference = sum(float((a - b).square().sum()) for a, b in pairs)
    return from_successive(product, difference, now[1], before[1])


def _scaling(sample: torch.Tensor, scaled: torch.Tensor) -> float | None:
    """Return the factor by which the script has scaled the gradients; None if it is unknown, as for
    gradients that are zero, or clipped element by element.
    """
    squared = float(sample.square().sum())
    factor = float((sample * scaled).sum()) / squared if squared > 0 else 0.0
    if not factor > 0:
        return None
    error = float((scaled - factor * sample).square().sum())
    return factor if error <= _UNIFORM * float(scaled.square().sum()) else None
