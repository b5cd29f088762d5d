"""What a daemon that starts tells the scavenger of the leases of its life before."""

from tests.malletrain.daemon.forged import Imagined, RunningDaemon, until


class Remembers(Imagined):
    """``calls``: the leases and jobs of each call of ``know``, and whether a poll came before."""

    def __init__(self, *nodes):
        super().__init__(*nodes)
        self.polled = False
        self.calls = []

    def poll(self):
        self.polled = True
        return super().poll()

    def know(self, leases, nodes, jobs):
        self.calls.append((dict(leases), dict(jobs), self.polled))


def test_whose_leases_were_taken_is_told_at_the_next_start_before_anything_is_asked(tmp_path):
    machine = Remembers("n0", "n1")
    daemon = RunningDaemon(tmp_path, machine)
    try:
        for user in ("ann", "bob"):
            daemon.submit(user)
        until(lambda: machine.of("ann") and machine.of("bob"), "each has a lease")
    finally:
        daemon.stop()
    machine.polled = False
    owners = {
        lease: request.owner
        for lease, request in machine.requests.items()
        if lease in machine.leases
    }
    jobs = {lease: machine.leases[lease].scheduler_id for lease in owners}
    assert all(jobs.values())
    RunningDaemon(tmp_path, machine).stop()
    assert machine.calls == [({}, {}, False), (owners, jobs, False)]
