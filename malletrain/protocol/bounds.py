"""The base of all messages, and the bounds of what agents and clients may send.

The messages are in :mod:`malletrain.protocol.messages`. Their senders may be any user's processes,
so the bounds ensure that no number overflows and no text fills the store. They are checked only
when a message arrives, not when it is built.
"""

from __future__ import annotations

import re
import sys
from typing import Annotated

import msgspec


class Message(
    msgspec.Struct,
    frozen=True,
    tag_field="type",
    tag=str.lower,
    forbid_unknown_fields=True,
    omit_defaults=True,
):
    """Base of all messages; the tag is the class name in lower case."""


MAX_NODES = 100_000
"""Maximum number of nodes of a job."""
MAX_PROCESSES = 4096
"""Maximum number of processes of a job on one node, and of threads of one process."""
MAX_ITEMS = 256
"""Maximum number of values of one metric in a message, and of nodes in one network probe."""
MAX_FAILURES = 4096
"""Maximum number of failed workers of one node in a message."""
MAX_WORTH_SIZES = 64
"""Maximum number of sizes for which a service states a value in one message."""
USER_NAME = re.compile(r"\w[\w.@\\+-]{0,254}\$?")
"""A user's login name: in any alphabet, with the separators of directory services
(ann@corp.example, CORP\\ann). It does not begin with a dash, so that no command takes it for an
option."""
JOB_ID = re.compile(r"j[0-9]+")
"""The form of a job's id, which no job's name may have."""

_FINITE = msgspec.Meta(ge=-sys.float_info.max, le=sys.float_info.max)
Count = Annotated[int, msgspec.Meta(ge=0, le=2**53)]
"""A count; up to 2**53, which the number types of all languages can hold."""
Code = Annotated[int, msgspec.Meta(ge=-(2**31), le=2**31)]
Rank = Annotated[int, msgspec.Meta(ge=0, le=10_000_000)]
Port = Annotated[int, msgspec.Meta(ge=0, le=65535)]
Amount = Annotated[float, msgspec.Meta(ge=0, le=1e15)]
"""A number of samples."""
EpochSeconds = Annotated[float, msgspec.Meta(ge=0, le=1e11)]
Duration = Annotated[float, msgspec.Meta(ge=0, le=1e9)]
Number = Annotated[float, _FINITE]
MetricValue = float
"""A value that a script measured: any number, including NaN and infinity."""
Id = Annotated[str, msgspec.Meta(max_length=64)]
Name = Annotated[str, msgspec.Meta(max_length=255, pattern=r"\A[^\x00-\x1f\x7f]*\Z")]
"""Name of a node, a node class or a host."""
Stream = Annotated[str, msgspec.Meta(pattern=r"\A(rank(0|[1-9][0-9]{0,6})|launcher|service)\Z")]
"""Name of one log of a job on one node."""
Sentence = Annotated[str, msgspec.Meta(max_length=8192)]
Tail = Annotated[str, msgspec.Meta(max_length=64 * 1024)]
"""The last lines of a log."""
Fact = (
    Annotated[str, msgspec.Meta(max_length=8192)]
    | Annotated[int, msgspec.Meta(ge=-(2**53), le=2**53)]
    | Number
    | bool
    | None
)
Facts = Annotated[dict[Id, Fact], msgspec.Meta(max_length=64)]
"""Named facts that JSON can represent."""
