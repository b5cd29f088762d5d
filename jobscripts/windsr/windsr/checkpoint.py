"""Trained models on disk: one safetensors file with the weights, and a header that describes the
model.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path

from torch import nn

from windsr import WindsrError
from windsr.methods import Method, make
from windsr.patches import Scales
from windsr.presets import Preset

FORMAT = "windsr-1"
FROZEN = "frozen."
"""Prefix of the names of weights that were trained earlier and are part of the model."""


def save(path: Path, method: Method, net: nn.Module, facts: dict[str, str | float | int]) -> None:
    """Write the weights of ``net`` (the method's predicting network, or its average), completely or
    not at all. ``facts``: any notes.
    """
    from safetensors.torch import save_file

    header = {
        "format": FORMAT,
        "method": method.name,
        "terrain": json.dumps(method.terrain),
        "preset": json.dumps(asdict(method.preset)),
        "scales": json.dumps(method.scales.to_dict()),
        "facts": json.dumps(facts),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}")
    weights = dict(net.state_dict())
    for name, other in method.frozen.items():
        weights |= {f"{FROZEN}{name}.{key}": t for key, t in other.state_dict().items()}
    save_file({name: t.detach().cpu().contiguous() for name, t in weights.items()}, part, header)
    os.replace(part, path)


def load(path: Path) -> tuple[Method, dict[str, str | float | int]]:
    """Read a model. Return the method with its trained network, and the facts. Raises
    WindsrError.
    """
    from safetensors import SafetensorError, safe_open

    if not path.is_file():
        raise WindsrError(f"There is no model {path}; 'windsr train' writes one.")
    try:
        with safe_open(path, "pt") as file:
            header = file.metadata() or {}
            weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise WindsrError(f"{path} is no safetensors file, or a damaged one: {error}") from error
    if header.get("format") != FORMAT:
        raise WindsrError(
            f"{path} is no model of windsr (its format is {header.get('format')!r}, expected: "
            f"{FORMAT!r})."
        )
    try:
        fields = json.loads(header["preset"])
        for name in ("channels", "attention", "srcnn", "rrdb", "betas"):
            if fields.get(name) is not None:
                fields[name] = tuple(fields[name])
        method = make(
            header["method"],
            Preset(**fields),
            Scales(**json.loads(header["scales"])),
            json.loads(header["terrain"]),
        )
        for name, other in method.frozen.items():
            start = f"{FROZEN}{name}."
            other.load_state_dict(
                {k.removeprefix(start): w for k, w in weights.items() if k.startswith(start)}
            )
            other.eval()
        method.nets["net"].load_state_dict(
            {k: w for k, w in weights.items() if not k.startswith(FROZEN)}
        )
        facts: dict[str, str | float | int] = json.loads(header["facts"])
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise WindsrError(
            f"{path} does not fit this version of windsr: {' '.join(str(error).split())}"
        ) from error
    method.nets["net"].eval()
    return method, facts
