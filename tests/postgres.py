"""A real PostgreSQL server for tests."""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.waiting import PATIENCE_S

FOUND = sorted(Path("/usr/lib/postgresql").glob("*/bin/pg_ctl"))
USER = "postgres"


class Server:
    """A server in a folder of its own, without a port. It ends with the test."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.bin = folder, FOUND[-1].parent
        self._as = ["runuser", "-u", USER, "--"] if os.geteuid() == 0 else []
        options = "-A", "trust", "-U", USER, "-N", "--no-locale", "-E", "UTF8"
        self._do("initdb", *options, "-D", str(folder / "data"))
        self.url = f"postgresql+psycopg://{USER}@/postgres?host={folder}"
        self.start()

    def start(self) -> None:
        options = f"-k {self.folder} -h '' -F"
        self._ctl("start", "-o", options, "-l", str(self.folder / "log"))

    def stop(self, how: str = "immediate") -> None:
        """Stop the server as in a crash, without waiting for clients. ``how``: another of pg_ctl's
        modes, or "kill".
        """
        if how != "kill":
            return self._ctl("stop", "-m", how)
        pid = int((self.folder / "data" / "postmaster.pid").read_text().split()[0])
        of_it = [psutil.Process(pid), *psutil.Process(pid).children()]
        of_it[0].kill()
        _, survivors = psutil.wait_procs(of_it, timeout=PATIENCE_S)
        assert not survivors

    @contextlib.contextmanager
    def stopped(self) -> Iterator[None]:
        """All its processes are stopped (SIGSTOP) within the block."""
        pid = int((self.folder / "data" / "postmaster.pid").read_text().split()[0])
        of_it = [psutil.Process(pid), *psutil.Process(pid).children()]
        for process in of_it:
            process.suspend()
        try:
            yield
        finally:
            for process in of_it:
                # One that was about to end when it was stopped is gone once its parent goes on.
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.resume()

    def _ctl(self, what: str, *more: str) -> None:
        self._do("pg_ctl", what, "-w", "-t", "600", "-D", str(self.folder / "data"), *more)

    def _do(self, program: str, *arguments: str) -> None:
        argv = [*self._as, str(self.bin / program), *arguments]
        subprocess.run(argv, check=True, stdout=subprocess.DEVNULL, cwd="/")


@contextlib.contextmanager
def running() -> Iterator[Server]:
    """Return a running server; skip the test if PostgreSQL is not available."""
    pytest.importorskip(
        "psycopg", reason="needs pip install malletrain[postgres]", exc_type=ImportError
    )
    if not FOUND:
        pytest.skip("needs PostgreSQL's server (Debian: postgresql)")
    uid = -1
    if os.geteuid() == 0:  # PostgreSQL refuses to run as root
        try:
            uid = pwd.getpwnam(USER).pw_uid
        except KeyError:
            pytest.skip(f"needs a user {USER}")
    # the path of a socket must be short
    folder = Path(tempfile.mkdtemp(prefix="mt-pg-", dir="/tmp"))
    made = None
    try:
        os.chown(folder, uid, -1)
        made = Server(folder)
        yield made
    finally:
        if made is not None:
            with contextlib.suppress(subprocess.CalledProcessError):
                made.stop()
        shutil.rmtree(folder, ignore_errors=True)
