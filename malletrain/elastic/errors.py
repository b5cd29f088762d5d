"""What live mode raises, and what it takes for the loss of a peer."""

from __future__ import annotations

import torch.distributed as dist

from malletrain.protocol.failures import peer_lost


class ElasticError(RuntimeError):
    """The script uses the run in a way that cannot work; the message says how to."""


class MismatchError(ElasticError):
    """Ranks are in different collectives."""


class Interrupted(RuntimeError):
    """What was going on is void: a newer round came, or a member of this one is lost."""


class UnfitModel(RuntimeError):
    """This process cannot join: its model differs from its peers'."""


def is_peer_loss(error: BaseException) -> bool:
    """Whether ``error`` is what a collective says when a peer is gone."""
    if isinstance(error, dist.DistBackendError | dist.DistNetworkError | Interrupted):
        return True
    text = str(error)
    return isinstance(error, RuntimeError) and ("gloo" in text or peer_lost(text))
