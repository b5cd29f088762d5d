"""Bounds of what agents and clients may send.

They may be anybody's processes: no number overflows and no text fills the store further in. Bounds
count on arrival only; who makes a message is trusted to make a good one.
"""

from __future__ import annotations

import re
import sys
from typing import Annotated

import msgspec

MAX_NODES = 100_000
"""The most nodes that a job may ask for."""
MOST_AT_ONCE = 256
"""Values of one metric in one message, and nodes that one trial of the network reaches."""
MOST_FAILURES = 4096
"""Workers of one node of which is said at once how they ended."""
MOST_WORTHS = 64
"""Sizes of which a service says at once what they are worth."""
USER_NAME = re.compile(r"\w[\w.@\\+-]{0,254}\$?")
"""A user's login name: of any alphabet, with the marks of directories (ann@corp.example,
CORP\\ann). It begins with no dash, so that no command takes it for an option."""
JOB_ID = re.compile(r"j[0-9]+")
"""The form of a job's id, which no job's name may have."""

_FINITE = msgspec.Meta(ge=-sys.float_info.max, le=sys.float_info.max)
Count = Annotated[int, msgspec.Meta(ge=0, le=2**53)]
"""What every language's numbers hold."""
Code = Annotated[int, msgspec.Meta(ge=-(2**31), le=2**31)]
Rank = Annotated[int, msgspec.Meta(ge=0, le=10_000_000)]
Port = Annotated[int, msgspec.Meta(ge=0, le=65535)]
Amount = Annotated[float, msgspec.Meta(ge=0, le=1e15)]
"""Of samples."""
Moment = Annotated[float, msgspec.Meta(ge=0, le=1e11)]
Duration = Annotated[float, msgspec.Meta(ge=0, le=1e9)]
Number = Annotated[float, _FINITE]
Measurement = float
"""What a script measured: any number, NaN and infinity too."""
Id = Annotated[str, msgspec.Meta(max_length=64)]
Name = Annotated[str, msgspec.Meta(max_length=255, pattern=r"\A[^\x00-\x1f\x7f]*\Z")]
"""Of a node, a class of nodes, a host."""
Stream = Annotated[str, msgspec.Meta(pattern=r"\A(rank(0|[1-9][0-9]{0,6})|launcher|service)\Z")]
"""Which log of a job on one node."""
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
"""Named facts that JSON can hold."""
