"""A user of Hugging Face's Trainer: a script after docs/library-trainers.md, changing nodes."""

from __future__ import annotations

import json

import pytest

SAMPLES, EPOCHS, STEPS = 150, 3, 75


@pytest.fixture(scope="module")
def user(person):
    pytest.importorskip("transformers", reason="pip install malletrain[integrations]")
    return person


@pytest.mark.thorough
def test_three_epochs_over_rescales(user):
    user.writes("go", "")
    alone = user.types("python finetune.py")
    assert alone.status == 0, alone.text
    expected = taken(user)
    assert [line["step"] for line in expected] == list(range(1, STEPS + 1))

    user.starts_a_daemon()
    (user.work / "go").unlink()
    output = user.types(
        "malletrain submit --no-profile --nodes 1:3 --env MALLETRAIN_PRELOAD=torch,transformers "
        "finetune.py"
    )
    assert output.status == 0, output.text
    user.until_it_trains_on("finetune", 3)
    user.writes("busy.py", "import time, malletrain\nwhile True:\n    time.sleep(0.1)\n")
    user.types("malletrain submit --weight 10 --name urgent busy.py")
    user.until_it_trains_on("finetune", 2)
    user.types("malletrain cancel urgent")
    user.until_it_trains_on("finetune", 3)
    user.writes("go", "")
    assert user.until_ended("finetune").state == "completed"
    words = f"trained to epoch 3.0 in {STEPS} steps"  # they may come after the job's end
    user.until(lambda: words in user.types("malletrain logs finetune").text, "its last words")

    lines = taken(user)
    assert {line["ranks"] for line in lines} >= {2, 3}
    assert max(line["epoch"] for line in lines) == EPOCHS
    for epoch in range(EPOCHS):
        own = range(epoch * STEPS // EPOCHS + 1, (epoch + 1) * STEPS // EPOCHS + 1)
        seen = [i for line in lines if line["step"] in own for i in line["samples"]]
        assert sorted(seen) == list(range(SAMPLES)), f"epoch {epoch}"
    rates = {line["step"]: line["rate"] for line in expected}
    for line in lines:
        assert line["rate"] == pytest.approx(rates[line["step"]], abs=1e-12), line["step"]


def taken(user):
    """The steps that the script noted, which are then forgotten."""
    record = user.work / "record.jsonl"
    lines = [json.loads(line) for line in record.read_text().splitlines()]
    record.unlink()
    return lines
