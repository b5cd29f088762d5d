"""``malletrain check`` on a PBS: every thing that would not work is a sentence that says what to
change.
"""

import pytest

from scavenger.pbs.job import PbsLeaseOptions
from tests.scavenger.pbs.fake_pbs import QUEUES
from tests.scavenger.pbs.pbs_world import World

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def pbs(tmp_path_factory):
    made = World(tmp_path_factory.mktemp("pbs"), hosts=2)
    yield made
    made.pbs.stop()


@pytest.fixture
def site(pbs):
    """The imitated PBS as it was at first."""
    before = pbs.pbs.state()
    yield pbs
    for name in ("qsub", "qdel", "qstat", "qmgr"):
        pbs.pbs.works(name)
    pbs.pbs.edit(
        lambda state: state.update(
            {key: before[key] for key in ("queues", "server", "sched", "version", "nodes")}
        )
    )


def troubles(site, **settings):
    return [sentence for works, sentence in site.scavenger(**settings).check() if works is False]


def test_a_good_site(site):
    findings = site.scavenger(needed_grace_s=7.0).check()
    assert all(works is not False for works, _ in findings), findings
    [look] = [sentence for works, sentence in findings if works is None]
    assert look.startswith("Jobs of workq do not preempt leases")
    assert "time_limit in [scheduler.pbs] (43200 s)" in look
    text = " ".join(sentence for _, sentence in findings)
    for words in (
        "PBS 23.06.06",
        "Priority 10",
        "expressq preempt those of preemptable",
        "a preempted job is deleted",
        "8 s to leave",
        "workq do not preempt",
        "2 hosts",
        "submitted and deleted",
    ):
        assert words in text
    assert not site.pbs.leases(), "the job on trial is gone"


@pytest.mark.parametrize(
    ("shape", "words"),
    [
        ("array", "All subjobs of a PBS job array have the same select statement"),
        ("block", "When PBS preempts a job, only its first host gets SIGTERM"),
    ],
)
def test_shapes_that_pbs_has_not(site, shape, words):
    [sentence] = troubles(site, shape=shape)
    assert words in sentence
    assert 'set lease_shape = "single" in [scheduler.pbs]' in sentence


def queue(**changes):
    return lambda state: state["queues"]["preemptable"].update(changes)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda s: s.update(version="14.1.0"), "is older than 18.1"),
        (lambda s: s["server"].update(scheduling="False"), "set server scheduling = True"),
        (lambda s: s["queues"].pop("preemptable"), "no queue preemptable; set queue"),
        (queue(enabled="False"), "set queue preemptable enabled = True"),
        (queue(started="False"), "set queue preemptable started = True"),
        (queue(from_route_only="True"), "routing queue only"),
        (queue(kill_delay=2), "set queue preemptable kill_delay = 7"),
        (queue(Priority=160), "an express queue whose jobs preempt others"),
        (
            queue(resources_max={"walltime": "00:00:30"}),
            "takes jobs of 30 s at most, and the shortest lease has 60 s: none could start",
        ),
        (queue(default_chunk={"Qlist": "lost"}), "No node of PBS takes jobs of queue preemptable"),
        (lambda s: s["queues"]["expressq"].update(Priority=100), "No queue preempts preemptable"),
        (
            lambda s: s["sched"].update(preempt_prio="normal_jobs"),
            "before normal_jobs, so leases would keep others waiting; run qmgr -c 'set sched "
            'preempt_prio = "express_queue, normal_jobs"\', or set mode = "backfill"',
        ),
        (
            lambda s: s["sched"].update(preempt_prio='"normal_jobs, express_queue"'),
            "(normal_jobs, express_queue) does not name express_queue before normal_jobs, so "
            "leases would keep others waiting and preempt jobs of express queues",
        ),
    ],
)
def test_what_would_not_work(site, change, words):
    site.pbs.edit(change)
    findings = troubles(site, needed_grace_s=7.0)
    assert any(words in sentence for sentence in findings), findings


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            lambda s: s["sched"].update(preempt_order="SCR"),
            "suspended: they get no signal and keep their memory",
        ),
        (lambda s: s["server"].update(query_other_jobs="False"), "query_other_jobs = True"),
        (queue(resources_min={"walltime": "00:10:00"}), 'time_min in [scheduler.pbs] to "600 s"'),
    ],
)
def test_what_works_with_a_warning(site, change, words):
    site.pbs.edit(change)
    findings = site.scavenger().check()
    assert any(works and words in sentence for works, sentence in findings), findings


def test_preemption_of_leases_that_exceed_a_limit_is_told(site):
    """Such a site limits the leases' queue softly; with the next order jobs of an express queue
    pass all levels.
    """
    site.pbs.edit(lambda s: s["sched"].update(preempt_prio='"normal_jobs, queue_softlimits"'))
    assert not troubles(site)
    words = "expressq preempt only those leases that exceed a soft limit or their fairshare"
    assert any(works is None and words in sentence for works, sentence in site.scavenger().check())
    site.pbs.edit(lambda s: s["queues"]["expressq"].update(Priority=1001))
    site.pbs.edit(lambda s: s["sched"].update(preempt_prio='"normal_jobs, express_queue"'))
    assert not [s for works, s in site.scavenger().check() if not works and "preempt_prio" in s]


@pytest.mark.parametrize(
    ("limits", "most", "works", "words"),
    [
        ({"max_run": "[u:PBS_GENERIC=2]"}, 2, False, "allows one user 2 jobs (max_run of queue"),
        (
            {"max_run": "[u:PBS_GENERIC=0]"},
            0,
            False,
            "max_run of queue preemptable is 0, so that no",
        ),
        # As in qstat's JSON: max_queued_res stands behind max_run_res.
        (
            {"max_run_res": {"ncpus": "[u:PBS_GENERIC=8],[o:PBS_ALL=6],[u:PBS_GENERIC=5]"}},
            0,
            True,
            "allows one user 2 jobs (max_run_res.ncpus of queue preemptable: 5, of which a lease "
            "takes 2 or more)",
        ),
        ({"max_run_res": {"ncpus": "[u:PBS_GENERIC=5],[u:pbsuser=9]"}}, 3, True, "take 3 of them"),
        ({"max_run_res": {"ncpus": "[u:PBS_GENERIC=1]"}}, 0, False, "No lease can run: a limit"),
    ],
)
def test_limits_on_a_users_jobs(site, limits, most, works, words):
    site.pbs.edit(queue(**limits))
    findings = site.scavenger(max_leases_per_user=most).check()
    assert any(worked is works and words in sentence for worked, sentence in findings), findings


@pytest.mark.parametrize("limit", ["[o:PBS_ALL=1]", "[g:users=1]", "[u:PBS_GENERIC=4gb]"])
def test_limits_that_are_not_on_a_users_leases(site, limit):
    site.pbs.edit(queue(max_run_res={"mem": limit, "ncpus": limit}))
    assert not [s for _, s in site.scavenger().check() if "max_run_res" in s]


@pytest.mark.parametrize(
    ("order", "suspended", "checkpointed"),
    [
        ("C", False, True),
        ("C 50 D", False, True),
        ("CD", False, False),
        ("CS", True, False),
        ("RS", True, False),
        ("DS", False, False),
        ("CR", False, False),
    ],
)
def test_how_leases_are_preempted_is_told(site, order, suspended, checkpointed):
    """A lease cannot be checkpointed without a script of the site, nor requeued if it is not
    rerunnable: PBS goes on to the next letter, if there is one.
    """
    site.pbs.edit(lambda s: s["sched"].update(preempt_order=order))
    findings = site.scavenger().check()
    assert any("leases are suspended" in words for _, words in findings) == suspended
    assert any("by checkpointing only" in words for _, words in findings) == checkpointed
    without_script = any("Without a checkpoint_abort script" in words for _, words in findings)
    assert without_script == (order == "CS")
    assert not [words for works, words in findings if works is False and "preempt_order" in words]


def test_of_several_express_queues_those_that_preempt_no_leases_are_told(site):
    """The Priority of a queue counts besides its level, which is 1000 above the next one."""

    def change(state):
        state["sched"].update(preempt_prio='"normal_jobs, express_queue"')
        state["queues"]["urgent"] = {**state["queues"]["expressq"], "Priority": 1024}

    site.pbs.edit(change)
    findings = site.scavenger().check()
    assert any(
        works is None and words.startswith("Jobs of expressq do not preempt leases, and may")
        for works, words in findings
    ), findings
    assert any(
        works and words.startswith("Jobs of urgent preempt those of preemptable")
        for works, words in findings
    ), findings
    assert not [
        words for _, words in findings if "Priority is below" in words and "expressq" in words
    ]


@pytest.mark.parametrize("order", ["R", "R 50 D"])
def test_leases_that_could_not_be_preempted(site, order):
    site.pbs.edit(lambda s: s["sched"].update(preempt_order=order))
    assert (
        "so leases would not be preempted then"
        in troubles(site, lease=PbsLeaseOptions(queue="preemptable", rerunnable="no"))[0]
    )


def test_a_refused_submission_is_told_in_pbss_words(site):
    site.tools.fails("qsub", "qsub: Unauthorized Request")
    [sentence] = troubles(site)
    assert "Unauthorized Request" in sentence
    assert "[scheduler.pbs]" in sentence
    site.pbs.works("qsub")
    site.tools.fails("qdel", "qdel: Unauthorized Request")
    [sentence] = troubles(site)
    assert "not deleted" in sentence
    site.pbs.works("qdel")


def test_a_pbs_that_does_not_answer(site):
    site.tools.fails(
        "qstat", "Connection refused\nqstat: cannot connect to server pbs0 (errno=111)"
    )
    [sentence] = troubles(site)
    assert "PBS cannot be asked" in sentence
    assert "cannot connect to server" in sentence


def test_no_queue_is_named(site):
    assert "set queue in [scheduler.pbs] to one of" in troubles(site, lease=PbsLeaseOptions())[0]


def test_backfill_mode_needs_no_preemption(site):
    site.pbs.edit(lambda s: s["queues"]["expressq"].update(Priority=100))
    assert troubles(site, backfill=True) == []
    site.pbs.edit(lambda s: s["server"].update(backfill_depth=0))
    assert "backfill_depth" in troubles(site, backfill=True)[0]


def test_the_defaults_do_where_the_scheduler_may_not_be_asked(site):
    site.tools.fails("qmgr", "qmgr: Unauthorized Request")
    findings = site.scavenger().check()
    assert any("by default" in sentence for _, sentence in findings), findings
    assert QUEUES["expressq"]["Priority"] == 200


def test_a_queue_whose_jobs_preempt_no_leases_is_named(site):
    def only_others(state):
        state["queues"]["expressq"]["resources_default"] = {"preempt_targets": "queue=workq"}

    site.pbs.edit(only_others)
    [sentence] = troubles(site, needed_grace_s=7.0)
    assert "Jobs of expressq do not preempt those of preemptable" in sentence
    assert "add queue=preemptable" in sentence
