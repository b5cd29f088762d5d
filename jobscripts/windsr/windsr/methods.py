"""The methods by name."""

from __future__ import annotations

from windsr import WindsrError
from windsr.diffusion import Windsr, WindsrEdm
from windsr.method import Draw, FixedPixels, Guidance, Method, mix
from windsr.patches import Scales
from windsr.presets import Preset
from windsr.regression import Bicubic, Esrgan, SrcnnMethod, UnetMethod

__all__ = ["METHODS", "Draw", "FixedPixels", "Guidance", "Method", "make", "mix"]

METHODS: dict[str, type[Method]] = {
    method.name: method for method in (Bicubic, SrcnnMethod, Esrgan, UnetMethod, Windsr, WindsrEdm)
}


def make(name: str, preset: Preset, scales: Scales, terrain: bool) -> Method:
    """Return a method by its name. Raises WindsrError."""
    if name not in METHODS:
        raise WindsrError(f"There is no method {name!r}; there are {', '.join(METHODS)}.")
    return METHODS[name](preset, scales, terrain)
