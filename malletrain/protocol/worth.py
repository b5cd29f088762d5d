"""The value of nodes to a service, as its process reports it at run time."""

from __future__ import annotations

from typing import Annotated

import msgspec

from malletrain.protocol.bounds import MAX_WORTH_SIZES, Amount, Count, Id
from malletrain.protocol.message import Message


class Worth(Message, frozen=True):
    """The value of each number of nodes to a service from now on, in samples/s."""

    job: Id
    nodes: Annotated[dict[Count, Amount], msgspec.Meta(min_length=1, max_length=MAX_WORTH_SIZES)]
