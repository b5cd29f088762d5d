"""The ways from a coarse field to a fine one, behind one interface: bicubic, SRCNN, ESRGAN, and
WindSR's diffusion.

A method knows its networks, the losses of a batch, and how to predict. When and where it is trained
is :mod:`windsr.train`'s.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from windsr import WindsrError
from windsr.grids import bicubic, block_mean
from windsr.networks import Critic, Denoiser, Rrdb, Srcnn
from windsr.patches import Scales
from windsr.presets import Preset

CHUNK = 32
"""Patches that go through a network at once when predicting."""
CLIP = 8.0
"""Standard deviations; predictions beyond are cut while denoising, as nothing in nature lies there.
"""
ADVERSARIAL = 5e-3
"""Weight of the critic in the generator's loss (Wang et al. 2018, eq. 3)."""

Network = Callable[..., torch.Tensor]


@dataclass(frozen=True)
class Draw:
    """How to draw from the diffusion: how many members, DDIM's steps, the seed, and which scheduler
    of diffusers.
    """

    members: int = 1
    steps: int | None = None
    seed: int = 0
    scheduler: str = "ddim"


@dataclass(frozen=True)
class HeldPixels:
    """What is held fast while denoising: ``mask`` 0..1 and ``values`` (m/s), both [n, 1, H, W]. See
    :mod:`windsr.assimilate`.
    """

    mask: torch.Tensor
    values: torch.Tensor


class Method:
    """Base of all. ``nets``: the networks that are trained, ``"net"`` the one that predicts;
    ``terrain``: whether it sees the terrain.
    """

    name = ""

    def __init__(self, preset: Preset, scales: Scales, terrain: bool) -> None:
        self.preset, self.scales, self.terrain = preset, scales, terrain
        self.nets: dict[str, nn.Module] = {}

    def _low(self, low: torch.Tensor) -> torch.Tensor:
        return (low - self.scales.wind_mean) / self.scales.wind_std

    def _height(self, terrain: torch.Tensor) -> torch.Tensor:
        return terrain / self.scales.terrain_std

    def _target(self, truth: torch.Tensor, base: torch.Tensor) -> torch.Tensor:
        """What the network is to give for the fine field ``truth`` [m/s], about one in size."""
        return (
            (truth - base) / self.scales.residual_std
            if self.preset.target == "residual"
            else self._low(truth)
        )

    def _speed(self, target: torch.Tensor, base: torch.Tensor) -> torch.Tensor:
        """The other way round, m/s, never negative."""
        if self.preset.target == "residual":
            return (base + target * self.scales.residual_std).clamp_min(0.0)
        return (target * self.scales.wind_std + self.scales.wind_mean).clamp_min(0.0)

    def _condition(self, base: torch.Tensor, terrain: torch.Tensor) -> torch.Tensor:
        return (
            torch.cat([self._low(base), self._height(terrain)], dim=1)
            if self.terrain
            else self._low(base)
        )

    @property
    def _conditions(self) -> int:
        return 2 if self.terrain else 1

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
        held: HeldPixels | None = None,
        noise: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Fine fields in m/s, [n, members, H, W], from coarse ones [n, 1, h, w] (m/s) and terrain
        [n, 1, H, W] (m).

        ``seeds``: one a patch; the same seeds give the same members, whatever they are drawn
        together with, but for rounding. ``net``: the network to use instead of its own (its
        average). ``noise``: [n, members, H, W] to begin with instead of one drawn by the seeds, so
        that neighbouring patches can share theirs. Methods that draw nothing return one member.
        """
        net = net or self.nets.get("net")
        with torch.no_grad():
            parts = [
                self._predict(
                    low[part],
                    terrain[part],
                    seeds[part],
                    draw,
                    net,
                    held and HeldPixels(held.mask[part], held.values[part]),
                    None if noise is None else noise[part],
                )
                for part in (slice(k, k + CHUNK) for k in range(0, len(low), CHUNK))
            ]
        return torch.cat(parts)

    def _predict(
        self,
        low: torch.Tensor,
        terrain: torch.Tensor,
        seeds: Sequence[int],
        draw: Draw,
        net: Any,
        held: HeldPixels | None,
        first: torch.Tensor | None,
    ) -> torch.Tensor:
        raise NotImplementedError


class Bicubic(Method):
    """Interpolation only."""

    name = "bicubic"

    def _predict(
        self,
        low: torch.Tensor,
        terrain: torch.Tensor,
        seeds: Sequence[int],
        draw: Draw,
        net: Any,
        held: HeldPixels | None,
        first: torch.Tensor | None,
    ) -> torch.Tensor:
        return bicubic(low, self.preset.factor).clamp_min(0.0)


class SrcnnMethod(Method):
    """SRCNN by the mean square error."""

    name = "srcnn"

    def __init__(self, preset: Preset, scales: Scales, terrain: bool) -> None:
        super().__init__(preset, scales, terrain)
        self.nets = {"net": Srcnn(preset, self._conditions)}

    def losses(
        self, batch: Mapping[str, torch.Tensor], nets: Mapping[str, Network]
    ) -> dict[str, torch.Tensor]:
        base = bicubic(block_mean(batch["truth"], self.preset.factor), self.preset.factor)
        found = nets["net"](self._condition(base, batch["terrain"]))
        return {"net": functional.mse_loss(found.float(), self._target(batch["truth"], base))}

    def _predict(
        self,
        low: torch.Tensor,
        terrain: torch.Tensor,
        seeds: Sequence[int],
        draw: Draw,
        net: Any,
        held: HeldPixels | None,
        first: torch.Tensor | None,
    ) -> torch.Tensor:
        base = bicubic(low, self.preset.factor)
        return self._speed(net(self._condition(base, terrain)).float(), base)


class Esrgan(Method):
    """ESRGAN without its perceptual loss, whose network was trained on photographs. The critic
    compares each true field with the one made from its own coarse field (a relativistic GAN by
    pairs, Jolicoeur-Martineau 2018), so that a sample's loss does not depend on which others share
    its node.
    """

    name = "esrgan"

    def __init__(self, preset: Preset, scales: Scales, terrain: bool) -> None:
        super().__init__(preset, scales, terrain)
        self.nets = {"net": Rrdb(preset, terrain), "critic": Critic(preset)}

    def losses(
        self, batch: Mapping[str, torch.Tensor], nets: Mapping[str, Network]
    ) -> dict[str, torch.Tensor]:
        low = block_mean(batch["truth"], self.preset.factor)
        base = bicubic(low, self.preset.factor)
        target = self._target(batch["truth"], base)
        made = nets["net"](
            self._low(low), self._height(batch["terrain"]) if self.terrain else None
        ).float()
        critic = nets["critic"]
        real = critic(target)
        return {
            "net": functional.l1_loss(made, target)
            + ADVERSARIAL * functional.softplus(real.detach() - critic(made)).mean(),
            "critic": functional.softplus(critic(made.detach()) - real).mean(),
        }

    def _predict(
        self,
        low: torch.Tensor,
        terrain: torch.Tensor,
        seeds: Sequence[int],
        draw: Draw,
        net: Any,
        held: HeldPixels | None,
        first: torch.Tensor | None,
    ) -> torch.Tensor:
        made = net(self._low(low), self._height(terrain) if self.terrain else None).float()
        return self._speed(made, bicubic(low, self.preset.factor))


class Windsr(Method):
    """A conditional denoising diffusion model (SR3, Saharia et al. 2021) with diffusers'
    schedulers.
    """

    name = "windsr"

    def __init__(self, preset: Preset, scales: Scales, terrain: bool) -> None:
        super().__init__(preset, scales, terrain)
        self.nets = {"net": Denoiser(preset, self._conditions)}
        self._training_noise = self._scheduler("ddpm")

    def _scheduler(self, kind: str) -> Any:
        import diffusers.schedulers as schedulers

        common = {
            "num_train_timesteps": self.preset.noise_levels,
            "beta_schedule": "squaredcos_cap_v2",
            "prediction_type": self.preset.prediction,
        }
        if kind == "ddim":
            return schedulers.DDIMScheduler(
                **common, clip_sample=True, clip_sample_range=CLIP, timestep_spacing="trailing"
            )
        if kind == "ddpm":
            return schedulers.DDPMScheduler(
                **common, clip_sample=True, clip_sample_range=CLIP, timestep_spacing="trailing"
            )
        if kind == "dpm":
            return schedulers.DPMSolverMultistepScheduler(**common, timestep_spacing="trailing")
        raise WindsrError(f"There is no scheduler {kind!r}; there are ddim, ddpm, dpm.")

    def losses(
        self, batch: Mapping[str, torch.Tensor], nets: Mapping[str, Network]
    ) -> dict[str, torch.Tensor]:
        base = bicubic(block_mean(batch["truth"], self.preset.factor), self.preset.factor)
        target = self._target(batch["truth"], base)
        noise, level = batch["noise"], batch["level"]
        noisy = self._training_noise.add_noise(target, noise, level)
        wanted = (
            noise
            if self.preset.prediction == "epsilon"
            else self._training_noise.get_velocity(target, noise, level)
        )
        found = nets["net"](noisy, self._condition(base, batch["terrain"]), level)
        return {"net": functional.mse_loss(found.float(), wanted)}

    def _predict(
        self,
        low: torch.Tensor,
        terrain: torch.Tensor,
        seeds: Sequence[int],
        draw: Draw,
        net: Any,
        held: HeldPixels | None,
        first: torch.Tensor | None,
    ) -> torch.Tensor:
        members, device = draw.members, low.device
        scheduler = self._scheduler(draw.scheduler)
        scheduler.set_timesteps(draw.steps or self.preset.sample_steps, device=device)
        generators = [
            torch.Generator().manual_seed(mix(draw.seed, seed, member))
            for seed in seeds
            for member in range(members)
        ]
        base = bicubic(low, self.preset.factor)
        condition = self._condition(base, terrain).repeat_interleave(members, dim=0)
        shape = (1, 1, *base.shape[-2:])

        def noise() -> torch.Tensor:
            return torch.cat(
                [torch.randn(shape, generator=generator) for generator in generators]
            ).to(device)

        goal = mask = None
        if held is not None:
            goal = self._target(held.values, base).repeat_interleave(members, dim=0)
            mask = held.mask.repeat_interleave(members, dim=0)
        x = (
            noise() if first is None else first.flatten(0, 1)[:, None].to(device)
        ) * scheduler.init_noise_sigma
        levels = scheduler.timesteps
        for k, level in enumerate(levels):
            found = net(
                scheduler.scale_model_input(x, level), condition, level.expand(len(x)).to(device)
            ).float()
            extra = {} if draw.scheduler == "dpm" else {"generator": generators}
            x = scheduler.step(found, level, x, **extra).prev_sample
            if (
                goal is not None and mask is not None
            ):  # the masked part goes down the noise levels along what was observed
                known = (
                    scheduler.add_noise(goal, noise(), levels[k + 1].expand(len(x)))
                    if k + 1 < len(levels)
                    else goal
                )
                x = mask * known + (1 - mask) * x
        speed = self._speed(x, base.repeat_interleave(members, dim=0))
        return speed.reshape(len(low), members, *base.shape[-2:])


METHODS: dict[str, type[Method]] = {
    method.name: method for method in (Bicubic, SrcnnMethod, Esrgan, Windsr)
}


def make(name: str, preset: Preset, scales: Scales, terrain: bool) -> Method:
    """The method called ``name``. Raises WindsrError."""
    if name not in METHODS:
        raise WindsrError(f"There is no method {name!r}; there are {', '.join(METHODS)}.")
    return METHODS[name](preset, scales, terrain)


def mix(*numbers: int | str) -> int:
    """A seed of 63 bits from several numbers."""
    import hashlib

    digest = hashlib.sha256(repr(numbers).encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1
