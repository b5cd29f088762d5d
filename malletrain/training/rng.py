"""Saves and restores the random number generators of a training process: torch on CPU and CUDA,
Python, and numpy if it is imported.

Decides the format of their states in a snapshot. :mod:`malletrain.training.snapshot` decides when
they are saved.
"""

from __future__ import annotations

import random
import sys
from typing import Any


def state() -> dict[str, Any]:
    """Return the states of the generators in use as plain numbers and tensors, which load without
    unpickling code.
    """
    import torch

    version, words, gauss = random.getstate()
    states: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "python": [version, list(words), gauss],
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states["cuda"] = torch.cuda.get_rng_state()
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        kind, keys, position, has_gauss, cached = numpy.random.get_state()
        states["numpy"] = [str(kind), keys.tolist(), int(position), int(has_gauss), float(cached)]
    return states


def load(states: dict[str, Any]) -> None:
    """Set the generators to ``states``. Ignores generators that are not in use here."""
    import torch

    if "torch" in states:
        torch.set_rng_state(states["torch"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
    if "python" in states:
        version, words, gauss = states["python"]
        random.setstate((version, tuple(words), gauss))
    if "numpy" in states and "numpy" in sys.modules:
        import numpy

        kind, keys, position, has_gauss, cached = states["numpy"]
        numpy.random.set_state(
            (kind, numpy.array(keys, dtype=numpy.uint32), position, has_gauss, cached)
        )
