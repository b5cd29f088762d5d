"""The database of sweeps where several processes open it."""

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest

from malletrain.sweep.ledger import open_storage, summaries
from malletrain.sweep.spec import SweepError

pytestmark = pytest.mark.slow


def test_sweeps_that_begin_at_one_time_may_make_the_database_together(tmp_path):
    many = 8
    for n in range(5):
        together = Barrier(many)

        def begin(url=f"sqlite:///{tmp_path}/{n}.db", together=together):
            together.wait()
            with open_storage(url) as storage:
                return summaries(storage)

        with ThreadPoolExecutor(many) as pool:
            begun = [pool.submit(begin) for _ in range(many)]
            assert [each.result() for each in begun] == [[]] * many
    assert sorted(p.name for p in tmp_path.iterdir()) == [f"{n}.db" for n in range(5)]


@pytest.mark.parametrize(
    "url",
    [
        "postgres://ann:s3cret@db/m",
        "postgresql://ann:s3cret@db:port/m",
        "postgresql+psycopg://ann@/m?host=/nowhere&password=s3cret",
    ],
)
def test_a_database_that_cannot_be_opened_is_told_without_its_password(url):
    with (
        pytest.raises(SweepError, match=r"sweeps .* cannot be") as refused,
        open_storage(url),
    ):
        pass
    assert "s3cret" not in str(refused.value)
