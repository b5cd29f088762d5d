"""Each row of the table of runtimes, against the command line that its manual describes."""

from dataclasses import replace

import pytest

from malletrain.agent.containers import (
    CONTAINER_PATH,
    RUNTIMES,
    ContainerSpec,
    container_command,
    runtime_environment,
)

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
