"""Keys change while the daemon runs: who was taken off the list is out, on the connection that is
open too; a new key of the same user is in.
"""

from __future__ import annotations

import pytest

from malletrain.client import ClientError, Connection
from malletrain.identity.keys import new_pair
from tests.malletrain.daemon.forged import USERS, Imagined, RunningDaemon, until


def refused(client):
    try:
        client.status()
    except ClientError as error:
        return "your key" in str(error).lower()
    return False


def test_a_revoked_key_is_out_and_a_new_one_in(tmp_path):
    running = RunningDaemon(tmp_path, Imagined("n0"))
    job, new = running.submit("ann"), new_pair()
    keys = running.daemon.keys.server.public.encode(), new.public.encode(), new.secret.encode()
    old, others = USERS["ann"].public, (tmp_path / "users").read_text()
    with running.client("ann") as client, running.client("bob") as bob:
        assert client.job(job).job.owner == "ann"
        (tmp_path / "users.new").write_text(others.replace(old, new.public))
        (tmp_path / "users.new").replace(tmp_path / "users")
        until(lambda: refused(client), "the old key is out")
        with pytest.raises(ClientError):
            client.cancel([job])
        assert bob.status().pid
        with Connection(running.daemon.endpoint, *keys) as again:
            assert again.job(job).job.owner == "ann"
    running.stop()
