"""A real PostgreSQL that is restarted while a store uses it."""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

from malletrain.store.store import Store, StoreError
from tests.malletrain.store.conftest import new_job

pytest.importorskip(
    "psycopg", reason="needs pip install malletrain[postgres]", exc_type=ImportError
)
FOUND = sorted(Path("/usr/lib/postgresql").glob("*/bin/pg_ctl"))
USER = "postgres"


class Server:
    """One of its own, in a folder of its own, on no port. Ends with the test."""

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

    def stop(self) -> None:
        """As a crash does: nobody is waited for."""
        self._ctl("stop", "-m", "immediate")

    def _ctl(self, what: str, *more: str) -> None:
        self._do("pg_ctl", what, "-w", "-t", "600", "-D", str(self.folder / "data"), *more)

    def _do(self, program: str, *arguments: str) -> None:
        argv = [*self._as, str(self.bin / program), *arguments]
        subprocess.run(argv, check=True, stdout=subprocess.DEVNULL, cwd="/")


@pytest.fixture
def server():
    if not FOUND:
        pytest.skip("needs PostgreSQL's server (Debian: postgresql)")
    uid = -1
    if os.geteuid() == 0:  # as root it does not run
        try:
            uid = pwd.getpwnam(USER).pw_uid
        except KeyError:
            pytest.skip(f"needs a user {USER}")
    folder = Path(tempfile.mkdtemp(prefix="mt-pg-", dir="/tmp"))  # a socket's path is short
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


def cut_short(store, server):
    """A transaction in which the server goes."""
    with store.transaction():
        new_job(store, name="lost")
        server.stop()
        new_job(store, name="lost, too")


def test_a_server_that_is_restarted_costs_the_transaction_under_way_and_no_other(server):
    with Store.open(server.url) as store:
        job = new_job(store, name="before")
        server.stop()
        server.start()
        assert store.get_job(job.id) == job, "between two transactions nobody notices"
        with pytest.raises(StoreError, match="Nothing of this step was saved"):
            cut_short(store, server)
        with pytest.raises(StoreError, match="refused"):
            store.list_jobs()
        server.start()
        assert [known.name for known in store.list_jobs()] == ["before"]
        assert new_job(store, name="after").id == "j2"
    with Store.open(server.url) as store:
        assert [known.name for known in store.list_jobs()] == ["before", "after"]
