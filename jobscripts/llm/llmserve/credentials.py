"""The bearer token between a dispatcher and the fronts of its replicas. Pure.

It is derived from the key of the job, and the key itself is never sent: a token that is read on the
network does not reveal the other secrets of the job.
"""

from __future__ import annotations

import hashlib
import hmac

PURPOSE = b"llmserve bearer"


def bearer_token(key: bytes) -> str:
    """Return the token of a job; empty without a key (outside MalleTrain).

    Args:
        key: ``malletrain.membership.job_key()``, or ``malletrain members JOB --key``.
    """
    return hmac.new(key, PURPOSE, hashlib.sha256).hexdigest() if key else ""


def is_authorized(header: str, token: str) -> bool:
    """Whether an ``Authorization`` header has the token, compared in constant time."""
    return hmac.compare_digest(header.encode(), f"Bearer {token}".encode())
