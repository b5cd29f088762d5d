"""The agent's own directory on its node, for sockets and logs.

Decides where it is: below the configured directory, else in the first directory for temporary files
that belongs to this user alone, else in the shared one under an unpredictable name. Removes the
directories of dead agents of the same user and node. Also decides where torch caches compiled code
if another user owns the default directory.
"""

from __future__ import annotations

import getpass
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Mapping
from pathlib import Path

from malletrain.memory.folder import is_locked, lock_folder

_CACHE_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"
_REPLACED_CHARACTERS = re.compile(r'[\\/:*?"<>|]')
"""Characters that torch replaces in a user name (torch/_inductor/runtime/cache_dir_utils.py)."""
PRIVATE_TEMP_VARIABLES = ("SLURM_TMPDIR", "XDG_RUNTIME_DIR")
"""Variables that name a directory for temporary files of one job or one user. The directory may not
exist on this node, because the environment of a lease comes from the daemon's host.
"""


def private_directory(run_dir: Path | None, node: str, environment: Mapping[str, str]) -> Path:
    """Create a directory that only this user can enter, and return its path.

    Args:
        run_dir: parent directory; None for the node's directory for temporary files.
        node: name of the node.
        environment: environment of this process.

    Raises:
        OSError: the directory cannot be created, or ``run_dir`` belongs to another user, who could
            replace the agent's sockets.
    """
    prefix = re.sub(r"[^\w.-]", "_", node)[:24]
    if run_dir is None:
        base, prefix = _base(environment), f"malletrain-{os.geteuid()}-{prefix}"
    else:
        base = run_dir.resolve()
        base.mkdir(mode=0o700, parents=True, exist_ok=True)
        if base.stat().st_uid != os.geteuid():
            raise PermissionError(
                f"The run directory {base} belongs to another user; give the agent another "
                "--run-dir."
            )
    name_pattern = re.compile(re.escape(prefix) + r"-(\d+)-[^-]+")
    for old in base.glob(f"{prefix}-*-*"):
        match = name_pattern.fullmatch(old.name)  # excludes node n1-2 if this node is n1
        dead = match and not os.path.exists(f"/proc/{match[1]}") and _is_private(old)
        if dead and not is_locked(old):
            shutil.rmtree(old, ignore_errors=True)
    directory = Path(tempfile.mkdtemp(prefix=f"{prefix}-{os.getpid()}-", dir=base))
    lock_folder(directory)
    return directory


def own_caches(environment: Mapping[str, str], directory: Path) -> dict[str, str]:
    """Return variables that set another directory for code that torch compiles, if the default one
    does not belong to this user alone.

    The name of the default directory is predictable, and every user can create it, so that torch
    could load code of another user from it. If it does not exist, it is created now, so that it
    belongs to this user. The other directory is in the home directory. If the user has none, it is
    below the agent's own ``directory`` and is removed with it.
    """
    if environment.get(_CACHE_VARIABLE):
        return {}
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        user = f"uid_{os.geteuid()}"
    default = (
        Path(tempfile.gettempdir()) / f"torchinductor_{re.sub(_REPLACED_CHARACTERS, '_', user)}"
    )
    try:
        default.mkdir(mode=0o700)
    except OSError:
        pass
    if _is_private(default):
        return {}
    try:
        parent = Path.home() / ".cache"
    except RuntimeError:  # HOME is not set, and the node does not know this user
        parent = directory
    return {_CACHE_VARIABLE: str(parent / "torchinductor")}


def _base(environment: Mapping[str, str]) -> Path:
    for name in PRIVATE_TEMP_VARIABLES:
        path = Path(environment.get(name) or "/nowhere")
        if path.is_absolute() and _is_private(path) and os.access(path, os.W_OK | os.X_OK):
            return path.resolve()
    return Path(tempfile.gettempdir()).resolve()


def _is_private(path: Path) -> bool:
    """Return whether ``path`` is a directory of this user, and not a symbolic link, to which no
    other user can write.
    """
    try:
        status = path.lstat()
    except OSError:
        return False
    writable_by_others = status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and not writable_by_others
