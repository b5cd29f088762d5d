"""What nodes are worth to a service, as its process says while it runs."""

from __future__ import annotations

from typing import Annotated

import msgspec

from malletrain.protocol.bounds import MOST_WORTHS, Amount, Count, Id
from malletrain.protocol.message import Message


class Worth(Message, frozen=True):
    """A service's process says what so many nodes are worth to it from now on, in samples/s."""

    job: Id
    nodes: Annotated[dict[Count, Amount], msgspec.Meta(min_length=1, max_length=MOST_WORTHS)]
