"""The layout of a node in a specification: what is accepted, and refusals with their sentences."""

import pytest

from malletrain.submission.error import SpecError
from malletrain.submission.options import ScriptOptions, layout_choice
from malletrain.submission.spec import build

PLAIN = {"mode": "restart", "launcher": "builtin", "has_curve": False, "variables": {}}


@pytest.mark.parametrize(
    ("options", "choice"),
    [
        ((None, None, None), (0, 0, 0, ())),
        ((2, 3, 4), (2, 3, 4, ())),
        (("2", " 3 ", "0"), (2, 3, 0, ())),
        (("auto", None, None), (0, 0, 0, ("processes",))),
        (("auto", "auto", "auto"), (0, 0, 0, ("processes", "threads", "loader-workers"))),
        ((4, None, "auto"), (4, 0, 0, ("loader-workers",))),
    ],
)
def test_numbers_and_auto(options, choice):
    assert layout_choice(*options, **PLAIN) == choice


@pytest.mark.parametrize(
    ("options", "others", "words"),
    [
        (("many", None, None), {}, "accepted is 1 or more, 4096 at most, or auto. Leave"),
        ((0, None, None), {}, "--nproc-per-node"),
        ((None, 0, None), {}, '--threads: "0" is not possible'),
        ((None, None, -1), {}, "accepted is 0 or more"),
        ((5000, None, None), {}, "4096 at most"),
        ((None, None, 1.5), {}, '"1.5" is not possible'),
        (("auto", None, None), {"mode": "service"}, "it makes no steps"),
        ((None, None, "auto"), {"launcher": "torchrun"}, "leave --launcher out"),
        ((None, "auto", None), {"has_curve": True}, "leave --curve out"),
        ((None, "auto", None), {"variables": {"OMP_NUM_THREADS": "2"}}, "leave one of them out"),
        ((None, 4, None), {"variables": {"OMP_NUM_THREADS": "2"}}, "leave one of them out"),
    ],
)
def test_what_is_refused_says_what_to_do(options, others, words):
    with pytest.raises(SpecError) as refused:
        layout_choice(*options, **{**PLAIN, **others})
    assert words in str(refused.value)
    assert refused.value.options


def test_a_job_has_them_in_its_specification(tmp_path):
    script = tmp_path / "train.py"
    script.write_text("")
    spec = build(
        str(script), (), ScriptOptions(nproc_per_node="auto", threads="2", loader_workers=1)
    )
    assert (spec.nproc_per_node, spec.threads, spec.loader_workers) == (0, 2, 1)
    assert spec.tuned == ("processes",)
    plain = build(str(script), ())
    assert (plain.nproc_per_node, plain.threads, plain.tuned) == (0, 0, ())
