import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scavenger.batch.lease_script import HOME_OUTPUT_DIR, PLACE, owner_prefix
from scavenger.batch.settings import BatchSettings
from scavenger.batch.submission import LeaseSpec, Shrink
from scavenger.interface import SchedulerError
from scavenger.slurm.job import (
    SlurmLeaseOptions,
    batch_script,
    job_id,
    sbatch,
    sbatch_shared,
    shared_script,
    shrink,
)
from tests.draws import cases

TEMPLATE = f'#!/bin/sh\n{PLACE}\nexec "$@"\n'
PRINT = "import os, sys; print(ascii([sys.argv[1:], os.environ.get('A')]))"
TEXT = st.text(st.characters(exclude_characters="\0", codec="utf-8"), max_size=40)


def submit(step=False, output=None, time_min_s=None, **options):
    settings = BatchSettings(
        "t", TEMPLATE, SlurmLeaseOptions(**options), time_min_s=time_min_s, start_within_s=60.0
    )
    return sbatch(settings, LeaseSpec("malletrain-t-l1", "n1", (), {}, 3600.0, 9.5, output), step)


@settings(max_examples=cases(25), deadline=None)
@given(st.lists(TEXT, max_size=5), TEXT)
def test_any_arguments_and_variables_arrive_unchanged(words, value):
    script = batch_script(TEMPLATE, [sys.executable, "-c", PRINT, *words], {"A": value}, step=False)
    assert b"\r\n" not in script, "sbatch refuses such a script"
    result = subprocess.run(
        ["/bin/sh", "-s"], input=script, capture_output=True, env={"LC_ALL": "C.UTF-8"}, check=True
    )
    assert result.stdout.decode().strip() == ascii([words, value])


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
    output = tmp_path / "home" / HOME_OUTPUT_DIR / "l1.out"
    if home == "home":
        assert (output.read_text(), made.stdout, made.stderr) == (" out\nerr\n", b"", b"")
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
    assert job_id("Submitted batch job 123 on cluster c\n") == "123"
    assert job_id("You have 40 hours left.\n123\nThank you for using this machine.\n\n") == "123"
    assert job_id("123\n123\n") == "123"
    for text in ("", "Submitted batch job", "12x"):
        with pytest.raises(SchedulerError, match="is no job id"):
            job_id(text)
    with pytest.raises(SchedulerError, match=r"2 lines that may be a job id \(123, 40\)"):
        job_id("40\n123\n")


# --- several leases in one job ---


def shared(shape, count=3):
    settings = BatchSettings("t", TEMPLATE, SlurmLeaseOptions(), start_within_s=60.0, shape=shape)
    pack = [
        LeaseSpec(
            f"malletrain-t-l{i}",
            f"n{i}",
            [sys.executable, "-c", PRINT, f"it's l{i}"],
            {"A": f"a\n{i}", "MALLETRAIN_LEASE": f"l{i}", "SAME": "$(id)"},
            3600.0 + 600 * i,
            9.5,
            None,
            lease=f"l{i}",
        )
        for i in range(1, count + 1)
    ]
    return settings, pack


def test_an_array_and_a_block_ask_for_some_of_the_nodes_of_their_leases():
    settings, pack = shared("array")
    words = sbatch_shared(settings, pack, ["n4", "n6", "n5"], step=False)
    assert {"--array=0-2", "--nodes=1", "--exclude=n[4-6]", "--signal=B:TERM@10"} <= set(words)
    assert {"--job-name=malletrain-t-l1-3", "--time=70"} <= set(words), "the shortest of them"
    settings, pack = shared("block")
    words = sbatch_shared(settings, pack, [], step=True)
    assert {"--nodes=1-3", "--no-kill", "--ntasks-per-node=1", "--signal=TERM@10"} <= set(words)
    assert not [word for word in words if word.startswith(("--exclude", "--nodelist", "--array"))]
    assert shrink(Shrink("8", "me", ("n1", "n3", "n2"), ("n4",))) == [
        "scontrol",
        "update",
        "JobId=8",
        "NodeList=n[1-3]",
    ]


@pytest.mark.parametrize("node", ["n1", "n2", "n9"])
def test_a_task_of_an_array_is_the_lease_of_its_node(node):
    settings, pack = shared("array")
    result = subprocess.run(
        ["/bin/sh", "-s"],
        input=shared_script(settings, pack, step=False),
        capture_output=True,
        env={"LC_ALL": "C.UTF-8", "SLURMD_NODENAME": node},
    )
    if node == "n9":
        assert (result.returncode, result.stdout) == (1, b"")
        assert result.stderr == b"No lease is for n9.\n"
    else:
        assert result.stdout.decode().strip() == ascii([[f"it's l{node[1]}"], f"a\n{node[1]}"])


SRUN = """#!/bin/sh
for word; do
    case $word in --nodelist=*) node=${word#*=};; --cpus-per-task=*) cpus=${word#*=};; esac
    case $word in -*) shift;; *) break;; esac
done
printf '%s\\n' "$node has $cpus: $MALLETRAIN_NODE $MALLETRAIN_LEASE $SAME $("$@")"
"""


@pytest.mark.parametrize(
    ("cpus", "counts"), [("4(x3)", [4, 4, 4]), ("4,2(x2)", [4, 2, 2]), ("1,2,3", [1, 2, 3])]
)
def test_a_block_starts_the_agent_of_each_node_that_it_has(tmp_path, cpus, counts):
    settings, pack = shared("block", 4)
    for name, text in {"srun": SRUN, "scontrol": "#!/bin/sh\nprintf 'n1\\nn3\\nn4\\n'\n"}.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    result = subprocess.run(
        ["/bin/sh", "-s"],
        input=shared_script(settings, pack, step=True),
        capture_output=True,
        check=True,
        env={
            "LC_ALL": "C.UTF-8",
            "PATH": f"{tmp_path}:/usr/bin:/bin",
            "SLURM_JOB_NODELIST": "n[1,3-4]",
            "SLURM_JOB_CPUS_PER_NODE": cpus,
        },
    )
    expected = [
        f"{node} has {count}: {node} l{node[1]} $(id) "
        + ascii([[f"it's l{node[1]}"], f"a\n{node[1]}"])
        for node, count in zip(("n1", "n3", "n4"), counts, strict=True)
    ]
    assert sorted(result.stdout.decode().splitlines()) == expected


@pytest.mark.parametrize("shape", ["array", "block"])
def test_keys_stand_in_no_command_line_and_each_agent_has_its_own_alone(tmp_path, shape):
    settings, pack = shared(shape)
    pack = [replace(one, env={**one.env, "KEY": f"secret-{one.lease}"}) for one in pack]
    shows = 'printf "argv %s\\n" "$*"; exec "$@"'
    settings = replace(settings, template=TEMPLATE.replace('exec "$@"', shows))
    for name, text in {
        "srun": '#!/bin/sh\necho "argv $*"\nenv\n',
        "scontrol": "#!/bin/sh\nenv >&2\necho n1\n",
    }.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    result = subprocess.run(
        ["/bin/sh", "-s"],
        input=shared_script(settings, pack, step=True),
        capture_output=True,
        check=True,
        env={
            "PATH": f"{tmp_path}:/usr/bin:/bin",
            "SLURM_JOB_NODELIST": "n1",
            "SLURMD_NODENAME": "n1",
            "SLURM_JOB_CPUS_PER_NODE": "4",
        },
    )
    lines = result.stdout.decode().splitlines()
    assert [line for line in lines if line.startswith("argv ")]
    assert not [line for line in lines if line.startswith("argv ") and "secret" in line]
    assert b"secret" not in result.stderr
    if shape == "block":
        assert [line for line in lines if "secret" in line] == ["KEY=secret-l1"]


def test_what_leases_of_one_job_print_is_kept_apart(tmp_path):
    settings, pack = shared("array")
    pack = [replace(one, output=tmp_path / f"it's {one.lease}.out") for one in pack]
    for node in ("n1", "n3"):
        subprocess.run(
            ["/bin/sh", "-s"],
            input=shared_script(settings, pack, step=False),
            env={"LC_ALL": "C.UTF-8", "SLURMD_NODENAME": node},
            check=True,
        )
    assert {path.name: "it's l" in path.read_text() for path in tmp_path.iterdir()} == {
        "it's l1.out": True,
        "it's l3.out": True,
    }
