"""A worker forked from the fork server behaves as if python had been started for its script."""

from __future__ import annotations

import subprocess
import sys

import pytest

FORKED = (
    "import sys; from malletrain.launch.fork_server import _leave, _run_script; "
    "_leave(_run_script(sys.argv[1:]))"
)

SCRIPTS = {
    "plain": "print('hello', __name__)",
    "arguments": "import sys; print(sys.argv[1:], sys.argv[0] == __file__)",
    "exit number": "import sys; sys.exit(7)",
    "exit none": "import sys; sys.exit()",
    "exit text": "import sys; sys.exit('no data')",
    "error": "def f():\n    raise ValueError('wrong shape')\nf()",
    "syntax": "def f(:\n    pass\n",
    "atexit": "import atexit; atexit.register(print, 'bye'); print('main')",
    "thread": "import threading, time\ndef f(): time.sleep(0.1); print('thread "
    "done')\nthreading.Thread(target=f).start()\nprint('main')",
    "neighbour": "import neighbour; print(neighbour.VALUE)",
    "pickle": "import pickle\nclass A: "
    "pass\nprint(type(pickle.loads(pickle.dumps(A()))).__module__)",
    "spawn": "import multiprocessing as m\ndef f(q): q.put(41 + 1)\nif __name__ == "
    "'__main__':\n    c = m.get_context('spawn')\n"
    "    q = c.Queue()\n    p = c.Process(target=f, args=(q,)); p.start(); print(q.get()); "
    "p.join()",
    "unprintable": "import sys; sys.stdout.buffer.write(b'\\xff\\n')",
    "fresh library": "import malletrain; print(malletrain.report(1))",
    "signal": "import os, signal; os.kill(os.getpid(), signal.SIGTERM)",
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_as_if_python_had_been_started(tmp_path, name):
    script = tmp_path / "script.py"
    script.write_text(SCRIPTS[name])
    (tmp_path / "neighbour.py").write_text("VALUE = 'next door'")
    argv = [str(script), "one", "two words", "-x"]
    plain = subprocess.run([sys.executable, *argv], capture_output=True, cwd="/")
    forked = subprocess.run([sys.executable, "-c", FORKED, *argv], capture_output=True, cwd="/")
    assert forked.returncode == plain.returncode
    assert forked.stdout == plain.stdout
    assert forked.stderr == plain.stderr


def test_a_script_that_is_not_there_is_told_in_a_sentence(tmp_path):
    forked = subprocess.run(
        [sys.executable, "-c", FORKED, str(tmp_path / "gone.py")],
        capture_output=True,
        text=True,
    )
    assert forked.returncode == 2
    assert "gone.py: No such file" in forked.stderr
    assert "Traceback" not in forked.stderr


def test_modules_a_job_asks_for_are_there_and_others_are_told():
    code = (
        "from malletrain.launch.fork_server import _preload_more; import sys; "
        "_preload_more('colorsys, no_such_module,,'); print('colorsys' in sys.modules)"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert told.stdout == "True\n"
    assert "MALLETRAIN_PRELOAD names 'no_such_module', which cannot be imported" in told.stderr
