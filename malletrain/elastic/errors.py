"""What live mode raises, and what it takes for the loss of a peer."""

from __future__ import annotations

import torch.distributed as dist

from malletrain.protocol import env
from malletrain.protocol.failures import peer_lost


class ElasticError(RuntimeError):
    """The script uses the run in a way that cannot work; the message says how to."""


class MismatchError(ElasticError):
    """Ranks are in different collectives."""


class Interrupted(RuntimeError):
    """What was going on is void: a newer round came, or a member of this one is lost."""


class UnfitModel(RuntimeError):
    """This process cannot join: its model differs from its peers'."""


SHARED_GPU = "Duplicate GPU detected"
"""What NCCL says of two ranks on one GPU, which it refuses."""


def is_peer_loss(error: BaseException) -> bool:
    """Whether ``error`` is what a collective says when a peer is gone.

    Raises:
        ElasticError: NCCL has refused the group, whose processes share a GPU.
    """
    if isinstance(error, ElasticError):  # whose sentences speak of gloo, too
        return False
    if SHARED_GPU in str(error):
        raise ElasticError(
            "Two processes of this job use the same GPU, which NCCL refuses. Start no more "
            "processes on a node than it has GPUs (--nproc-per-node), or submit the job with "
            f"--env {env.GPU_BACKEND}=gloo: tensors then go through host memory, slower."
        ) from error
    if isinstance(error, dist.DistBackendError | dist.DistNetworkError | Interrupted):
        return True
    text = str(error)
    return isinstance(error, RuntimeError) and ("gloo" in text or peer_lost(text))
