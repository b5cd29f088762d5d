"""Finds the environment in which vLLM is installed for the tests (``make vllm``), and starts vLLM
in it.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
OPTIONS = ("--dtype", "float32", "--enforce-eager", "--max-model-len", "2048")
"""Options of vLLM: the same answer in batches of any size, no compiler at the start, a short
context.
"""
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
}
"""Variables for vLLM on a processor: a KV cache of 1 GiB, no cores reserved, no access to the
network.
"""


class NotInstalledError(Exception):
    """There is no environment with vLLM; the message says how to create it."""


def folder() -> Path:
    """Return the environment with vLLM: that of MALLETRAIN_VLLM, else of ``make vllm``.

    Raises:
        NotInstalledError: there is none.
    """
    path = Path(os.environ.get("MALLETRAIN_VLLM") or ROOT / ".venv-vllm")
    if not (path / "bin" / "python").exists():
        raise NotInstalledError(
            f"vLLM is not installed in {path}: make vllm (3.5 GB). Its versions of fastapi and "
            "transformers are not those of constraints.txt."
        )
    return path


def vllm() -> Path:
    """Return the environment with vLLM. Skips the test where there is none."""
    try:
        return folder()
    except NotInstalledError as error:
        pytest.skip(str(error))
