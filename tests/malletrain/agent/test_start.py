"""How the tasks of a farm are started in a container: what each runtime passes to them."""

import pytest

from malletrain.agent.launch import JobPlace, job_environment
from malletrain.agent.software import RUNTIMES
from malletrain.agent.start import launcher_command, task_setting
from malletrain.launch.farm import thread_variables
from malletrain.protocol.farm import FarmSpec
from malletrain.protocol.launcher_channel import LaunchOrder
from malletrain.protocol.payloads import JobSpec, SoftwareEnvironment

FARM = FarmSpec(("true",), ("index",), 4, "log-{index}", cpus=2)


def job_in(folder, name, **fields):
    """A job in a container of this runtime, and its node, where the runtime is on PATH."""
    program = folder / "bin" / RUNTIMES[name].program
    program.parent.mkdir()
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    for sub in ("image", "run"):
        (folder / sub).mkdir()
    spec = JobSpec(
        *("farm", "ann", "true", str(folder), "python"),
        software=SoftwareEnvironment(container=str(folder / "image"), runtime=name),
        **fields,
    )
    place = JobPlace(
        *(folder / "run", "ipc:///l", str(folder / "run" / "w")),
        host="n",
        interface="",
        node="n0",
        lease="l0",
        environment={"PATH": str(folder / "bin"), "HOME": "/", "SLURM_JOB_ID": "lease-77"},
    )
    return spec, place


@pytest.fixture
def setting_of(tmp_path):
    """Call it with the name of a runtime for the setting of a farm in one of its containers."""

    def make(name):
        spec, place = job_in(tmp_path, name, mode="farm", farm=FARM)
        return task_setting(spec, place, {"PATH": str(tmp_path / "bin"), "HOME": "/"})

    return make


@pytest.mark.parametrize("mode", ["restart", "farm"])
@pytest.mark.parametrize("name", RUNTIMES)
def test_the_job_id_of_the_lease_does_not_get_into_a_container(tmp_path, name, mode):
    spec, place = job_in(tmp_path, name, mode=mode, farm=FARM if mode == "farm" else None)
    order = LaunchOrder("j1", spec, "ipc:///l", "n", ".", 5.0, 60.0)
    environment = job_environment(place, order, flags="/f")
    if mode == "farm":
        setting = task_setting(spec, place, environment)
        words, inside = setting.prefix, setting.environment
    else:
        words, inside = launcher_command(spec, tmp_path / "order.json", place, environment)
    assert "l0" in inside.values(), "other variables of the lease are there"
    assert "lease-77" not in inside.values()
    assert not any("lease-77" in word for word in words)


@pytest.mark.parametrize("variable", ["OMP_NUM_THREADS", "MALLETRAIN_THREADS"])
@pytest.mark.parametrize("name", RUNTIMES)
def test_the_number_of_threads_of_a_task_reaches_its_container(setting_of, name, variable):
    """By its name on the command line, with the runtime's prefix, or as all variables do."""
    setting, runtime = setting_of(name), RUNTIMES[name]
    own = thread_variables(FARM, 8, 4, setting.environment, setting.variable_prefix)
    assert own[variable] == "2"
    if runtime.variable:
        words = [word.format(name=variable) for word in runtime.variable]
        assert words[-1] in setting.prefix
    elif runtime.variable_prefix:
        assert own[runtime.variable_prefix + variable] == "2"
    else:
        assert f"--unset-env={variable}" not in setting.prefix
