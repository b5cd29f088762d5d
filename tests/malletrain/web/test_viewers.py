"""What is shown to whom a proxy names."""

from __future__ import annotations

import dataclasses

import msgspec

from malletrain.protocol.redaction import FAILED_REASON, PRIVATE
from malletrain.protocol.views import JobDetail, ShareView, UsageView
from malletrain.web.guard import Viewer
from malletrain.web.poller import Board
from tests.malletrain.web.looks import event, job, look

ANN = Viewer("ann", "site")


def test_the_page_s_own_user_sees_what_the_daemon_says():
    own, theirs = Viewer("site", "site"), job(1, "failed", "bob", reason="secret")
    assert own.job(theirs) == theirs
    change = Board("site").everything()
    assert own.change(change, {}) is change


def test_others_see_their_own_jobs_and_of_others_what_everybody_may_see():
    mine, theirs = job(1, owner="ann"), job(2, "failed", "bob", reason="secret")
    assert ANN.job(mine) == mine
    assert (ANN.job(theirs).reason, ANN.job(theirs).metrics) == (FAILED_REASON, {})
    spec = {"script": "/s.py", "args": ["secret"], "env": {"KEY": "secret"}, "setup": "secret"}
    shown = ANN.detail(JobDetail(theirs, spec, notices=("secret",), failure="secret"))
    assert "secret" not in str(shown)
    assert ANN.detail(JobDetail(mine, spec, failure="secret")).failure == "secret"


def test_changes_are_shown_in_the_same_way():
    board = Board("site")
    events = [event(1, "job-failed", on="j1"), event(2, "job-failed", on="j2")]
    late = event(3, "job-failed", on="j9")
    board.update(look(1.0, [job(1, owner="ann"), job(2, owner="bob")], (), [*events, late]), None)
    owners = {each.id: each.owner for each in board.jobs.values()}
    change = ANN.change(board.everything(), owners)
    assert [each.metrics for each in change.jobs] == [{"loss": 0.5}, {}]
    assert [each.sentence for each in change.events] == [
        "sentence 1",
        PRIVATE["job-failed"],
        PRIVATE["job-failed"],
    ]
    assert change.machine.user == "ann"


def test_what_is_said_to_operators_is_not_shown_to_others():
    board = Board("site")
    seen = look(1.0, [job(1, owner="ann"), job(2, owner="bob")])
    status = msgspec.structs.replace(
        seen.status,
        restrictions="No leases are requested.",
        users_problems=("Line 3 is wrong.",),
        failed_starts=("No agent reported from n1.",),
        handler_failures="2 messages failed.",
        shares=(ShareView("bobs", 1.0, 2.0, 3.0, 1.0),),
        late={"j1": "Ann's is late.", "j2": "Bob's is late.", "j9": "Whose is late?"},
    )
    board.update(dataclasses.replace(seen, status=status), None)
    assert Viewer("site", "site").machine(board.machine, {}).status == status
    owners = {"j1": "ann", "j2": "bob"}
    shown = ANN.machine(board.machine, owners)
    assert ANN.change(board.everything(), owners).machine == shown
    assert (shown.user, shown.status.restrictions) == ("ann", "No leases are requested.")
    assert shown.status.late == {"j1": "Ann's is late."}
    rest = (shown.status.users_problems, shown.status.failed_starts, shown.status.shares)
    assert (*rest, shown.status.handler_failures) == ((), (), (), "")


def test_usage_is_one_s_own():
    rows = [UsageView("2026-11", user, "default", *6 * (1.0,)) for user in ("ann", "bob")]
    assert ANN.usage(rows) == rows[:1]
    assert Viewer("site", "site").usage(rows) == rows
