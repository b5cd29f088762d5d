"""Accounts and QOS for a Slurm of cluster.py: slurmdbd on a database of its own, on sockets below
the cluster's directory.
"""

from __future__ import annotations

import getpass
import subprocess
from pathlib import Path

from tests.slurm.cluster import SlurmCluster, absence, which

PROGRAMS = ("slurmdbd", "mariadbd", "sacctmgr")
SYSTEM_TABLES = Path("/usr/share/mysql/mysql_system_tables.sql")
"""slurmdbd keeps a procedure in the database, and those are kept in a table."""

CONF = """
DbdHost=localhost
DbdAddr=127.0.0.1
DbdPort={port}
SlurmUser={user}
AuthType=auth/munge
AuthInfo=socket={root}/run/munge.socket
StorageType=accounting_storage/mysql
StorageHost=localhost
StorageUser=slurm
StoragePass=none
StorageLoc=slurm
PidFile={root}/run/slurmdbd.pid
DebugLevel=info
"""


def missing() -> str:
    """Why there can be no accounting here; empty when there can."""
    return absence("Slurm's accounting", PROGRAMS)


class AccountedCluster(SlurmCluster):
    """A SlurmCluster with accounting: every user is in account ``all``; ``prepare`` creates the QOS
    (arguments of sacctmgr).
    """

    def __init__(
        self, root: Path, nodes: int = 8, *, prepare: tuple[str, ...] = (), **options: object
    ) -> None:
        self.prepare = prepare
        storage = (
            "AccountingStorageType=accounting_storage/slurmdbd\nAccountingStorageHost=127.0.0.1\nAccountingStoragePort={port}\n"
            "AccountingStoragePass={root}/run/munge.socket\nAccountingStorageEnforce=associations,limits,qos"
        )
        super().__init__(root, nodes, storage=storage, **options)

    def start_controller(self, fresh: bool = False) -> None:
        if fresh:
            self._start_accounting()
        super().start_controller(fresh)

    def _start_accounting(self) -> None:
        root, user = self.root, getpass.getuser()
        data, socket = root / "data", root / "run" / "db.socket"
        data.mkdir()
        options = (
            "--no-defaults",
            f"--datadir={data}",
            "--skip-grant-tables",
            f"--user={user}",
            "--innodb-buffer-pool-size=16M",
            "--innodb-log-file-size=8M",
            "--innodb-flush-log-at-trx-commit=0",
            "--innodb-fast-shutdown=2",
        )
        tables = "create database mysql;\nuse mysql;\n" + SYSTEM_TABLES.read_text()
        subprocess.run(
            [str(which("mariadbd")), *options, "--bootstrap"],
            input=tables,
            text=True,
            capture_output=True,
            check=True,
        )
        # No grants: the socket's directory is the protection.
        self._spawn(
            "mariadbd",
            *options,
            f"--socket={socket}",
            "--skip-networking",
            f"--pid-file={root}/run/db.pid",
        )
        self.until(socket.exists, "the database listens")
        conf = root / "slurmdbd.conf"
        conf.write_text(CONF.format(port=self.spare_port, user=user, root=root))
        conf.chmod(0o600)
        self.environment["MYSQL_UNIX_PORT"] = str(socket)
        self._spawn("slurmdbd", "-D")
        self.until(self._answers, "slurmdbd answers")
        self.run("sacctmgr", "-i", "add", "cluster", self.cluster_name)
        self.run("sacctmgr", "-i", "add", "account", "all")
        for arguments in self.prepare:
            self.run("sacctmgr", "-i", *arguments.split())
        self.run("sacctmgr", "-i", "add", "user", user, "account=all")

    def _answers(self) -> bool:
        try:
            self.run("sacctmgr", "-n", "show", "cluster")
        except subprocess.SubprocessError:
            return False
        return True
