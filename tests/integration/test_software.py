"""Software environments through the whole product: the site's image, and what ``show`` says of an
environment that lacks something.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks.host_image import host_binds, make_image
from malletrain.render import job_detail
from malletrain.submission.options import ScriptOptions
from malletrain.submission.software import SoftwareOptions
from malletrain.submission.spec import build
from tests.integration.embedded import site

pytest.importorskip("torch")

INSIDE = "import os; import malletrain; malletrain.report(1); print('in', os.environ['IMAGE_SAYS'])"


def test_the_sites_image_and_an_environment_without_malletrain(tmp_path):
    image = make_image(tmp_path / "image", Path(sys.executable))
    bare = tmp_path / "bare"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(bare)], check=True)
    containers = (
        f'[containers]\nimage = "{image}"\nruntime = "charliecloud"\n'
        f"binds = {json.dumps(host_binds(tmp_path))}\n"
    )
    with site(tmp_path / "site", nodes=1, config=containers) as s:
        script = s.script("train.py", INSIDE)
        inside = s.submit(script, name="inside")
        s.until_state(inside, "completed", "failed")
        options = SoftwareOptions(venv=str(bare))
        spec = build(
            str(script), (), ScriptOptions(name="bare", workdir=str(s.work), software=options)
        )
        with s.client() as client:
            outside = client.submit(spec).id
        s.until_state(outside, "completed", "failed")
        with s.client() as client:
            s.until(lambda: "in so" in client.logs(inside).text, "what the script printed")
        lines = shown(s.show(outside)).splitlines()
        text = " ".join(" ".join(lines).split())
        assert (
            f"The virtual environment {bare} has no malletrain; install it there: "
            f"{bare}/bin/python -m pip install --find-links WHEELS malletrain" in text
        )
        assert s.job(outside).reason.startswith(f"The virtual environment {bare} has no malletrain")
        assert any(line.split()[:1] == ["Container"] for line in shown(s.show(inside)).splitlines())
        assert s.job(inside).state == "completed"


def shown(detail) -> str:
    console = Console(width=1000, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(job_detail.job(detail))
    return console.export_text()
