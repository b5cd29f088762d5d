"""Resources as accounting logs of Slurm and PBS write them."""

from __future__ import annotations

import pytest

from malletrain.sim.logged_jobs import Resources, pbs_size, slurm_tres
from malletrain.sim.workloads import WorkloadError


@pytest.mark.parametrize(
    ("text", "resources"),
    [
        ("", None),
        ("gres/gpu=4,gres/gpu:a100=4", Resources(4)),
        ("gres/gpu:a100=3,gres/gpu:v100=1", Resources(4)),
        ("gres/gpu=4,gres/gpu:a100=1", Resources(4)),
        ("gres/gpumem=80G,gres/gpuutil=50,node=1", Resources()),
        ("gres/gpu:a100_1g.5gb=2,mem=1.50T", Resources(2, 0, 3 * 2**39)),
        ("mem=500", Resources(memory=500 * 2**20)),
        ("mem=512000K,cpu=1K", Resources(0, 1024, 500 * 2**20)),
    ],
)
def test_trackable_resources(text, resources):
    assert slurm_tres(text) == resources


@pytest.mark.parametrize("text", ["gpu", "gres/gpu=four", "mem=60GB", "cpu=-1"])
def test_what_is_no_trackable_resource(text):
    with pytest.raises(WorkloadError, match=f"'{text}'"):
        slurm_tres(text)


def test_sizes_of_pbs():
    for text, size in (("5", 5), ("5b", 5), ("2kb", 2048), ("3GB", 3 * 2**30), ("1mw", 2**23)):
        assert pbs_size(text) == size
    with pytest.raises(WorkloadError, match="'60G B' is no size of PBS"):
        pbs_size("60G B")
