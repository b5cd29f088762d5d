"""Processes of these tests, and what the driver says of them."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.forked import CONTEXT, work
from tests.last_words import tail
from tests.waiting import PATIENCE_S

FIRST_GPU = os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0]
"""The first GPU that these tests may use, as ``nvidia-smi -i`` and CUDA name it."""


@contextlib.contextmanager
def started(
    folder: Path, script: Callable[..., None], *arguments: Any, **environment: str
) -> Iterator[Any]:
    """A process that runs ``script(*arguments)``; it is gone at the end."""
    folder.mkdir(exist_ok=True)
    output = folder / f"{script.__name__}-{time.monotonic_ns()}.log"
    process = CONTEXT.Process(
        target=work, args=(script, environment, str(output), arguments), daemon=True
    )
    process.start()
    process.output = output
    try:
        yield process
    finally:
        process.kill()
        process.join()


def run(folder: Path, script: Callable[..., None], *arguments: Any, **environment: str) -> None:
    """Run ``script(*arguments)`` in a process to its good end."""
    with started(folder, script, *arguments, **environment) as process:
        process.join(PATIENCE_S)
        assert process.exitcode == 0, tail(process.output)


def memory_by_pid() -> dict[int, int]:
    """MiB of the GPU by process, as the driver lists them."""
    query = ["nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits"]
    lines = subprocess.run(query, capture_output=True, text=True, check=True).stdout.splitlines()
    rows = (line.split(",") for line in lines if line.strip())
    return {int(pid): int(mib) if mib.strip().isdigit() else -1 for pid, mib in rows}


def memory_used() -> int:
    """MiB of the first GPU in use."""
    query = ["nvidia-smi", "-i", FIRST_GPU, "--query-gpu=memory.used"]
    query += ["--format=csv,noheader,nounits"]
    return int(subprocess.run(query, capture_output=True, text=True, check=True).stdout)


def device_files(pid: int) -> list[str]:
    """NVIDIA's device files that a process has open: a CUDA context has some."""
    files = []
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            target = str(entry.readlink())
            if target.startswith("/dev/nvidia"):
                files.append(target)
    return files


def state_of(pid: int) -> str:
    """Return the state of the process in the kernel; "" once it has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""
