"""In a clone without data and without the packages of the extras, each benchmark says in a sentence
what it needs.
"""

from __future__ import annotations

import importlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import needs
from tests.benchmarks.test_help import MODULES, is_command

ROOT = Path(__file__).parents[2]
EXTRAS = sorted(
    {
        *needs.JOBSCRIPTS,
        "ray",
        "submitit",
        "torchft",
        *(m for each in needs.EXTRAS.values() for m in each),
    }
)
BLOCKER = f"""
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {EXTRAS!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Absent())
"""
"""Python imports it first; the packages of the extras are installed where tests run."""
NEEDS_NOTHING = {"pbs_poll", "report", "slurm_poll"}
"""They would run; they are only asked for help."""
ARGUMENTS = {
    "siblings": ["no-table.csv"],
    "simulation": ["--trace", "no-trace.csv", "--curves", "no-curves.csv"],
    "windsr": ["--out", "results", "--data", "no-wind.nc"],
}
"""Those that the parser asks for before the benchmark begins."""
SENTENCE = re.compile(
    r"needs the package \w+, which is not installed: pip install "
    r"|needs .+, a file that it reads or a program that it runs"
    r"|There is no (file )?\S+"
    r"|The table \S+ cannot be read"
)


@pytest.fixture(scope="module")
def clone(tmp_path_factory):
    """A clone without ../shared, and a folder with the blocker."""
    folder = tmp_path_factory.mktemp("stranger")
    repository = folder / "malletrain"
    leave_out = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "benchmarks", repository / "benchmarks", ignore=leave_out)
    for name in ("malletrain", "scavenger", "allocator", "jpa", "jobscripts", "tests"):
        (repository / name).symlink_to(ROOT / name)
    (folder / "blocker").mkdir()
    (folder / "blocker" / "sitecustomize.py").write_text(BLOCKER)
    return repository


def started(clone, name, *arguments, without_extras=True):
    paths = [str(clone.parent / "blocker")] if without_extras else []
    folders = () if without_extras else needs.JOBSCRIPTS.values()
    paths += [str(ROOT / "jobscripts" / folder) for folder in folders]
    return subprocess.run(
        [sys.executable, "-m", f"benchmarks.{name}", *arguments],
        cwd=clone,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in MODULES if is_command(name)])
def test_a_benchmark_says_what_it_needs(clone, name):
    ended = started(
        clone, name, *(["--help"] if name in NEEDS_NOTHING else ARGUMENTS.get(name, []))
    )
    assert "Traceback" not in ended.stderr
    if name in NEEDS_NOTHING:
        assert ended.returncode == 0
        return
    assert ended.returncode == 1, ended.stdout + ended.stderr
    assert SENTENCE.search(ended.stderr), ended.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], r"There is no \S*summit_idle_week1.csv.gz. .* name another: --idle FILE"),
        (["--requests", "web"], r"There is no \S*web_requests_bu98.csv.gz. .* --traces FOLDER"),
        (["--idle", "mine.csv"], r"There is no mine.csv. The benchmark reads when nodes are idle"),
        (["--requests", "mail"], r"--requests 'mail' is none of docker, cloudphysics, web"),
    ],
)
def test_the_replay_of_the_cache_takes_paths(clone, arguments, says):
    ended = started(clone, "infinicache_replay", *arguments, without_extras=False)
    assert ended.returncode in (1, 2)
    assert re.search(says, ended.stderr), ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.mark.slow
def test_the_replay_reads_the_files_that_are_named(clone, tmp_path):
    idle = tmp_path / "idle.csv"
    rows = [f"{10 * k},n{k},idle" for k in range(12)] + ["600,n1,busy", "700,n2,busy"]
    idle.write_text("time_s,node,event\n" + "\n".join(rows) + "\n")
    arguments = ["--idle", idle, "--days", "0", "--hours", "0.2", "--ways", "at random", "--json"]
    ended = started(clone, "infinicache_replay", *map(str, arguments), without_extras=False)
    assert ended.returncode == 0, ended.stderr
    assert f'"idle": "{idle}"' in ended.stdout


@pytest.mark.parametrize(
    ("module", "command"),
    [
        ("redis", "pip install -e '.[redis]'"),
        ("infinicache", "pip install -e jobscripts/infinicache"),
        ("fedcase", "pip install -e jobscripts/federated"),
        ("llmserve", "pip install -e jobscripts/llm"),
        ("ray", "pip install ray"),
        ("malletrain", "pip install -e . (and run the benchmark in the root of the repository)"),
    ],
)
def test_how_a_package_is_installed(monkeypatch, module, command):
    monkeypatch.setitem(sys.modules, module, None)  # Python does not find it
    assert needs.install_command(module) == command
    error = ModuleNotFoundError(f"No module named '{module}.x'", name=f"{module}.x")
    assert needs.sentence("benchmarks.farm", error) == (
        f"benchmarks.farm needs the package {module}, which is not installed: {command}"
    )


@pytest.mark.parametrize("module", ["malletrain.absent", "numpy.absent.part"])
def test_a_module_that_an_installed_package_lacks_is_a_defect(capsys, module):
    with pytest.raises(ModuleNotFoundError) as raised:
        importlib.import_module(module)
    assert needs.sentence("benchmarks.farm", raised.value) is None
    needs.explain(raised.type, raised.value, raised.tb)
    text = capsys.readouterr().err
    assert "Traceback" in text
    assert "is not installed" not in text


def reader(*files):
    """A function of the last file that calls the one of the file before it, and so on; the first
    reads.
    """
    calls = Path.read_text
    for file in files:
        scope: dict = {"calls": calls}
        exec(compile("def read(path): return calls(path)", str(file), "exec"), scope)
        calls = scope["read"]
    return calls


BENCHMARK = Path(needs.__file__).with_name("some.py")


@pytest.mark.parametrize(
    ("files", "is_defect"),
    [
        ([BENCHMARK], False),
        ([ROOT / "malletrain" / "store" / "some.py", BENCHMARK], True),
        (["/usr/lib/python3/site-packages/some/part.py", BENCHMARK], True),
    ],
)
def test_a_missing_file_is_named_if_the_benchmark_itself_reads_it(tmp_path, files, is_defect):
    with pytest.raises(FileNotFoundError) as raised:
        reader(*files)(tmp_path / "absent.txt")
    text = needs.sentence("benchmarks.some", raised.value)
    assert (text is None) == is_defect
    assert is_defect or "absent.txt, a file that it reads" in text


def test_other_errors_keep_their_traceback(capsys):
    try:
        raise ValueError("a defect")
    except ValueError as error:
        needs.explain(type(error), error, error.__traceback__)
    text = capsys.readouterr().err
    assert "Traceback" in text
    assert "a defect" in text


def test_a_missing_program_is_named():
    with pytest.raises(FileNotFoundError) as raised:
        subprocess.run(["no-such-program"])
    text = needs.sentence("benchmarks.noharm", raised.value)
    assert text is not None
    assert text.startswith(
        "benchmarks.noharm needs no-such-program, a file that it reads or a prog"
    )


def test_every_extra_that_is_named_exists():
    text = (ROOT / "setup.cfg").read_text()
    extras = text.partition("[options.extras_require]")[2].partition("\n[")[0]
    assert set(needs.EXTRAS) <= set(re.findall(r"^(\w+) =", extras, re.MULTILINE))
