"""The options of ``malletrain submit`` that ``llmserve batch`` has too: the nodes and the
environment of its job, its start, and notifications. Decides which Python the nodes run.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Any

NAMES = (
    "kind",
    "setup",
    "module",
    "conda",
    "venv",
    "container",
    "no_container",
    "container_runtime",
    "container_bind",
    "env",
    "after",
    "time_limit",
    "budget",
    "notify",
)
"""Parameters of ``malletrain submit``, which are keywords of ``malletrain.Client.submit`` too."""
OTHER_PYTHON = ("venv", "conda", "container")
"""Options with which a job does not run the Python that submits it."""


def python_of(job: Mapping[str, Any]) -> tuple[str, dict[str, str]] | None:
    """Return the Python that runs a job on its nodes, and its environment variables; None if they
    are not known here, because modules, conda, a container or a setup command may change them.

    Args:
        job: keywords of ``malletrain.Client.submit``.
    """
    if any(job.get(name) for name in ("module", "conda", "container", "setup")):
        return None
    own = dict(os.environ)
    venv = job.get("venv")
    if venv:
        own.pop("PYTHONPATH", None)  # not passed on to another Python
    python = os.path.join(os.path.expanduser(venv), "bin", "python") if venv else sys.executable
    return python, {**own, **job.get("env", {})}
