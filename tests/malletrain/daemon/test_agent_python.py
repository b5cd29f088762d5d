"""Under which of its names the Python of the agents is called."""

import sys
import venv

import pytest

from malletrain.daemon.site.backends import agent_program


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """A virtual environment as its users make it, without pip."""
    folder = tmp_path_factory.mktemp("venv")
    venv.create(folder, symlinks=True)
    return folder


def test_the_names_of_one_python_are_one_program(environment):
    names = sorted(path.name for path in (environment / "bin").glob("python*"))
    assert {"python", "python3"} <= set(names)
    called = {agent_program(str(environment / "bin" / name), str(environment)) for name in names}
    assert called == {(str(environment / "bin" / "python"), "-m", "malletrain.agent")}


def test_another_python_there_is_not_taken_for_it(tmp_path):
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").write_text("")
    assert agent_program(sys.executable, str(tmp_path))[0] == sys.executable
    assert agent_program(sys.executable, str(tmp_path / "none"))[0] == sys.executable
