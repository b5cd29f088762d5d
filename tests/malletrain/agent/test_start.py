"""How the tasks of a farm are started in a container: what each runtime passes to them."""

import pytest

from malletrain.agent.containers import RUNTIMES
from malletrain.agent.launch import JobPlace
from malletrain.agent.start import task_setting
from malletrain.launch.farm import thread_variables
from malletrain.protocol.farm import FarmSpec
from malletrain.protocol.payloads import JobSpec, SoftwareEnvironment

FARM = FarmSpec(("true",), ("index",), 4, "log-{index}", cpus=2)


@pytest.fixture
def setting_of(tmp_path):
    """Call it with the name of a runtime for the setting of a farm in one of its containers."""

    def make(name):
        program = tmp_path / "bin" / RUNTIMES[name].program
        program.parent.mkdir()
        program.write_text("#!/bin/sh\n")
        program.chmod(0o755)
        for folder in ("image", "run"):
            (tmp_path / folder).mkdir()
        spec = JobSpec(
            *("farm", "ann", "true", str(tmp_path), "python"),
            mode="farm",
            farm=FARM,
            software=SoftwareEnvironment(container=str(tmp_path / "image"), runtime=name),
        )
        place = JobPlace(
            *(tmp_path / "run", "ipc:///l", str(tmp_path / "run" / "w")),
            host="n",
            interface="",
            node="n0",
            lease="l0",
            environment={},
        )
        return task_setting(spec, place, {"PATH": str(tmp_path / "bin"), "HOME": "/"})

    return make


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
