"""Jobs that wait at a limit against which leases count."""

import pytest

from scavenger.batch.check import job_limit
from scavenger.slurm.job import SlurmLeaseOptions, split_by_lease
from scavenger.slurm.limits import MAX_YIELD_S, START_WAIT_S, YIELD_PAUSE_S, LimitWatch, at_limit
from scavenger.slurm.parse import read_jobs
from tests.scavenger.slurm import slurm_world as world

PREFIX = "malletrain-t-"
OURS = "".join(
    world.job("RUNNING", 10 + k, f"{PREFIX}l{k}", user=user, account=account, nodes=f"n{k}")
    for k, (user, account) in enumerate((("me", "phys"), ("me", "phys"), ("ann", "chem")), 1)
)


def answer(reason, *, user="me", account="phys", count=1, owner="me", **options):
    line = world.job("PENDING", 1, "big", user=user, account=account, count=count, reason=reason)
    jobs = read_jobs(line + OURS, "MARK", PREFIX)
    own = {job.name[len(PREFIX) :]: job for job in jobs.ours}
    return at_limit(jobs.pending, own, SlurmLeaseOptions(**options), owner)


@pytest.mark.parametrize(("count", "leave"), [(1, ["l1"]), (2, ["l1", "l3"]), (5, ["l1", "l3"])])
def test_the_slots_of_a_host_count_as_the_one_job_that_they_are(count, leave):
    """The ender of leases has the others leave with the first."""
    lines = [
        world.job("PENDING", 1, "big", account="phys", count=count, reason="AssocMaxJobsLimit")
    ]
    lines += [
        world.job(
            "RUNNING", 70 + host, f"{PREFIX}l{first}-{first + 1}", account="phys", nodes=f"n{host}"
        )
        for host, first in ((1, 1), (2, 3))
    ]
    jobs = read_jobs("".join(lines), "MARK", PREFIX)
    slots = {f"l{n}": f"n{host}/gpu.{n}" for host, ns in ((1, (1, 2)), (2, (3, 4))) for n in ns}
    parts = split_by_lease(jobs.ours, PREFIX, slots.get, {"me"})
    own = {job.name[len(PREFIX) :]: job for job in parts}
    assert own.keys() == slots.keys()
    assert at_limit(jobs.pending, own, SlurmLeaseOptions(), "me").needed_leases == {"1": leave}


def test_the_nodes_of_a_block_count_each():
    block = world.job("RUNNING", 70, f"{PREFIX}l1-5", account="phys", nodes="n[1-5]", batch="n1")
    lines = [
        world.job("PENDING", n, "big", account="phys", count=count, reason="AssocGrpNodeLimit")
        for n, count in ((1, 3), (2, 2))
    ]
    jobs = read_jobs("".join([*lines, block]), "MARK", PREFIX)
    nodes = {f"l{n}": f"n{n}" for n in range(1, 6)}
    own = {
        job.name[len(PREFIX) :]: job for job in split_by_lease(jobs.ours, PREFIX, nodes.get, {"me"})
    }
    demand = at_limit(jobs.pending, own, SlurmLeaseOptions(), "me")
    assert demand.needed_leases == {"1": ["l1", "l2", "l3"], "2": ["l4", "l5"]}


@pytest.mark.parametrize(
    ("reason", "more", "leave"),
    [
        ("AssocGrpNodeLimit", {}, ["l1"]),
        ("AssocGrpNodeLimit", {"count": 5}, ["l1", "l2"]),
        ("AssocGrpCpuLimit", {"user": "bob"}, ["l1"]),
        ("AssocGrpCPUMinutesLimit", {}, []),
        ("AssocGrpCPURunMinutesLimit", {}, ["l1"]),
        ("AssocGrpWallLimit", {}, []),
        ("AssocMaxNodePerJobLimit", {}, []),
        ("AssocMaxWallDurationPerJobLimit", {}, []),
        ("QOSMaxNodePerJobLimit", {}, []),
        ("QOSMaxNodePerUserLimit", {}, ["l1"]),
        ("QOSGrpGRESMinutes", {}, []),
        ("QOSGrpWallLimit", {}, []),
        ("AssocGrpJobsLimit", {"account": "chem", "user": "bob"}, ["l3"]),
        ("AssocMaxJobsLimit", {}, ["l1"]),
        ("AssocMaxJobsLimit", {"user": "bob"}, []),
        ("AssocMaxJobsLimit", {"user": "ann", "account": "phys"}, []),
        ("QOSMaxJobsPerUserLimit", {}, ["l1"]),
        ("QOSMaxJobsPerUserLimit", {"qos": "low"}, []),
        ("QOSGrpNodeLimit", {}, ["l1"]),
        ("QOSGrpNodeLimit", {"qos": "low"}, []),
        ("Resources", {}, []),
        ("Priority", {}, []),
        ("Dependency", {}, []),
        ("JobHeldUser", {}, []),
    ],
)
def test_leases_that_count_against_the_limit_leave_as_many_as_the_job_has_nodes(
    reason, more, leave
):
    result = answer(reason, **more)
    assert result.needed_leases == ({"1": leave} if leave else {})


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ({}, True),
        ({"user": "bob"}, False),  # of which account our leases will be is not known
        ({"user": "bob", "options": "phys"}, True),
        ({"owner": ""}, False),
    ],
)
def test_no_lease_is_asked_for_while_a_job_waits_at_its_limit(more, expected):
    account = {"account": more.pop("options")} if "options" in more else {}
    line = world.job(
        "PENDING", 1, "big", account="phys", reason="AssocGrpNodeLimit", user=more.get("user", "me")
    )
    jobs = read_jobs(line, "MARK", PREFIX)
    result = at_limit(jobs.pending, {}, SlurmLeaseOptions(**account), more.get("owner", "me"))
    assert bool(result.hold) is expected


class Queue:
    """What a watch says of a queue, at a time."""

    def __init__(self):
        self.watch = LimitWatch()

    def look(self, now, *waiting, running=(1, 2), reason="AssocGrpNodeLimit", count=1):
        lines = "".join(
            world.job("PENDING", job, "big", user="me", account="phys", reason=reason, count=count)
            for job in waiting
        ) + "".join(
            world.job("RUNNING", 10 + k, f"{PREFIX}l{k}", user="me", account="phys", nodes=f"n{k}")
            for k in running
        )
        jobs = read_jobs(lines, "MARK", PREFIX)
        own = {job.name[len(PREFIX) :]: job for job in jobs.ours}
        result = self.watch.update(
            jobs.pending, own, SlurmLeaseOptions(account="phys"), "me", float(now)
        )
        return bool(result.hold), result.needed_leases


def test_a_job_that_gets_no_further_although_leases_left_holds_them_off_for_a_while_only():
    queue = Queue()
    assert queue.look(0, 1) == (True, {"1": ["l1"]})
    assert queue.look(MAX_YIELD_S - 1, 1, running=()) == (True, {})
    assert queue.look(MAX_YIELD_S, 1, running=()) == (False, {})
    assert queue.look(MAX_YIELD_S + YIELD_PAUSE_S - 1, 1) == (False, {}), "leases are taken again"
    assert queue.look(MAX_YIELD_S + YIELD_PAUSE_S, 1) == (True, {"1": ["l1"]}), "and leave again"


def test_another_job_at_a_limit_where_none_gets_on_is_not_believed_for_longer():
    queue = Queue()
    for now in range(0, int(MAX_YIELD_S), 50):  # a new one every time
        assert queue.look(now, *range(1, 3 + now // 50), running=())[0]
    assert queue.look(MAX_YIELD_S, *range(1, 20), running=()) == (False, {})


def test_as_long_as_jobs_get_on_the_limit_is_believed():
    queue = Queue()
    for now in range(0, int(MAX_YIELD_S * 5), 300):  # one starts every five minutes
        waiting = range(1 + now // 300, 100)
        assert queue.look(now, *waiting, running=())[0]
    assert queue.look(now + MAX_YIELD_S, *waiting, running=()) == (False, {})


def test_no_more_leases_leave_than_the_job_has_nodes_before_it_has_had_a_turn():
    queue, every = Queue(), (1, 2, 3, 4, 5)
    assert queue.look(0, 1, count=2, running=every)[1] == {"1": ["l1", "l2"]}
    assert queue.look(5, 1, count=2, running=every[1:])[1] == {"1": ["l2"]}
    assert queue.look(10, 1, count=2, running=every[2:]) == (True, {})
    assert queue.look(4 + START_WAIT_S, 1, count=2, running=every[2:]) == (True, {})
    assert queue.look(5 + START_WAIT_S, 1, count=2, running=every[2:])[1] == {"1": ["l3", "l4"]}


def test_leases_are_told_to_leave_once_the_job_has_waited_for_a_moment(tmp_path):
    slurm = world.World(tmp_path)
    options = SlurmLeaseOptions(partition="preemptable", leave_at_limits=True)
    one = slurm.ready(lease=options)
    lease = world.job("RUNNING", 9, f"{PREFIX}l1", nodes="n1", end=slurm.now + 3600, account="phys")
    main = world.job("PENDING", 4, "main", reason="AssocGrpNodeLimit", account="phys")
    slurm.nodes(idle="n[2-8]", allocated="n1")
    slurm.queue(lease, main)
    polled = one.poll()
    assert polled.gaps == ()
    assert "waits for AssocGrpNodeLimit" in next(
        sentence
        for e in polled.explanations
        if e.node == "n3"
        for rule, passed, sentence in e.rules
        if rule == "hold"
    )
    assert slurm.tools.calls("scancel") == []
    slurm.now += 3
    polled = one.poll()
    assert slurm.tools.calls("scancel") == ["scancel --signal=TERM --batch 9"]
    assert [polled_lease.reason for polled_lease in polled.leases] == [
        "job 4 waits at a limit against which it counts"
    ]
    slurm.queue(lease)
    slurm.now += 20
    assert len(one.poll().gaps) == 7
    careless = slurm.ready(lease=SlurmLeaseOptions(partition="preemptable"))
    slurm.queue(lease, main)
    assert len(careless.poll().gaps) == 7, "where the site does not say so, nothing changes"


@pytest.mark.parametrize(
    ("ours", "works", "words"),
    [
        (0, True, "set max_leases_per_user in [scheduler.slurm] to leave room"),
        (20, True, "leases take 20 of them at most"),
        (50, False, "set max_leases_per_user in [scheduler.slurm] below 50"),
        (80, False, "max_leases_per_user is 80"),
    ],
)
def test_what_check_says_of_a_limit(ours, works, words):
    [(ok, sentence)] = job_limit("Slurm", "MaxJobs of x", 50, ours, "scheduler.slurm")
    assert (ok, words in sentence) == (works, True), sentence


def test_a_limit_of_no_jobs_lets_no_lease_start():
    """There is no number of leases below it."""
    for leases in (0, 20):
        [(works, sentence)] = job_limit("Slurm", "MaxJobs of x", 0, leases, "scheduler.slurm")
        assert not works
        assert sentence.startswith("MaxJobs of x is 0, so that no lease can start; raise it,")


ASSOC = """\
||root||||200||node=10
me|||40|100|node=0|||
ann|||7|||||
"""
"""Of sacctmgr -nP show assoc, in the order that check asks for."""
ROOT = """\
||||||||cpu=5000
root||||||||
"""


def test_check_reads_the_limits_of_the_association(tmp_path):
    slurm = world.World(tmp_path)
    slurm.file("config", world.CONFIG + "AccountingStorageEnforce = associations,limits,qos\n")
    slurm.tools.runs(
        "sacctmgr",
        'case "$*" in *" user "*) echo phys;; *defaultqos*) ;; *account=root*) cat "$here/root";; '
        '*" assoc "*) cat "$here/assoc";; *) echo "low||3||||||";; esac; exit 0',
    )
    slurm.file("assoc", ASSOC)
    slurm.file("root", ROOT)
    one = slurm.scavenger(max_leases_per_user=40)
    findings = {
        sentence: works
        for works, sentence in one.check()
        if "limit" in sentence or "allows" in sentence or "Max" in sentence
    }
    assert [
        works
        for sentence, works in findings.items()
        if "MaxJobs of the association of me" in sentence
    ] == [False]
    assert [
        works
        for sentence, works in findings.items()
        if "MaxSubmitJobs of the association" in sentence
    ] == [True]
    [shared] = [s for s in findings if "limits of account phys (GrpJobs=200, GrpTRES=node=10)" in s]
    assert findings[shared] is False
    assert "leave_at_limits = true" in shared
    [none] = [s for s in findings if s.startswith("MaxTRESPerJob of the association of me")]
    assert findings[none] is False
    assert "is node=0, so that no lease can start" in none
    parent = "Leases count against the limits of account root, a parent of phys (GrpTRES=cpu=5000)"
    assert [works for s, works in findings.items() if s.startswith(parent)] == [False]
    options = SlurmLeaseOptions(partition="preemptable", qos="low", leave_at_limits=True)
    findings = {s: w for w, s in slurm.scavenger(lease=options, max_leases_per_user=2).check()}
    assert [w for s, w in findings.items() if "MaxSubmitJobsPerUser of QOS low" in s] == [True]
    assert [w for s, w in findings.items() if "they leave for its jobs" in s] == [True]
    assert [w for s, w in findings.items() if s.startswith(parent)] == [None]


@pytest.mark.parametrize(
    ("rows", "names"),
    [
        ("me|||40|||||\n", ["me"]),
        ("me|||40|||||\nme|preemptable||30|||||\n", ["me for partition preemptable"]),
        ("me|||40|||||\nme|other||30|||||\n", ["me"]),
        ("me|other||30|||||\n", []),
    ],
    ids=["for all partitions", "for the partition of leases", "for another", "none"],
)
def test_the_association_whose_limits_apply_is_named(tmp_path, rows, names):
    slurm = world.World(tmp_path)
    slurm.file("config", world.CONFIG + "AccountingStorageEnforce = associations,limits,qos\n")
    slurm.tools.runs(
        "sacctmgr",
        f"case \"$*\" in *' user '*) echo phys;; *' assoc '*) printf '{rows}';; esac; exit 0",
    )
    findings = [sentence for _, sentence in slurm.scavenger().check() if "(MaxJobs" in sentence]
    assert [s.partition("association of ")[2].partition(")")[0] for s in findings] == names


QOS = """\
low|||cpu=64,node=4|||node=0|||
part||||||node=9|5||
"""
"""Of sacctmgr -nP show qos, in the order that check asks for."""


def test_check_reads_what_the_qos_of_leases_and_of_their_partitions_allow(tmp_path):
    slurm = world.World(tmp_path)
    slurm.file("config", world.CONFIG + "AccountingStorageEnforce = associations,limits,qos\n")
    slurm.file("partitions", world.PARTITIONS.replace("MaxTime=1-", "QoS=part MaxTime=1-"))
    slurm.tools.runs(
        "sacctmgr",
        'case "$*" in *" user "*) echo phys;; *maxtresperuser*) cat "$here/qos";; esac; exit 0',
    )
    slurm.file("qos", QOS)
    options = SlurmLeaseOptions(partition="preemptable", qos="low")
    findings = {s: works for works, s in slurm.scavenger(lease=options).check() if "QOS" in s}
    for words, expected in (
        ("Leases have cpu=64,node=4 at most (MaxTRESPerUser of QOS low)", True),
        ("MaxTRES of QOS low is node=0, so that no lease can start", False),
        ("Leases have 5 jobs at most (GrpJobs of QOS part)", True),
    ):
        assert [works for s, works in findings.items() if words in s] == [expected], findings
