"""The agent's own directory on its node, for sockets and logs.

Decides where it is: below the configured directory, else in the first directory for temporary files
that belongs to this user alone, else in the shared one under an unpredictable name. Directories of
dead agents of the same user and node are removed. Also decides where torch caches compiled code if
another user has taken the usual place.
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

from malletrain.memory.folder_lock import is_locked, lock_folder

_COMPILED = "TORCHINDUCTOR_CACHE_DIR"
_NO_NAME = re.compile(r'[\\/:*?"<>|]')
"""As torch has it (torch/_inductor/runtime/cache_dir_utils.py)."""
OWN_PLACES = ("SLURM_TMPDIR", "XDG_RUNTIME_DIR")
"""Variables that name a directory for temporary files of one job or one user, where there is one.
It may be named and not exist: the environment of a lease comes from the daemon's host."""


def private_directory(run_dir: Path | None, node: str, environment: Mapping[str, str]) -> Path:
    """A new directory that only this user may enter.

    Args:
        run_dir: where to make it; None: where the node keeps temporary files.
        node: name of the node.
        environment: of this process.

    Raises:
        OSError: there can be none, or ``run_dir`` is somebody else's (who could then put own
            sockets in place of ours).
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
    made_by = re.compile(re.escape(prefix) + r"-(\d+)-[^-]+")
    for old in base.glob(f"{prefix}-*-*"):
        match = made_by.fullmatch(old.name)  # not of node n1-2, where this is n1
        dead = match and not os.path.exists(f"/proc/{match[1]}") and _is_ours(old)
        if dead and not is_locked(old):
            shutil.rmtree(old, ignore_errors=True)
    made = Path(tempfile.mkdtemp(prefix=f"{prefix}-{os.getpid()}-", dir=base))
    lock_folder(made)
    return made


def own_caches(environment: Mapping[str, str], directory: Path) -> dict[str, str]:
    """Variables that name another place for what torch compiles, where the usual one is not this
    user's alone; nothing else keeps another user's code from being run out of it: its name is
    foretold, and it lies where everybody may make one. Else it is made, so that it stays this
    user's. The other is in the home directory; below the agent's own ``directory``, and gone with
    it, where the user has none.
    """
    if environment.get(_COMPILED):
        return {}
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        user = f"uid_{os.geteuid()}"
    usual = Path(tempfile.gettempdir()) / f"torchinductor_{re.sub(_NO_NAME, '_', user)}"
    try:
        usual.mkdir(mode=0o700)
    except OSError:
        pass
    if _is_ours(usual):
        return {}
    try:
        other = Path.home() / ".cache"
    except RuntimeError:  # no HOME, and the node knows no such user
        other = directory
    return {_COMPILED: str(other / "torchinductor")}


def _base(environment: Mapping[str, str]) -> Path:
    for name in OWN_PLACES:
        place = Path(environment.get(name) or "/nowhere")
        if place.is_absolute() and _is_ours(place) and os.access(place, os.W_OK | os.X_OK):
            return place.resolve()
    return Path(tempfile.gettempdir()).resolve()


def _is_ours(path: Path) -> bool:
    """Whether it is a directory (not a link to one) of this user that nobody else may write to."""
    try:
        status = path.lstat()
    except OSError:
        return False
    others = status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and not others
