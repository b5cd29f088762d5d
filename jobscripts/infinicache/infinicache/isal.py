"""Calls Intel's ISA-L (https://github.com/intel/isa-l) directly: Reed-Solomon over GF(2^8) and a
CRC, on any buffers, without copies.

The library is part of the wheel of pyeclib, or of the system (Debian: libisal2). pyeclib's own
interface needs the whole object in one piece, copies every fragment and adds a header to it;
therefore it is not used. The calls release the global interpreter lock.
"""

from __future__ import annotations

import ctypes
import ctypes.util
from collections.abc import Sequence
from functools import lru_cache
from importlib import metadata
from typing import Any

_U8P = ctypes.POINTER(ctypes.c_ubyte)
Buffer = bytes | bytearray | memoryview


class NoLibrary(RuntimeError):
    """ISA-L was not found; the message says what to install."""


def _find() -> str:
    try:
        files = metadata.files("pyeclib") or ()
    except metadata.PackageNotFoundError:
        files = ()
    for file in files:
        if file.name.startswith("libisal"):
            return str(file.locate())
    library = ctypes.util.find_library("isal")
    if library is None:
        raise NoLibrary(
            "ISA-L was not found; install it with: pip install pyeclib (or the package libisal2 "
            "of the system)."
        )
    return library


@lru_cache(maxsize=1)
def library() -> Any:
    """Load the library once, and return it. Raises NoLibrary."""
    lib = ctypes.CDLL(_find())
    lib.ec_encode_data.argtypes = [
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_int,
        _U8P,
        ctypes.c_void_p,
        ctypes.c_void_p,
    ]
    lib.ec_encode_data.restype = None
    lib.ec_init_tables.argtypes = [ctypes.c_int, ctypes.c_int, _U8P, _U8P]
    lib.ec_init_tables.restype = None
    lib.gf_gen_cauchy1_matrix.argtypes = [_U8P, ctypes.c_int, ctypes.c_int]
    lib.gf_gen_cauchy1_matrix.restype = None
    lib.gf_invert_matrix.argtypes = [_U8P, _U8P, ctypes.c_int]
    lib.gf_invert_matrix.restype = ctypes.c_int
    lib.gf_mul.argtypes = [ctypes.c_ubyte, ctypes.c_ubyte]
    lib.gf_mul.restype = ctypes.c_ubyte
    lib.crc64_ecma_refl.argtypes = [ctypes.c_uint64, ctypes.c_void_p, ctypes.c_uint64]
    lib.crc64_ecma_refl.restype = ctypes.c_uint64
    return lib


class _PyBuffer(ctypes.Structure):
    _fields_ = [
        ("buf", ctypes.c_void_p),
        ("obj", ctypes.py_object),
        ("len", ctypes.c_ssize_t),
        ("itemsize", ctypes.c_ssize_t),
        ("readonly", ctypes.c_int),
        ("ndim", ctypes.c_int),
        ("format", ctypes.c_char_p),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("suboffsets", ctypes.c_void_p),
        ("internal", ctypes.c_void_p),
    ]


_get_buffer = ctypes.pythonapi.PyObject_GetBuffer
_get_buffer.argtypes = [ctypes.py_object, ctypes.POINTER(_PyBuffer), ctypes.c_int]
_release_buffer = ctypes.pythonapi.PyBuffer_Release
_release_buffer.argtypes = [ctypes.POINTER(_PyBuffer)]


def address(data: Buffer) -> int:
    """Return the address of a contiguous buffer. The caller keeps ``data`` alive. Raises
    BufferError if the buffer is not contiguous.
    """
    view = _PyBuffer()
    _get_buffer(data, ctypes.byref(view), 0)
    try:
        return int(view.buf or 0)
    finally:
        _release_buffer(ctypes.byref(view))


def crc64(data: Buffer) -> int:
    """Return the CRC-64/XZ of a buffer (ECMA-182, reflected)."""
    return int(library().crc64_ecma_refl(0, address(data), len(data)))


@lru_cache(maxsize=64)
def matrix(d: int, p: int) -> bytes:
    """Return the (d+p) x d generator matrix: the identity above a Cauchy matrix. Any d of its rows
    are independent.
    """
    out = (ctypes.c_ubyte * ((d + p) * d))()
    library().gf_gen_cauchy1_matrix(out, d + p, d)
    return bytes(out)


@lru_cache(maxsize=1024)
def rows_from(d: int, p: int, have: tuple[int, ...], want: tuple[int, ...]) -> bytes:
    """Return the len(want) x d matrix that computes the chunks ``want`` from the d chunks
    ``have``.
    """
    lib, full = library(), matrix(d, p)
    chosen = (ctypes.c_ubyte * (d * d)).from_buffer_copy(
        b"".join(full[i * d : (i + 1) * d] for i in have)
    )
    inverse = (ctypes.c_ubyte * (d * d))()
    if lib.gf_invert_matrix(chosen, inverse, d) != 0:
        raise ArithmeticError(f"Chunks {have} of a ({d}+{p}) code do not determine the others.")
    rows = bytearray()
    for i in want:
        if i < d:
            rows += bytes(inverse[i * d : (i + 1) * d])
            continue
        for column in range(d):
            value = 0
            for k in range(d):
                value ^= lib.gf_mul(full[i * d + k], inverse[k * d + column])
            rows.append(value)
    return bytes(rows)


@lru_cache(maxsize=1024)
def _tables(d: int, rows: bytes) -> Any:
    count = len(rows) // d
    tables = (ctypes.c_ubyte * (32 * d * count))()
    library().ec_init_tables(d, count, (ctypes.c_ubyte * len(rows)).from_buffer_copy(rows), tables)
    return tables


def combine(rows: bytes, sources: Sequence[Buffer], targets: Sequence[Buffer]) -> None:
    """Write to each target the linear combination of the sources given by its row of ``rows``. All
    buffers have the same length.
    """
    d, length = len(sources), len(sources[0])
    if len(rows) != d * len(targets) or any(len(b) != length for b in (*sources, *targets)):
        raise ValueError("The buffers of a code have different lengths.")
    source = (ctypes.c_void_p * d)(*(address(b) for b in sources))
    target = (ctypes.c_void_p * len(targets))(*(address(b) for b in targets))
    library().ec_encode_data(length, d, len(targets), _tables(d, rows), source, target)
