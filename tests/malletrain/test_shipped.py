"""Files that come with the product: found by name, refused with what there is."""

from __future__ import annotations

import re

import pytest

from malletrain.cli import main
from malletrain.shipped import names, shipped
from tests.bare import ROOT
from tests.command_runner import CliRunner


def test_every_name_is_that_of_a_file_in_the_tree():
    for name in names():
        assert shipped(name).samefile(ROOT / name)


def test_everything_that_operators_need_is_there():
    kinds = {"slurm", "pbs"}
    assert {f"jobscripts/{kind}/lease.sh" for kind in kinds} <= set(names())
    tree = (ROOT / "site-configs").rglob("*")
    configurations = {str(f.relative_to(ROOT)) for f in tree if f.is_file()}
    assert configurations <= set(names())


def test_a_file_that_does_not_ship_is_refused_with_those_that_do():
    with pytest.raises(FileNotFoundError, match=r'no file "nope"; it comes with .*slurm/lease.sh'):
        shipped("nope")
    done = CliRunner().invoke(main, ["shipped", "nope"])
    assert done.exit_code == 1
    assert "jobscripts/examples/digits.py" in done.output


def test_the_unit_names_what_the_page_on_slurm_installs():
    unit = shipped("site-configs/malletrain.service").read_text()
    page = (ROOT / "docs" / "slurm.md").read_text()
    program, config = re.search(r"^ExecStart=(\S+) --config (\S+)$", unit, re.MULTILINE).groups()
    folder = program.removesuffix("/bin/malletraind")
    assert f"$ python3 -m venv {folder}\n" in page
    assert f"cp site-configs/slurm.toml {config}\n" in page
    assert f"`{program}` and `{config}`" in page
