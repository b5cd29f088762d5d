"""Differences between two configurations of a site. Pure.

Decides how a change is reported, and builds the configuration in which only some changes are
applied. The daemon decides which.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from malletrain.config.model import Config

SECRET = "daemon.database"
"""Its URL may have a password in it."""


def changes(before: Config, after: Config) -> dict[str, str]:
    """Returns the full name of each key whose value differs → its values, as ``OLD -> NEW``."""
    old, new = (_leaves(config.model_dump(mode="json")) for config in (before, after))
    return {
        name: "changed" if name == SECRET else f"{_shown(old.get(name))} -> {_shown(new.get(name))}"
        for name in sorted(old.keys() | new.keys())
        if old.get(name) != new.get(name)
    }


def with_changes(before: Config, after: Config, names: Collection[str]) -> Config:
    """Returns ``before`` with the values of these keys (SECTION.KEY) from ``after``."""
    sections: dict[str, Any] = {}
    for name in names:
        section, _, key = name.partition(".")
        new_section = sections.get(section, getattr(before, section))
        value = getattr(getattr(after, section), key)
        sections[section] = new_section.model_copy(update={key: value})
    return before.model_copy(update=sections)


def _leaves(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    leaves: dict[str, Any] = {}
    for key, value in table.items():
        if isinstance(value, dict):
            leaves |= _leaves(value, f"{prefix}{key}.")
        else:
            leaves[f"{prefix}{key}"] = value
    return leaves


def _shown(value: Any) -> str:
    text = "not set" if value is None else str(value).lower() if value is True else str(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
