"""Configures hypothesis (the same cases in each check, fresh ones in the random search), pytest's
memory, and the packages of this tree, which are made once per run.

``make test`` uses the profile "check": a run that passed passes again. ``make fuzz`` uses "fuzz"
with a seed that it prints. A case found by the search becomes an explicit example of its test.
"""

from __future__ import annotations

import gc
import os
import random
import signal
import sys
import tarfile
from pathlib import Path

import pytest
import structlog
from hypothesis.internal.conjecture import providers

from malletrain import __version__
from malletrain.protocol import env
from tests.bare import build, files_of, install, made_once, source_tree
from tests.dealing import deal
from tests.draws import register_profiles
from tests.last_words import (  # noqa: F401 (hooks)
    pytest_runtest_makereport,
    pytest_terminal_summary,
)
from tests.waiting import PATIENCE_S

pytest_plugins = ("tests.processor_time",)

# A shell that starts the tests in the background may ignore SIGINT, which every process inherits.
# Ctrl-C is part of what is tested.
signal.signal(signal.SIGINT, signal.default_int_handler)

# A daemon may stand still for longer than its clients wait for it: the clients of these tests, in
# these processes and in those that they start, wait longer.
os.environ[env.TIMEOUT] = f"{PATIENCE_S:g}"

# One thread for NumPy's and SciPy's linear algebra; see tests.malletrain.one_thread.
os.environ["OPENBLAS_NUM_THREADS"] = "1"

# Jobs have the umask of their submission. That of the developer is not part of what is tested.
os.umask(0o022)

register_profiles()
# Hypothesis would also draw numbers and texts from the loaded modules of this project: other cases
# in each worker and run.
providers._get_local_constants = lambda: providers._local_constants  # type: ignore[attr-defined] # noqa: SLF001


SLOW = (
    "slurm",
    "containers",
    "docs",
    "packaging",
    "hosts",
    "integration",
    "zoo",
    "firstday",
    "jobscripts",
    "malletrain/elastic",
    "malletrain/launch",
)
"""Folders of which all tests are marked ``slow``. Elsewhere modules and tests have the mark."""
FORKING = (
    "tests.forked",
    "tests.malletrain.elastic.conductor",
    "tests.malletrain.forked_programs",
)
"""A module with something from these needs a fork server with torch."""


def _needs_fork_server(module):
    return any(
        getattr(value, "__module__", "") in FORKING or getattr(value, "__name__", "") in FORKING
        for value in vars(module).values()
    )


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(items):
    rooms = [Path(__file__).parent / room for room in SLOW]
    slow_path = {
        path: any(path.is_relative_to(room) for room in rooms)
        for path in {item.path for item in items}
    }
    for item in items:
        if slow_path[item.path]:
            item.add_marker(pytest.mark.slow)
        if "any_seed" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.any_seed)
    yield  # after this, pytest removes what ``-m`` does not select
    modules = {}
    for item in items:
        modules.setdefault(str(item.path), []).append(item)
    sizes = {name: len(tests) for name, tests in modules.items()}
    slow = {n for n, tests in modules.items() if any(t.get_closest_marker("slow") for t in tests)}
    forking = {name for name, tests in modules.items() if _needs_fork_server(tests[0].module)}
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    order = deal(sizes, slow | forking, workers, forking)  # a server takes seconds to start
    items[:] = [item for name in order for item in modules[name]]


_frozen_modules = 0
"""Number of modules when objects were last frozen."""
MODULES_BETWEEN_FREEZES = 100
"""Number of new modules after which objects are frozen again."""


def _freeze():
    global _frozen_modules
    gc.freeze()
    _frozen_modules = len(sys.modules)


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Freeze the objects that importing and collecting the tests has made. They live until the end;
    searching them for garbage would take a third of the collection's processor time.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        _freeze()
        gc.enable()
        # A daemon that starts in this process would search all these objects, too.
        if daemon := sys.modules.get("malletrain.daemon.main"):
            daemon.freeze_objects = gc.collect


MAX_DESCRIPTORS = 400
"""Maximum number of descriptors that a process of the tests may have open. ``select`` refuses
descriptors above 1,024; this limit notices a leak long before.
"""


FOLDER = Path.cwd()
"""Working folder of the tests, which every test leaves as it was."""


def _working_folder():
    try:
        return str(Path.cwd())
    except FileNotFoundError:
        return "a folder that was removed"


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item):
    if (folder := _working_folder()) != str(FOLDER):
        os.chdir(FOLDER)
        pytest.fail(f"After this test the working folder is {folder}, not {FOLDER}.")
    descriptors = os.listdir("/proc/self/fd")
    if len(descriptors) > MAX_DESCRIPTORS:
        gc.collect()
        descriptors = os.listdir("/proc/self/fd")
    if len(descriptors) > MAX_DESCRIPTORS:
        pytest.fail(
            f"{len(descriptors)} descriptors are open; this test or an earlier one leaks them."
        )


@pytest.hookimpl(trylast=True)
def pytest_runtest_logfinish():
    """Undo the logging configuration of a daemon that ran in this process. Freeze the modules that
    a test has imported, because they live until the end: torch's compiler alone, which the first
    optimizer imports, doubles the objects that a search for garbage visits.
    """
    structlog.reset_defaults()
    if len(sys.modules) > _frozen_modules + MODULES_BETWEEN_FREEZES:
        gc.collect()
        _freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call():
    """Undo changes of the environment by a test or by a library in it; Accelerate, for example,
    leaves ``RANK``.
    """
    before = dict(os.environ)
    try:
        return (yield)
    finally:
        for name in (before.keys() | os.environ.keys()) - {"PYTEST_CURRENT_TEST"}:
            if name not in before:
                del os.environ[name]
            elif os.environ.get(name) != before[name]:
                os.environ[name] = before[name]


@pytest.fixture
def any_seed(request):
    """Return a function that maps a number to a seed: ``any_seed(3)`` is 3 in the check, and
    depends on the search's seed in ``make fuzz``. For tests with their own random draws that hold
    for every seed.
    """
    seed = request.config.getoption("--hypothesis-seed")
    if seed is None:
        return lambda fixed: fixed
    return lambda fixed: random.Random(f"{seed} {fixed}").randrange(2**31)


@pytest.fixture(scope="session")
def tree(tmp_path_factory):
    return source_tree(tmp_path_factory.mktemp("source") / "malletrain")


@pytest.fixture(scope="session")
def sdist(tree, tmp_path_factory):
    """Return the unpacked source package."""

    def make(target):
        before = files_of(tree)
        build("sdist", tree, target)
        with tarfile.open(target / f"malletrain-{__version__}.tar.gz") as archive:
            archive.extractall(target, filter="data")
        unpacked = target / f"malletrain-{__version__}"
        (unpacked / "before.txt").write_text("\n".join(sorted(before)))

    return made_once(tmp_path_factory, "sdist", make) / f"malletrain-{__version__}"


@pytest.fixture(scope="session")
def wheel(sdist, tmp_path_factory):
    folder = made_once(tmp_path_factory, "wheel", lambda target: build("wheel", sdist, target))
    return folder / f"malletrain-{__version__}-py3-none-any.whl"


@pytest.fixture(scope="session")
def installed(wheel, tmp_path_factory):
    """Return a virtual environment with only the wheel installed."""
    folder = made_once(tmp_path_factory, "installed", lambda target: install(wheel, target))
    return folder / "environment"
