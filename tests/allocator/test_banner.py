"""The licence lines of HiGHS do not appear on standard output."""

import json
import subprocess
import sys

SOLVED = """
import json, sys
import numpy as np
from allocator.highs import LinearProgram, maximise
one = np.ones(1)
solution = maximise(
    LinearProgram(
        cost=one, lower=0 * one, upper=one, integral=np.array([True]), starts=np.array([0, 1]),
        rows=np.array([0]), coefficients=one, row_lower=-one, row_upper=0.5 * one,
    ),
    time_limit_s=10.0,
)
json.dump(solution.x.tolist(), sys.stdout)
"""
PRINTED = """
import ctypes, os
from allocator.highs import without_banner

def made():
    libc = ctypes.CDLL(None)
    libc.puts(b"Running HiGHS 1.16.0 (git hash: f3f113d): Copyright (c) 2026")
    libc.puts(b"Includes third-party software components, see there")
    os.write(1, b"a line of another thread\\n")
    return 7

print("before", flush=True)
print(without_banner(made), flush=True)
ctypes.CDLL(None).puts(b"Running HiGHS is printed later")
"""


def output_of(program):
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def test_a_solution_is_all_that_is_printed():
    assert json.loads(output_of(SOLVED)) == [0.0]


def test_the_licence_line_goes_and_what_others_print_stays():
    assert output_of(PRINTED).splitlines() == [
        "before",
        "a line of another thread",
        "7",
        "Running HiGHS is printed later",
    ]


def test_without_a_standard_output():
    program = "import os; os.close(1)\n" + SOLVED.replace("sys.stdout", "sys.stderr")
    done = subprocess.run([sys.executable, "-c", program], stderr=subprocess.PIPE, text=True)
    assert (done.returncode, json.loads(done.stderr)) == (0, [0.0])  # or -0.0
