"""Leases that an answer of PBS lacks: whether they have ended is what it remembers of them."""

import pytest

from scavenger.interface import LeaseState, SchedulerError
from scavenger.pbs import scavenger
from tests.scavenger.pbs.pbs_world import request, running, states, worlds

pytestmark = pytest.mark.slow

RUN = LeaseState.RUNNING


@pytest.fixture
def world(tmp_path):
    with worlds(tmp_path) as make:
        yield make


@pytest.fixture
def lacking(world):
    """Two leases that run, and the function that has the usual answers lack those of a set."""
    made = world(hosts=2)
    one = made.scavenger()
    one.poll()
    one.take([request(1, "sleep", "600"), request(2, "sleep", "600")])
    running(made, one, "l1", "l2")
    whole, cut = one.source.read, set()

    def read(prefix, with_running=False):
        nodes, jobs = whole(prefix)
        ours = [job for job in jobs.ours if job.name.removeprefix(prefix) not in cut]
        return nodes, jobs._replace(ours=ours)

    one.source.read = read
    return made, one, cut


def when_asked_of_ended(made, script):
    """``qstat -x`` does this first."""
    usual = (made.tools.root / "qstat.sh").read_text()
    made.tools.runs("qstat", f'case "$*" in -x*) {script};; esac\n{usual}')


@pytest.mark.parametrize("history", ["True", "False"])
def test_a_lease_that_one_answer_lacks_goes_on(lacking, history):
    made, one, cut = lacking
    made.pbs.edit(lambda state: state["server"].update(job_history_enable=history))
    cut.add("l1")
    assert states(one) == {"l1": RUN, "l2": RUN}
    cut.clear()
    assert states(one) == {"l1": RUN, "l2": RUN}


def test_however_many_are_missing_each_is_asked_for(lacking, monkeypatch):
    made, one, cut = lacking
    monkeypatch.setattr(scavenger, "IDS_PER_QUERY", 1)
    cut |= {"l1", "l2"}
    assert states(one) == {"l1": RUN, "l2": RUN}
    assert len(made.tools.calls("qstat -x")) == 2


@pytest.mark.parametrize(
    "silence",
    [
        "kill -9 $$",
        "echo 'qstat: cannot connect to server pbs0 (errno=15010)' >&2; exit 255",
        "echo 'qstat: Unknown Job Id 77777.pbs0' >&2; exit 153",
    ],
)
def test_a_look_that_cannot_tell_what_became_of_a_lease_fails(lacking, silence):
    made, one, cut = lacking
    cut.add("l1")
    when_asked_of_ended(made, silence)
    with pytest.raises(SchedulerError, match="qstat -x"):
        one.poll()
    cut.clear()
    assert states(one) == {"l1": RUN, "l2": RUN}


def test_a_lease_that_a_hook_has_renamed_is_named(lacking):
    made, one, _ = lacking
    [first] = [n for n, job in made.pbs.leases().items() if job["name"].endswith("-l1")]
    made.pbs.edit(lambda state: state["jobs"][first].update(name="ann_malletrain-t-l1"))
    with pytest.raises(SchedulerError) as error:
        one.poll()
    assert f"job {first} has the name ann_malletrain-t-l1" in str(error.value)
    assert "a hook of the site renames jobs" in str(error.value)
    made.pbs.edit(lambda state: state["jobs"][first].update(name="malletrain-t-l1"))
    assert states(one) == {"l1": RUN, "l2": RUN}


@pytest.mark.parametrize("renamed", ["while it runs", "at its end", "by its number"])
def test_a_lease_with_another_name_that_has_ended_is_gone(lacking, renamed):
    """PBS keeps the records of finished jobs for two weeks (job_history_duration). ``by its
    number``: a finished job of another user has the lease's id.
    """
    made, one, _ = lacking
    [first] = [n for n, job in made.pbs.leases().items() if job["name"].endswith("-l1")]
    other = {"name": "theirs", "owner": "bob"} if renamed == "by its number" else {"name": "mine"}
    if renamed == "while it runs":
        made.pbs.edit(lambda state: state["jobs"][first].update(other))
        with pytest.raises(SchedulerError, match="renames jobs"):
            one.poll()
    made.pbs.edit(lambda state: state["jobs"][first].update(delete=True))
    made.pbs.until(lambda: made.pbs.jobs()[first]["state"] == "F", "it has ended")
    made.pbs.edit(lambda state: state["jobs"][first].update(other))
    assert states(one) == {"l1": LeaseState.ENDED, "l2": RUN}
    assert states(one) == {"l2": RUN}


def test_a_lease_that_pbs_does_not_know_any_more_has_ended(lacking):
    made, one, cut = lacking
    cut.add("l1")
    unknown = 'case $i in [0-9]*) echo "qstat: Unknown Job Id $i" >&2;; esac'
    when_asked_of_ended(made, f"for i; do {unknown}; done; exit 153")
    assert states(one) == {"l1": LeaseState.ENDED, "l2": RUN}


def test_without_job_history_a_lease_that_has_ended_is_known_by_its_absence(lacking):
    made, one, _ = lacking
    made.pbs.edit(lambda state: state["server"].update(job_history_enable="False"))
    [first] = [n for n, job in made.pbs.leases().items() if job["name"].endswith("-l1")]
    made.pbs.edit(lambda state: state["jobs"][first].update(delete=True))
    made.pbs.until(lambda: len(made.pbs.leases()) == 1, "one has ended")
    assert states(one) == {"l1": LeaseState.ENDED, "l2": RUN}
