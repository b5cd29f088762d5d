"""The database of sweeps where several processes open it."""

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest

from malletrain.sweep.ledger import MAX_STEP, Ledger, open_storage, summaries
from malletrain.sweep.spec import SweepError
from tests import postgres
from tests.malletrain.sweep.sweep_world import described

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


def test_postgresql_refuses_a_step_that_its_column_cannot_hold():
    with postgres.running() as server, open_storage(server.url) as storage:
        ledger = Ledger.create(storage, described())
        number = ledger.ask().number
        assert not ledger.report(number, [(MAX_STEP, 0.5)], judge=False)
        with pytest.raises(SweepError, match="reports step 2,147,483,648, but this database"):
            ledger.report(number, [(MAX_STEP + 1, 0.5)], judge=False)


def test_sqlite_stores_steps_of_any_size(tmp_path):
    with open_storage(f"sqlite:///{tmp_path}/sweeps.db") as storage:
        ledger = Ledger.create(storage, described())
        number = ledger.ask().number
        assert not ledger.report(number, [(10 * MAX_STEP, 0.5)], judge=False)
        assert ledger.trials()[0].intermediate_values == {10 * MAX_STEP: 0.5}
