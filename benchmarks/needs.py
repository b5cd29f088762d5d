"""Reports missing requirements of a benchmark as a sentence instead of a traceback.

``benchmarks/__init__.py`` installs :func:`explain` for each ``python -m benchmarks.NAME``. A
benchmark that reads data takes a path, and checks it with :func:`existing` before it begins.
"""

from __future__ import annotations

import os
import shutil
import sys
import traceback as tracebacks
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType

OWN = ("malletrain", "scavenger", "allocator", "jpa", "benchmarks", "tests")
JOBSCRIPTS = {
    "fedcase": "federated",
    "infinicache": "infinicache",
    "llmserve": "llm",
    "nas": "nas",
    "windsr": "windsr",
}
"""Module of a distribution → its folder in jobscripts/."""
EXTRAS = {
    "daemon": ("alembic", "highspy", "numpy", "prometheus_client", "pydantic", "sqlalchemy",
               "structlog", "tomli"),
    "train": ("torch", "safetensors"),
    "integrations": ("accelerate", "lightning", "transformers"),
    "python": ("cloudpickle", "pandas"),
    "mpi": ("mpi4py",),
    "sweep": ("cmaes", "optuna", "scipy"),
    "postgres": ("psycopg",),
    "web": ("fastapi", "uvicorn"),
    "demo": ("matplotlib", "sklearn"),
    "redis": ("hiredis", "redis"),
    "test": ("cfgrib", "diffusers", "h5netcdf", "h5py", "hypothesis", "pexpect", "psutil",
             "pyeclib", "pytest", "selenium", "skimage", "xarray", "yaml"),
}  # fmt: skip
"""Extra of setup.cfg → the modules that it installs."""


def install_command(module: str) -> str:
    """Return the command that installs a module, from the root of the repository."""
    if module in OWN:
        return "pip install -e . (and run the benchmark in the root of the repository)"
    if module in JOBSCRIPTS:
        return f"pip install -e jobscripts/{JOBSCRIPTS[module]}"
    extra = next((name for name, modules in EXTRAS.items() if module in modules), None)
    return f"pip install {module}" if extra is None else f"pip install -e '.[{extra}]'"


def existing(path: Path, option: str, content: str) -> Path:
    """Return a path that exists.

    Args:
        path: file or folder to read.
        option: option of the command line for another path.
        content: its content, for the message.

    Raises:
        SystemExit: the path does not exist; the message says what is needed.
    """
    if not path.exists():
        sys.exit(f"There is no {path}. The benchmark reads {content} there; name another: {option}")
    return path


def package(module: str) -> None:
    """Raise ModuleNotFoundError if a package is not installed, before a benchmark begins."""
    __import__(module)


def sentence(name: str, error: BaseException) -> str | None:
    """Return what is missing, or None if the error is about something else.

    A package is missing only if Python does not find it at all: a module that an installed package
    lacks is a defect. A missing file counts only if the benchmark itself opens it, or if it is a
    program.

    Args:
        name: the benchmark, such as ``benchmarks.farm``.
        error: the exception with which it ended.
    """
    if isinstance(error, ModuleNotFoundError) and error.name:
        module = error.name.partition(".")[0]
        if _is_installed(module):
            return None
        return (
            f"{name} needs the package {module}, which is not installed: {install_command(module)}"
        )
    if isinstance(error, FileNotFoundError) and error.filename:
        if not (_is_absent_program(error) or _is_of_a_benchmark(error)):
            return None
        return (
            f"{name} needs {error.filename}, a file that it reads or a program that it runs, and "
            f"does not find it. python -m {name} --help lists its options."
        )
    return None


def _is_installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:
        return False
    except ValueError:
        return True  # a module without a specification, such as __main__


def _is_absent_program(error: FileNotFoundError) -> bool:
    """Return whether the error is about a program that is not in the path of programs."""
    last = tracebacks.extract_tb(error.__traceback__)[-1:]
    started = any(Path(frame.filename).name == "subprocess.py" for frame in last)
    program = os.fsdecode(error.filename)
    return started and os.sep not in program and shutil.which(program) is None


def _is_of_a_benchmark(error: FileNotFoundError) -> bool:
    """Return whether the innermost line of this repository or of a package is one of a
    benchmark.
    """
    library = Path(os.__file__).parent
    frames = [Path(frame.filename) for frame in tracebacks.extract_tb(error.__traceback__)]
    own = [
        path
        for path in frames
        if not path.is_relative_to(library) or "site-packages" in path.parts
        if path.is_absolute()  # <frozen importlib> is not a file
    ]
    return bool(own) and own[-1].parent == Path(__file__).parent


def explain(
    kind: type[BaseException], error: BaseException, traceback: TracebackType | None
) -> None:
    """Print what is missing; print any other error with its traceback. For ``sys.excepthook``."""
    main = getattr(sys.modules.get("__main__"), "__spec__", None)
    text = sentence(main.name if main is not None else "the benchmark", error)
    if text is None:
        sys.__excepthook__(kind, error, traceback)
        return
    last = tracebacks.extract_tb(traceback)[-1:]
    where = (
        ""
        if isinstance(error, ModuleNotFoundError)
        else "".join(f" ({Path(frame.filename).name}, line {frame.lineno})" for frame in last)
    )
    print(f"{text}{where}", file=sys.stderr)
