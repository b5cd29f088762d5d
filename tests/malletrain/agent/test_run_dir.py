"""Where an agent puts its sockets, and that no other user can prevent it."""

import ast
import getpass
import importlib.util
import os
import pwd
import re
import tempfile
from pathlib import Path

import pytest

from malletrain.agent.run_dir import own_caches, private_directory

DEAD = 2**22 + 1  # more than pid_max(5) allows


@pytest.fixture
def tmp(tmp_path, monkeypatch):
    """The node's directory for temporary files of all users."""
    everybodys = tmp_path / "tmp"
    everybodys.mkdir()
    everybodys.chmod(0o1777)
    monkeypatch.setattr(tempfile, "tempdir", str(everybodys))
    return everybodys


def test_directories_of_dead_agents_are_removed_and_others_kept(tmp_path):
    run = tmp_path / "run"
    mine = private_directory(run, "node 1", {})
    assert mine.stat().st_mode & 0o077 == 0
    dead, other, longer = (run / f"{node}-{DEAD}-abc" for node in ("node_1", "node_2", "node_1-2"))
    for directory in (dead, other, longer):
        directory.mkdir(mode=0o700)
    again = private_directory(run, "node 1", {})
    assert set(run.iterdir()) == {mine, again, other, longer}


def test_a_directory_of_somebody_else_is_not_used(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: tmp_path.stat().st_uid + 1)
    with pytest.raises(PermissionError, match="belongs to another user"):
        private_directory(tmp_path, "n1", {})


def test_nobody_can_take_its_place_beforehand(tmp, monkeypatch):
    user = os.geteuid()
    for name in (f"malletrain-{user}", f"malletrain-{user}-n1", f"malletrain-{user}-n1-{DEAD}-x"):
        (tmp / name).mkdir(mode=0o777)
    taken = set(tmp.iterdir())
    monkeypatch.setattr(os, "geteuid", lambda: user + 1)  # all of these are another user's
    for name in (f"malletrain-{user + 1}", f"malletrain-{user + 1}-n1-{DEAD}-x"):
        (tmp / name).mkdir(mode=0o777)
        taken.add(tmp / name)
    made = private_directory(None, "n1", {})
    assert made.parent == tmp
    assert made.stat().st_mode & 0o777 == 0o700
    assert set(tmp.iterdir()) == {*taken, made}, "what others made is theirs"


def test_what_dead_agents_left_in_everybodys_place_is_removed(tmp):
    leftover = tmp / f"malletrain-{os.geteuid()}-n1-{DEAD}-abc"
    leftover.mkdir(mode=0o700)
    made = private_directory(None, "n1", {})
    assert list(tmp.iterdir()) == [made]


@pytest.mark.parametrize("variable", ["SLURM_TMPDIR", "XDG_RUNTIME_DIR"])
def test_a_place_of_its_own_comes_first(tmp, tmp_path, variable):
    own = tmp_path / "own"
    own.mkdir(mode=0o700)
    assert private_directory(None, "n1", {variable: str(own)}).parent == own
    own.chmod(0o777)  # not its own any more
    assert private_directory(None, "n1", {variable: str(own)}).parent == tmp
    assert private_directory(None, "n1", {variable: "/run/user/0000000"}).parent == tmp
    assert private_directory(None, "n1", {variable: "own"}).parent == tmp
    (tmp_path / "link").symlink_to(own)
    own.chmod(0o700)
    assert private_directory(None, "n1", {variable: str(tmp_path / "link")}).parent == tmp


CACHE = "TORCHINDUCTOR_CACHE_DIR"
OWN = Path("/run/of-this-agent")


@pytest.fixture
def compiled(tmp):
    """Where torch keeps what it compiled."""
    return tmp / f"torchinductor_{getpass.getuser()}"


def test_the_place_for_what_torch_compiles_is_made_before_others_can(compiled):
    assert own_caches({}, OWN) == {}
    assert compiled.stat().st_mode & 0o777 == 0o700
    assert own_caches({}, OWN) == {}
    assert own_caches({CACHE: "/elsewhere"}, OWN) == {}


def by_everybody(place):
    place.mkdir()
    place.chmod(0o777)


def by_a_link(place):
    (place.parent / "theirs").mkdir()
    place.symlink_to(place.parent / "theirs")


def by_another_user(place):
    place.mkdir(mode=0o700)
    if os.geteuid() == 0:
        os.chown(place, 65534, -1)
    else:
        place.chmod(0o777)


@pytest.mark.parametrize("taken", [by_everybody, by_a_link, by_another_user])
def test_code_of_others_is_not_run_out_of_it(compiled, taken):
    taken(compiled)
    caches = own_caches({}, OWN)
    assert Path(caches[CACHE]).is_relative_to(Path.home())


def test_a_user_without_a_home_has_it_in_the_agents_directory(compiled, monkeypatch):
    def unknown(user):
        raise KeyError(user)

    monkeypatch.setenv("LOGNAME", compiled.name.partition("_")[2])
    monkeypatch.delenv("HOME")
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    by_everybody(compiled)
    assert own_caches({}, OWN) == {CACHE: str(OWN / "torchinductor")}


def torchs_own_place():
    """What torch's function says. It alone is run: to import torch takes many times as long."""
    torch = importlib.util.find_spec("torch")
    if torch is None:
        pytest.skip("needs torch")
    file = Path(torch.origin).parent / "_inductor" / "runtime" / "cache_dir_utils.py"
    if not file.exists():
        pytest.skip("this torch has it elsewhere")
    name = "default_cache_dir"
    parts = [part for part in ast.parse(file.read_text()).body if getattr(part, "name", "") == name]
    namespace = {"os": os, "re": re, "getpass": getpass, "tempfile": tempfile, "is_fbcode": bool}
    exec(compile(ast.Module(parts, []), str(file), "exec"), namespace)
    return Path(namespace[name]())


@pytest.mark.parametrize("user", ["ann", "site\\ann:1"])
def test_it_is_the_place_that_torch_takes(tmp, monkeypatch, user):
    monkeypatch.setenv("LOGNAME", user)
    own_caches({}, OWN)
    assert torchs_own_place().is_dir()
    assert torchs_own_place().parent == tmp
