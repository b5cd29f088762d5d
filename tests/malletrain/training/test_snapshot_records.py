"""Whose snapshot a file is, read without torch and without running what is in it."""

import collections
import os
import pickle
import zipfile

from malletrain.training import snapshot_file
from malletrain.training.owner import RunIdentity, owner_in

OWNER = {"job": "j1", "script": "t.py", "arguments": "ab", "daemon": "d1"}


class Odd:
    """Runs something when it is unpickled as it wants."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


def test_the_owner_of_a_snapshot_with_tensors_and_objects_of_all_kinds(tmp_path):
    import torch

    model = torch.nn.Linear(3, 3)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    objects = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "odd": {"deque": collections.deque([1]), "set": {1, (2, 3)}, "where": Odd("never")},
        "dtype": torch.float32,
        "counter": collections.Counter("aab"),
    }
    path = str(tmp_path / "s.pt")
    snapshot_file.write(
        path, {"malletrain_snapshot": 1, "objects": objects, "owner": OWNER, "time": 1.0}, 0
    )
    assert owner_in(path) == RunIdentity(**OWNER)
    assert not os.path.exists("never")


def test_what_names_nobody_and_what_is_no_snapshot(tmp_path):
    import torch

    path = tmp_path / "s.pt"
    assert owner_in(str(path)) is None
    path.write_bytes(b"nothing")
    assert owner_in(str(path)) is None
    torch.save({"owner": OWNER}, path)
    assert owner_in(str(path)) is None, "of another program"
    snapshot_file.write(str(path), {"malletrain_snapshot": 1, "objects": {}}, 0)
    assert owner_in(str(path)) is None
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("x/data.pkl", pickle.dumps({"malletrain_snapshot": 1, "owner": OWNER}))
    assert owner_in(str(path)) == RunIdentity(**OWNER)
