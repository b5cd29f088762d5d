"""A Python for jobs of tests whose scripts make no optimizer.

Its fork server does not import torch's compiler, which takes as long as the rest of torch and is
needed by optimizers only. Everything else is as in the Python of the tests.
"""

from __future__ import annotations

import sys
from pathlib import Path

_PROGRAM = """#!{python}
import os, runpy, sys
del sys.argv[0], sys.path[0]
from malletrain.launch import fork_server
sys.path.insert(0, os.path.dirname(sys.argv[0]))
fork_server.PRELOADED = tuple(name for name in fork_server.PRELOADED if name != "torch._dynamo")
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def light_python(folder: Path) -> str:
    """Write the program.

    Args:
        folder: the directory in which it lies as long as jobs use it.

    Returns:
        Its path, for the field ``python`` of a job.
    """
    path = folder / "light-python"
    path.write_text(_PROGRAM.format(python=sys.executable))
    path.chmod(0o755)
    return str(path)
