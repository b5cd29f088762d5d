"""Gradients of sharded models over gloo, under the torch that is installed: averages, or refused
with a sentence (``make torch-matrix`` runs this with several versions).
"""

from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
from torch.distributed.fsdp import FSDPModule  # noqa: E402

from malletrain.training import torch_private  # noqa: E402
from malletrain.training.sharded_state import check_gradients  # noqa: E402
from malletrain.training.snapshot_file import SnapshotError  # noqa: E402
from tests.malletrain.training.many_ranks import Ranks  # noqa: E402

RELEASE = torch_private.torch_release()
CAN_FORCE_SUMS = hasattr(FSDPModule, "set_force_sum_reduction_for_comms")


@pytest.fixture(scope="module")
def ranks():
    ranks = Ranks("sharded_scripts")
    yield ranks
    ranks.close()


def test_gloo_does_as_it_is_told_from_torch_2_9_on():
    assert torch_private.gloo_ignores_operations() == (RELEASE < (2, 9))


@pytest.mark.slow
@pytest.mark.parametrize(
    "model",
    [
        pytest.param({}, id="float32"),
        pytest.param({"dtype": "bfloat16"}, id="bfloat16"),
        pytest.param({"dtype": "float16"}, id="float16"),
        pytest.param({"dtype": "float64"}, id="float64"),
        pytest.param({"shards": 1}, id="replicas-of-one-rank"),
        pytest.param(
            {"force_sum": True},
            id="sums-that-it-divides",
            marks=pytest.mark.skipif(not CAN_FORCE_SUMS, reason="this torch cannot"),
        ),
    ],
)
def test_a_model_is_refused_if_and_only_if_its_gradient_is_wrong(ranks, model):
    for gradient, says in ranks.run(2, "gradient", **model):
        assert gradient in (1.5, 3.0, None)
        assert bool(says) == (gradient == 3.0), says


@pytest.mark.slow
def test_a_frozen_model_has_no_gradients_to_be_wrong(ranks):
    assert ranks.run(2, "gradient", frozen=True) == [(None, "")] * 2


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2])
def test_the_first_step_of_a_snapshot_says_so_on_every_rank(ranks, tmp_path, world):
    answers = ranks.run(world, "steps_of_a_sharded_model", path=str(tmp_path / "x.pt"))
    refuses = world > 1 and torch_private.gloo_ignores_operations()
    assert [bool(says) for says in answers] == [refuses] * world
    assert all("Install torch 2.9 or newer" in says for says in answers if says)


class Part(torch.nn.Module):
    """As ``fully_shard`` of torch 2.7 to 2.9 makes a module, for two ranks."""

    def __init__(self, backend, **group):
        super().__init__()
        policy = SimpleNamespace(reduce_dtype=group.pop("reduce", None), param_dtype=None)
        shards = SimpleNamespace(size=lambda: 2, _get_backend=lambda device: backend)
        parameter = SimpleNamespace(sharded_param=torch.nn.Parameter(torch.zeros(1)))
        self.group = SimpleNamespace(
            mesh_info=SimpleNamespace(shard_process_group=shards),
            mp_policy=policy,
            device=torch.device("cpu"),
            fsdp_params=[parameter],
            **group,
        )

    def _get_fsdp_state(self):
        return SimpleNamespace(_fsdp_param_group=self.group)


@pytest.fixture(scope="module")
def gloo():
    return dist.ProcessGroupGloo(dist.HashStore(), 0, 1)


@pytest.mark.parametrize(
    ("version", "ignores", "refused"),
    [
        ("2.7.1", True, True),
        ("2.8.0+cu128", True, True),
        ("2.9.0a0+50eac81", True, True),
        ("2.9.0a0+50eac81", False, False),
        ("2.9.1", False, False),
        ("2.10.0", True, False),  # not asked
    ],
)
def test_the_version_and_what_gloo_does_decide(monkeypatch, gloo, version, ignores, refused):
    monkeypatch.setattr(torch, "__version__", version)
    monkeypatch.setattr(torch_private, "gloo_ignores_operations", lambda: ignores)
    assert bool(torch_private.wrong_gradients(torch.nn.Sequential(Part(gloo)))) == refused


@pytest.mark.parametrize(
    "group",
    [
        {"backend": object()},  # NCCL
        {"reduce": torch.float16},
        {"gradient_divide_factor": 1.0},
        {"force_sum_reduction_for_comms": True},
        {"reduce_scatter_reduce_op": dist.ReduceOp.SUM},
    ],
    ids=lambda group: next(iter(group)),
)
def test_a_model_with_right_gradients_is_not_refused(monkeypatch, gloo, group):
    monkeypatch.setattr(torch, "__version__", "2.8.0")
    monkeypatch.setattr(torch_private, "gloo_ignores_operations", lambda: True)
    assert torch_private.wrong_gradients(Part(**{"backend": gloo, **group})) == ""
    assert torch_private.wrong_gradients(Part(gloo)) != ""
    debugged = SimpleNamespace(wrapped_pg=gloo)  # with TORCH_DISTRIBUTED_DEBUG=DETAIL
    assert torch_private.wrong_gradients(Part(debugged)) != ""


def test_the_sentence_says_what_where_and_what_to_do(monkeypatch, gloo):
    monkeypatch.setattr(torch, "__version__", "2.8.0")
    monkeypatch.setattr(torch_private, "gloo_ignores_operations", lambda: True)
    with pytest.raises(
        SnapshotError,
        match=r"Snapshot: net: .* fully_shard over gloo, .* torch 2\.8\.0 adds up .* averaging "
        r"them\. Install torch 2\.9 or newer.*\.$",
    ):
        check_gradients({"facts": {}, "net": Part(gloo)})
