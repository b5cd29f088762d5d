"""What the sizes of a job count where leases are slots, and what is refused."""

from __future__ import annotations

import pytest

from malletrain.config.slots import SlotSection
from malletrain.daemon.jobs.admission import RequestRefused, problem_of
from malletrain.daemon.jobs.sizes import with_kind
from malletrain.protocol.messages import JobSpec


def kind(name, gpus=0, nodes=()):
    return SlotSection(name=name, gpus=gpus, memory="1 GiB", nodes=list(nodes))


GPU, QUAD, CPU = kind("gpu", 1), kind("quad", 4), kind("cpu")
MIG = kind("mig", 1)
ON_SOME = kind("gpu", 1, ["g[1-4]"])


def job(counts, size, named=""):
    low, high = size
    return JobSpec(
        "j", "ann", "/x.py", "/", "python", min_nodes=low, max_nodes=high, counts=counts,
        node_class=named,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("counts", "size", "named", "kinds", "expected"),
    [
        ("slots", (1, 16), "", [GPU], "gpu"),
        ("slots", (1, 16), "cpu", [GPU, CPU], "cpu"),
        ("gpus", (1, 16), "", [GPU], "gpu"),
        ("gpus", (1, 16), "", [CPU, GPU, QUAD], "gpu"),
        ("gpus", (1, 16), "mig", [GPU, MIG], "mig"),
        # Sizes in nodes are of any class, slots or not: the allocator chooses.
        ("", (1, 16), "", [], ""),
        ("", (1, 1), "", [GPU, CPU], ""),
        ("", (1, 16), "", [GPU], ""),
        ("", (2, 16), "", [GPU, CPU], ""),
        ("", (2, 16), "", [ON_SOME], ""),
        ("", (1, 16), "gpu", [GPU, CPU], "gpu"),
        ("", (1, 16), "a100", [ON_SOME], "a100"),
    ],
)
def test_the_kind_on_which_a_job_runs(counts, size, named, kinds, expected):
    spec = with_kind(job(counts, size, named), kinds)
    assert spec.node_class == expected
    assert (spec.min_nodes, spec.max_nodes, spec.counts) == (*size, counts)
    assert with_kind(spec, kinds) == spec, "submitted again it is the same job"


@pytest.mark.parametrize(
    ("counts", "size", "named", "kinds", "sentence"),
    [
        ("slots", (1, 16), "", [], "whole nodes and has no slots, so that --slots is not "
         "possible; give --nodes MIN:MAX."),
        ("gpus", (1, 16), "", [], "so that --gpus is not possible; give --nodes MIN:MAX, and "
         "the GPUs of a node have a process each."),
        ("slots", (2, 4), "", [GPU, CPU], "several kinds, gpu, cpu; name one, such as --slots "
         "2:4 --kind gpu."),
        ("slots", (2, 2), "a100", [ON_SOME], "a class of whole nodes and not of slots "
         "(gpu); give --nodes 2 --kind a100."),
        ("gpus", (1, 16), "", [GPU, MIG], "several kinds of slots with one GPU, gpu, mig; name "
         "one, such as --gpus 1:16 --kind gpu."),
        ("gpus", (1, 16), "", [CPU], "No slots of this site have GPUs (cpu)"),
        ("gpus", (1, 16), "cpu", [CPU, GPU], "have no GPU; for slots without GPUs give --slots "
         "1:16 --kind cpu."),
        ("gpus", (2, 8), "", [QUAD], "have 4 GPUs each, and --gpus counts slots of one GPU; "
         "give --slots 1:2 --kind quad for 4:8 GPUs."),
        ("gpus", (1, 3), "quad", [GPU, QUAD], "give --slots 1 --kind quad for 4 GPUs."),
    ],
)  # fmt: skip
def test_what_could_mean_two_things_is_refused(counts, size, named, kinds, sentence):
    with pytest.raises(RequestRefused) as refused:
        with_kind(job(counts, size, named), kinds)
    assert sentence in str(refused.value)


def test_sizes_that_count_something_else_are_refused():
    assert problem_of(job("racks", (1, 2)), files=False) == (
        "The sizes of a job count slots or gpus, or nodes if nothing is said, and not 'racks'."
    )
