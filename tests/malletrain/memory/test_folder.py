"""The folder in a node's memory: private, bounded, and gone when its agent is."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from malletrain.memory import folder
from malletrain.memory.folder import (
    MemoryFolder,
    NoRoomError,
    folder_for_job,
    private_folder,
)
from malletrain.protocol.sizes import shown
from malletrain.shipped import shipped
from tests.strangers import as_somebody

LABEL = "0123456789abcdef"
LOOKS = """
refused = 0
for look in (Path.iterdir, Path.stat, Path.read_bytes):
    try:
        list(look(Path(sys.argv[1 + (look is not Path.iterdir)])))
    except PermissionError:
        refused += 1
sys.exit(refused)
"""
"""Ends with how often it was refused: to list the folder, to see and to read the file in it."""


@pytest.fixture
def place(tmp_path):
    path = private_folder("n1", tmp_path)
    (path / LABEL).mkdir()
    return MemoryFolder(path, 1 << 20)


def test_another_user_can_neither_list_nor_read_it(tmp_path, place):
    os.chmod(tmp_path, 0o755)
    secret = place.file(f"{LABEL}/1-2-3-0.pt")
    secret.write_bytes(b"weights")
    assert place.path.stat().st_mode & 0o777 == 0o700
    if os.geteuid() != 0:
        return  # nobody to be but oneself
    with as_somebody(
        "import sys\nfrom pathlib import Path\n", LOOKS, place.path, secret
    ) as stranger:
        pass
    assert stranger.returncode == 3


def test_what_a_dead_agent_left_goes_and_a_living_ones_stays(tmp_path):
    dead = subprocess.run(
        [sys.executable, "-c", CHILD, str(tmp_path)], capture_output=True, text=True, check=True
    ).stdout.strip()
    alive, other = private_folder("n1", tmp_path), private_folder("n1-2", tmp_path)
    assert not os.path.exists(dead)
    new = private_folder("n1", tmp_path)
    assert {alive, other, new} == set(tmp_path.iterdir())


def test_a_schedulers_epilog_removes_what_no_further_agent_of_the_user_would(tmp_path):
    living = private_folder("n1", tmp_path)
    argv = [sys.executable, "-c", CHILD, str(tmp_path)]
    dead = Path(subprocess.run(argv, capture_output=True, text=True, check=True).stdout.strip())
    (dead / LABEL).mkdir()
    (dead / LABEL / "1-2-3-0.pt").write_bytes(b"weights")
    # The number of the process is somebody else's by now.
    taken = living.with_name(living.name.replace(f"-{os.getpid()}-", f"-{os.getpid()}-1"))
    link, odd = tmp_path / "malletrain-mem-0-n-1-2-x", tmp_path / "malletrain-mem-of-mine"
    link.symlink_to(living)
    for other in (taken, odd):
        other.mkdir()
    subprocess.run(["sh", str(shipped("site-configs/epilog.sh")), str(tmp_path)], check=True)
    assert set(tmp_path.iterdir()) == {living, odd, link}
    subprocess.run(["sh", shipped("site-configs/epilog.sh"), str(tmp_path / "no")], check=True)


CHILD = """
import sys, pathlib
from malletrain.memory.folder import private_folder
made = private_folder("n1", pathlib.Path(sys.argv[1]))
(made / "state").write_bytes(bytes(1000))
print(made)
"""


def test_a_process_of_the_same_number_is_not_the_dead_agent(tmp_path):
    own = private_folder("n1", tmp_path)
    stem, _, rest = own.name.partition(f"-{os.getpid()}-")
    old = tmp_path / f"{stem}-{os.getpid()}-1-x{rest[-3:]}"  # began at another time
    old.mkdir()
    private_folder("n1", tmp_path)
    assert own.exists()
    assert not old.exists()


def test_a_job_runs_where_no_folder_can_be_made_for_it(tmp_path):
    home = private_folder("n1", tmp_path)
    job_folder = folder_for_job(home, "job-1")
    assert job_folder.stat().st_mode & 0o777 == 0o700
    assert folder_for_job(home, "job-1") is None
    assert folder_for_job(None, "job-1") is None


def test_no_more_than_its_bound(place):
    place.claim(1 << 20)
    place.file(f"{LABEL}/1-2-3-0.pt").write_bytes(bytes(600_000))
    assert 600_000 <= place.used() < 610_000
    place.claim(400_000)
    with pytest.raises(NoRoomError, match=r"of 500 kB does not fit .*1.05 MB, of which 6\d\d kB"):
        place.claim(500_000)


def test_a_node_that_is_full_is_not_filled(place, monkeypatch):
    monkeypatch.setattr(folder, "available", lambda: 1000)
    with pytest.raises(NoRoomError, match=r"memory that is free on this node \(1 kB\)"):
        place.claim(1001)


@pytest.mark.parametrize(
    "name",
    ["../x.pt", f"{LABEL}/../../x.pt", "x.pt", f"{LABEL}/1-2/.other", f"{LABEL}/.arriving-1-x", ""],
)
def test_only_files_of_snapshots_have_a_name(place, name):
    with pytest.raises(ValueError, match="is no file of a snapshot"):
        place.file(name)


def test_what_dead_workers_had_begun_goes(place):
    gone = subprocess.Popen(["true"])
    gone.wait()
    mine = folder.unfinished(place.path / LABEL / "1-2-3-0.pt")
    theirs = mine.with_name(f".arriving-{gone.pid}-1-2-3-0.pt")
    view = place.path / f".view-{gone.pid}-x"
    for path in (mine, theirs):
        path.touch()
    view.mkdir()
    place.remove_unfinished()
    assert (mine.exists(), theirs.exists(), view.exists()) == (True, False, False)


def test_bytes_for_people():
    assert [shown(n) for n in (0, 999, 1000, 2_500_000, 4e9, 12e15)] == [
        *("0 bytes", "999 bytes", "1 kB", "2.5 MB", "4 GB", "1.2e+04 TB")
    ]


@pytest.mark.parametrize(
    ("own", "where"),
    [
        ("0::/job_1/step_0\n", "job_1/memory.max"),
        ("0::/\n", "memory.max"),
        ("9:cpu,memory:/job_1/step_0\n0::/\n", "memory/job_1/memory.limit_in_bytes"),
    ],
)
def test_a_lease_that_is_confined_counts_with_what_it_has(tmp_path, monkeypatch, own, where):
    limit = tmp_path / where
    limit.parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / "own").write_text(own)
    monkeypatch.setattr(folder, "_CGROUP", tmp_path)
    monkeypatch.setattr(folder, "_OWN_CGROUPS", tmp_path / "own")
    whole = folder.bound(1.0)
    for unlimited in ("max\n", "9223372036854771712\n"):
        limit.write_text(unlimited)
        assert folder.bound(0.5) == whole // 2 > 1_000_000
    limit.write_text("1000000\n")
    assert folder.bound(0.25) == 250_000
