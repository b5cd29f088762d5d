"""The networks: SR3's denoiser on diffusers' U-Net, SRCNN, ESRGAN's generator and critic. Only
their shapes; training is elsewhere.
"""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.nn import functional

from windsr.presets import Preset


class Denoiser(nn.Module):
    """Saharia et al. 2021: a U-Net that sees the noisy field beside its condition. ``conditions``:
    channels of the condition.
    """

    def __init__(self, preset: Preset, conditions: int) -> None:
        super().__init__()
        from diffusers.models.unets.unet_2d import UNet2DModel

        self.fold = preset.fold
        self.net = UNet2DModel(
            sample_size=preset.patch // preset.fold,
            in_channels=(1 + conditions) * preset.fold**2,
            out_channels=preset.fold**2,
            layers_per_block=preset.layers,
            block_out_channels=preset.channels,
            down_block_types=tuple(
                "AttnDownBlock2D" if a else "DownBlock2D" for a in preset.attention
            ),
            up_block_types=tuple(
                "AttnUpBlock2D" if a else "UpBlock2D" for a in reversed(preset.attention)
            ),
            add_attention=any(preset.attention),
            norm_num_groups=preset.groups,
            dropout=preset.dropout,
        )

    def forward(
        self, noisy: torch.Tensor, condition: torch.Tensor, level: torch.Tensor
    ) -> torch.Tensor:
        """[n, 1, H, W], [n, c, H, W], [n] noise levels → [n, 1, H, W]."""
        folded = functional.pixel_unshuffle(torch.cat([noisy, condition], dim=1), self.fold)
        return functional.pixel_shuffle(self.net(folded, level).sample, self.fold)


class Srcnn(nn.Module):
    """Dong et al. 2014, 9-1-5: three convolutions over the interpolated field. [n, c, H, W] → [n,
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
    then doubling by nearest neighbours.

    ``terrain``: the fine terrain comes in too, folded to the coarse grid. [n, 1, h, w] (and [n, 1,
    H, W]) → [n, 1, H, W].
    """

    def __init__(self, preset: Preset, terrain: bool) -> None:
        super().__init__()
        blocks, channels, growth = preset.rrdb
        self.factor = preset.factor
        self.first = nn.Conv2d(1 + (preset.factor**2 if terrain else 0), channels, 3, padding=1)
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

    def forward(self, low: torch.Tensor, terrain: torch.Tensor | None) -> torch.Tensor:
        if terrain is not None:
            low = torch.cat([low, functional.pixel_unshuffle(terrain, self.factor)], dim=1)
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
    """The discriminator: convolutions that halve the grid, then the mean of one number a place. [n,
    1, H, W] → [n]. No batch norm.
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
