"""The number of GPUs that a process on a node may use."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping


def count_gpus(environment: Mapping[str, str] = os.environ) -> int:
    """Return the number of GPUs that this process may use: by CUDA_VISIBLE_DEVICES if it is set,
    else by the NVIDIA device files.
    """
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len(
            [part for part in visible.split(",") if part.strip() not in ("", "-1", "NoDevFiles")]
        )
    return len([name for name in os.listdir("/dev") if re.fullmatch(r"nvidia\d+", name)])
