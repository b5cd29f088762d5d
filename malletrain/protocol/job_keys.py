"""The CURVE keys that follow from a job's secret: who does not have the secret is not heard.

Decides how keys are derived and where the secret is found. Who talks about what over a connection
is :mod:`malletrain.launch.relay`'s and :mod:`malletrain.memory`'s.
"""

from __future__ import annotations

import hmac
import os
from typing import Any

import zmq
from zmq.utils import z85

from malletrain.protocol import env

ZAP = "inproc://zeromq.zap.01"
"""Where ZeroMQ asks who may come in."""


def job_secret() -> bytes:
    """The job's secret, from this process's environment.

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
    """The CURVE keys of one round, the same for whoever knows the job's secret.

    Args:
        secret: the job's, as bytes.
        round_name: job and generation, or what else the keys are for: they open nothing else.
    """

    def __init__(self, secret: bytes, round_name: str) -> None:
        def made(part: str) -> tuple[bytes, bytes]:
            own = z85.encode(hmac.digest(secret, f"store {part} {round_name}".encode(), "sha256"))
            return own, zmq.curve_public(own)

        self.server_secret, self.server_public = made("server")
        self.client_secret, self.client_public = made("client")

    def answered(self, frames: list[bytes]) -> list[bytes]:
        """The answer to ZAP's question: may who has this key come in? (rfc.zeromq.org/spec/27)"""
        version, request, _domain, _address, _identity, mechanism, key = frames
        own = z85.decode(self.client_public)
        valid = mechanism == b"CURVE" and hmac.compare_digest(key, own)
        answer = (b"200", b"OK") if valid else (b"400", b"no key of this round")
        return [version, request, *answer, b"", b""]

    def serve(self, router: Any, domain: bytes) -> None:
        """Have ``router`` let in only who has the keys."""
        router.curve_server = True
        router.curve_secretkey, router.curve_publickey = self.server_secret, self.server_public
        router.zap_domain = domain

    def call(self, dealer: Any) -> None:
        """Have ``dealer`` show them."""
        dealer.curve_serverkey = self.server_public
        dealer.curve_secretkey, dealer.curve_publickey = self.client_secret, self.client_public
