"""Modules, conda and virtual environments, entered by the shell that enters them on a node; what
a container is shown, and the command lines of its runtimes.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from malletrain.agent.software import (
    CONTAINER_PATH,
    RUNTIMES,
    ContainerSpec,
    binds,
    container_command,
    enter_command,
    missing_mount_points,
    passed_variables,
    python_command,
    runtime_environment,
    task_environment_command,
    task_prefix_in_container,
)
from malletrain.protocol.env import UMASK
from malletrain.protocol.messages import FarmSpec, JobSpec, SoftwareEnvironment

# As Lmod's and Tcl modules' own: a function that evaluates what a command prints.
MODULE = """
module() { eval "$("$MODULECMD" bash "$@")"; }
"""
READ = MODULE + "set -- changed by the script that is read\n"
MODULECMD = """#!{python}
import json, os, shlex, sys
with open(os.environ["CALLS"], "a") as calls:
    calls.write(json.dumps(sys.argv[1:]) + "\\n")
name = sys.argv[3]
if name.startswith("no"):
    print(f"ERROR: unable to locate a modulefile for {{name!r}}", file=sys.stderr)
    print("false;")
else:
    loaded = os.environ.get("LOADEDMODULES", "").split(":")
    print(f"LOADEDMODULES={{shlex.quote(':'.join(filter(None, [*loaded, name])))}};")
    print("export LOADEDMODULES;")
    print("true;")
"""
# As conda's: a program that prints shell functions, of which one asks the program again.
CONDA = """#!/bin/bash
if [ "$1" = shell.bash ]; then
    printf 'export CONDA_EXE=%q\\n' "$0"
    echo '__conda_activate() { \\local ask; ask="$("$CONDA_EXE" activate "$2")" || \\return; \\eval "$ask"; }'
    echo 'conda() { \\local cmd="${1-__missing__}"; case "$cmd" in activate) __conda_activate "$@";; *) \\return 1;; esac; }'
elif [ -d "$ENVS/$2" ]; then
    printf 'export CONDA_PREFIX=%q\\nexport PATH=%q\\n' "$ENVS/$2" "$ENVS/$2/bin:$PATH"
else
    echo "EnvironmentNameNotFound: $2" >&2
    exit 1
fi
"""  # noqa: E501
EVIL = [
    "two words",
    "it's",
    'a "b" c',
    "$(touch evil)",
    "`touch evil`",
    "; touch evil #",
    "a\\b$HOME*",
]
SHOW = "import json, os, sys; print(json.dumps([sys.argv[1:], dict(os.environ)]))"


def program(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


@pytest.fixture
def enter(tmp_path):
    """Run a Python that shows its arguments and environment in a software environment."""
    modulecmd = program(tmp_path / "modulecmd", MODULECMD.format(python=sys.executable))
    base = {
        "PATH": "/usr/bin:/bin",
        "MODULECMD": str(modulecmd),
        "CALLS": str(tmp_path / "calls"),
        "ENVS": str(tmp_path / "envs"),
    }

    def run(*arguments, python=sys.executable, environment=None, **fields):
        command = enter_command(SoftwareEnvironment(**fields), [python, "-c", SHOW, *arguments])
        done = subprocess.run(
            command,
            env={**base, **(environment or {})},
            capture_output=True,
            text=True,
            cwd=tmp_path,
        )
        assert not (tmp_path / "evil").exists()
        return done

    return run


@pytest.fixture
def profile(tmp_path):
    """A script that defines ``module``, as a site's profile does."""
    program(tmp_path / "every_shell", MODULE)
    return program(tmp_path / "Modules" / "init" / "bash", READ)


@pytest.mark.parametrize("how", ["MODULESHOME", "BASH_ENV"])
def test_modules_are_loaded_in_order_whatever_their_names(enter, profile, tmp_path, how):
    place = str(tmp_path / "every_shell" if how == "BASH_ENV" else profile.parent.parent)
    done = enter("an argument", "$(touch evil)", modules=tuple(EVIL), environment={how: place})
    assert done.returncode == 0, done.stderr
    arguments, environment = json.loads(done.stdout)
    assert arguments == ["an argument", "$(touch evil)"]
    assert environment["LOADEDMODULES"] == ":".join(EVIL)
    calls = [json.loads(line) for line in (tmp_path / "calls").read_text().splitlines()]
    assert calls == [["bash", "load", name] for name in EVIL]


def test_a_module_that_cannot_be_loaded_is_named(enter, profile):
    done = enter(
        modules=("cuda/12", "no such"), environment={"MODULESHOME": str(profile.parent.parent)}
    )
    assert done.returncode == 78
    assert "ERROR: unable to locate" in done.stderr
    assert done.stderr.splitlines()[-1].startswith(
        "malletrain: The module 'no such' cannot be loaded on this node"
    )


@pytest.mark.parametrize(
    ("how", "name"),
    [("CONDA_EXE", "train"), ("submitted", "train"), *(("PATH", name) for name in EVIL)],
)
def test_a_conda_environment_is_activated(enter, tmp_path, how, name):
    exe = program(tmp_path / "conda's" / "bin" / "conda", CONDA)
    home = tmp_path / "envs" / name / "bin"
    home.mkdir(parents=True)
    (home / "python").symlink_to(sys.executable)
    around = {"PATH": f"{exe.parent}:/usr/bin:/bin"} if how == "PATH" else {}
    around |= {"CONDA_EXE": str(exe)} if how == "CONDA_EXE" else {}
    submitted = str(exe) if how == "submitted" else ""
    done = enter(python="python", conda=name, conda_exe=submitted, environment=around)
    assert done.returncode == 0, done.stderr
    _, environment = json.loads(done.stdout)
    assert environment["CONDA_PREFIX"] == str(home.parent)


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (False, "cannot be activated on this node; 'conda env list' lists"),
        (True, "has no Python; install one: conda install -n 'train' python."),
    ],
)
def test_a_conda_environment_that_is_not_fit(enter, tmp_path, made, words):
    exe = program(tmp_path / "bin" / "conda", CONDA)
    if made:
        (tmp_path / "envs" / "train").mkdir(parents=True)
    done = enter(python="python", conda="train", conda_exe=str(exe))
    assert done.returncode == 78
    assert words in done.stderr.splitlines()[-1]


def test_a_node_without_conda_says_so(enter):
    done = enter(python="python", conda="train")
    assert (done.returncode, done.stdout) == (78, "")
    assert "malletrain: This node has no conda, so the environment 'train'" in done.stderr


@pytest.fixture(scope="module")
def venv(tmp_path_factory):
    place = tmp_path_factory.mktemp("envs") / "my venv $(touch evil)"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(place)], check=True)
    return place


def test_a_virtual_environment_runs_its_own_python(enter, venv):
    done = enter(python="python", venv=str(venv), environment={"PYTHONHOME": "/nowhere"})
    assert done.returncode == 0, done.stderr
    _, environment = json.loads(done.stdout)
    assert environment["VIRTUAL_ENV"] == str(venv)
    assert environment["PATH"] == f"{venv}/bin:/usr/bin:/bin"
    assert "PYTHONHOME" not in environment


def test_a_virtual_environment_that_is_not_there(enter, tmp_path):
    done = enter(python="python", venv=str(tmp_path / "gone"))
    assert done.returncode == 78
    assert f"There is no virtual environment {tmp_path}/gone on this node" in done.stderr


def test_without_an_environment_no_shell_is_between():
    assert (
        enter_command(None, ["python"])
        == enter_command(SoftwareEnvironment(), ["python"])
        == ["python"]
    )
    contained = SoftwareEnvironment(container="/x.sif", venv="/v")
    assert enter_command(contained, ["apptainer"]) == ["apptainer"]


# --- what a container is shown ---


def test_binds_come_once_and_parents_first():
    assert binds(
        ["/a/b/c", "/scratch:/data", "/a/b", "/a/b/c/d", "/x/../a/b/e", "/other:/a/b/f", "/data"],
        apart=[("/pkg", "/a/b/lib")],
    ) == (
        ("/scratch", "/data"),
        ("/a/b", "/a/b"),
        ("/other", "/a/b/f"),
        ("/pkg", "/a/b/lib"),
    )


_PATHS = st.lists(st.sampled_from("abc"), min_size=1, max_size=4).map(lambda p: "/" + "/".join(p))


@given(st.lists(st.one_of(_PATHS, st.tuples(_PATHS, _PATHS).map(":".join)), max_size=8))
@example(["/a", "/a/a/a", "/a:/a/a"])
def test_every_path_is_seen_inside_as_the_first_that_wanted_its_place(paths):
    made = binds(paths)
    places = [target for _, target in made]
    assert len(set(places)) == len(places)
    assert all(not places[j].startswith(p + "/") for i, p in enumerate(places) for j in range(i))
    first: dict[str, str] = {}
    for text in paths:
        source, _, target = text.partition(":")
        first.setdefault(target or source, source)
    for target, source in first.items():
        outer, place = max(
            (pair for pair in made if f"{target}/".startswith(pair[1] + "/")),
            key=lambda pair: len(pair[1]),
        )
        assert os.path.normpath(outer + target[len(place) :]) == source
    points = missing_mount_points(places)
    assert all(any(f"{t}/".startswith(p + "/") for p in points) for t in places)


def test_variables_of_the_node_stay_outside_unless_the_job_sets_them():
    around = {
        "PATH": "/bin",
        "LD_PRELOAD": "x.so",
        "PYTHONPATH": "/p",
        "PYTHONUNBUFFERED": "1",
        "TMPDIR": "/local",
        "BASH_FUNC_module%%": "() { :; }",
        "SLURM_JOB_ID": "7",
        "HOME": "/users/me",
    }
    names, globs = passed_variables(around, ())
    assert names == ("HOME", "PYTHONUNBUFFERED", "SLURM_JOB_ID")
    assert {"PATH", "LD_*", "TMPDIR"} <= set(globs)
    names, globs = passed_variables(around, {"LD_PRELOAD", "PATH"})
    assert names == ("HOME", "LD_PRELOAD", "PATH", "PYTHONUNBUFFERED", "SLURM_JOB_ID")
    assert not {"PATH", "LD_*"} & set(globs)


def farm_spec(tmp_path, **fields):
    tasks = FarmSpec(("true",), ("x",), 1, "{index}.log")
    return JobSpec("f", "ann", "true", str(tmp_path), "python", mode="farm", farm=tasks, **fields)


def test_a_farm_without_software_enters_nothing(tmp_path):
    assert task_environment_command(farm_spec(tmp_path), "v") == []


def test_the_variables_of_a_farms_tasks_are_those_after_modules_and_setup(profile, tmp_path):
    file, modulecmd = (
        tmp_path / "variables",
        program(tmp_path / "modulecmd", MODULECMD.format(python=sys.executable)),
    )
    spec = farm_spec(
        tmp_path,
        setup='echo noise; export LINES="a\nb" FROM_SETUP=$LOADEDMODULES',
        software=SoftwareEnvironment(modules=("gcc/12",)),
    )
    environment = {
        "PATH": "/usr/bin:/bin",
        "MODULECMD": str(modulecmd),
        "MODULESHOME": str(profile.parent.parent),
        "CALLS": str(tmp_path / "calls"),
    }
    subprocess.run(task_environment_command(spec, str(file)), env=environment, check=True)
    pairs = dict(pair.partition("=")[::2] for pair in file.read_text().split("\0") if pair)
    assert (pairs["LINES"], pairs["FROM_SETUP"]) == ("a\nb", "gcc/12")


def test_a_setup_that_fails_fails_the_entering(tmp_path):
    spec = farm_spec(tmp_path, setup="false")
    command = task_environment_command(spec, str(tmp_path / "variables"))
    assert subprocess.run(command, check=False).returncode == 1


def test_words_before_a_task_in_a_container(tmp_path):
    """They run here as well as in a container."""
    spec = farm_spec(
        tmp_path, setup="A=1; export A", software=SoftwareEnvironment(container="image")
    )
    assert task_environment_command(spec, "v") == []
    task = ["sh", "-c", 'echo "$A $PWD $1"', "sh", "a  b"]
    done = subprocess.run(
        [*task_prefix_in_container(spec), *task], capture_output=True, text=True, check=True
    )
    assert done.stdout == f"1 {tmp_path} a  b\n"


CONTAINED = ContainerSpec(
    image="/images/my torch.sif",
    workdir="/users/me/a job",
    binds=(("/users/me", "/users/me"), ("/scratch/d", "/data")),
    variables=("HOME", "MALLETRAIN_JOB_KEY", "MINE"),
    unset_variables=("PATH", "LD_*"),
    options=("--of-the-site",),
    command_script="/run/j/rc",
)
COMMAND = ["/bin/sh", "-c", "true", "$(x)"]
INSIDE = {"HOME": "/users/me", "MALLETRAIN_JOB_KEY": "secret", "MINE": "a,b"}
PODMAN = [
    *("run", "--rm", "--pid=host", "--network=host", "--ipc=host"),
    *("--security-opt=label=disable", "--entrypoint=", "--workdir=/users/me/a job"),
]
VOLUMES = ["--volume=/users/me:/users/me", "--volume=/scratch/d:/data"]
NAMES = ["--env=HOME", "--env=MALLETRAIN_JOB_KEY", "--env=MINE"]
# https://apptainer.org/docs/user/latest/cli/apptainer_exec.html: exec [options] image command
SINGULARITY = [
    *("exec", "--cleanenv", "--pwd", "/users/me/a job", "--nv"),
    *("--bind", "/users/me:/users/me", "--bind", "/scratch/d:/data"),
    *("--of-the-site", "/images/my torch.sif"),
]
ROWS = {
    "apptainer": ["apptainer", *SINGULARITY],
    "singularity": ["singularity", *SINGULARITY],
    # podman-hpc run [options of podman run] [--gpu] IMAGE COMMAND
    "podman-hpc": [
        *("podman-hpc", *PODMAN, "--userns=keep-id", "--gpu", *NAMES, *VOLUMES),
        *("--of-the-site", "/images/my torch.sif"),
    ],
    # ch-run [OPTION...] IMAGE -- CMD [ARG...]; GPUs are in /dev, their libraries in the image
    "charliecloud": [
        *("ch-run", "--cd=/users/me/a job", "--unset-env=PATH", "--unset-env=LD_*"),
        f"--set-env=PATH={CONTAINER_PATH}",
        *("--bind=/users/me:/users/me", "--bind=/scratch/d:/data"),
        *("--of-the-site", "/images/my torch.sif", "--"),
    ],
    # enroot start [options] NAME|IMAGE [COMMAND] [ARG...]; fstab fields with colons
    "enroot": [
        *("enroot", "start", "--rc", "/run/j/rc", "--env", "NVIDIA_VISIBLE_DEVICES=all"),
        *("--env", "NVIDIA_DRIVER_CAPABILITIES=compute,utility"),
        *("--env", "HOME", "--env", "MALLETRAIN_JOB_KEY", "--env", "MINE"),
        *("--mount", "/users/me:/users/me:none:x-create=auto,rbind"),
        *("--mount", "/scratch/d:/data:none:x-create=auto,rbind"),
        *("--of-the-site", "/images/my torch.sif"),
    ],
    # podman run [options] image [command [arg ...]]; CDI names of the NVIDIA container toolkit
    "podman": [
        *("podman", *PODMAN, "--userns=keep-id", "--device=nvidia.com/gpu=all", *NAMES, *VOLUMES),
        *("--of-the-site", "/images/my torch.sif"),
    ],
}


def test_every_row_is_tried():
    assert ROWS.keys() == RUNTIMES.keys()


@pytest.mark.parametrize("name", RUNTIMES)
def test_a_row(name):
    made = container_command(RUNTIMES[name], replace(CONTAINED, nvidia=True), COMMAND)
    assert made == ROWS[name] + COMMAND


@pytest.mark.parametrize("name", RUNTIMES)
def test_values_of_variables_are_in_no_command_line(name):
    runtime = RUNTIMES[name]
    outside = {"PATH": "/bin", **INSIDE}
    made = container_command(runtime, CONTAINED, COMMAND)
    assert "secret" not in " ".join(made)
    around = runtime_environment(runtime, CONTAINED, outside)
    assert outside.items() <= around.items()
    variables = {runtime.variable_prefix + k: v for k, v in INSIDE.items() if k != "HOME"}
    assert around == {**outside, **(variables if runtime.variable_prefix else {})}


@pytest.mark.parametrize("name", RUNTIMES)
def test_variables_that_each_task_has_of_its_own_may_be_absent(name):
    contained = replace(CONTAINED, variables=(*CONTAINED.variables, "MALLETRAIN_TASK"))
    around = runtime_environment(RUNTIMES[name], contained, {"PATH": "/bin", **INSIDE})
    assert not [variable for variable in around if variable.endswith("MALLETRAIN_TASK")]


@pytest.mark.parametrize(
    ("name", "fields", "words"),
    [
        ("apptainer", {"amd": True}, ["--rocm"]),
        ("podman", {"amd": True}, ["--device=/dev/kfd", "--device=/dev/dri"]),
        ("charliecloud", {"image_environment": True}, ["--set-env"]),
    ],
)
def test_what_a_node_or_an_image_adds(name, fields, words):
    without = container_command(RUNTIMES[name], CONTAINED, COMMAND)
    added = container_command(RUNTIMES[name], replace(CONTAINED, **fields), COMMAND)
    assert [word for word in added if word in words] == words
    assert [word for word in added if word not in words] == without


def test_root_has_no_user_namespace_of_podman():
    made = container_command(RUNTIMES["podman"], replace(CONTAINED, root=True), COMMAND)
    assert "--userns=keep-id" not in made


@pytest.mark.parametrize(
    ("setup", "mask"),
    [("umask 002", "002"), ("true", "007"), (f"unset {UMASK}", "007"), ("", "007")],
)
def test_a_umask_in_the_setup_comes_after_that_of_the_submission(setup, mask):
    spec = JobSpec(
        "a", "ann", "a.py", "/", sys.executable, env={UMASK: "0007"}, setup=setup, goal="throughput"
    )
    code = "import os, malletrain.launch.entry as e; e.set_umask(); print(f'{os.umask(0):03o}')"
    done = subprocess.run(
        python_command(spec, ["-c", code]),
        env={**os.environ, **spec.env},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == f"{mask}\n"
