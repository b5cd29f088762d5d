"""Sizes of model and training, by name. Presets are data."""

from __future__ import annotations

from dataclasses import dataclass, replace

from windsr import WindsrError


@dataclass(frozen=True)
class Preset:
    """The sizes and settings of a model and its training.

    Args:
        patch: pixels per side of an output patch.
        factor: ratio of the fine grid to the coarse one.
        channels, layers, attention: of the U-Net (diffusers' ``UNet2DModel``): channels per level
            from the finest; blocks per level; levels with attention.
        fold: the U-Net works on ``fold`` × ``fold`` pixels folded into channels (space to depth),
            which is ``fold``² times cheaper.
        target: ``field``, as SR3, or ``residual``: the difference from the bicubic field, as
            SRDiff, which needs far fewer training steps.
        prediction: output of the network: ``epsilon``, as SR3, or ``v_prediction`` (Salimans and
            Ho, 2022).
        batch: samples per step over all nodes.
        steps: number of training steps.
        warmup: steps until the full learning rate.
        sample_steps: steps of DDIM.
        betas: first and last level of a linear noise schedule, as SR3; None: the squared cosine
            (Nichol and Dhariwal 2021).
        constrained: whether block means are restored, in interpolated fields and in results
            (:func:`windsr.grids.restore_block_means`).
        relative: whether wind is divided by the mean of the coarse field, so that a day with more
            wind than any in training is nothing new.
        sea: whether the sea is a channel of its own beside the terrain.
        srcnn: channels of SRCNN's two hidden layers.
        rrdb: (blocks, channels, growth) of ESRGAN's generator.
        critic: channels of the discriminator's first layer.
    """

    name: str
    patch: int
    factor: int
    channels: tuple[int, ...]
    layers: int
    attention: tuple[bool, ...]
    groups: int
    fold: int
    target: str
    prediction: str
    batch: int
    lr: float
    steps: int
    warmup: int
    ema: float
    precision: str
    sample_steps: int
    srcnn: tuple[int, int]
    rrdb: tuple[int, int, int]
    critic: int
    noise_levels: int = 1000
    dropout: float = 0.0
    betas: tuple[float, float] | None = None
    constrained: bool = False
    relative: bool = False
    sea: bool = False


# paper: SR3's 16 → 128 (Saharia et al. 2021, arXiv 2104.07636): depth multipliers 1, 2, 4, 8, 8,
# three blocks, attention at 16², dropout 0.2, 2,000 noise levels (1e-6 to 1e-2), 1M steps.
PRESETS = {
    preset.name: preset
    for preset in (
        Preset(
            "paper",
            128,
            8,
            (64, 128, 256, 512, 512),
            3,
            (False, False, False, True, False),
            32,
            1,
            "field",
            "epsilon",
            batch=256,
            lr=1e-4,
            steps=1_000_000,
            warmup=10_000,
            ema=0.9999,
            precision="bf16",
            sample_steps=50,
            srcnn=(64, 32),
            rrdb=(23, 64, 32),
            critic=64,
            noise_levels=2000,
            dropout=0.2,
            betas=(1e-6, 1e-2),
        ),
        Preset(
            "gpu",
            128,
            8,
            (64, 128, 256, 256),
            2,
            (False, False, False, True),
            32,
            1,
            "residual",
            "v_prediction",
            batch=64,
            lr=2e-4,
            steps=20_000,
            warmup=500,
            ema=0.999,
            precision="bf16",
            sample_steps=20,
            srcnn=(64, 32),
            rrdb=(8, 64, 32),
            critic=64,
            constrained=True,
            relative=True,
            sea=True,
        ),
        Preset(
            "cpu",
            96,
            8,
            (32, 48, 64),
            1,
            (False, False, False),
            8,
            2,
            "residual",
            "v_prediction",
            batch=8,
            lr=1e-3,
            steps=600,
            warmup=40,
            ema=0.99,
            precision="fp32",
            sample_steps=8,
            srcnn=(32, 16),
            rrdb=(3, 24, 12),
            critic=16,
            constrained=True,
            relative=True,
            sea=True,
        ),
        Preset(
            "tiny",
            16,
            4,
            (8, 16),
            1,
            (False, False),
            4,
            2,
            "residual",
            "v_prediction",
            batch=8,
            lr=2e-3,
            steps=24,
            warmup=4,
            ema=0.9,
            precision="fp32",
            sample_steps=3,
            srcnn=(8, 4),
            rrdb=(1, 8, 4),
            critic=4,
            constrained=True,
            relative=True,
            sea=True,
        ),
    )
}


def as_published(preset: Preset) -> Preset:
    """Return a preset of the size of ``preset`` with the settings that SR3 and WindSR publish:
    prediction of the field's noise, a linear schedule of 2,000 levels, absolute wind, no
    constraint.
    """
    return replace(
        preset,
        target="field",
        prediction="epsilon",
        noise_levels=2000,
        betas=(1e-6, 1e-2),
        constrained=False,
        relative=False,
        sea=False,
    )


def preset_of(name: str) -> Preset:
    """Return a preset by its name. Raises WindsrError."""
    try:
        return PRESETS[name]
    except KeyError:
        raise WindsrError(f"There is no preset {name!r}; there are {', '.join(PRESETS)}.") from None
