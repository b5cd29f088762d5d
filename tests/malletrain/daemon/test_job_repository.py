from types import SimpleNamespace
from unittest.mock import MagicMock

from malletrain.daemon.jobs.monitor import JobMonitor
from malletrain.daemon.jobs.repository import JobRepository
from malletrain.daemon.jobs.worker_counts import StepWindows
from malletrain.store.records import JobRow, RescaleRow
from malletrain.store.store import Store
from tests.malletrain.daemon.worker_counts import progress, trained


def test_late_counts_outlive_a_restart_of_the_daemon(tmp_path):
    """A node that was cut off sends its 86 samples when the next round has counted 10."""
    store = Store.open(f"sqlite:///{tmp_path}/jobs.db")
    row = store.add_job(JobRow(store.new_job_id(), "x", "ada", "{}", "queued"))
    monitor = JobMonitor(row.id)
    run = SimpleNamespace(row=row, monitor=monitor)
    repository = JobRepository(store, None, None, None)
    monitor.forming(1, ("n1",), 100.0)
    monitor.progress(progress(40, 101.0, generation=1))
    monitor.forming(2, ("n2",), 102.0)
    repository.save(run, generation=2)
    monitor.progress(progress(10, 103.0, generation=2))
    monitor.progress(progress(126, 104.0, generation=1))
    assert monitor.total == 136
    repository.save(run)

    stored_row = store.get_job(row.id)
    again = JobMonitor(row.id, stored_row.samples, stored_row.samples_before, stored_row.generation)
    again.progress(progress(15, 105.0, generation=2))
    assert again.total == 141


def test_what_was_seen_at_a_scale_is_stored(tmp_path):
    store = Store.open(f"sqlite:///{tmp_path}/jobs.db")
    row = store.add_job(JobRow(store.new_job_id(), "x", "ada", "{}", "running"))
    monitor = JobMonitor(row.id)
    end = trained(monitor, 1, 2, 100.0, 30.0, rate=100.0)
    rounds = SimpleNamespace(generation=1)
    run = SimpleNamespace(row=row, monitor=monitor, rounds=rounds, steps=StepWindows())
    JobRepository(store, None, None, None).checkpoint(run, end)
    [stored] = store.observations(row.id)
    seen = monitor.observation()
    assert (stored.nodes, stored.batch) == (2, monitor.batch)
    assert (stored.rate, stored.spread) == (seen.rate, seen.half_width)
    assert (stored.samples, stored.seconds) == (seen.samples, seen.seconds)
    assert (stored.time, stored.step_times) == (end, {})


def test_the_sentence_of_a_loss_blames_no_node_where_a_worker_was_lost():
    audit = MagicMock()
    repository = JobRepository(MagicMock(), None, MagicMock(), audit)
    repository.rescale(RescaleRow("j1", 2, "loss", 3, 3, 100.0, 102.0, 2.0))
    sentence = audit.record.call_args.args[1]
    assert sentence.startswith("From 3 to 3 nodes, because a node or a worker was lost; ")
