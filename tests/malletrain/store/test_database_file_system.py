"""In which file system a database lies."""

from pathlib import Path

import pytest

from malletrain.store.database import MOUNTS, file_system_type

TEXT = """\
overlay / overlay rw,relatime 0 0
proc /proc proc rw 0 0
/dev/sda1 /var ext4 rw 0 0
autofs /home autofs rw 0 0
head:/export/home /home nfs4 rw,vers=4.2 0 0
10.0.0.1@tcp:/fs /scratch\\040one lustre rw,flock 0 0
broken
"""


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/srv/malletrain.db", "overlay"),
        ("/var/lib/malletrain/malletrain.db", "ext4"),
        ("/variable/malletrain.db", "overlay"),
        ("/home/ann/malletrain.db", "nfs4"),
        ("/scratch one/m.db", "lustre"),
    ],
)
def test_the_mount_with_the_longest_path_counts_and_the_last_of_equal_ones(path, kind):
    assert file_system_type(Path(path), TEXT) == kind


def test_this_host():
    assert file_system_type(Path("/proc/self"), MOUNTS.read_text()) == "proc"
    assert file_system_type(Path("/x"), "") == ""
