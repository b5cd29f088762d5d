"""The CURVE keys that are derived from a job's secret: peers without the secret are rejected.

Decides how keys are derived and where the secret is read. :mod:`malletrain.launch.round_store` and
:mod:`malletrain.memory` use the connections.
"""

from __future__ import annotations

import hmac
import os
from typing import Any

import zmq
from zmq.utils import z85

from malletrain.protocol import env

ZAP = "inproc://zeromq.zap.01"
"""Address at which ZeroMQ asks for the authentication of a peer."""


def job_secret() -> bytes:
    """Return the job's secret, from this process's environment.

    Raises:
        ValueError: There is none.
    """
    try:
        secret = bytes.fromhex(os.environ.get(env.JOB_KEY, ""))
    except ValueError:
        secret = b""
    if not secret:
        raise ValueError(
            f"{env.JOB_KEY} in the launcher's environment is not the secret that the daemon gives "
            "to every job. Are agent and daemon of the same version of MalleTrain?"
        )
    return secret


class RoundKeys:
    """The CURVE keys of one round, the same for all processes that know the job's secret.

    Args:
        secret: the job's secret.
        round_name: job and generation, or another purpose; keys are valid for this purpose only.
    """

    def __init__(self, secret: bytes, round_name: str) -> None:
        def derive_pair(part: str) -> tuple[bytes, bytes]:
            own = z85.encode(hmac.digest(secret, f"store {part} {round_name}".encode(), "sha256"))
            return own, zmq.curve_public(own)

        self.server_secret, self.server_public = derive_pair("server")
        self.client_secret, self.client_public = derive_pair("client")

    def answered(self, frames: list[bytes]) -> list[bytes]:
        """Return the answer to a ZAP request: whether a peer with this key is accepted
        (rfc.zeromq.org/spec/27)."""
        version, request, _domain, _address, _identity, mechanism, key = frames
        own = z85.decode(self.client_public)
        valid = mechanism == b"CURVE" and hmac.compare_digest(key, own)
        answer = (b"200", b"OK") if valid else (b"400", b"no key of this round")
        return [version, request, *answer, b"", b""]

    def serve(self, router: Any, domain: bytes) -> None:
        """Make ``router`` accept only peers with these keys."""
        router.curve_server = True
        router.curve_secretkey, router.curve_publickey = self.server_secret, self.server_public
        router.zap_domain = domain

    def call(self, dealer: Any) -> None:
        """Make ``dealer`` authenticate with these keys."""
        dealer.curve_serverkey = self.server_public
        dealer.curve_secretkey, dealer.curve_publickey = self.client_secret, self.client_public
