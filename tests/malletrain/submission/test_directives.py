"""The head of a batch script: which options of sbatch are used, and as what."""

from __future__ import annotations

import pytest

from malletrain.submission import directives
from malletrain.submission.directives import batch_options, log_of, memory_of, time_of
from malletrain.submission.error import SpecError

SCRIPT = """#!/bin/bash
#SBATCH --job-name=sweep --array=1-100:3%10   # a comment
#SBATCH -c 4
#SBATCH --mem-per-cpu 2G

# words
#SBATCH -t 1-02:30
#SBATCH --gres=gpu:a100:2
#SBATCH -o logs/%x-%A_%4a.out
#SBATCH --partition=gpu -N1
#SBATCH --exclusive
#SBATCH --export=ALL,DATA=/scratch,SEED
echo start
#SBATCH --time=5
"""


def test_a_batch_script(monkeypatch):
    monkeypatch.setattr(directives, "new_stamp", lambda: "T")
    options = batch_options(SCRIPT, "run.sbatch")
    assert options.values == {
        "name": "sweep",
        "array": "1-100:3%10",
        "cpus": 4,
        "memory_bytes": 8 * 2**30,
        "time_s": 86400 + 2 * 3600 + 30 * 60,
        "gpus": 2,
        "log": "logs/{name}-{name}-T_{index}.out",
        "env": ("DATA=/scratch", "SEED"),
    }
    assert options.ignored == (
        "the width of %4a in --output=logs/%x-%A_%4a.out",
        *("--partition=gpu", "--exclusive", "--export=ALL"),
    )


@pytest.mark.parametrize(
    ("lines", "values", "ignored"),
    [
        (["--mem=0"], {}, ()),
        (["--mem=0 -c 1"], {}, ("--cpus-per-task=1 beside --mem=0",)),
        (["--mem=0 -c 1", "--mem=2G"], {"cpus": 1, "memory_bytes": 2**31}, ()),
        (["--mem=0 --gpus=2"], {"gpus": 2}, ("--mem=0",)),
        (["--gres=gpu:2,tmpfs:10G"], {"gpus": 2}, ("--gres=tmpfs:10G",)),
        (["--gres=gpu:a100:1,gpu:v100:1"], {"gpus": 2}, ()),
        (["--gpus=a100:1,v100:2"], {"gpus": 3}, ()),
        (["--gres=tmpfs:10G"], {}, ("--gres=tmpfs:10G",)),
        (["--gpus-per-task=1", "--gres=lscratch:10"], {"gpus": 1}, ("--gres=lscratch:10",)),
        (['--export="FOO=1,BAR=2"'], {"env": ("FOO=1", "BAR=2")}, ()),
        (['--export="ALL,FOO=bar"'], {"env": ("FOO=bar",)}, ("--export=ALL",)),
        (["--export=ALL,A='a,b'"], {"env": ("A=a", "b")}, ("--export=ALL",)),
        ([r'''--export="ALL,A='a,b',B=2"'''], {"env": ("A=a,b", "B=2")}, ("--export=ALL",)),
        (["--comment='a, b'"], {}, ("--comment=a, b",)),
    ],
)
def test_lists_and_whole_nodes(lines, values, ignored):
    script = "#!/bin/bash\n" + "".join(f"#SBATCH {line}\n" for line in lines)
    options = batch_options(script, "x")
    assert (options.values, options.ignored) == (values, ignored)


def test_line_ends_of_windows_are_refused():
    with pytest.raises(SpecError, match=r"line ends of Windows.*dos2unix run\.sbatch"):
        batch_options("#!/bin/bash\r\n#SBATCH -c 1\r\necho\r\n", "run.sbatch")
    assert batch_options("#!/usr/bin/python3\r\nprint()\r\n", "x.py").values == {}


def test_a_script_without_options():
    assert batch_options("#!/bin/sh\necho\n", "x").values == {}


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90", 5400),
        ("1:30", 90),
        ("2:00:05", 7205),
        ("1-0", 86400),
        ("1-2:3", 93780),
        ("1-2:3:4", 93784),
        ("UNLIMITED", 0),
    ],
)
def test_times(text, seconds):
    assert time_of(text) == seconds


@pytest.mark.parametrize(
    ("text", "size"), [("4000", 4000 * 2**20), ("16G", 2**34), ("1t", 2**40), ("512K", 2**19)]
)
def test_memory(text, size):
    assert memory_of(text) == size


def test_logs():
    assert log_of("slurm-%A_%a.out", "ann", "T") == ("slurm-{name}-T_{index}.out", [])
    assert log_of("{x}%%%j", "ann", "T") == ("{{x}}%{name}-T-{index}", [])
    assert log_of("%u/%x/%J.%n.%t.%s", "ann", "T") == ("ann/{name}/{name}-T-{index}.0.0.batch", [])
    assert log_of("%N-%4a.%b", "ann", "T") == ("-{index}.", ["%N", "the width of %4a", "%b"])
    assert log_of(r"a\%a", "ann", "T") == ("a%a", []), "a backslash: nothing is replaced"
    with pytest.raises(ValueError, match="%q"):
        log_of("%q.out", "ann", "T")


def test_parts_of_a_name_that_a_farm_does_not_have_are_named():
    options = batch_options("#!/bin/sh\n#SBATCH -o %N.%a.log\n", "x")
    assert options.values == {"log": ".{index}.log"}
    assert options.ignored == ("%N in --output=%N.%a.log",)


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("--time=soon", "x line 2: --time is 'soon'"),
        ("--mem=lots", "--mem is 'lots'"),
        ("-c many", "--cpus-per-task is 'many'"),
        ("--output=%q.log", "--output is '%q.log'"),
        ('--job-name="x', "No closing quotation"),
        ("job", "job is no option"),
    ],
)
def test_what_cannot_be_read_is_refused(line, sentence):
    with pytest.raises(SpecError, match=sentence):
        batch_options(f"#!/bin/sh\n#SBATCH {line}\n", "x")


def test_a_second_submission_of_a_script_has_other_logs(tmp_path):
    """%A and %j are ids of jobs to sbatch: each run of a script has logs of its own."""
    text = "#!/bin/sh\n#SBATCH --array=1-2\n#SBATCH --output=out_%A_%a.txt\n"
    logs = {batch_options(text, "a.sbatch").values["log"] for _ in range(3)}
    assert len(logs) == 3


@pytest.mark.parametrize(
    ("text", "foreign"),
    [
        ("#!/bin/bash\n#SBATCH --nodes=4\nsrun x\n", "#SBATCH"),
        ("#!/bin/bash\n\n#PBS -l select=4\n", "#PBS"),
        ("# words about #SBATCH --nodes\n", ""),
        ("#!/bin/bash\n#SBATCH --nodes=4\n#MALLETRAIN --nodes 1:4\n", ""),
        ("#!/bin/bash\necho\n#SBATCH --nodes=4\n", ""),
        ("", ""),
    ],
)
def test_lines_of_other_schedulers_that_a_submission_does_not_read(text, foreign):
    assert directives.foreign_directives(text) == foreign
