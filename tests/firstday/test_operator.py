"""An operator's first day: what would my machine yield, and would this configuration work?"""

from __future__ import annotations

from datetime import datetime, timedelta

import pytest

NODES, HOUR_S, DAY_S = 4, 3600, 86400


def moment(second: int) -> str:
    return (datetime(2024, 1, 1) + timedelta(seconds=second)).isoformat()


def busy_january() -> list[list[str]]:
    """What sacct prints of a machine without an idle moment in January, as docs/assess.md asks for
    it: jobs of one node, 9 to 12 hours long, end to end, from before the month until after it.
    """
    rows = [["JobID", "Submit", "Start", "End", "State", "NNodes", "NodeList"]]
    for node in range(NODES):
        length, start = (9 + node) * HOUR_S, -6 * HOUR_S * (node + 1)
        while start < 31 * DAY_S:
            times = [moment(start - HOUR_S), moment(start), moment(start + length)]
            if start + length > 0:
                rows.append([str(100 + len(rows)), *times, "COMPLETED", "1", f"c{node + 1}"])
            start += length
    return rows


LOGS = {
    "january.txt": lambda rows: ["|".join(row) for row in rows],
    "commas.csv": lambda rows: [",".join(row) for row in rows],
    "counts.txt": lambda rows: ["|".join(row[:-1]) for row in rows],
}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name == "counts.txt" else pytest.mark.thorough)
        for name in LOGS
    ],
)
def test_a_busy_machine_has_nothing_idle(person, name):
    person.writes(name, "\n".join(LOGS[name](busy_january())) + "\n")
    output = person.types(f"malletrain assess --sacct {name} --nodes {NODES}")
    assert output.status == 0, output.text
    assert f"None of {NODES} nodes was idle at any time" in output.text


def test_a_log_that_counts_processors(person):
    """Three jobs of two nodes at any time, of eight nodes with 16 processors each."""
    lines = ["; MaxProcs: 128", "; MaxNodes: 8"]
    lines += [
        f"{k + 1} {1000 * k} 0 3000 32 -1 -1 32 3600 -1 1 1 1 1 1 1 -1 -1" for k in range(100)
    ]
    person.writes("processors.swf", "\n".join(lines) + "\n")
    output = person.types("malletrain assess --swf processors.swf --max-jobs 2 --hours 2")
    assert output.status == 0, output.text
    assert "On average 2.0 of 8 nodes (25.0 %) were idle" in output.text


def test_a_file_that_is_no_log(person):
    person.writes("list.txt", "a|b\n1|2\n")
    output = person.types("malletrain assess --sacct list.txt")
    assert output.status == 1
    assert "has no column Submit, Start, End, NNodes; run: sacct --allusers" in output.text


def test_the_examples_of_configurations(person):
    """Each file is valid here; a line of the output names what this machine lacks for it."""
    shipped = person.types("malletrain shipped").lines
    examples = [name for name in shipped if name.endswith(".toml")]
    assert len(examples) >= 5
    [path] = person.types(f"malletrain shipped {examples[0]}").lines
    folder = path.removesuffix(examples[0])
    for name in examples:
        # The port of the metrics may be in use on the machine of the tests.
        person.types(f'sed \'s/"127.0.0.1:9464"/""/\' {folder}{name} >site.toml')
        output = person.types("malletrain check --config site.toml")
        assert "site.toml is valid." in output.text, output.text
        if name == "site-configs/embedded.toml":
            assert output.status == 0, output.text
        elif output.status:
            assert "would not work main scheduler" in output.text
            assert "Run MalleTrain where" in output.text


def test_simulated_with_the_sites_own_settings(person):
    person.writes(
        "week.csv", "time_s,node,event\n0,a,idle\n0,b,idle\n600,a,busy\n1200,a,idle\n3600,b,busy\n"
    )
    person.writes("site.toml", "[allocation]\nt_fwd = '5 min'\n")
    output = person.types("malletrain simulate --trace week.csv --config site.toml --jobs 2")
    assert output.status == 1
    assert "scheduler" in output.text, "a configuration names its scheduler"
    person.writes("site.toml", "[scheduler]\nkind = 'local'\n[allocation]\nt_fwd = '5 min'\n")
    output = person.types(
        "malletrain simulate --trace week.csv --config site.toml --jobs 2 --samples 1e6"
    )
    assert output.status == 0, output.text
    assert "T_fwd 300 s" in output.text
    assert "2 done of 2" in output.text


@pytest.mark.thorough
def test_what_was_held_is_a_trace_to_simulate(person):
    person.writes("hold.py", "import time, malletrain\ntime.sleep(0.1)\nmalletrain.report(1)\n")
    person.starts_a_daemon()
    assert person.types("malletrain submit hold.py").status == 0
    assert person.until_ended("hold").state == "completed"
    output = person.types("malletrain events --as-trace -o held.csv")
    assert output.status == 0, output.text
    rows = (person.work / "held.csv").read_text().splitlines()
    assert rows[0].split(",")[:3] == ["time_s", "node", "event"]
    assert any(",idle" in line for line in rows[1:])
    output = person.types("malletrain simulate --trace held.csv --jobs 1 --samples 1")
    assert output.status == 0, output.text
    assert "idle node-hours" in output.text
