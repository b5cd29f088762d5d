"""Whether a Python has what an engine needs, so that a job is refused before it gets a node."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping

from llmserve.engines import INSTALLATIONS, REQUIREMENTS

TIMEOUT_S = 60.0
"""Maximum time in which a Python on a slow file system starts, seconds."""
_FIND = (
    "import importlib.util, sys\n"
    "print(*(name for name in sys.argv[1:] if importlib.util.find_spec(name) is None))"
)


class MissingPackages(ValueError):
    """A Python lacks packages of an engine; the message is a sentence."""


def check_engine(engine: str, python: str, environment: Mapping[str, str]) -> None:
    """Look for the packages of an engine. A Python that does not answer counts as complete: it may
    run on the nodes only.

    Args:
        engine: a name of ``llmserve.engines.PROFILES``.
        python: path of the Python that the nodes run.
        environment: its environment variables.

    Raises:
        MissingPackages: it lacks one.
    """
    command = [python, "-c", _FIND, "llmserve", *REQUIREMENTS[engine]]
    try:
        answer = subprocess.run(
            command,
            env=dict(environment),
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return
    missing = answer.stdout.split()
    if missing:
        raise MissingPackages(
            f"The Python that runs the engine, {python}, has no {' and no '.join(missing)}, which "
            f"--engine {engine} needs. Install it there: {INSTALLATIONS[engine]}."
        )
