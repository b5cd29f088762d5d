"""The exceptions of live mode, and the test whether an exception means that a peer is lost."""

from __future__ import annotations

import torch.distributed as dist

from malletrain.protocol import env
from malletrain.protocol.failures import peer_lost


class ElasticError(RuntimeError):
    """The script uses the run in a way that cannot work. The message says what to change."""


class MismatchError(ElasticError):
    """The ranks have called different collectives."""


class Interrupted(RuntimeError):
    """The operation is void: a newer round has begun, or a member of this one is lost."""


class UnfitModel(RuntimeError):
    """This process cannot join, because its model differs from that of its peers."""


SHARED_GPU = "Duplicate GPU detected"
"""Part of NCCL's error message when two ranks use one GPU, which NCCL does not support."""


def is_peer_loss(error: BaseException) -> bool:
    """Return whether a collective raised ``error`` because a peer is lost.

    Raises:
        ElasticError: NCCL refused the group because two of its processes share a GPU.
    """
    if isinstance(error, ElasticError):  # its messages can contain "gloo" as well
        return False
    if SHARED_GPU in str(error):
        raise ElasticError(
            "Two processes of this job use the same GPU, which NCCL refuses. Call "
            'torch.cuda.set_device(int(os.environ["LOCAL_RANK"])) before the first use of a GPU, '
            "and start no more processes on a node than it has GPUs (--nproc-per-node). Or submit "
            "the job with "
            f"--env {env.GPU_BACKEND}=gloo: tensors then go through host memory, slower."
        ) from error
    if isinstance(error, dist.DistBackendError | dist.DistNetworkError | Interrupted):
        return True
    text = str(error)
    return isinstance(error, RuntimeError) and ("gloo" in text or peer_lost(text))
