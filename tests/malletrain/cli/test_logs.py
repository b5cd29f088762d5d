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


def test_logs_the_last_lines_and_what_follows(run, daemon):
    whole = "".join(f"line {i}\n" for i in range(100))
    pieces = {"1": log_view("more\n", "2", ended=False), "2": log_view("", "2")}
    daemon.answers["logs"] = lambda p: (
        log_view(whole, "1", ended=False) if "tail" in p["cursor"] else pieces[p["cursor"]]
    )
    daemon.answers["job"] = lambda p: detail(job=job_view(state="completed", ended=1009.0))
    assert run("logs", "train", "--tail", 2).stdout == "line 98\nline 99\n"
    assert run("logs", "train", "--tail", 1, "-f").stdout == "line 99\nmore\n"
    assert run("logs", "train", "--tail", 500).stdout == whole
    assert run("logs", "train", "--tail", 0).stdout == ""


def test_logs_the_last_lines_where_they_are_long(run, daemon):
    whole = "".join(f"{i} {'x' * 300_000}\n" for i in range(4))
    daemon.answers["logs"] = lambda p: log_view(whole[-int(p["cursor"].removeprefix("tail:")) :])
    assert run("logs", "train", "--tail", 2).stdout == "".join(
        line + "\n" for line in whole.splitlines()[-2:]
    )
