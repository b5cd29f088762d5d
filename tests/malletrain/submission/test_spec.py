"""--data-memory reaches the script as a variable, and only a size does."""

import os

import pytest

from malletrain.protocol.sizes import share_or_size
from malletrain.submission.error import SpecError
from malletrain.submission.spec import with_data_memory, with_umask

GIB = 1 << 30


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("25%", GIB // 4),
        (" 12.5 % ", GIB // 8),
        ("100%", GIB),
        ("8G", 8 * GIB),
        ("512M", GIB // 2),
        ("1.5g", 3 * GIB // 2),
        ("2GiB", 2 * GIB),
        ("4096", 4096),
        (4096, 4096),
        ("1T", 1024 * GIB),
    ],
)
def test_sizes(text, size):
    assert share_or_size(text, GIB) == size


@pytest.mark.parametrize("text", ["", "many", "0%", "101%", "-1", "0", "5 %%", "8X", "nan", 0, -3])
def test_what_is_no_size(text):
    with pytest.raises(ValueError, match="is no size of memory"):
        share_or_size(text, GIB)


def test_the_variable_of_the_job():
    assert with_data_memory({"A": "1"}, "25%") == {"A": "1", "MALLETRAIN_DATA_MEMORY": "25%"}
    assert with_data_memory({"A": "1"}, None) == {"A": "1"}
    with pytest.raises(SpecError, match=r"--data-memory: .*such as 25%"):
        with_data_memory({}, "much")


@pytest.mark.parametrize("mask", ["0022", "0077"])
def test_a_job_has_the_umask_of_its_submission(mask):
    """Also 022, since a lease may have another mask."""
    before = os.umask(int(mask, 8))
    try:
        assert with_umask({"A": "1"}) == {"A": "1", "MALLETRAIN_UMASK": mask}
        assert with_umask({"MALLETRAIN_UMASK": "007"}) == {"MALLETRAIN_UMASK": "007"}
    finally:
        os.umask(before)
