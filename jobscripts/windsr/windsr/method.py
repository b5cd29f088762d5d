"""What every way from a coarse field to a fine one has in common: units, condition, constraint,
fields of any size.

A method knows its networks, the losses of a batch, and how to predict. When and where it is trained
is :mod:`windsr.train`'s; which methods there are is :mod:`windsr.methods`'.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn
from torch.nn import functional

from windsr import WindsrError
from windsr.fields import Fields
from windsr.grids import block_mean, interpolate, restore_block_means
from windsr.patches import Scales, unit_of
from windsr.presets import Preset

CHUNK_PIXELS = 32 * 64 * 64
"""Pixels of one member that go through a network at once when predicting."""
SEA_LEVEL_M = 0.5
"""Terrain below it is sea."""

Network = Callable[..., torch.Tensor]


@dataclass(frozen=True)
class Draw:
    """How to draw: how many members, denoising steps, the seed, and which scheduler of diffusers.
    ``constrain``: whether block means are restored in what comes out; None: as the preset says.
    """

    members: int = 1
    steps: int | None = None
    seed: int = 0
    scheduler: str = "ddim"
    constrain: bool | None = None


@dataclass(frozen=True)
class FixedPixels:
    """What is held fast while denoising: ``mask`` 0..1 and ``values`` (m/s), both [n, 1, H, W]. See
    :mod:`windsr.assimilate`.
    """

    mask: torch.Tensor
    values: torch.Tensor


@dataclass(frozen=True)
class Guidance:
    """Observations that pull while denoising (score-based assimilation, Rozet and Louppe 2023;
    Manshausen et al. 2024).

    Args:
        mask: [n, 1, H, W], 1 where a station is, else 0; ``values``: m/s there.
        error: m/s, standard deviation of an observation.
        looseness: how much a half denoised field counts as unsure of the truth: 1 is Bayes' rule
            where fields are normally distributed; less pulls harder.
    """

    mask: torch.Tensor
    values: torch.Tensor
    error: float = 0.3
    looseness: float = 1.0


@dataclass(frozen=True)
class FineCase:
    """Inputs of one prediction, all [n, 1, ...]: coarse wind and terrain; ``base``, the fine field
    it starts from (m/s); ``unit``, m/s that wind is divided by; a seed for each field; noise [n,
    members, H, W] to begin with, pixels held fast, observations that pull, where there are any.
    """

    low: torch.Tensor
    terrain: torch.Tensor
    base: torch.Tensor
    unit: torch.Tensor
    seeds: Sequence[int]
    noise: torch.Tensor | None = None
    fixed_pixels: FixedPixels | None = None
    guidance: Guidance | None = None


class Method:
    """Base of all. ``nets``: the networks that are trained, ``"net"`` the one that predicts;
    ``frozen``: those that were trained before; ``terrain``: whether it sees the terrain.
    """

    name = ""

    def __init__(self, preset: Preset, scales: Scales, terrain: bool) -> None:
        self.preset, self.scales, self.terrain = preset, scales, terrain
        self.nets: dict[str, nn.Module] = {}
        self.frozen: dict[str, nn.Module] = {}

    def _low(self, speed: torch.Tensor, unit: torch.Tensor) -> torch.Tensor:
        return (speed / unit - self.scales.wind_mean) / self.scales.wind_std

    def _target(self, truth: torch.Tensor, base: torch.Tensor, unit: torch.Tensor) -> torch.Tensor:
        """What the network is to give for the fine field ``truth`` [m/s], about one in size."""
        return (
            (truth - base) / unit / self.scales.residual_std
            if self.preset.target == "residual"
            else self._low(truth, unit)
        )

    def _speed(self, target: torch.Tensor, base: torch.Tensor, unit: torch.Tensor) -> torch.Tensor:
        """The other way round, m/s, never negative."""
        if self.preset.target == "residual":
            return (base + target * unit * self.scales.residual_std).clamp_min(0.0)
        wind = target * self.scales.wind_std + self.scales.wind_mean
        return (wind * unit).clamp_min(0.0)

    def _ground(self, terrain: torch.Tensor) -> list[torch.Tensor]:
        """The channels of the ground under a field, if it is seen."""
        if not self.terrain:
            return []
        height = terrain / self.scales.terrain_std
        sea = (terrain < SEA_LEVEL_M).to(terrain.dtype)
        return [height, sea] if self.preset.sea else [height]

    def _condition(
        self, base: torch.Tensor, terrain: torch.Tensor, unit: torch.Tensor
    ) -> torch.Tensor:
        return torch.cat([self._low(base, unit), *self._ground(terrain)], dim=1)

    @property
    def _grounds(self) -> int:
        """Channels of the ground."""
        return 0 if not self.terrain else 2 if self.preset.sea else 1

    @property
    def _multiple(self) -> int:
        """A field's sides are filled up to multiples of so many pixels: whole coarse cells, and
        what a U-Net can halve.
        """
        return math.lcm(self.preset.factor, self.preset.fold * 2 ** (len(self.preset.channels) - 1))

    def _interpolated(self, low: torch.Tensor) -> torch.Tensor:
        return interpolate(low, self.preset.factor, self.preset.constrained)

    def _case_of(self, batch: Mapping[str, torch.Tensor]) -> FineCase:
        """A batch of training as a case."""
        low = block_mean(batch["truth"], self.preset.factor)
        unit = unit_of(low, self.preset.relative)
        return FineCase(low, batch["terrain"], self._interpolated(low), unit, ())

    def build_on(self, mean: Method) -> None:
        """Take over a trained method that this one builds on. Raises WindsrError for methods that
        build on none.
        """
        raise WindsrError(f"{self.name} builds on no other model; leave --mean out.")

    def prepare(self, fields: Fields) -> None:
        """Look at the training days before the first step; by default nothing."""

    def losses(
        self, batch: Mapping[str, torch.Tensor], nets: Mapping[str, Network]
    ) -> dict[str, torch.Tensor]:
        """The loss of each network: a mean over the samples. ``nets``: the networks to call,
        perhaps wrapped for several nodes.
        """
        raise WindsrError(f"{self.name} has nothing to train.")

    def predict(
        self,
        low: torch.Tensor,
        terrain: torch.Tensor,
        seeds: Sequence[int],
        draw: Draw,
        net: nn.Module | None = None,
        fixed_pixels: FixedPixels | None = None,
        noise: torch.Tensor | None = None,
        base: torch.Tensor | None = None,
        guidance: Guidance | None = None,
    ) -> torch.Tensor:
        """Fine fields in m/s, [n, members, H, W], from coarse ones [n, 1, h, w] (m/s) and terrain
        [n, 1, H, W] (m), of any size.

        Args:
            seeds: one a field; the same seeds give the same members, whatever they are drawn
                together with, but for rounding.
            net: the network to use instead of its own (its average).
            noise: [n, members, H, W] to begin with instead of one drawn by the seeds, so that
                neighbouring patches can share theirs.
            base: [n, 1, H, W] m/s, a fine field that takes the place of the interpolated coarse
                one, such as a composite with observations; its block means that of ``low``.
            fixed_pixels, guidance: observations, for methods that denoise.

        Methods that draw nothing return one member.
        """
        if base is not None:
            low = block_mean(base, self.preset.factor)
        rows, columns = terrain.shape[-2:]
        extra = [-length % self.preset.factor for length in (rows, columns)]
        if any(extra) or (rows, columns) != tuple(
            length * self.preset.factor for length in low.shape[-2:]
        ):
            raise WindsrError(
                f"Coarse fields of {low.shape[-2]} × {low.shape[-1]} do not fit a terrain of {rows}"
                f" × {columns} points; the model makes {self.preset.factor} of each."
            )
        whole = FineCase(
            low,
            terrain,
            self._interpolated(low) if base is None else base,
            unit_of(low, self.preset.relative),
            seeds,
            noise,
            fixed_pixels,
            guidance,
        )
        whole = _filled(whole, self._multiple, self.preset.factor)
        size = max(1, CHUNK_PIXELS // (whole.base.shape[-1] * whole.base.shape[-2]))
        with torch.no_grad():
            made = torch.cat(
                [
                    self._predict(
                        _part(whole, slice(k, k + size)), draw, net or self.nets.get("net")
                    )
                    for k in range(0, len(low), size)
                ]
            )[..., :rows, :columns]
            constrain = self.preset.constrained if draw.constrain is None else draw.constrain
            return restore_block_means(made, low, self.preset.factor) if constrain else made

    def _predict(self, case: FineCase, draw: Draw, net: nn.Module | None) -> torch.Tensor:
        """Speeds [n, members, H, W], m/s, not negative."""
        raise NotImplementedError


def _part(case: FineCase, part: slice) -> FineCase:
    return replace(
        case,
        low=case.low[part],
        terrain=case.terrain[part],
        base=case.base[part],
        unit=case.unit[part],
        seeds=case.seeds[part],
        noise=None if case.noise is None else case.noise[part],
        fixed_pixels=case.fixed_pixels
        and FixedPixels(case.fixed_pixels.mask[part], case.fixed_pixels.values[part]),
        guidance=case.guidance
        and replace(
            case.guidance, mask=case.guidance.mask[part], values=case.guidance.values[part]
        ),
    )


def _filled(case: FineCase, multiple: int, factor: int) -> FineCase:
    """The case with its last rows and columns repeated up to sides of ``multiple`` pixels."""
    rows, columns = (-length % multiple for length in case.base.shape[-2:])
    if not rows and not columns:
        return case

    def more(field: torch.Tensor, mode: str = "replicate", cell: int = 1) -> torch.Tensor:
        return functional.pad(field, (0, columns // cell, 0, rows // cell), mode=mode)

    fixed_pixels, guidance = case.fixed_pixels, case.guidance
    return replace(
        case,
        low=more(case.low, cell=factor),
        terrain=more(case.terrain),
        base=more(case.base),
        noise=None if case.noise is None else more(case.noise, "constant"),
        fixed_pixels=fixed_pixels
        and FixedPixels(more(fixed_pixels.mask, "constant"), more(fixed_pixels.values)),
        guidance=guidance
        and replace(guidance, mask=more(guidance.mask, "constant"), values=more(guidance.values)),
    )


def mix(*numbers: int | str) -> int:
    """A seed of 63 bits from several numbers."""
    digest = hashlib.sha256(repr(numbers).encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1
