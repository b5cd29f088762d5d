"""The example notebook, as its reader runs it: beside a daemon, in a folder of its own."""

from __future__ import annotations

import asyncio

import nbformat
import pytest
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient

from tests.bare import ROOT
from tests.integration.embedded import site

NOTEBOOK = ROOT / "docs" / "first-sweep.ipynb"


def texts(cell) -> list[str]:
    """What a cell showed as text."""
    result = []
    for output in cell.outputs:
        assert output.output_type != "error", output
        result.append(output.get("text") or output.data["text/plain"])
    return result


def test_the_notebook_as_it_stands(tmp_path, monkeypatch):
    book = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(book)
    code = [cell for cell in book.cells if cell.cell_type == "code"]
    assert not any(cell.outputs or cell.execution_count for cell in code), "it is kept bare"
    with site(tmp_path / "site", nodes=1) as made:
        monkeypatch.setenv("MALLETRAIN_STATE_DIR", str(made.state))
        monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
        # Sockets in the file system: no port that somebody else may take.
        kernel = AsyncKernelManager(
            kernel_name="python3", transport="ipc", connection_file=str(made.root / "kernel.json")
        )
        (tmp_path / "work").mkdir()
        reader = NotebookClient(
            book,
            km=kernel,
            timeout=600,
            startup_timeout=600,
            iopub_timeout=600,
            resources={"metadata": {"path": tmp_path / "work"}},
        )
        asyncio.run(reader.async_execute(cleanup_kc=True))
    _, waited, shown, values, swept, best, table, jobs = code
    assert texts(waited) == ["'completed'"]
    assert "completed" in shown.outputs[0].data["text/html"]
    assert float(texts(values)[0].splitlines()[-1].split()[2]) == pytest.approx(
        9 * 0.8**18, rel=1e-4
    )
    sweep_log = "".join(texts(swept))
    assert sweep_log.count(" begins: lr 0.") == sweep_log.count(" complete ") == 2
    assert texts(best) == ["({'lr': 0.5}, 0.0)"]
    assert [line.split()[1] for line in texts(table)[0].splitlines()[1:]] == ["0.50", "0.25"]
    assert sorted(eval(texts(jobs)[0])) == [("valley-0", "completed"), ("valley-1", "completed")]
