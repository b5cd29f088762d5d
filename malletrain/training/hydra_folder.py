"""Recognizes a snapshot path in a folder that hydra names after the time of each start.

With hydra's ``job.chdir`` the working folder is such a folder, so relative paths and the default
path are below it. The next round gets another folder and does not find the snapshot. Decides
whether to print a message; changes no path. Standard library only.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from malletrain.protocol import env
from malletrain.training import report

_REMEDIES = (
    ("run", "dir", "hydra.run.dir='outputs/${oc.env:MALLETRAIN_JOB}'"),
    ("sweep", "dir", "hydra.sweep.dir='multirun/${oc.env:MALLETRAIN_JOB}'"),
    ("sweep", "subdir", "hydra.sweep.subdir='${hydra.job.num}'"),
)
"""(section, key, argument) of hydra's configuration: what to set instead of a name with a time."""


def warn_of_dated_folder(path: str) -> None:
    """Print a message, once, if a later round of this job does not find the snapshot because its
    folder is named after the time. Call it on rank 0. Never raises.

    Args:
        path: the snapshot's absolute path.
    """
    if env.JOB not in os.environ or env.GENERATION not in os.environ or env.TASK in os.environ:
        return
    module = sys.modules.get("hydra.core.hydra_config")
    if module is None:
        return
    try:
        folder, remedies = _dated_folder(module)
        is_below = _is_below(path, folder) and _is_below(os.getcwd(), folder)
    except Exception:  # a release of hydra that keeps its configuration elsewhere
        return
    if not (remedies and is_below):
        return
    report.tell(
        f"hydra puts the time of the start into the name of the folder {folder}. A round of this "
        f"job that starts at another time gets another folder, does not find the snapshot {path} "
        f"and begins anew. To keep the snapshots and the script's other files in one folder, run "
        f"the script with {' '.join(remedies)}, or pass Snapshot an absolute path elsewhere.",
        once="hydra folder",
    )


def _dated_folder(module: Any) -> tuple[str, list[str]]:
    """Return hydra's folder of this process, and what to set so that its name has no time; empty
    if it has none.
    """
    if not module.HydraConfig.initialized():
        return "", []
    config = module.HydraConfig.get()
    section = "sweep" if "MULTIRUN" in str(config.mode) else "run"
    # Unresolved: a folder that the user has named after a date has the same name in each round.
    names = sys.modules["omegaconf"].OmegaConf.to_container(config[section], resolve=False)
    remedies = [
        argument
        for of, key, argument in _REMEDIES
        if of == section and "${now:" in str(names.get(key, ""))
    ]
    return str(config.runtime.output_dir), remedies


def _is_below(path: str, folder: str) -> bool:
    real, real_folder = (os.path.realpath(os.path.abspath(each)) for each in (path, folder))
    return os.path.commonpath([real, real_folder]) == real_folder
