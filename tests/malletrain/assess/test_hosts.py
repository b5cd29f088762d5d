"""Names of hosts in a file and in a log."""

from __future__ import annotations

import pytest

from malletrain.assess.hosts import Hosts, SizeRules, read_hosts
from malletrain.sim.workloads import WorkloadError


@pytest.mark.parametrize(
    ("listed", "used", "refused"),
    [
        ("n1.site.org", "n1", True),
        ("n1", "n1.site.org", True),
        ("N1", "n1", True),
        ("n1", "n1", False),
        ("n1.site.org", "n1.site.org", False),
        ("n2.site.org", "n1", False),
        ("n1.site.org", "n1.other.org", False),
        ("10.0.0.1", "10.0.0.2", False),
        ("10", "10.0.0.2", False),
    ],
)
def test_a_host_in_another_form_does_not_count_twice(tmp_path, listed, used, refused):
    (tmp_path / "hosts.csv").write_text(f"node,gpus\n{listed},4\n")
    hosts = read_hosts(tmp_path / "hosts.csv")
    if not refused:
        hosts.require_forms_of([used, "m7"])
        return
    with pytest.raises(WorkloadError, match=rf"hosts.csv, line 2: {listed} is called {used} in"):
        hosts.require_forms_of([used, "m7"])


def test_hosts_of_an_option_have_the_names_of_the_log():
    hosts = Hosts(gpus=SizeRules.parse("--gpus-per-node", ["n[1-2].site.org=4"]))
    hosts.require_forms_of(["n3"])
    with pytest.raises(WorkloadError, match=r"An option: n2\.site\.org is called n2 in the log"):
        hosts.require_forms_of(["n2", "n3"])


def test_hosts_of_two_domains_are_two():
    """Both are in the log."""
    Hosts(gpus=SizeRules.parse("", ["n1.a=4", "n1.b=8"])).require_forms_of(["n1.a", "n1.b"])
