"""Saves and restores the random number generators of a training process: torch on CPU and CUDA,
Python, and numpy if it is imported.

Decides the format of their states in a snapshot. :mod:`malletrain.training.snapshot` decides when
they are saved.

The states in a snapshot are those of rank 0. If the script seeds its ranks differently, they must
also draw different numbers after a restore. :class:`RankSeeds` decides which generators of this
rank continue like those of rank 0. Each other generator gets a seed that follows from the restored
state and from the state that this rank had at its start.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import random
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
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


@contextlib.contextmanager
def preserved() -> Iterator[None]:
    """Let the generators on the CPU continue after a block as if nothing had been drawn in it:
    Python's, and those of numpy and torch if they are imported before.
    """
    python = random.getstate()
    numpy, torch = (sys.modules.get(name) for name in ("numpy", "torch"))
    of_numpy = None if numpy is None else numpy.random.get_state(legacy=False)
    of_torch = None if torch is None else torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(python)
        if numpy is not None:
            numpy.random.set_state(of_numpy)
        if torch is not None:
            torch.set_rng_state(of_torch)


def branch(number: int, generator: Any = None) -> None:
    """Set a generator of torch, by default that on the CPU, to a state that follows from its
    present one and ``number``.
    """
    import torch

    generator = generator or torch.default_generator
    device = generator.device
    drawn = int(torch.randint(2**62, (), generator=generator, device=device))
    generator.manual_seed(drawn ^ number)


class RankSeeds:
    """The seeds of this rank. Create it before a state is loaded.

    Args:
        from_rank_0: a broadcast: returns on every rank the text that rank 0 passes to it.
    """

    def __init__(self, from_rank_0: Callable[[str], str]) -> None:
        own = fingerprints()
        of_rank_0 = json.loads(from_rank_0(json.dumps(own)))
        self._own = own
        self._different = {name for name, value in own.items() if of_rank_0.get(name) != value}

    def separate(self) -> None:
        """Give this rank numbers of its own. Call it after the states of rank 0 are loaded."""
        separate(self._different, self._own)


def fingerprints() -> dict[str, str]:
    """Return a hash of the state of each generator on the CPU, by its name in :func:`state`."""
    states = state()
    states.pop("cuda", None)  # seeded together with that of the CPU
    states["torch"] = states["torch"].tolist()
    return {name: _hash(value) for name, value in states.items()}


def separate(names: Collection[str], own: Mapping[str, str]) -> None:
    """Seed generators by their present states and the fingerprints of this rank.

    Args:
        names: names of the generators, as in :func:`state`.
        own: fingerprints of this rank (:func:`fingerprints`).
    """
    import torch

    now = fingerprints()
    for name in sorted(set(names) & now.keys()):
        seed = int(_hash([now[name], own[name]])[:15], 16)
        if name == "torch":
            torch.default_generator.manual_seed(seed)
            if torch.cuda.is_available():  # before the first use of CUDA, too, as in load()
                torch.cuda.manual_seed(seed)
        elif name == "python":
            random.seed(seed)
        else:
            sys.modules["numpy"].random.seed(seed % 2**32)


def _hash(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()
