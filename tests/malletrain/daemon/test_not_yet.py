"""Leases for which the site's pace left no room are asked for again, and nobody is blamed."""

from scavenger.interface import Lease, LeaseState
from tests.malletrain.daemon.forged import Imagined, RunningDaemon, until


class Slow(Imagined):
    """At first it takes no request at all, for its pace."""

    paced = True

    def take(self, requests):
        if not self.paced:
            return super().take(requests)
        return [Lease(r.id, "", LeaseState.NOT_YET, r.node, "one a day") for r in requests]


def test_what_is_not_asked_for_yet_is_asked_for_again_and_is_no_refusal(tmp_path):
    """Five times would be enough for the nodes and the user to be left alone for a while."""
    machine = Slow("n0", "n1")
    daemon = RunningDaemon(tmp_path, machine)

    def put_off():
        return [e for e in daemon.events() if e.kind == "lease-ended"]

    try:
        job = daemon.submit("ann", min_nodes=2, max_nodes=2)
        until(lambda: len(put_off()) >= 10, "asked for again and again")
        assert {e.sentence for e in put_off()} == {"The lease ended: not asked for yet: one a day."}
        assert daemon.metric("leases_ended_total", reason="not-yet") >= 10
        assert "one a day" not in daemon.job(job).reason, "nobody refused anything"
        assert not daemon.components.state.controller.gaps.backing_off_s(
            daemon.components.state.clock.now()
        )
        machine.paced = False
        until(lambda: len(machine.of("ann")) == 2, "both leases are taken")
    finally:
        daemon.stop()
