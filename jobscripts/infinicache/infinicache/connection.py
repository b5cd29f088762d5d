"""The cache's connections: :mod:`malletrain.streams` with the cache's protocol name."""

from __future__ import annotations

from infinicache.objects import CacheError
from malletrain.streams.connection import CallFailed as CallFailed
from malletrain.streams.connection import ConnectionLost as ConnectionLost
from malletrain.streams.connection import KeyRefused as KeyRefused
from malletrain.streams.connection import PeerConnections

PROTOCOL = "infinicache"


class Peers(PeerConnections):
    """The connections of a client, a node or a proxy. ``key``: the cache's key."""

    error = CacheError
    owner = "cache"

    def __init__(self, key: bytes) -> None:
        super().__init__(key, PROTOCOL)
