"""`malletrain logs`: streams, pieces, following."""

from tests.malletrain.cli.fake_daemon import detail, job_view, log_view


def test_logs(run, daemon):
    result = run("logs", "train")
    assert result.stdout == "hello\n"
    assert daemon.seen[0][1]["stream"] == "rank0"


def test_logs_streams(run, daemon):
    run("logs", "train", "--rank", 3)
    run("logs", "train", "--launcher")
    assert [params["stream"] for _, params in daemon.seen] == ["rank3", "launcher"]


def test_logs_follow_to_the_end(run, daemon):
    pieces = {
        "": log_view("a", "1", ended=False),
        "1": log_view("b", "2", ended=False),
        "2": log_view("", "2"),
        "3": log_view("x"),
    }
    daemon.answers["logs"] = lambda p: pieces[p["cursor"]]
    daemon.answers["job"] = lambda p: detail(job=job_view(state="completed", ended=1009.0))
    assert run("logs", "train", "-f").stdout == "ab"
    assert [p["wait_s"] for op, p in daemon.seen if op == "logs"] == [0.0, 5.0, 5.0]


def test_logs_all_pieces_of_a_long_log(run, daemon):
    pieces = {
        "": log_view("a" * 10, "1", more=True),
        "1": log_view("b", "2", more=False, ended=False),
    }
    daemon.answers["logs"] = lambda p: pieces[p["cursor"]]
    assert run("logs", "train").stdout == "a" * 10 + "b"


def test_logs_empty_names_the_others(run, daemon):
    daemon.answers["logs"] = lambda p: log_view("", "", ended=False)
    result = run("logs", "train", "--launcher")
    assert result.exit_code == 0
    assert (
        result.stderr
        == "train has written nothing to launcher yet; there is output of rank0, rank1.\n"
    )
