"""The scripts of the zoo, by name."""

from __future__ import annotations

from tests.zoo.cases import Script

_RESTART = {
    "plain": ("epoch_scheduler",),
}
_LIVE = {
    "live": ("epoch_scheduler",),
}
_NEEDS = {
    "hugging_face": "transformers",
    "lightning_trainer": "lightning",
    "accelerate_loop": "accelerate",
}
"""Packages that the scripts of a module need."""


def _scripts() -> dict[str, Script]:
    scripts = [
        Script(f"{mode}/{name}", mode, f"{module}:{name}", _NEEDS.get(module, ""))
        for mode, modules in (("restart", _RESTART), ("live", _LIVE))
        for module, names in modules.items()
        for name in names
    ]
    return {script.name: script for script in scripts}


SCRIPTS = _scripts()
