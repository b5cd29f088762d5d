"""A container image without cost: a directory of empty mount points into which this machine's own
file system is bound. For tests and benchmarks of the cost of a container. It has no /usr of its
own, and no Python but the running one; nothing is copied.
"""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec
from pathlib import Path

LINKS = {"bin": "usr/bin", "sbin": "usr/sbin", "lib": "usr/lib", "lib64": "usr/lib64"}
EMPTY = ("dev", "proc", "sys", "tmp", "etc", "home", "mnt", "var/tmp", "run", "root")


def make_image(directory: Path, python: Path | None = None) -> Path:
    """Make the image. Return its path.

    Args:
        directory: the new directory of the image.
        python: target of ``python``, first on the image's PATH; None: an image without one.
    """
    for name in (*EMPTY, "usr", "opt/bin", "ch"):
        (directory / name).mkdir(parents=True)
    for name, target in LINKS.items():
        if os.path.lexists(f"/{name}"):
            (directory / name).symlink_to(target)
    for name in ("passwd", "group", "hosts", "resolv.conf", "machine-id"):
        (directory / "etc" / name).touch()
    path = "/opt/bin" if python is None else f"{python.parent}:/opt/bin"
    (directory / "ch" / "environment").write_text(f"PATH={path}:/bin_of_the_image\nIMAGE_SAYS=so\n")
    return directory


def host_binds(*more: Path) -> list[str]:
    """Return the paths of this machine that must be bound for this Python and its torch."""
    torch = find_spec("torch")
    places = [
        Path("/usr"),
        Path(sys.base_prefix).resolve(),
        Path(sys.prefix),
        *(Path(place).parent for place in (torch and torch.submodule_search_locations) or ()),
        *more,
    ]
    etc = [f"/etc/{name}" for name in ("ld.so.cache", "ld.so.conf", "localtime")]
    return [str(p) for p in dict.fromkeys(places)] + [p for p in etc if os.path.isfile(p)]
