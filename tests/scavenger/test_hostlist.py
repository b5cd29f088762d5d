import pytest
from hypothesis import given
from hypothesis import strategies as st

from scavenger import hostlist
from scavenger.hostlist import HostlistError, expand, fold, named


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("", []),
        ("n1", ["n1"]),
        ("n[1-3]", ["n1", "n2", "n3"]),
        ("n[1-2,5]", ["n1", "n2", "n5"]),
        ("n[08-11]", ["n08", "n09", "n10", "n11"]),
        ("n[8-11]", ["n8", "n9", "n10", "n11"]),
        ("n[098-101]", ["n098", "n099", "n100", "n101"]),
        ("login,n[1-2],gpu-a", ["login", "n1", "n2", "gpu-a"]),
        ("r[1-2]n[1-2]", ["r1n1", "r1n2", "r2n1", "r2n2"]),
        ("x1000c0s[0-1]b0n0", ["x1000c0s0b0n0", "x1000c0s1b0n0"]),
        ("c[1,3]-[01-02].site", ["c1-01.site", "c1-02.site", "c3-01.site", "c3-02.site"]),
    ],
)
def test_expand(text, names):
    assert list(expand(text)) == names


@pytest.mark.parametrize(
    "text", ["n[1-", "n[a]", "n[3-1]", "n1]", "[", "n[1-999999999]", "n[1-1000]m[1-1000]"]
)
def test_nonsense_is_refused(text):
    with pytest.raises(HostlistError):
        expand(text)


@given(st.lists(st.from_regex(r"[a-z]{1,3}[0-9]{0,4}", fullmatch=True), max_size=30))
def test_fold_is_undone_by_expand(names):
    assert sorted(expand(fold(names))) == sorted(set(names))


def test_fold_is_short():
    assert fold(f"n{i}" for i in range(1, 10_001)) == "n[1-9,10-99,100-999,1000-9999,10000]"
    assert fold(["n01", "n02", "n03", "m1"]) == "m1,n[01-03]"


def test_names_in_a_sentence_are_folded_and_bounded():
    assert named(["n2", "n1", "n10"]) == "n[1-2,10]"
    assert named([f"n{k}" for k in range(1, 41)]) == "n[1-9,10-40]"
    assert named([f"host-{k}-x" for k in (10, 2, 1, 30)], 24) == "host-1-x,host-2-x and 2 more"
    assert named(["a-very-long-name-of-one-node"], 10) == "a-very-long-name-of-one-node"
    assert named([]) == ""


def test_names_of_a_large_machine_are_folded_a_few_times_only(monkeypatch):
    """Folded once for each name, 2,000 of them took two seconds, and the daemon waits for it."""
    folded = []

    def counting(names):
        folded.append(len(names))
        return fold(names)

    monkeypatch.setattr(hostlist, "fold", counting)
    with_gaps = [f"n{k:05}" for k in (*range(1, 9000), *range(9001, 9400, 2))]
    assert named(with_gaps) == (
        "n[00001-08999,09001,09003,09005,09007,09009,09011,09013,09015,09017,09019,09021] and 189 "
        "more"
    )
    assert len(folded) < 20
