"""The common parts of all methods that make a fine field from a coarse one: units, condition,
constraint, fields of any size.

A method has its networks, the losses of a batch, and the prediction. :mod:`windsr.train` decides
when and where it is trained; :mod:`windsr.methods` lists the methods.
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
"""Maximum number of pixels of one member that go through a network at once when predicting."""
SEA_LEVEL_M = 0.5
"""Terrain below this height is sea, m."""

Network = Callable[..., torch.Tensor]


@dataclass(frozen=True)
class Draw:
    """How to draw members: their number, the denoising steps, the seed, and the scheduler of
    diffusers. ``constrain``: whether the block means of the result are restored; None: as in the
    preset.
    """

    members: int = 1
    steps: int | None = None
    seed: int = 0
    scheduler: str = "ddim"
    constrain: bool | None = None


@dataclass(frozen=True)
class FixedPixels:
    """Pixels that are fixed while denoising: ``mask`` 0..1 and ``values`` (m/s), both [n, 1, H, W].
    See :mod:`windsr.assimilate`.
    """

    mask: torch.Tensor
    values: torch.Tensor


@dataclass(frozen=True)
class Guidance:
    """Observations that guide the denoising (score-based assimilation, Rozet and Louppe 2023;
    Manshausen et al. 2024).

    Args:
        mask: [n, 1, H, W], 1 at stations, else 0.
        values: observed wind at the stations, m/s.
        error: standard deviation of an observation, m/s.
        looseness: factor on the variance of a half denoised field around the truth. 1 is Bayes'
            rule for normally distributed fields; a smaller value gives the observations more
            weight.
    """

    mask: torch.Tensor
    values: torch.Tensor
    error: float = 0.3
    looseness: float = 1.0


@dataclass(frozen=True)
class FineCase:
    """Inputs of one prediction, all [n, 1, ...].

    ``low``, ``terrain``: coarse wind (m/s) and terrain (m). ``base``: the fine field to start from,
    m/s. ``unit``: divisor of the wind, m/s. ``seeds``: one per field. ``noise``: first noise, [n,
    members, H, W]; None: drawn from the seeds. ``fixed_pixels``, ``guidance``: observations, if
    there are any.
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
    """Base class of all methods. ``nets``: the networks to train, of which ``"net"`` predicts;
    ``frozen``: networks that were trained earlier; ``terrain``: whether terrain is an input.
    """

    name = ""

    def __init__(self, preset: Preset, scales: Scales, terrain: bool) -> None:
        self.preset, self.scales, self.terrain = preset, scales, terrain
        self.nets: dict[str, nn.Module] = {}
        self.frozen: dict[str, nn.Module] = {}

    def _low(self, speed: torch.Tensor, unit: torch.Tensor) -> torch.Tensor:
        return (speed / unit - self.scales.wind_mean) / self.scales.wind_std

    def _target(self, truth: torch.Tensor, base: torch.Tensor, unit: torch.Tensor) -> torch.Tensor:
        """Return the network's target for the fine field ``truth`` [m/s], scaled to a size of about
        one.
        """
        return (
            (truth - base) / unit / self.scales.residual_std
            if self.preset.target == "residual"
            else self._low(truth, unit)
        )

    def _speed(self, target: torch.Tensor, base: torch.Tensor, unit: torch.Tensor) -> torch.Tensor:
        """Return the wind for a target: the inverse of ``_target``, m/s, never negative."""
        if self.preset.target == "residual":
            return (base + target * unit * self.scales.residual_std).clamp_min(0.0)
        wind = target * self.scales.wind_std + self.scales.wind_mean
        return (wind * unit).clamp_min(0.0)

    def _ground(self, terrain: torch.Tensor) -> list[torch.Tensor]:
        """Return the channels of the ground below a field; none if terrain is not an input."""
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
        """Number of channels of the ground."""
        return 0 if not self.terrain else 2 if self.preset.sea else 1

    @property
    def _multiple(self) -> int:
        """Fields are padded to sides that are multiples of this many pixels: whole coarse cells
        that a U-Net can halve.
        """
        return math.lcm(self.preset.factor, self.preset.fold * 2 ** (len(self.preset.channels) - 1))

    def _interpolated(self, low: torch.Tensor) -> torch.Tensor:
        return interpolate(low, self.preset.factor, self.preset.constrained)

    def _case_of(self, batch: Mapping[str, torch.Tensor]) -> FineCase:
        """Return a batch of training as a case."""
        low = block_mean(batch["truth"], self.preset.factor)
        unit = unit_of(low, self.preset.relative)
        return FineCase(low, batch["terrain"], self._interpolated(low), unit, ())

    def build_on(self, mean: Method) -> None:
        """Use a trained method as the basis of this one. Raises WindsrError if this method builds
        on none.
        """
        raise WindsrError(f"{self.name} builds on no other model; leave --mean out.")

    def prepare(self, fields: Fields) -> None:
        """Measure the training days before the first step; by default nothing."""

    def losses(
        self, batch: Mapping[str, torch.Tensor], nets: Mapping[str, Network]
    ) -> dict[str, torch.Tensor]:
        """Return the loss of each network, a mean over the samples. ``nets``: the networks to call,
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
        """Make fine fields in m/s, [n, members, H, W], of any size. Methods without random members
        return one member.

        Args:
            low: coarse wind, [n, 1, h, w] m/s.
            terrain: [n, 1, H, W] m.
            seeds: one per field. The same seed gives the same members, whichever fields are drawn
                with it, except for rounding.
            draw: how to draw.
            net: the network to use instead of the method's own (its average).
            noise: [n, members, H, W] to begin with instead of noise from the seeds, so that
                neighbouring patches can share it.
            base: [n, 1, H, W] m/s, a fine field in place of the interpolated coarse one, such as a
                composite with observations; its block means replace ``low``.
            fixed_pixels, guidance: observations, for methods that denoise.
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
            speeds = torch.cat(
                [
                    self._predict(
                        _part(whole, slice(k, k + size)), draw, net or self.nets.get("net")
                    )
                    for k in range(0, len(low), size)
                ]
            )[..., :rows, :columns]
            constrain = self.preset.constrained if draw.constrain is None else draw.constrain
            return restore_block_means(speeds, low, self.preset.factor) if constrain else speeds

    def _predict(self, case: FineCase, draw: Draw, net: nn.Module | None) -> torch.Tensor:
        """Return speeds, [n, members, H, W] m/s, not negative."""
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
    """Return the case with its last rows and columns repeated up to sides of multiples of
    ``multiple`` pixels.
    """
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
    """Return a seed of 63 bits from several numbers."""
    digest = hashlib.sha256(repr(numbers).encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1
