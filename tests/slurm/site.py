"""A whole MalleTrain site on a real Slurm, the cluster of cluster.py."""

from __future__ import annotations

import contextlib
from collections.abc import Collection
from pathlib import Path

import psutil

from tests.integration.batch_site import BatchSite, running
from tests.slurm.cluster import SlurmCluster


class SlurmTestSite(BatchSite):
    """One daemon on ``slurm``."""

    kind = "slurm"

    def __init__(
        self, root: Path, slurm: SlurmCluster, *, lines: str = "", **sections: str
    ) -> None:
        super().__init__(
            root, slurm.environment, lines=f'partition = "preemptable"\n{lines}', **sections
        )
        self.slurm = slurm

    def leases(self) -> Collection[str]:
        return self.slurm.leases()

    def processes(self) -> list[psutil.Process]:
        return self.slurm.jobs_processes()

    def clear(self, leases: Collection[str]) -> None:
        if leases:
            self.slurm.run("scancel", *leases)
        self.slurm.until(lambda: not self.slurm.leases(), "the leases end")
        self.slurm.until(lambda: not self.agents(), "no agent is left")

    def tell(self) -> str:
        return f"{self.slurm.jobs() if 'slurmctld' in self.slurm.processes else '(no slurmctld)'}\n{self.slurm.log('slurmctld')}"  # noqa: E501


def slurm_site(
    root: Path, slurm: SlurmCluster, **options: str
) -> contextlib.AbstractContextManager[SlurmTestSite]:
    """A site with a running daemon; everything of it is gone at the end."""
    return running(SlurmTestSite(root, slurm, **options))
