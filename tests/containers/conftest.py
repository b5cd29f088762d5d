"""An image for each test that asks for one. Without Charliecloud the tests fail: ``make test``
installs it.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from benchmarks.host_image import host_binds, make_image
from malletrain.protocol.messages import SoftwareEnvironment


@pytest.fixture
def software(tmp_path):
    """Call it for a software environment of Charliecloud and an image of this machine's files, by
    default with the Python that runs this.
    """
    if shutil.which("ch-run") is None:
        pytest.fail(
            "Charliecloud is not installed (there is no ch-run), so no container can be tested; "
            "run tests/slurm/install.sh as root, or: apt-get install charliecloud-runtime"
        )

    def make(python: Path | None = Path(sys.executable), **fields) -> SoftwareEnvironment:
        image = make_image(tmp_path / "an image; $(touch evil) 'of' mine", python)
        fields.setdefault("runtime", "charliecloud")
        binds = tuple(host_binds(tmp_path))
        return SoftwareEnvironment(container=str(image), binds=binds, **fields)

    return make


@pytest.fixture
def bare_python(tmp_path) -> Path:
    """A Python with nothing installed."""
    place = tmp_path / "bare"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(place)], check=True)
    return place / "bin" / "python"


@pytest.fixture
def python_without_malletrain(tmp_path) -> Path:
    """A Python with the packages that this one imports from its directory, torch among them, and
    without those that an editable installation adds to it: malletrain is not installed.
    """
    place = tmp_path / "without"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(place)], check=True)
    packages = sysconfig.get_path("purelib")
    own = sysconfig.get_path("purelib", vars={"base": str(place), "platbase": str(place)})
    Path(own, "others.pth").write_text(f"{packages}\n")
    return place / "bin" / "python"
