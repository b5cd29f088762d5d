import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st
from infinicache import isal
from infinicache.codec import (
    CODES_BY_SIZE,
    LARGE,
    Code,
    chunk_bytes,
    code_for,
    encode,
    fit,
    rebuild,
    stripes,
)


@st.composite
def losses(draw):
    code = Code(draw(st.integers(1, 20)), draw(st.integers(0, 4)))
    lost = draw(st.sets(st.integers(0, code.n - 1), max_size=code.p))
    return code, lost


@given(losses(), st.binary(max_size=3000))
def test_any_d_chunks_make_the_rest(case, data):
    code, lost = case
    chunks = encode(data, code)
    size = chunk_bytes(len(data), code.d)
    assert [len(c) for c in chunks] == [size] * code.n
    assert b"".join(chunks[: code.d])[: len(data)] == data
    made = [bytearray(size) for _ in lost]
    rebuild({i: c for i, c in enumerate(chunks) if i not in lost}, sorted(lost), made, code)
    assert [bytes(m) for m in made] == [bytes(chunks[i]) for i in sorted(lost)]


def test_fewer_chunks_are_refused():
    chunks = encode(b"x" * 100, Code(4, 2))
    with pytest.raises(ValueError, match="too few"):
        rebuild({0: chunks[0], 1: chunks[1], 5: chunks[5]}, [2], [bytearray(25)], Code(4, 2))


def test_the_checksum_is_the_published_one():
    assert (
        isal.crc64(b"123456789") == 0x995DC9BBDF1939FA
    )  # CRC-64/XZ, reveng.sourceforge.io/crc-catalogue
    assert isal.crc64(bytearray(b"123456789")) == isal.crc64(memoryview(b"0123456789")[1:])
    assert zlib.crc32(b"a") != isal.crc64(b"a")


@given(st.integers(0, 10**9), st.integers(1, 10**8))
def test_stripes_cover_the_object(size, limit):
    parts = stripes(size, limit) if size / limit < 1000 else [size]
    assert sum(parts) == size
    assert parts


@given(st.integers(1, 20), st.integers(0, 4), st.integers(1, 40))
def test_a_code_fits_the_pool_or_shrinks(d, p, nodes):
    target = Code(d, p)
    code = fit(target, nodes)
    assert code.n <= nodes
    assert code.p <= target.p
    assert code == target or nodes < target.n
    assert code.p == target.p or nodes <= target.p


def test_codes_by_size():
    assert [code_for(limit - 1) for limit, _ in CODES_BY_SIZE] == [
        code for _, code in CODES_BY_SIZE
    ]
    assert code_for(10**10) == LARGE


@pytest.mark.parametrize(("d", "p"), [(0, 2), (3, -1), (120, 20)])
def test_impossible_codes(d, p):
    with pytest.raises(ValueError, match="not possible"):
        Code(d, p)
