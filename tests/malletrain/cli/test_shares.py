"""How a share is shown."""

import msgspec
import pytest

from malletrain.cli.check import shares
from malletrain.config.model import parse_config
from malletrain.protocol.views import JobDetail, JobView, ShareView, StatusView

SHARE = ShareView("physics", 3.0, 100.0, 80.0, 1.5, "physics got 80.0 of the 100.0 node-hours …")
JOB = JobView("j1", "train", "ann", "queued", "", (), 1, 4, 0.0, 0.0, 0, 0, 0.0, None, None)
STATUS = StatusView("0", 1, "b", 0.0, 9.0, "slurm", 0, 0, 0, {}, 0.0, 0.0, 0, 0, None, "")


@pytest.fixture
def answers(daemon):
    daemon.answers["status"] = lambda params: msgspec.structs.replace(STATUS, shares=(SHARE,))
    daemon.answers["jobs"] = lambda params: []
    daemon.answers["job"] = lambda params: JobDetail(JOB, {"script": "/x.py"}, share=SHARE)


@pytest.mark.parametrize("words", [("status",), ("show", "train")])
def test_status_and_show_say_how_the_share_stands(run, answers, words):
    shown = " ".join(run(*words).stdout.split())
    assert (
        "physics: weight 3, 80.0 of 100.0 node-hours due of late (80 %), bids count 1.5 times"
        in shown
    )


def test_nothing_is_said_where_nobody_counts(run, daemon):
    daemon.answers["status"] = lambda params: STATUS
    daemon.answers["jobs"] = lambda params: []
    assert "weight" not in run("status").stdout


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", [(True, "Nobody's share is counted")]),
        (
            '[shares]\nby = "user"\nweights = ["ann 3"]\nothers = 0.5',
            [(True, "Shares are counted by user, with these weights: ann 3, others 0.5.")],
        ),
        (
            "[quotas]\naccount_nodes = 4",
            [
                (None, "No user is in an account, so accounts make no difference; name the users"),
                (True, "Nobody's share is counted"),
            ],
        ),
    ],
)
def test_check_says_whose_shares_are_counted(text, expected):
    config = parse_config(f'[scheduler]\nkind = "local"\n{text}')
    findings = list(shares(config))
    assert [works for works, _ in findings] == [works for works, _ in expected]
    for (_, sentence), (_, begin) in zip(findings, expected, strict=True):
        assert sentence.startswith(begin)
