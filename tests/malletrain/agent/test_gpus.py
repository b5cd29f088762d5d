"""What nvidia-smi says, recorded by hand from NVIDIA's documentation (nvidia-smi(1), the GPU debug
guidelines and the notes on row remapping), and what is made of it.
"""

from __future__ import annotations

import pytest

from malletrain.agent.health import listing, trouble

A100 = """
==============NVSMI LOG==============

Timestamp                                 : Tue Mar  5 10:11:12 2024
Driver Version                            : 535.104.05
CUDA Version                              : 12.2

Attached GPUs                             : 2
GPU 00000000:07:00.0
    Product Name                          : NVIDIA A100-SXM4-80GB
    GPU UUID                              : GPU-5c2d0f4e-0000-0000-0000-000000000001
    MIG Mode
        Current                           : Disabled
        Pending                           : Disabled
    GPU Reset Status
        Reset Required                    : {reset}
        Drain and Reset Recommended       : No
    ECC Mode
        Current                           : Enabled
        Pending                           : Enabled
    ECC Errors
        Volatile
            SRAM Correctable              : 4
            SRAM Uncorrectable            : 0
            DRAM Correctable              : 17
            DRAM Uncorrectable            : {dram}
        Aggregate
            SRAM Correctable              : 4
            SRAM Uncorrectable            : 1
            DRAM Correctable              : 17
            DRAM Uncorrectable            : 3
    Retired Pages
        Single Bit ECC                    : N/A
        Double Bit ECC                    : N/A
        Pending Page Blacklist            : N/A
    Remapped Rows
        Correctable Error                 : 0
        Uncorrectable Error               : 2
        Pending                           : {pending}
        Remapping Failure Occurred        : {failure}
        Bank Remap Availability Histogram
            Max                           : 639 bank(s)
    GPU Recovery Action                   : {action}
    Processes                             : None
GPU 00000000:0F:00.0
    Product Name                          : NVIDIA A100-SXM4-80GB
    ECC Errors
        Volatile
            SRAM Correctable              : 0
            SRAM Uncorrectable            : {second}
            DRAM Correctable              : 0
            DRAM Uncorrectable            : 0
"""
WELL = {
    "reset": "No",
    "dram": "0",
    "pending": "No",
    "failure": "No",
    "action": "None",
    "second": "0",
}
"""A GPU that has had its errors, long ago, and remapped the rows."""

V100 = """
Attached GPUs                             : 1
GPU 00000000:3B:00.0
    Product Name                          : Tesla V100-SXM2-16GB
    ECC Errors
        Volatile
            Single Bit
                Device Memory             : 2
                Total                     : 2
            Double Bit
                Device Memory             : {double}
                Total                     : {double}
        Aggregate
            Double Bit
                Total                     : 5
    Retired Pages
        Single Bit ECC                    : 0
        Double Bit ECC                    : 1
        Pending                           : {pending}
"""


def listed(**changes):
    return A100.format(**{**WELL, **changes})


@pytest.mark.parametrize(
    ("changes", "gpu", "words"),
    [
        ({}, "", ""),
        ({"dram": "2"}, "07", "DRAM Uncorrectable: 2"),
        ({"second": "1"}, "0F", "SRAM Uncorrectable: 1"),
        ({"second": "N/A"}, "", ""),
        ({"pending": "Yes"}, "07", "rows wait to be remapped"),
        ({"failure": "Yes"}, "07", "no spare memory rows left"),
        ({"reset": "Yes"}, "07", "a reset is required"),
        ({"action": "Reset"}, "07", "the driver asks for (GPU Recovery Action: Reset)"),
    ],
)
def test_an_a100_is_fit_unless_something_has_to_be_done_to_it(changes, gpu, words):
    sentence = trouble(0, listed(**changes))
    assert words in sentence
    assert bool(sentence) == bool(words)
    assert f"GPU 00000000:{gpu}" in sentence if gpu else not sentence


@pytest.mark.parametrize(
    ("double", "pending", "words"),
    [(0, "No", ""), (1, "No", "(Total: 1)"), (0, "Yes", "pages wait to be retired")],
)
def test_a_v100_names_its_errors_otherwise(double, pending, words):
    sentence = trouble(0, V100.format(double=double, pending=pending))
    assert words in sentence
    assert bool(sentence) == bool(words)


@pytest.mark.parametrize(
    ("code", "printed"),
    [
        (15, "Unable to determine the device handle for GPU 0000:02:00.0: GPU is lost.  Reboot the "
         "system to recover this GPU"),
        (255, "Unable to determine the device handle for GPU0000:84:00.0: Unknown Error"),
        (0, "GPU 00000000:3B:00.0: GPU requires reset"),
        (6, "No devices were found"),
        (9, "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver. Make "
         "sure that the latest NVIDIA driver is installed and running."),
        (18, "Failed to initialize NVML: Driver/library version mismatch"),
    ],
)  # fmt: skip
def test_a_gpu_or_a_driver_that_is_gone_is_told_in_nvidias_words(code, printed):
    assert trouble(code, f"\n{printed}\n") == f"nvidia-smi says: {printed}"


@pytest.mark.parametrize("code", [8, 10, 14, 15])
def test_an_exit_code_alone_is_enough(code):
    assert trouble(code, "")


@pytest.mark.parametrize("code", [2, 3, 4, 13])
def test_a_question_that_was_refused_says_nothing_of_the_gpus(code):
    assert not trouble(code, "Field is not supported")


def test_one_that_hangs_is_told():
    assert trouble(None, "") == "nvidia-smi hangs"


def test_fields_are_told_apart_by_their_sections():
    fields = {(gpu[-6:], path): value for gpu, path, value in listing(listed())}
    assert fields["7:00.0", "ECC Errors/Aggregate/DRAM Uncorrectable"] == "3"
    assert fields["7:00.0", "MIG Mode/Pending"] == "Disabled"
    assert fields["7:00.0", "GPU Recovery Action"] == "None"
    assert fields["F:00.0", "ECC Errors/Volatile/SRAM Uncorrectable"] == "0"
