"""ElasticStream in real processes: ranks 1, 4, 3, 2, two loader workers each, one killed."""

import io
import tarfile
from collections import Counter

import pytest

from tests.malletrain.training.many_ranks import Ranks

pytestmark = pytest.mark.slow

SHARDS = [9, 30, 17, 25, 13, 21, 28, 11, 19, 24, 15, 22, 27, 10, 18, 20]


@pytest.fixture
def ranks():
    ranks = Ranks("stream_scripts")
    yield ranks
    ranks.close()


def test_planned_changes_lose_nothing_and_a_loss_repeats_one_step(ranks, tmp_path):
    count = 0
    for shard, length in enumerate(SHARDS):
        with tarfile.open(tmp_path / f"{shard:02}.tar", "w") as archive:
            for _ in range(length):
                entry = tarfile.TarInfo(f"{count:06}.txt")
                content = str(count).encode()
                entry.size = len(content)
                archive.addfile(entry, io.BytesIO(content))
                count += 1
    folder = str(tmp_path)

    def trained():
        logs = [path.read_text().split() for path in tmp_path.glob("rank*.log")]
        return Counter(int(number) for log in logs for number in log)

    assert ranks.run(1, "run", folder=folder, steps=3) == [(36, 0)]
    assert ranks.run(4, "run", folder=folder, steps=4) == [(84, 0)] * 4
    before = trained()
    assert before.total() == 84
    assert set(before.values()) == {1}
    outcomes = ranks.outcomes(4, "run", folder=folder, steps=9, killed_at=5)
    assert outcomes[2] == ("died", -9)
    lost = trained() - before
    assert lost.total() >= 4 * 12 + 3  # rank 2's, and those of ranks that came as far
    assert ranks.run(3, "run", folder=folder, steps=6) == [(84 + 48 + 72, 0)] * 3
    assert ranks.run(2, "run", folder=folder) == [(0, 1)] * 2
    total = trained()
    assert set(total) == set(range(count))
    again = [number for number, times in total.items() if times > 1]
    assert all(total[number] == 2 for number in again)
    assert 3 <= len(again) <= 12
    assert set(again) <= set(lost)
