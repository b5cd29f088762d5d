"""Who follows the changes knows what there is, whatever was missed on the way."""

from __future__ import annotations

import asyncio

from hypothesis import given
from hypothesis import strategies as st

from malletrain.web.poller import MAX_CHANGES, Board
from tests.malletrain.web.looks import event, job, look, node

NAMES = st.sampled_from(["1", "2", "3"])
LOOKS = st.lists(
    st.tuples(
        st.dictionaries(NAMES, st.sampled_from(["queued", "running", "completed"])),
        st.dictionaries(NAMES, st.sampled_from(["idle", "free", "job"])),
        st.booleans(),
    ),
    min_size=1,
    max_size=12,
)


class Page:
    """A viewer as daemon.js is one."""

    def __init__(self):
        self.version, self.jobs, self.nodes, self.events, self.away = -1, {}, {}, [], ""

    def take(self, changes):
        for change in changes:
            if change.full:
                self.jobs, self.nodes, self.events = {}, {}, []
            self.jobs |= {each.id: each for each in change.jobs}
            self.nodes |= {each.node: each for each in change.nodes}
            for name in change.gone:
                del self.jobs[name]
            for name in change.nodes_gone:
                del self.nodes[name]
            self.events += change.events
            self.away, self.version = change.machine.away, change.version


@given(LOOKS)
def test_changes_add_up_to_what_there_is(looks):
    async def follow():
        board, always, sometimes = Board("ann"), Page(), Page()
        always.take([board.everything()])
        for k, (jobs, nodes, asks) in enumerate(looks):
            if not jobs and not nodes:
                board.away("It is away.")
            else:
                job_views = [job(int(n), state) for n, state in jobs.items()]
                node_views = [node(n, state) for n, state in nodes.items()]
                board.update(look(float(k), job_views, node_views, [event(k, "job-notice")]), None)
            always.take(board.since(always.version))
            if asks:
                sometimes.take(board.since(sometimes.version))
        sometimes.take(board.since(sometimes.version))
        for page in (always, sometimes):
            assert page.version == board.version
            assert page.jobs == board.jobs
            assert page.nodes == board.nodes
            assert page.events == list(board.events)
            assert page.away == board.machine.away

    asyncio.run(follow())


def test_who_is_far_behind_gets_everything():
    board = Board("ann")
    for k in range(MAX_CHANGES + 5):
        board.update(look(float(k), [job(k)]), None)
    (change,) = board.since(1)
    assert change.full
    assert [each.id for each in change.jobs] == [f"j{MAX_CHANGES + 4}"]
    assert board.since(board.version + 1)[0].full
    assert board.since(board.version) == ()


def test_waiting_ends_with_the_news():
    async def wait():
        board = Board("ann")
        waiting = asyncio.ensure_future(board.news(0, 3600.0))
        await asyncio.sleep(0)
        board.away("It is away.")
        return await waiting, await board.news(board.version, 0.001)

    assert asyncio.run(wait()) == (True, False)
