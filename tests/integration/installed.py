"""A site whose daemon and agents are of an installation of their own, so that a test can upgrade
it.

The version before is this one under another number; with MALLETRAIN_BEFORE=COMMIT that commit of
the repository, under that number too. The ranks of the version after it exchange one number more
in each step.
"""

from __future__ import annotations

import os
import shutil
import site as python_site
import subprocess
import venv
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

from malletrain import __version__
from tests.integration.embedded import Site

ROOT = Path(__file__).parents[2]
BEFORE = os.environ.get("MALLETRAIN_BEFORE", "")
"""A commit; empty: this version."""
VERSION = "0.0.9"
"""Number of the version before."""
ANOTHER_EXCHANGE = """
_AFTER = EXCHANGES[-1]._replace(compared=(*EXCHANGES[-1].compared, "another"))
EXCHANGES = (*EXCHANGES, _AFTER)
"""
PARTS = ("allocator", "jobscripts", "jpa", "malletrain", "scavenger", "site-configs")


def missing() -> str:
    """Why there is no version before here; empty if there is one."""
    commit = ["git", "-C", str(ROOT), "cat-file", "-e", f"{BEFORE}^{{commit}}"]
    if not BEFORE or subprocess.run(commit, capture_output=True, check=False).returncode == 0:
        return ""
    return f"The history of the repository has no commit {BEFORE} here."


@contextmanager
def _own_path() -> Iterator[None]:
    """Start processes without PYTHONPATH: the malletrain of the tests would come before theirs."""
    with patch.dict(os.environ):
        os.environ.pop("PYTHONPATH", None)
        yield


class Installed(Site):
    """A site whose daemon, agents and jobs have a virtual environment of their own, with the
    version before.
    """

    def __init__(self, root: Path, nodes: int, grace_s: float = 600.0) -> None:
        with _own_path():
            super().__init__(root, nodes=nodes, grace_s=grace_s)
        self.code = root / "code"
        self.install(VERSION)
        venv.create(root / "venv", symlinks=True, with_pip=False)
        [packages] = (root / "venv" / "lib").glob("python*/site-packages")
        paths = [self.code, *python_site.getsitepackages()]
        (packages / "malletrain.pth").write_text("".join(f"{path}\n" for path in paths))
        self.python = str(root / "venv" / "bin" / "python")

    def install(self, version: str) -> None:
        """Put a version in the place of the one that is installed: VERSION, or this one."""
        new = self.code.with_name("code.new")
        if version == __version__ or not BEFORE:
            for part in PARTS:
                shutil.copytree(ROOT / part, new / part, symlinks=True)
        else:
            new.mkdir()
            archive = ["git", "-C", str(ROOT), "archive", BEFORE, *PARTS]
            with subprocess.Popen(archive, stdout=subprocess.PIPE) as git:
                subprocess.run(["tar", "-x", "-C", str(new)], stdin=git.stdout, check=True)
        if version == __version__:
            with (new / "malletrain" / "elastic" / "step_exchange.py").open("a") as file:
                file.write(ANOTHER_EXCHANGE)
        if version == VERSION:
            init = new / "malletrain" / "__init__.py"
            text = init.read_text()
            assert f'"{__version__}"' in text
            init.write_text(text.replace(f'"{__version__}"', f'"{VERSION}"'))
        shutil.rmtree(self.code, ignore_errors=True)
        new.rename(self.code)

    def launch_daemon(self) -> None:
        argv = [self.python, "-m", "malletrain", "daemon", "--config", str(self.config)]
        with (self.root / "daemon.log").open("ab") as log, _own_path():
            # Not in the folder of the tests, whose malletrain would come first.
            self.daemon = subprocess.Popen(argv, stdout=log, stderr=log, cwd=self.root)
