"""Which Slurm the tests use."""

from __future__ import annotations

import pytest

from tests.slurm import accounting
from tests.slurm.cluster import PREFIX, PROGRAMS, missing, release, which


@pytest.fixture
def other(tmp_path, monkeypatch):
    """A Slurm 25.05 below a prefix, programs that tell their release and nothing else."""
    for name in PROGRAMS:
        folder = tmp_path / ("sbin" if name.startswith("slurm") else "bin")
        folder.mkdir(exist_ok=True)
        (folder / name).write_text("#!/bin/sh\necho slurm 25.05.8\n")
        (folder / name).chmod(0o755)
    monkeypatch.setenv(PREFIX, str(tmp_path))
    return tmp_path


def test_the_slurm_below_the_prefix_comes_first(other):
    assert missing() == ""
    assert which("slurmctld") == f"{other}/sbin/slurmctld"
    assert which("squeue") == f"{other}/bin/squeue"
    assert release() == (25, 5)


def test_programs_of_two_releases_are_not_mixed(other):
    (other / "bin" / "squeue").unlink()
    assert missing() == (
        f"Slurm is not installed below {other}, which MALLETRAIN_TEST_SLURM names: no squeue"
    )
    assert "no slurmdbd" in accounting.missing()
