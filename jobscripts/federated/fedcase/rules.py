"""Ratio rules as the server makes them: a rule whose package is missing is refused before the first
round, with what to install where.
"""

from __future__ import annotations

import importlib.util
import sys

from fedcase.ratio import RULES, RatioRule

PACKAGES = {"forest": "sklearn"}
"""Rule → package that it needs at the server, in Flower's environment."""


class RuleError(RuntimeError):
    """A rule cannot be used here; the message says what to install and where."""


def missing_package(rule: str, environment: str) -> str:
    """Return what to do about the package that a rule needs, as sentences.

    Args:
        rule: name of the rule.
        environment: folder of the environment that does not have the package.
    """
    return (
        f"The rule {rule} needs scikit-learn, which is not in {environment}, the environment of "
        f"Flower. Install it there ({environment}/bin/pip install 'scikit-learn>=1.4'), or take "
        "another --rule."
    )


def made_rule(name: str) -> RatioRule:
    """Return a new rule.

    Args:
        name: a name in :data:`RULES`.

    Raises:
        RuleError: this Python does not have the package that the rule needs.
    """
    if name in PACKAGES and importlib.util.find_spec(PACKAGES[name]) is None:
        raise RuleError(missing_package(name, sys.prefix))
    return RULES[name]()
