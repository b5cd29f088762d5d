"""The networks: SR3's denoiser on diffusers' U-Net, SRCNN, ESRGAN's generator and critic. Defines
their shapes only.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from windsr.presets import Preset


def _unet(preset: Preset, inputs: int) -> nn.Module:
    """diffusers' U-Net on folded pixels, with ``inputs`` channels of the fine grid."""
    from diffusers.models.unets.unet_2d import UNet2DModel

    unet: nn.Module = UNet2DModel(
        sample_size=preset.patch // preset.fold,
        in_channels=inputs * preset.fold**2,
        out_channels=preset.fold**2,
        layers_per_block=preset.layers,
        block_out_channels=preset.channels,
        down_block_types=tuple("AttnDownBlock2D" if a else "DownBlock2D" for a in preset.attention),
        up_block_types=tuple(
            "AttnUpBlock2D" if a else "UpBlock2D" for a in reversed(preset.attention)
        ),
        add_attention=any(preset.attention),
        norm_num_groups=preset.groups,
        dropout=preset.dropout,
    )
    return unet


class Denoiser(nn.Module):
    """A U-Net that sees the noisy field and its condition (Saharia et al. 2021). ``conditions``:
    number of channels of the condition.
    """

    def __init__(self, preset: Preset, conditions: int) -> None:
        super().__init__()
        self.fold = preset.fold
        self.net = _unet(preset, 1 + conditions)

    def forward(
        self, noisy: torch.Tensor, condition: torch.Tensor, level: torch.Tensor
    ) -> torch.Tensor:
        """[n, 1, H, W], [n, c, H, W], [n] noise levels → [n, 1, H, W]."""
        folded = functional.pixel_unshuffle(torch.cat([noisy, condition], dim=1), self.fold)
        return functional.pixel_shuffle(self.net(folded, level).sample, self.fold)


class ResidualDenoiser(Denoiser):
    """A :class:`Denoiser` of the residual of a regression. ``size``: standard deviation of the
    residual in units of the regression's target.
    """

    size: torch.Tensor

    def __init__(self, preset: Preset, conditions: int) -> None:
        super().__init__(preset, conditions)
        self.register_buffer("size", torch.ones(()))
        _say_nothing(self.net)


class RegressionUnet(nn.Module):
    """The same U-Net without noise: condition [n, c, H, W] → [n, 1, H, W]."""

    def __init__(self, preset: Preset, conditions: int) -> None:
        super().__init__()
        self.fold = preset.fold
        self.net = _unet(preset, conditions)
        _say_nothing(self.net)

    def forward(self, condition: torch.Tensor) -> torch.Tensor:
        level = torch.zeros(len(condition), device=condition.device)
        folded = functional.pixel_unshuffle(condition, self.fold)
        return functional.pixel_shuffle(self.net(folded, level).sample, self.fold)


def _say_nothing(net: Any) -> None:
    """Make the initial output of a network zero, which makes a short training better."""
    nn.init.zeros_(net.conv_out.weight)
    nn.init.zeros_(net.conv_out.bias)


class Srcnn(nn.Module):
    """Three convolutions, 9-1-5, over the interpolated field (Dong et al. 2014). [n, c, H, W] → [n,
    1, H, W].
    """

    def __init__(self, preset: Preset, conditions: int) -> None:
        super().__init__()
        first, second = preset.srcnn
        self.layers = nn.Sequential(
            nn.Conv2d(conditions, first, 9, padding=4, padding_mode="replicate"),
            nn.ReLU(),
            nn.Conv2d(first, second, 1),
            nn.ReLU(),
            nn.Conv2d(second, 1, 5, padding=2, padding_mode="replicate"),
        )

    def forward(self, condition: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layers(condition)
        return out


class _Dense(nn.Module):
    def __init__(self, channels: int, growth: int) -> None:
        super().__init__()
        self.convolutions = nn.ModuleList(
            nn.Conv2d(channels + k * growth, growth if k < 4 else channels, 3, padding=1)
            for k in range(5)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        seen = [x]
        for convolution in self.convolutions[:-1]:
            seen.append(functional.leaky_relu(convolution(torch.cat(seen, dim=1)), 0.2))
        last: torch.Tensor = self.convolutions[-1](torch.cat(seen, dim=1))
        return x + 0.2 * last


class Rrdb(nn.Module):
    """ESRGAN's generator (Wang et al. 2018): residual-in-residual dense blocks on the coarse grid,
    then doubling by nearest neighbours. [n, 1, h, w] (and [n, grounds, H, W]) → [n, 1, H, W].
    ``grounds``: number of channels of the ground, on the fine grid and folded to the coarse one.
    """

    def __init__(self, preset: Preset, grounds: int) -> None:
        super().__init__()
        blocks, channels, growth = preset.rrdb
        self.factor = preset.factor
        self.first = nn.Conv2d(1 + grounds * preset.factor**2, channels, 3, padding=1)
        self.blocks = nn.ModuleList(
            nn.Sequential(*(_Dense(channels, growth) for _ in range(3))) for _ in range(blocks)
        )
        self.trunk = nn.Conv2d(channels, channels, 3, padding=1)
        doublings = round(math.log2(preset.factor))
        self.up = nn.ModuleList(
            nn.Conv2d(channels, channels, 3, padding=1) for _ in range(doublings)
        )
        self.last = nn.Sequential(
            nn.Conv2d(channels, channels, 3, padding=1),
            nn.LeakyReLU(0.2),
            nn.Conv2d(channels, 1, 3, padding=1),
        )

    def forward(self, low: torch.Tensor, ground: torch.Tensor | None) -> torch.Tensor:
        if ground is not None:
            low = torch.cat([low, functional.pixel_unshuffle(ground, self.factor)], dim=1)
        first = self.first(low)
        x = first
        for block in self.blocks:
            x = x + 0.2 * (block(x) - x)
        x = first + self.trunk(x)
        for convolution in self.up:
            x = functional.leaky_relu(
                convolution(functional.interpolate(x, scale_factor=2, mode="nearest")), 0.2
            )
        out: torch.Tensor = self.last(x)
        return out


class Critic(nn.Module):
    """The discriminator: convolutions that halve the grid, then the mean of one number per place.
    [n, 1, H, W] → [n]. No batch normalisation.
    """

    def __init__(self, preset: Preset) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        before = 1
        for channels in (preset.critic, 2 * preset.critic, 4 * preset.critic):
            layers += [nn.Conv2d(before, channels, 3, padding=1), nn.LeakyReLU(0.2)]
            layers += [nn.Conv2d(channels, channels, 4, stride=2, padding=1), nn.LeakyReLU(0.2)]
            before = channels
        layers.append(nn.Conv2d(before, 1, 3, padding=1))
        self.layers = nn.Sequential(*layers)

    def forward(self, field: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layers(field).mean(dim=(1, 2, 3))
        return out
