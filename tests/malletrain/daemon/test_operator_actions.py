"""What operators name: nodes, and lists of nodes."""

from dataclasses import replace

import pytest

from malletrain.client.errors import ClientError
from scavenger.interface import Explanation
from tests.malletrain.daemon.forged import Imagined, RunningDaemon, until

pytestmark = pytest.mark.slow


class Known(Imagined):
    """A main scheduler that says which nodes it has."""

    def poll(self):
        explanations = tuple(Explanation(node, "idle", True, ()) for node in self.nodes)
        return replace(super().poll(), explanations=explanations)


@pytest.fixture
def daemon(tmp_path):
    running = RunningDaemon(tmp_path, Known("n0", "n1", "n2"))
    until(lambda: running.components.leases.last_poll, "the machine is known")
    yield running
    running.stop()


def test_nodes_are_drained_and_resumed_by_a_list(daemon):
    with daemon.client() as client:
        sentence = client.call("drain", {"nodes": ["n[0-1]"]}, changes=True)["sentence"]
        assert sentence.startswith("n[0-1]: ")
        restrictions = client.status().restrictions
        assert restrictions.startswith("Drained: n[0-1]")
        # Other versions of clients read this word.
        assert client.call("status")["restraint"] == restrictions
        assert client.call("resume", {"nodes": ["n1", "n[0-0]"]}, changes=True)["sentence"] == (
            "May be leased again: n[0-1]."
        )


@pytest.mark.parametrize(
    ("nodes", "problem"), [("n[2-4]", r"knows no node n\[3-4\];"), ("n[2", "no list of nodes")]
)
def test_a_list_that_names_others_is_refused(daemon, nodes, problem):
    with daemon.client() as client, pytest.raises(ClientError, match=problem):
        client.call("drain", {"nodes": [nodes]}, changes=True)
