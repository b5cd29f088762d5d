"""Which jobs are asked for after which news."""

from malletrain.api.following import Endings
from tests.malletrain.cli.fake_daemon import event_view, job_view


def over(seq, job):
    return event_view(seq, "job-completed", job=job)


def test_a_job_is_asked_for_again_until_its_state_is_known():
    """News are read once. If the daemon goes away before it says the state, they are not lost."""
    endings = Endings(["j1", "j2"])
    assert endings.receive([over(7, "j9")]) == ["j1", "j2"]
    endings.update(job_view(id="j1"))
    endings.update(job_view(id="j2"))
    assert endings.request(5.0).params["since"] == 7
    assert endings.receive([over(8, "j1"), over(9, "j2")]) == ["j1", "j2"]
    endings.update(job_view(id="j1", state="completed"))  # the daemon was away for j2
    assert (endings.request(5.0).params["since"], endings.request(5.0).wait_s) == (9, 0.0)
    assert endings.receive([]) == ["j2"]
    endings.update(job_view(id="j2", state="completed"))
    assert not endings.waiting


def test_after_a_restart_every_job_is_asked_for():
    """A restored database counts its events from an older number on."""
    endings = Endings(["j1"])
    endings.receive([over(5000, "j9")])
    endings.update(job_view(id="j1"))
    endings.restart()
    assert endings.request(5.0).params["since"] == -1
    assert endings.receive([over(40, "j1")]) == ["j1"]
    assert endings.request(5.0).params["since"] == 40


def test_a_job_that_is_added_is_asked_for_without_news():
    endings = Endings(())
    endings.receive([over(3, "j1")])
    endings.add("j1")
    assert endings.request(5.0).wait_s == 0.0
    assert endings.receive([]) == ["j1"]
    endings.drop("j1")
    assert not endings.waiting
    assert endings.receive([]) == []
