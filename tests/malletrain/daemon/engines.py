"""The engine of a daemon without the rest of it: no leases, agents and clients."""

from dataclasses import dataclass

from malletrain.daemon.compose import make_site_state
from malletrain.daemon.engine.decisions import Decisions, Reachability
from malletrain.daemon.engine.state import SiteState
from malletrain.daemon.engine.transactions import Transactions
from malletrain.daemon.engine.unfinished_jobs import UnfinishedJobs
from malletrain.daemon.site.clock import Clock
from malletrain.daemon.site.metrics import Metrics


@dataclass
class Engine:
    """The parts of an engine, as :mod:`malletrain.daemon.compose` connects them."""

    state: SiteState
    transactions: Transactions
    jobs: UnfinishedJobs

    def close(self):
        """Cancel all timers."""
        self.jobs.close()
        self.transactions.close()


def make_engine(config, store):
    """An engine over ``store``. Make it within a loop."""
    state = make_site_state(config, store, Clock(), Metrics(), lambda peer, message: True, str)
    transactions = Transactions(state, Decisions(state, Reachability(state), None))
    return Engine(state, transactions, UnfinishedJobs(state, transactions))
