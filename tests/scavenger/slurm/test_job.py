import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scavenger.batch.lease_script import KEPT_AT_HOME, PLACE, owner_prefix
from scavenger.batch.settings import BatchSettings
from scavenger.batch.submission import Wanted
from scavenger.interface import SchedulerError
from scavenger.slurm.job import SlurmLeaseOptions, batch_script, job_id, sbatch

TEMPLATE = f'#!/bin/sh\n{PLACE}\nexec "$@"\n'
PRINT = "import os, sys; print(ascii([sys.argv[1:], os.environ.get('A')]))"
TEXT = st.text(st.characters(exclude_characters="\0", codec="utf-8"), max_size=40)


def submit(step=False, output=None, time_min_s=None, **options):
    settings = BatchSettings(
        "t", TEMPLATE, SlurmLeaseOptions(**options), time_min_s=time_min_s, start_within_s=60.0
    )
    return sbatch(settings, Wanted("malletrain-t-l1", "n1", (), {}, 3600.0, 9.5, output), step)


@settings(max_examples=25, deadline=None)
@given(st.lists(TEXT, max_size=5), TEXT)
def test_any_arguments_and_variables_arrive_unchanged(words, value):
    script = batch_script(TEMPLATE, [sys.executable, "-c", PRINT, *words], {"A": value}, step=False)
    assert b"\r\n" not in script, "sbatch refuses such a script"
    said = subprocess.run(
        ["/bin/sh", "-s"], input=script, capture_output=True, env={"LC_ALL": "C.UTF-8"}, check=True
    )
    assert said.stdout.decode().strip() == ascii([words, value])


@pytest.mark.parametrize("home", ["home", "no such place", "a file", "unset"])
def test_what_a_lease_of_another_user_prints_is_kept_at_home_where_that_can_be(tmp_path, home):
    (tmp_path / "home").mkdir()
    (tmp_path / "a file").touch()
    (tmp_path / "no such place").symlink_to("/proc/nowhere")
    argv = ["/bin/sh", "-c", 'echo "$words out"; echo err >&2; exit 7']
    script = batch_script(TEMPLATE, argv, {"MALLETRAIN_LEASE": "l1"}, False, True)
    environment = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path / home)}
    if home == "unset":
        del environment["HOME"]
    made = subprocess.run(["/bin/sh", "-s"], input=script, capture_output=True, env=environment)
    assert made.returncode == 7
    kept = tmp_path / "home" / KEPT_AT_HOME / "l1.out"
    if home == "home":
        assert (kept.read_text(), made.stdout, made.stderr) == (" out\nerr\n", b"", b"")
    else:
        assert (made.stdout, made.stderr) == (b" out\n", b"err\n")


def test_what_cannot_be_passed_on_is_refused():
    with pytest.raises(SchedulerError, match="NUL"):
        batch_script(TEMPLATE, ["a\0"], {}, False)
    with pytest.raises(SchedulerError, match="no name of an environment variable"):
        batch_script(TEMPLATE, ["a"], {"A B": "x"}, False)
    with pytest.raises(SchedulerError, match=f"no line {PLACE}"):
        batch_script("#!/bin/sh\nexec true\n", ["a"], {}, False)


def test_directives_in_an_argument_stay_an_argument():
    script = batch_script(TEMPLATE, ["x", "\n#SBATCH --partition=other\n"], {}, False).decode()
    before, _, _ = script.partition("#SBATCH")
    assert "\nset -- " in before, "sbatch reads directives up to the first command only"


def test_the_words_of_sbatch():
    named = {"partition": "low", "qos": "scavenger", "account": "a1", "constraint": "a100&ib"}
    words = submit(**named, nice=100, options=("--licenses=x",))
    assert words[0] == "sbatch"
    for word in (
        "--parsable",
        "--nodelist=n1",
        "--nodes=1",
        "--no-requeue",
        "--output=/dev/null",
        "--time=60",
        "--signal=B:TERM@10",
        "--exclusive",
        "--mem=0",
        "--nice=100",
        "--partition=low",
        "--qos=scavenger",
        "--account=a1",
        "--constraint=a100&ib",
        "--deadline=now+3720seconds",
    ):
        assert word in words
    assert words[-1] == "--licenses=x"
    assert not [word for word in words if word.startswith(("--gres", "--time-min"))]


def test_by_gres_as_a_step_and_with_a_shortest_time():
    words = submit(
        exclusive=False,
        gres="gpu:2",
        time_min_s=300.0,
        output=Path("/s 100%/leases/l1.out"),
        step=True,
    )
    assert "--gres=gpu:2" in words
    assert "--exclusive" not in words
    assert "--time-min=5" in words
    assert "--signal=TERM@10" in words, "to the step, in which the agent is"
    assert "--output=/s 100%%/leases/l1.out" in words


def test_partitions():
    assert (
        SlurmLeaseOptions(partition="low,lower").partitions,
        SlurmLeaseOptions(partition="low,lower").main_partition,
    ) == (["low", "lower"], "low")
    assert (SlurmLeaseOptions().partitions, SlurmLeaseOptions().main_partition) == ([], "")


def test_another_owner():
    submit_as = ("sudo", "-n", "-u", "{owner}", "--")
    assert owner_prefix(submit_as, "ann") == ["sudo", "-n", "-u", "ann", "--"]
    assert owner_prefix(submit_as, None) == []


def test_job_ids():
    assert job_id("123\n") == "123"
    assert job_id("a filter says hello\n123;cluster\n") == "123"
    for text in ("", "Submitted batch job", "12x"):
        with pytest.raises(SchedulerError, match="is no job id"):
            job_id(text)
