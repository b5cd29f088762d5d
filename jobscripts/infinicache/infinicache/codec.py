"""Reed-Solomon coding of objects: cuts an object into stripes and chunks, computes parity, and
rebuilds missing chunks.

A stripe of ``n`` bytes is cut into d data chunks of ``ceil(n / d)`` bytes (the last ones padded
with zeros) and p parity chunks of the same length. Any d of the d+p chunks determine the stripe.
Pure: no sockets.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from infinicache import isal
from infinicache.isal import Buffer

MIB = 1 << 20
STRIPE_BYTES = 64 * MIB
"""Maximum size of a stripe, bytes. A stream needs the memory of a few stripes."""


@dataclass(frozen=True)
class Code:
    """A code with ``d`` data chunks and ``p`` parity chunks: any ``d`` of the ``d + p`` suffice."""

    d: int
    p: int

    def __post_init__(self) -> None:
        if not (self.d >= 1 and self.p >= 0 and self.n <= 128):
            raise ValueError(
                f"A ({self.d}+{self.p}) code is not possible; give d >= 1, p >= 0 and d + p <= 128."
            )

    @property
    def n(self) -> int:
        """Number of all chunks."""
        return self.d + self.p

    def __str__(self) -> str:
        return f"({self.d}+{self.p})"


SMALL, MEDIUM, DEFAULT, LARGE = Code(1, 2), Code(4, 2), Code(10, 2), Code(20, 4)
CODES_BY_SIZE = ((64 << 10, SMALL), (MIB, MEDIUM), (256 * MIB, DEFAULT))
"""(upper limit of the size in bytes, code). Small objects gain nothing from many chunks."""


def code_for(size: int) -> Code:
    """Return the code of an object of ``size`` bytes if the user names none."""
    return next((code for below, code in CODES_BY_SIZE if size < below), LARGE)


def fit(target: Code, nodes: int) -> Code:
    """Return the code that a pool of ``nodes`` nodes can hold with one chunk per node: ``target``
    if it fits, else one with fewer data chunks, and with less parity if that is not enough.
    """
    if nodes >= target.n:
        return target
    p = min(target.p, max(0, nodes - 1))
    return Code(max(1, min(target.d, nodes - p)), p)


def chunk_bytes(stripe: int, d: int) -> int:
    """Return the size of each chunk of a stripe of ``stripe`` bytes, bytes."""
    return -(-stripe // d)


def stripes(size: int, stripe_bytes: int = STRIPE_BYTES) -> list[int]:
    """Return the size of each stripe of an object, bytes. An empty object has one empty stripe."""
    full, rest = divmod(size, stripe_bytes)
    return [stripe_bytes] * full + ([rest] if rest or not full else [])


def encode(data: Buffer, code: Code) -> list[memoryview]:
    """Return the n chunks of a stripe. Data chunks are views of ``data`` except the padded ones;
    parity chunks are new.
    """
    view = memoryview(data).cast("B")
    length = chunk_bytes(len(view), code.d)
    chunks: list[memoryview] = []
    for i in range(code.d):
        part = view[i * length : (i + 1) * length]
        if len(part) < length:
            padded = bytearray(length)
            padded[: len(part)] = part
            part = memoryview(padded)
        chunks.append(part)
    if not code.p or not length:
        return chunks + [memoryview(b"")] * code.p
    parity = [memoryview(bytearray(length)) for _ in range(code.p)]
    isal.combine(isal.matrix(code.d, code.p)[code.d * code.d :], chunks, parity)
    return chunks + parity


def rebuild(
    chunks: Mapping[int, Buffer], want: Sequence[int], into: Sequence[Buffer], code: Code
) -> None:
    """Rebuild chunks from any d of ``chunks``.

    Args:
        chunks: index → content of the available chunks.
        want: indices of the chunks to rebuild.
        into: a buffer for each of them.
        code: the code of the object.

    Raises:
        ValueError: there are fewer than d chunks.
    """
    if len(chunks) < code.d:
        raise ValueError(f"{len(chunks)} chunks of a {code} code are too few; {code.d} are needed.")
    if not want or not len(into[0]):
        return
    have = tuple(sorted(chunks)[: code.d])
    isal.combine(isal.rows_from(code.d, code.p, have, tuple(want)), [chunks[i] for i in have], into)
