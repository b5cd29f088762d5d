"""Which errors are the loss of a peer, and which are a sentence for the person."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from malletrain.elastic.errors import ElasticError, Interrupted, is_peer_loss


@pytest.mark.parametrize(
    "error",
    [
        Interrupted("A peer is lost."),
        RuntimeError("[gloo/transport/tcp/pair.cc:534] Connection closed by peer"),
        dist.DistBackendError("NCCL communicator was aborted on rank 0."),
    ],
)
def test_what_collectives_say_of_a_lost_peer(error):
    assert is_peer_loss(error)


@pytest.mark.parametrize("error", [RuntimeError("size mismatch"), ValueError("gloo")])
def test_errors_of_the_script_are_none(error):
    assert not is_peer_loss(error)


def test_a_refusal_that_speaks_of_gloo_is_no_lost_peer():
    """It would be tried again for ever, and the sentence never seen."""
    assert not is_peer_loss(ElasticError("submit the job without MALLETRAIN_GPU_BACKEND=gloo."))


def test_two_processes_of_one_gpu_are_told_what_to_do():
    error = dist.DistBackendError(
        "NCCL error in: ProcessGroupNCCL.cpp, invalid usage. Last error:\n"
        "Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 60"
    )
    with pytest.raises(
        ElasticError, match=r"NCCL refuses.*set_device.*MALLETRAIN_GPU_BACKEND=gloo"
    ):
        is_peer_loss(error)
