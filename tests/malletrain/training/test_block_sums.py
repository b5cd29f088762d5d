"""Check sums of blocks: of any file, any part is read as it was written or not at all."""

import itertools
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from malletrain.training.snapshot_file import (
    MAX_BLOCKS,
    MIN_BLOCK_BYTES,
    BlockFile,
    BlockSums,
    block_of,
    sums_of,
)


class WrongError(Exception):
    pass


@given(size=st.integers(0, 1 << 45))
def test_blocks_are_few_and_small(size):
    block = block_of(size)
    assert block >= MIN_BLOCK_BYTES
    assert block.bit_count() == 1
    assert -(-size // block) <= MAX_BLOCKS
    assert block == MIN_BLOCK_BYTES or size / (block / 2) > MAX_BLOCKS


def test_the_sums_are_those_of_the_blocks_and_of_all(tmp_path):
    path, data = tmp_path / "x", bytes(n % 251 for n in range(3 * MIN_BLOCK_BYTES + 5))
    path.write_bytes(data)
    size, total, (block, sums) = sums_of(str(path))
    assert (size, total, block) == (len(data), zlib.crc32(data), MIN_BLOCK_BYTES)
    parts = [data[at : at + block] for at in range(0, size, block)]
    assert sums == b"".join(zlib.crc32(part).to_bytes(4, "little") for part in parts)


@given(data=st.data(), blocks=st.booleans())
def test_parts_are_read_and_no_block_twice(tmp_path_factory, data, blocks):
    path = tmp_path_factory.getbasetemp() / "parts"
    content = bytes(n * 7 % 253 for n in range(data.draw(st.integers(1, 6 * MIN_BLOCK_BYTES))))
    path.write_bytes(content)
    block_sums = sums_of(str(path))[2] if blocks else None
    ends = sorted(data.draw(st.lists(st.integers(0, len(content)), min_size=2, max_size=9)))
    with BlockFile(str(path), block_sums, WrongError) as file:
        for first, end in itertools.pairwise(ends):
            assert bytes(file.read(first, end - first)) == content[first:end]
        if blocks:
            assert file.bytes_read <= len(content)
        else:
            assert file.bytes_read == ends[-1] - ends[0]


def test_more_than_there_is_and_more_than_is_known_is_not_read(tmp_path):
    path = tmp_path / "x"
    path.write_bytes(bytes(MIN_BLOCK_BYTES + 1))
    block_sums = sums_of(str(path))[2]
    with BlockFile(str(path), block_sums, WrongError) as file, pytest.raises(WrongError):
        file.read(MIN_BLOCK_BYTES, 2)
    fewer = BlockSums(block_sums.block, block_sums.sums[:4])
    with BlockFile(str(path), fewer, WrongError) as file, pytest.raises(WrongError):
        file.read(MIN_BLOCK_BYTES, 1)
