"""Who the users of a daemon are: the list, and MUNGE."""

import os
import re
import subprocess
from itertools import count

import pytest

from malletrain.identity.keys import new_pair, user_name
from malletrain.identity.users import (
    Munge,
    UserList,
    Users,
    UsersError,
    login_payload,
    parse_users,
    read_users,
)
from tests.waiting import until

ADA, BOB = new_pair().public, new_pair().public


def _check_at_each_call(monkeypatch, min_age_s: float = 0.0) -> None:
    monkeypatch.setattr("malletrain.identity.users.MIN_CHECK_INTERVAL_S", 0.0)
    monkeypatch.setattr("malletrain.identity.users.MIN_AGE_S", min_age_s)


def test_a_list(tmp_path):
    text = (
        f"# the group\n\nada {ADA}\n  bob\t{BOB}  # his laptop\nada "
        f"{(second := new_pair().public)}\n"
    )
    assert parse_users(text) == UserList({ADA: "ada", BOB: "bob", second: "ada"})
    assert parse_users("") == UserList({})


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("ada", "line 2, is left out: it must be a user name and a key"),
        (f"{ADA} ada", "line 2"),
        ("ada short", "line 2"),
        (f"ada {BOB} and more", "line 2"),
        (f"../ada {BOB}", r"line 2, is left out: '\.\./ada' is no user name"),
        (f"-u {BOB}", "'-u' is no user name"),
        (f"#0:ada {BOB} x", "no such line"),
        (f"bob {ADA}", "the key of bob is that of ada already"),
    ],
    ids=[
        "no key",
        "the other way round",
        "a short key",
        "more words",
        "a path for a name",
        "an option for a name",
        "a comment",
        "two users of one key",
    ],
)
def test_a_wrong_line_costs_itself_and_is_told(line, words):
    carl = new_pair().public
    user_list = parse_users(f"ada {ADA}\n{line}\ncarl {carl}\n")
    assert user_list.users == {ADA: "ada", carl: "carl"}
    if line.startswith("#"):
        assert user_list.problems == ()
        return
    (problem,) = user_list.problems
    assert re.search(words, problem)
    assert user_list.ignored_keys == ({BOB} if BOB in line else frozenset()), line


def test_a_byte_of_another_encoding_costs_no_other_line(tmp_path):
    """As an editor in Latin-1 saves names with umlauts."""
    carl, path = new_pair().public, tmp_path / "users"
    lines = f"# Gruppe Müller\nada {ADA}  # Frau Müller\nmüller {BOB}\ncarl {carl}\n"
    path.write_bytes(lines.encode("latin-1"))
    path.chmod(0o644)
    user_list = read_users(path)
    assert user_list.users == {ADA: "ada", carl: "carl"}
    assert user_list.problems == (
        f"{path}, line 3, is left out: it is not UTF-8 text; save the file in that encoding.",
    )


def test_a_byte_order_mark_costs_no_line(tmp_path):
    """As some editors begin a file in UTF-8."""
    path = tmp_path / "users"
    path.write_text(f"ada {ADA}\n", "utf-8-sig")
    path.chmod(0o644)
    assert read_users(path) == UserList({ADA: "ada"})


@pytest.mark.parametrize(
    "name",
    ["ann@corp.example", "CORP\\ann", "ann+hpc", "007ann", "Ann", "änne", "安", "a.b-c", "host$"],
)
def test_names_as_directories_have_them(name):
    assert parse_users(f"{name} {ADA}\nbob {BOB}\n") == UserList({ADA: name, BOB: "bob"})


def test_a_list_that_others_could_have_written_is_not_believed(tmp_path, monkeypatch):
    path = tmp_path / "users"
    path.write_text(f"ada {ADA}\n")
    path.chmod(0o664)
    with pytest.raises(UsersError, match="can be written by others"):
        read_users(path)
    path.chmod(0o644)
    assert read_users(path).users == {ADA: "ada"}
    os.chown(path, 12345, -1) if os.geteuid() == 0 else monkeypatch.setattr(
        os, "geteuid", lambda: 12345
    )
    with pytest.raises(UsersError, match="can be written by others"):
        read_users(path)


def test_the_list_is_read_again_when_it_changes_and_a_wrong_one_changes_nothing(
    tmp_path, monkeypatch
):
    _check_at_each_call(monkeypatch)
    path = tmp_path / "users"
    users = Users(path)
    assert users.user_of(ADA) is None
    assert "not there" in users.problem
    path.write_text(f"ada {ADA}\n")
    assert (users.user_of(ADA), users.user_of(BOB), users.problem) == ("ada", None, "")
    path.write_text(f"ada {ADA}\nbob {BOB}\n")
    assert users.user_of(BOB) == "bob"
    path.write_text(f"ada {ADA}\nbob\n")
    assert (users.user_of(ADA), users.user_of(BOB)) == ("ada", None), "a bad line costs itself"
    assert "line 2" in users.problems()[0]
    path.chmod(0o666)
    path.write_text("ada changes it\n")
    assert users.user_of(ADA) == "ada", "a file that others could have written changes nothing"
    assert len(users.problems()) == 2
    path.chmod(0o644)
    path.write_text(f"bob {BOB}\n")
    assert (users.user_of(ADA), users.problem) == (None, "")
    path.unlink()
    assert users.user_of(BOB) is None


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32", "latin-1"])
def test_a_file_that_is_no_list_of_users_changes_nothing(tmp_path, monkeypatch, encoding):
    """Saved in another encoding, which leaves no valid line."""
    _check_at_each_call(monkeypatch)
    path, carl = tmp_path / "users", new_pair().public
    users = Users(path)
    path.write_text(f"ada {ADA}\n")
    assert users.user_of(ADA) == "ada"
    path.write_bytes(f"adä {ADA}\nmüller {BOB}\ncarl: {carl}\n".encode(encoding))
    assert (users.user_of(ADA), users.user_of(BOB)) == ("ada", None)
    words = "has no valid line" if encoding == "latin-1" else "is not UTF-8 text"
    assert users.problem.startswith(f"The list of users {path} {words}")
    assert users.is_ignored(BOB) == users.is_ignored(carl) == (encoding == "latin-1")
    assert not users.is_ignored(ADA), "whose line of the previous list is in force"
    path.write_text("# nobody any more\n")
    assert (users.user_of(ADA), users.problem) == (None, "")


def test_a_list_that_was_away_for_a_while_is_no_problem_any_more(tmp_path, monkeypatch):
    _check_at_each_call(monkeypatch)
    place, away = tmp_path / "place", tmp_path / "away"
    place.mkdir()
    users = Users(place / "users")
    users.path.write_text(f"ada {ADA}\n")
    for _ in range(2):
        assert (users.user_of(ADA), users.problem) == ("ada", "")
        place.rename(away)
        place.write_text("")  # its file system is not there
        assert users.user_of(ADA) == "ada"
        assert users.problem
        place.unlink()
        away.rename(place)
    assert (users.user_of(ADA), users.problem) == ("ada", "")


def _users(path, monkeypatch, min_age_s: float = 3600.0) -> Users:
    """Users of a file with the keys of two users."""
    _check_at_each_call(monkeypatch, min_age_s)
    path.write_text(f"# the group\nada {ADA}\nbob {BOB}\n")
    users = Users(path)
    assert (users.user_of(ADA), users.user_of(BOB)) == ("ada", "bob")
    return users


@pytest.mark.parametrize(
    "unfinished",
    ["", "# the group\n", f"# the group\nada {ADA}\nbo", f"# the group\nada {ADA[:20]}"],
    ids=["empty", "a comment", "a part of a line", "no valid line yet"],
)
def test_a_list_that_is_being_written_in_place_refuses_nobody(tmp_path, monkeypatch, unfinished):
    """As `cp NEW users` does: the file is emptied, and filled afterwards."""
    path, carl = tmp_path / "users", new_pair().public
    users = _users(path, monkeypatch)
    with path.open("w") as file:
        file.write(unfinished)
        file.flush()
        assert users.user_of(BOB) == "bob"
        assert (users.problems(), users.is_ignored(ADA)) == ((), False)
        path.write_text(f"# the group\nada {ADA}\nbob {BOB}\ncarl {carl}\n")
    assert (users.user_of(BOB), users.user_of(carl), users.problems()) == ("bob", "carl", ())


def test_a_list_that_is_replaced_by_an_editor_refuses_nobody(tmp_path, monkeypatch):
    """The old file gets another name before the new one is there."""
    path = tmp_path / "users"
    users = _users(path, monkeypatch)
    for _ in range(2):
        path.rename(tmp_path / "users~")
        assert (users.user_of(BOB), users.problems()) == ("bob", ())
        (tmp_path / "users~").rename(path)
        assert users.user_of(BOB) == "bob"


@pytest.mark.parametrize("text", ["", f"ada {ADA}\n", None], ids=["empty", "shorter", "removed"])
def test_a_key_that_a_list_has_lost_is_valid_until_the_next_check(tmp_path, monkeypatch, text):
    path = tmp_path / "users"
    users = _users(path, monkeypatch)
    path.unlink() if text is None else path.write_text(text)
    assert users.user_of(BOB) == "bob"
    assert users.user_of(BOB) is None


@pytest.mark.parametrize("text", ["", f"ada {ADA}\n", None], ids=["empty", "shorter", "removed"])
def test_a_key_that_a_list_has_lost_some_time_ago_is_invalid_at_once(tmp_path, monkeypatch, text):
    path = tmp_path / "users"
    users = _users(path, monkeypatch, min_age_s=0.0)
    path.unlink() if text is None else path.write_text(text)
    assert users.user_of(BOB) is None


def test_a_key_that_a_list_has_lost_becomes_invalid_although_the_list_is_written_all_the_time(
    tmp_path, monkeypatch
):
    path = tmp_path / "users"
    users = _users(path, monkeypatch, min_age_s=0.2)
    numbers = count()

    def is_invalid() -> bool:
        path.write_text(f"ada {ADA}\n{'#' * next(numbers)}\n")
        return users.user_of(BOB) is None

    until(is_invalid, "the key is invalid")


def test_a_new_key_of_a_list_that_has_lost_others_is_valid_at_once(tmp_path, monkeypatch):
    path, new = tmp_path / "users", new_pair().public
    users = _users(path, monkeypatch)
    path.write_text(f"ada {ADA}\nbob {new}\n")
    assert (users.user_of(new), users.user_of(BOB)) == ("bob", None)


@pytest.fixture(scope="module")
def munge(tmp_path_factory):
    """A MUNGE service of this test's own."""
    root = tmp_path_factory.mktemp("munge")
    key, socket = root / "key", root / "socket"
    key.write_bytes(os.urandom(128))
    key.chmod(0o600)
    options = {
        "socket": socket,
        "key-file": key,
        "pid-file": root / "pid",
        "log-file": root / "log",
        "seed-file": root / "seed",
    }
    argv = [
        "munged",
        "--foreground",
        "--force",
        *(f"--{name}={path}" for name, path in options.items()),
    ]
    service = subprocess.Popen(argv, stderr=subprocess.PIPE, text=True)
    for line in service.stderr:
        if "work thread" in line:
            break
    yield Munge(str(socket))
    service.terminate()
    service.communicate()


def test_munge_says_whose_a_credential_is(munge):
    payload = login_payload(ADA, BOB)
    credential = munge.credential(payload)
    assert munge.user(credential, payload) == user_name()
    with pytest.raises(UsersError, match="used before"):
        munge.user(credential, payload)


def test_a_credential_is_good_for_one_key_at_one_daemon(munge):
    for other in (
        login_payload(ADA, ADA),
        login_payload(BOB, BOB),
        "",
        login_payload(ADA, BOB) + " ",
    ):
        with pytest.raises(UsersError, match="another purpose"):
            munge.user(munge.credential(other), login_payload(ADA, BOB))


@pytest.mark.parametrize(
    "credential",
    ["", "root", "MUNGE:AwQ:", "MUNGE:" + "A" * 10_000, "MUNGE:€", "MUNGE:\udc80", "MUNGE:\0"],
)
def test_what_is_no_credential(munge, credential):
    with pytest.raises(UsersError, match=r"no credential|refused"):
        munge.user(credential, "x")


def test_without_the_service(tmp_path):
    with pytest.raises(UsersError, match=r"munge refused: .*Failed to access"):
        Munge(str(tmp_path / "none")).credential("x")
