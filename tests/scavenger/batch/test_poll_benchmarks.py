"""The benchmarks of a poll run, and their made-up answers are of the machine they tell of; no times
are judged.
"""

import pytest

from benchmarks import pbs_poll, poll, slurm_poll


@pytest.mark.parametrize(
    ("made", "parts"),
    [
        (slurm_poll, ["read, first", "read", "poll", "explain all"]),
        (pbs_poll, ["nodes", "jobs", "repaired", "poll", "explain all"]),
    ],
    ids=["slurm", "pbs"],
)
def test_a_poll_is_measured_in_parts(made, parts, monkeypatch, capsys):
    monkeypatch.setattr(poll, "REPEATS", 1)
    result = made.measure(3000, 300)
    assert result["leases"] == 300
    assert 0 < result["gaps"] <= 200, "as many as are taken at once"
    assert list(result["ms"]) == parts
    monkeypatch.setattr("sys.argv", ["poll", "--nodes", "100", "--jobs", "50"])
    poll.main("about", made.measure)
    head, row = capsys.readouterr().out.splitlines()
    assert all(f"{part} wall/cpu ms" in head for part in parts)
    assert row.split()[:2] == ["100", "100"]
