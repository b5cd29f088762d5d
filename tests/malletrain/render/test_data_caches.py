"""What ``malletrain show`` says of a data cache."""

from malletrain.protocol.views import DataCacheView
from malletrain.render.job_detail import cache_advice, cache_sentence

GB = 10**9


def view(**changes):
    return DataCacheView(
        **{
            "name": "imagenet",
            "node_hits": 600,
            "peer_hits": 300,
            "source_reads": 100,
            "hit_bytes": 9 * GB,
            "source_bytes": GB,
            "samples": 2000,
            "present": 1500,
            "data_bytes": 20 * GB,
            "memory_bytes": 15 * GB,
            "node_bytes": 32 * GB,
            "coverage": 1.0,
            **changes,
        }
    )


def test_hits_by_place_with_the_bytes_saved_and_the_coverage_beside_them():
    assert cache_sentence(view()) == (
        "1,000 reads: 60 % on the node, 30 % from other nodes, 10 % from the data set; 9 GB were "
        "not read from it. The memory of its nodes has 75 % of the samples. An epoch reads 100 % "
        "of the samples, each once."
    )
    assert cache_sentence(view(memory_bytes=0)).count("The memory") == 0  # after its end
    assert cache_sentence(view(node_hits=0, peer_hits=0, source_reads=0)) == "no reads yet."


def test_the_coverage_is_told_or_said_to_be_unknown():
    partial = cache_sentence(view(coverage=0.985))
    assert partial.endswith("An epoch reads 98.5 % of the samples.")
    assert "given no sampler" in cache_sentence(view(coverage=None))


def test_a_cache_that_is_of_no_use_is_told():
    assert cache_advice(view()) == ""
    assert cache_advice(view(data_bytes=2 * GB)) == (
        "The data (2 GB) fit into the page cache of one node (32 GB of memory): from the second "
        "epoch on a node the cache is of no use there."
    )
    assert "7 reads were of samples that cannot be cached" in cache_advice(view(unpacked=7))
