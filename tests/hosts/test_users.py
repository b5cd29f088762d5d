"""One daemon for two users, set up as in docs/several-users.md: its own account, sudo with the rule
of that page, MUNGE; and what nobody may do there.
"""

import os
import shutil
import sys
from pathlib import Path

import pytest

from tests.hosts.account import Account
from tests.hosts.bed import FIRST_USER
from tests.hosts.site import HostsSite

pytest.importorskip("torch")

from tests.hosts.exact import Training
from tests.hosts.test_fabric import STRANGER

pytestmark = pytest.mark.sites

PAGE = Path(__file__).parents[2] / "docs/several-users.md"
RULE = "malletrain ALL=(%users) NOPASSWD: /usr/bin/sbatch, /usr/bin/scancel"
ACCOUNT = "useradd --system --home-dir /var/lib/malletrain malletrain"
SUBMIT_AS = 'submit_as = ["sudo", "-n", "-u", "{owner}", "--"]'
GATE_RULE = Path(__file__).parents[2] / "site-configs/sudoers.conf"
GATE = "/usr/local/sbin/malletrain-lease"
GATE_HERE = "/etc/malletrain-lease"
GATED = f'submit_as = ["sudo", "-n", "-u", "{{owner}}", "--", "{GATE_HERE}"]'
ANNOUNCED = "/etc/malletrain/daemon.json"
ANN, BOB = FIRST_USER, FIRST_USER + 1
VARIABLES = {"MALLETRAIN_DAEMON": ANNOUNCED}


@pytest.fixture
def site(hosts):
    """A daemon of its own account, set up by the page, and the users ann and bob."""
    return made(hosts, RULE, SUBMIT_AS)


@pytest.fixture
def gated_site(hosts):
    """The same with malletrain-lease, as on the page except for the paths."""
    return made(hosts, GATE_RULE.read_text().replace(GATE, GATE_HERE), GATED, put_gate)


def put_gate(etc):
    """The program, its rules and the batch script, root's, in the head's own /etc."""
    source = GATE_RULE.parent
    program, rules, script = (etc / name for name in ("malletrain-lease", "gate.conf", "lease.sh"))
    text = (source / "malletrain-lease.py").read_text()
    text = text.replace("/opt/malletrain/bin/python", sys.executable)
    text = text.replace("main(sys.argv[1:])", 'main(sys.argv[1:], Path("/etc/gate.conf"))')
    program.write_text(text.replace("import sys\n", "import sys\nfrom pathlib import Path\n"))
    program.chmod(0o755)
    rules_text = (source / "malletrain-lease.conf").read_text()
    rules_text = rules_text.replace("/opt/malletrain/bin/python", sys.executable)
    rules_text = rules_text.replace("/usr/local/lib/malletrain/lease.sh", "/etc/lease.sh")
    rules.write_text(rules_text.replace("least_uid = 1000", f"least_uid = {ANN}"))
    script.write_text((source.parent / "jobscripts/slurm/lease.sh").read_text())
    for path in (rules, script):
        path.chmod(0o644)


def made(hosts, rule_text, submit_as, more=lambda etc: None):
    if shutil.which("sudo") is None:
        pytest.skip("sudo is not installed; run tests/slurm/install.sh as root")
    page = PAGE.read_text()
    excerpts = (RULE, ACCOUNT, SUBMIT_AS, GATE, ANNOUNCED, "munge = true")
    assert all(line in page for line in excerpts)
    bed = hosts(4, users=("ann", "bob"))
    more(bed.head.folder / "etc")
    rule = bed.head.folder / "etc" / "sudoers.d" / "malletrain"
    rule.write_text(f"{rule_text}\n")
    rule.chmod(0o440)
    bed.head.run(*ACCOUNT.split())
    bed.head.run("install", "--directory", "--owner=malletrain", "/etc/malletrain")
    for node in bed.nodes:
        taken = node.folder / "tmp" / f"malletrain-{ANN}"
        taken.mkdir(mode=0o777)
        os.chown(taken, BOB, -1)
    return HostsSite(
        bed,
        bed.root / "shared",
        "malletrain",
        daemon=f'munge = true\nannounce = "{ANNOUNCED}"',
        slurm=submit_as,
        # what a move costs must not decide: on a busy machine it is much
        allocation='reclaim_every = "1 s"\nt_fwd = "1 h"\nobjective = "efficiency"',
    ).start()


def leases(site):
    """Node → the user whose lease is there."""
    lines = site.bed.head.run("squeue", "-h", "-t", "R", "-o", "%N %u").splitlines()
    return dict(line.split() for line in lines)


@pytest.mark.parametrize("mode", ["restart", "live"])
def test_each_users_processes_are_that_users_on_every_node(site, mode):
    ann, bob = (Account(site.bed, site.bed.home(n), n, VARIABLES) for n in ("ann", "bob"))
    first = Training(ann, mode, "2:4")
    first.trains(4)
    assert leases(site) == dict.fromkeys(("n1", "n2", "n3", "n4"), "ann")
    second = Training(bob, mode, "2:2")
    site.until(lambda: bob.job(second.id)["nodes"], "nodes are reclaimed for bob")
    second.trains(2)
    first.trains(2)
    owners = leases(site)
    for each, uid in ((first, ANN), (second, BOB)):
        user = each.site.user
        mine = [node for node in site.bed.nodes if owners[node.name] == user]
        assert len(mine) == 2
        for node in mine:
            assert set(node.processes(str(each.site.work / "train.py"))) == {uid}
            assert set(node.processes("malletrain.agent")) == {uid}
    [daemon] = site.bed.head.processes("malletrain daemon")
    assert daemon not in (0, ANN, BOB)

    # What is another's cannot be ended, neither by way of MalleTrain nor by Slurm.
    refused = ann.command("cancel", second.id)
    assert refused.returncode == 1
    assert "belongs to bob; only its owner or an operator can" in refused.stderr
    lease = site.bed.head.run("squeue", "-h", "-u", "bob", "-o", "%A").split()[0]
    assert "denied" in ann.shell("scancel", lease).stderr
    second.trains(2)

    # Both end whole, and what ended goes back by the rule's scancel.
    bob_job = second.finish()
    first.trains(4)
    first.finish()
    assert bob_job["tries"] == 0
    assert not first.back() or mode == "restart"
    site.until(lambda: not leases(site), "every lease is given back")


def test_the_rule_lets_the_daemons_account_submit_and_cancel_and_nothing_else(site):
    ann = Account(site.bed, site.bed.home("ann"), "ann", VARIABLES)
    check = site.command("check", "--config", str(site.config))
    trial = "sudo -n -u {owner} -- /usr/bin/sbatch --version"
    assert trial in " ".join((check.stdout + check.stderr).split())
    for user in ("ann", "bob"):
        made = site.shell(*trial.replace("{owner}", user).split())
        assert (made.returncode, made.stdout.split()[0]) == (0, "slurm-wlm")
    beyond = [
        (site, "-u ann -- /bin/sh -c id"),
        (site, "-u ann -- /usr/bin/scontrol --version"),
        (site, "-u ann -- /usr/bin/env /usr/bin/sbatch --version"),
        (site, "-u root -- /usr/bin/sbatch --version"),
        (site, "/usr/bin/scancel --version"),
        (site, "-u munge -- /usr/bin/sbatch --version"),
        (ann, "-u bob -- /usr/bin/sbatch --version"),
        (ann, "-u malletrain -- /usr/bin/sbatch --version"),
    ]
    for account, rest in beyond:
        refused = account.shell("sudo", "-n", *rest.split())
        assert refused.returncode, rest
        assert not refused.stdout, rest
        assert "password is required" in refused.stderr or "not allowed" in refused.stderr
    # The daemon's files are its own.
    assert ann.shell("ls", str(site.state)).returncode


def test_another_user_of_a_jobs_node_reaches_nothing_of_it(site):
    """Every port of the node, those of its loopback too, tried as a client of a TCPStore."""
    ann, bob = (Account(site.bed, site.bed.home(n), n, VARIABLES) for n in ("ann", "bob"))
    training = Training(ann, "restart", "2:2")
    training.trains(2)
    node = next(n for n in site.bed.nodes if leases(site).get(n.name) == "ann")
    ports = {line.split()[3].rpartition(":")[2] for line in node.run("ss", "-Htln").splitlines()}
    assert ports
    for address in ("127.0.0.1", node.address):
        client = (sys.executable, "-I", "-c", STRANGER, address, *sorted(ports))
        output = node.run(*bob.become(*client))
        assert output.splitlines() == ["nothing"] * len(ports)
    training.trains(2)
    assert not site.events("workers-failed", "node-lost")
    job = training.finish()
    assert not training.back()
    assert job["samples"] == training.trace()[-1].position


def test_through_the_gate_the_daemons_account_submits_and_ends_leases_and_nothing_else(gated_site):
    """With real sudo: the daemon does all that it has to, its account no more."""
    site = gated_site
    ann = Account(site.bed, site.bed.home("ann"), "ann", VARIABLES)
    training = Training(ann, "restart", "2:2")
    training.trains(2)
    assert set(leases(site).values()) == {"ann"}
    mine = ann.shell("sbatch", "--parsable", "--wrap=sleep 3600", "--hold").stdout.strip()
    assert mine.isdecimal()
    as_ann = ("sudo", "-n", "-u", "ann", "--")
    for words in (
        (GATE_HERE, "scancel", mine),
        (GATE_HERE, "scancel", "--user=ann"),
        (GATE_HERE, "sbatch", "--parsable", "--wrap=id"),
        (GATE_HERE, "sbatch", "/etc/lease.sh"),
        (GATE_HERE, "/bin/sh", "-c", "id"),
        ("/usr/bin/sbatch", "--version"),
        ("/usr/bin/scancel", mine),
        ("/bin/sh", "-c", "id"),
    ):
        refused = site.shell(*as_ann, *words)
        assert refused.returncode, words
        assert not refused.stdout, words
    assert mine in site.bed.head.run("squeue", "-h", "-u", "ann", "-o", "%A").split()
    assert site.shell("sudo", "-n", "-u", "root", "--", GATE_HERE, "sbatch").returncode
    training.trains(2)
    training.finish()
    site.until(lambda: not leases(site), "every lease is given back through the gate")
