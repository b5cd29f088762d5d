"""What an engine's KV cache holds, read from its metrics, and that nothing larger is dispatched."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import pytest
from llmserve.batch_member import BatchMember, MemberOptions
from llmserve.engine_cache import cache_tokens
from llmserve.engines import PROFILES
from llmserve.replica_process import (
    DEFAULT_KV_TOKENS,
    ReplicaOptions,
    ReplicaProcess,
    command_of,
)

from tests.jobscripts.llm.live import until_async
from tests.jobscripts.llm.test_batch import created, request
from tests.jobscripts.llm.test_live_dispatcher import run

RECORDED = """\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 0.0
# HELP vllm:cache_config_info Information of the LLMEngine CacheConfig
# TYPE vllm:cache_config_info gauge
vllm:cache_config_info{block_size="16",cache_dtype="auto",calculate_kv_scales="False",\
cpu_kvcache_space_bytes="None",cpu_offload_gb="0.0",enable_prefix_caching="True",engine="0",\
gpu_memory_utilization="0.65",is_attention_free="False",kv_cache_memory_bytes="None",\
kv_sharing_fast_prefill="False",mamba_cache_dtype="auto",mamba_page_size_padded="None",\
mamba_ssm_cache_dtype="auto",num_cpu_blocks="None",num_gpu_blocks="9271",\
num_gpu_blocks_override="None",prefix_caching_hash_algo="sha256",sliding_window="None",\
swap_space="0.0",swap_space_bytes="0.0"} 1.0
"""
"""vLLM 0.11.0 (vllm-project/vllm, issue 28924)."""
OLD = 'vllm:cache_config_info{block_size="16",cache_dtype="auto",num_gpu_blocks="None"} 1.0\n'
"""vLLM 0.8.1 did not say it (issue 15719)."""
HYBRID = (
    'vllm:cache_config_info{block_size="8",engine="0",kv_cache_size_tokens="463459",'
    'num_gpu_blocks="320"} 1.0\n'
)
"""A newer vLLM and a model of which only some layers have a cache."""
ON_CPU = (
    'vllm:cache_config_info{_block_size_resolved="True",block_size="128",cache_dtype="auto",'
    'effective_attention_block_size="128",enable_prefix_caching="True",engine="0",'
    'gpu_memory_utilization="0.92",hash_block_size="None",kv_cache_max_concurrency="128.0",'
    'kv_cache_memory_bytes="1073741824",kv_cache_size_tokens="524288",num_cpu_blocks="None",'
    'num_gpu_blocks="4096",num_gpu_blocks_override="None",user_specified_block_size="False"} 1.0\n'
)
"""vLLM 0.32.0 on a CPU (shortened): 4,096 blocks, of which one is no request's."""


@pytest.mark.parametrize(
    ("text", "slots", "tokens"),
    [
        (RECORDED, 1, 9270 * 16 - 15),
        (RECORDED, 64, 9270 * 16 - 64 * 15),
        (RECORDED, 100_000, 9270 * 16 // 2),
        (HYBRID, 10, 463_459 - 8 - 70),
        (ON_CPU, 8, 4095 * 128 - 8 * 127),
        (RECORDED + RECORDED.replace('engine="0"', 'engine="1"'), 1, 2 * 9270 * 16 - 15),
        (OLD, 64, None),
        (RECORDED + OLD, 64, None),
        ("", 64, None),
        ('vllm:cache_config_info{model="a}b\\"",num_gpu_blocks="3",block_size="4"} 1', 1, 5),
        ('vllm:cache_config_info{num_gpu_blocks="1",block_size="16"} 1.0', 1, None),
    ],
)
def test_what_a_cache_holds(text, slots, tokens):
    assert cache_tokens(text, slots) == tokens


def engine(folder: Path, text: str) -> tuple[str, ...]:
    """The command of an engine with these metrics."""
    path = folder / "metrics.txt"
    path.write_text(text)
    words = PROFILES["simulated"]
    return (
        words[0],
        str(Path(__file__).with_name("engine_with_metrics.py")),
        str(path),
        *words[3:],
    )


@pytest.mark.parametrize(
    ("text", "option", "tokens"),
    [
        (RECORDED, None, 9270 * 16 - 8 * 15),
        (RECORDED, 5_000, 5_000),
        (RECORDED, 1_000_000, 9270 * 16 - 8 * 15),
        (OLD, None, DEFAULT_KV_TOKENS),
        (OLD, 5_000, 5_000),
    ],
)
@run
async def test_a_replica_says_what_the_cache_of_its_engine_holds(
    tmp_path, monkeypatch, text, option, tokens
):
    monkeypatch.setenv("PYTHONPATH", ":".join(sys.path))
    options = ReplicaOptions(engine(tmp_path, text), "m", "m", 8, option)
    async with ReplicaProcess(options) as replica:
        task = asyncio.create_task(replica.run())
        await until_async(lambda: replica.status().state == "ready", "it has loaded")
        assert replica.status().kv_tokens == tokens
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def test_a_request_of_a_batch_that_no_cache_holds_has_an_error(tmp_path, monkeypatch):
    """So it waits for no replica; the cache holds 20 blocks of 16, less 8 · 15 tokens."""
    monkeypatch.setenv("PYTHONPATH", ":".join(sys.path))
    lines = [request(n) for n in range(3)]
    lines[1]["body"] = {**lines[1]["body"], "max_tokens": 250}
    folder = created(tmp_path, lines)
    small = 'vllm:cache_config_info{block_size="16",num_gpu_blocks="21"} 1.0\n'
    replica = ReplicaOptions(engine(tmp_path, small), "simulated", "simulated", 8)
    asyncio.run(BatchMember(MemberOptions(folder.output, replica, "simulated", 1.0, 1)).run())
    [error] = map(json.loads, folder.errors.read_text().splitlines())
    assert error["custom_id"] == "c1"
    assert error["error"]["code"] == "context_length_exceeded"
    assert "the maximum of both together is 200" in error["error"]["message"]
    assert len(folder.output.read_text().splitlines()) == 2


@pytest.mark.parametrize(("visible", "gpus"), [("0,1,3", "3"), ("", "1"), ("GPU-ab", "1")])
def test_vllm_uses_all_gpus_of_the_lease(monkeypatch, visible, gpus):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    words = command_of(ReplicaOptions(PROFILES["vllm"], "m", "m", 8), Path("/s"))
    assert words[words.index("--tensor-parallel-size") + 1] == gpus
