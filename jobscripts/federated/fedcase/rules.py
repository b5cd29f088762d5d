"""Creates the ratio rule of a training. If a package that the rule needs is missing, refuses the
rule before the first round, and says what to install where.
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
    """Return sentences that say how to install the package that a rule needs.

    Args:
        rule: name of the rule.
        environment: folder of the Python environment without the package.
    """
    return (
        f"The rule {rule} needs scikit-learn, which is not in {environment}, the environment of "
        f"Flower. Install it there ({environment}/bin/pip install 'scikit-learn>=1.4'), or choose "
        "another --rule."
    )


def create_rule(name: str) -> RatioRule:
    """Return a new rule.

    Args:
        name: a name in :data:`RULES`.

    Raises:
        RuleError: this Python does not have the package that the rule needs.
    """
    if name in PACKAGES and importlib.util.find_spec(PACKAGES[name]) is None:
        raise RuleError(missing_package(name, sys.prefix))
    return RULES[name]()
