"""What a worker imports in a container, into which only the package malletrain is bound."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import malletrain

IMPORTS = """
import pkgutil, sys
from importlib import import_module
from importlib.machinery import PathFinder

class Siblings:
    def find_spec(self, name, path=None, target=None):
        if name in ("scavenger", "jpa", "allocator", "jobscripts"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Siblings())
import malletrain
assert malletrain.__file__.startswith(sys.path[0]), malletrain.__file__
for name in malletrain.__all__:
    getattr(malletrain, name)
for room in sys.argv[1:]:
    package = import_module(f"malletrain.{room}")
    for module in pkgutil.walk_packages(getattr(package, "__path__", []), f"{package.__name__}."):
        import_module(module.name)
print(len([name for name in sys.modules if name.startswith("malletrain.")]))
"""
ROOMS = ("training", "elastic", "datacache", "membership", "memory", "launch", "streams", "api")
"""Without integrations, whose libraries take seconds to import. An import contract in setup.cfg
covers them too.
"""


def test_a_worker_needs_no_package_beside_malletrain(tmp_path):
    pytest.importorskip("torch")
    (tmp_path / "malletrain").symlink_to(Path(malletrain.__file__).parent)
    ran = subprocess.run(
        [
            sys.executable,
            "-c",
            f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n{IMPORTS}",
            *ROOMS,
        ],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    assert int(ran.stdout) > 100
