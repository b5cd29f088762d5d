"""All private interfaces of torch that MalleTrain uses. Decides nothing.

:data:`PARTS` lists them; :func:`require` reports those that the installed torch lacks. Tested with
the oldest and the newest torch that setup.cfg admits (``make torch-matrix``). The module is in this
package because the launcher and the live training loop both need it. Only the launcher imports
TorchElastic, in :func:`node_agent`.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterable
from datetime import timedelta
from functools import cache, reduce
from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from torch.distributed.elastic.agent.server.api import RunResult, WorkerSpec
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent

    from malletrain.protocol.messages import Failure

_C10D = "torch.distributed.distributed_c10d"
_LOADER = "torch.utils.data._utils.worker"
_AGENT = "torch.distributed.elastic.agent.server.local_elastic_agent"
_FSDP = "torch.distributed.fsdp._fully_shard._fsdp_param_group"
_SET_TIMEOUT = "set_timeout" if hasattr(dist, "set_timeout") else "_set_pg_timeout"
"""A newer torch (2.14 has it) warns of the private name."""
PARTS: dict[str, tuple[tuple[str, str], ...]] = {
    "ElasticStream": ((_LOADER, "_worker_info"),),
    "parts of a step": (
        ("torch.utils.data.dataloader", "_BaseDataLoaderIter.__next__"),
        ("torch.autograd", "Variable._execution_engine.queue_callback"),
        ("torch.nn.parallel", "DistributedDataParallel._sync_buffers"),
        (_FSDP, "FSDPParamGroup.unshard"),
    ),
    "live mode": ((_C10D, "_world.group_count"), (_C10D, _SET_TIMEOUT)),
    "sharded live mode": (
        ("torch.distributed", "ProcessGroup._register_backend"),
        ("torch.distributed", "ProcessGroup._set_default_backend"),
        ("torch.distributed.tensor", "DTensor.__create_chunk_list__"),
    ),
    "restart mode": tuple(
        (_AGENT, f"LocalElasticAgent.{name}")
        for name in (
            *("_construct_event", "_initialize_workers", "_invoke_run"),
            *("_monitor_workers", "_restart_workers", "_start_workers"),
        )
    ),
}
"""Private names by the feature that needs them: (module, path in it). Names that exist only on
instances are checked where they are used.
"""


def missing(purpose: str) -> list[str]:
    """Return the private names for ``purpose`` that the installed torch lacks."""
    missing_names = []
    for module, path in PARTS[purpose]:
        try:
            reduce(getattr, path.split("."), import_module(module))
        except (ImportError, AttributeError):
            missing_names.append(f"{module}.{path}")
    return missing_names


def require(purpose: str) -> None:
    """Check that the installed torch has the private names for ``purpose``.

    Raises:
        RuntimeError: a name is missing; the message says which, and what to do.
    """
    if missing_names := missing(purpose):
        raise RuntimeError(
            f"torch {torch.__version__} has no {', '.join(missing_names)}, which {purpose} needs. "
            "Install a version of torch that MalleTrain was tested with (see its setup.cfg)."
        )


# --- processes of a DataLoader (malletrain.training.stream) ---


def forget_worker() -> None:
    """Hide from datasets that this process is a DataLoader worker. Many iterable datasets skip the
    data of other workers, but the shards of a stream are dealt out already.

    Raises:
        RuntimeError: the installed torch lacks the private name.
    """
    require("ElasticStream")
    loader: Any = import_module(_LOADER)
    loader._worker_info = None  # noqa: SLF001 (there is no public way)


# --- the iterator of a DataLoader (malletrain.training.sampler) ---


def batches_yielded(iterator: Any, otherwise: int) -> int:
    """Return the number of batches that a DataLoader's ``iterator`` has given to the loop;
    ``otherwise`` if this torch does not count them.
    """
    return int(getattr(iterator, "_num_yielded", otherwise))


# --- parts of a step (malletrain.training.step_hooks) ---


def batches_class() -> Any:
    """Return the base class of a DataLoader's iterators; None if this torch has none."""
    return getattr(import_module("torch.utils.data.dataloader"), "_BaseDataLoaderIter", None)


def work_class() -> Any:
    """Return the class of a collective under way; None if this torch is built without them."""
    return getattr(dist, "Work", None) if dist.is_available() else None


def buffers_sync() -> tuple[Any, str]:
    """Return the class and the name of the method in which DistributedDataParallel broadcasts the
    buffers before a forward pass.
    """
    return torch.nn.parallel.DistributedDataParallel, "_sync_buffers"


def sharded_parameters() -> list[tuple[Any, str]]:
    """Return the classes and the names of their methods that gather the parameters of a sharded
    model; none if this process has not imported them.
    """
    modules = (
        ("torch.distributed.fsdp", "FullyShardedDataParallel", "forward"),
        (_FSDP, "FSDPParamGroup", "unshard"),
    )
    classes = ((getattr(sys.modules.get(path), owner, None), name) for path, owner, name in modules)
    return [(owner, name) for owner, name in classes if owner is not None]


def queue_after_backward(callback: Callable[[], None]) -> None:
    """Call ``callback`` when the current backward pass has computed the last gradient. Call this
    within that pass. Does nothing if the installed torch has no such callbacks.
    """
    engine = getattr(torch.autograd.Variable, "_execution_engine", None)
    if engine is not None:
        engine.queue_callback(callback)


# --- process groups (malletrain.elastic.group) ---


def forget_failed_group() -> None:
    """Reset torch's group counter, which also counts a group that failed: the next group would
    otherwise have different numbers, and hence store keys, on different ranks.
    """
    dist.distributed_c10d._world.group_count = 0  # noqa: SLF001 (there is no public way)


def set_timeout(group: Any, timeout: timedelta) -> None:
    """Set the timeout of the following collectives of ``group``."""
    getattr(dist.distributed_c10d, _SET_TIMEOUT)(timeout, group)


def set_backend_timeout(backend: Any, timeout: timedelta) -> None:
    """Set the timeout of a backend that is not part of a group yet."""
    backend._set_default_timeout(timeout)  # noqa: SLF001 (what torch does for a group)


def adopt_backend(group: dist.ProcessGroup, gloo: Any) -> None:
    """Register gloo in our own process group, for the operations that it does not implement
    itself.
    """
    kind = dist.ProcessGroup.BackendType.GLOO
    group._register_backend(torch.device("cpu"), kind, gloo)  # noqa: SLF001 (likewise)
    group._set_default_backend(kind)  # noqa: SLF001 (likewise)


# --- shards (malletrain.elastic.sharded) ---


def boxes_of(tensor: Any) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Return (offsets, sizes) of the parts of a DTensor that this rank holds, as torch's
    checkpoints use them.

    Raises:
        RuntimeError: the installed torch lacks the private method.
    """
    ask = getattr(tensor, "__create_chunk_list__", None)
    if ask is None:
        raise RuntimeError(
            f"DTensor of torch {torch.__version__} does not say what a rank holds, which sharded "
            "models in live mode need. Install a newer one, or train in restart mode."
        )
    return [(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in ask()]


def forget_meshes() -> None:
    """Clear DTensor's cache of operations on the meshes of earlier rounds, which are not used
    again. If this torch has no such function, the cache stays, with a few kilobytes per operation.
    """
    debug = import_module("torch.distributed.tensor.debug")
    forget = getattr(debug, "_clear_sharding_prop_cache", None)
    if forget is not None:
        forget()


def lend_group(mesh: Any, group: Any) -> bool:
    """Make ``mesh``, of one dimension over all ranks, use ``group``; None removes its group.
    Return False if this torch stores the groups elsewhere or has given the mesh its own group; the
    mesh must then not be used again.
    """
    names, groups = getattr(mesh, "_dim_group_names", None), getattr(mesh, "_pg_registry", None)
    if not isinstance(groups, dict):
        return False
    groups.clear()
    if group is None:
        return True
    groups[group.group_name] = group
    return names == [group.group_name]


def leave_out_hooks(twin: torch.optim.Optimizer) -> None:
    """Remove the step hooks of ``twin``, which shares all attributes with another optimizer. If
    this torch stores the hooks elsewhere, they stay.
    """
    for name in ("pre", "post"):
        if hasattr(twin, f"_optimizer_step_{name}_hooks"):
            setattr(twin, f"_optimizer_step_{name}_hooks", {})


# --- gradients of sharded models (malletrain.training.sharded_state) ---


def wrong_gradients(module: torch.nn.Module) -> str:
    """Return a sentence if ``fully_shard`` adds up the gradients of the ranks where it averages
    them elsewhere, and what to do; empty if the gradients are right.

    ``fully_shard`` requests an average from the backend of the process group. Before torch 2.9 the
    reduce_scatter of gloo adds up, whatever is requested (pytorch/pytorch#162338). In torch 2.8 a
    script can make ``fully_shard`` request sums, and divide them itself.
    """
    if torch_release() >= (2, 10) or not any(map(_averages_over_gloo, module.modules())):
        return ""
    if not gloo_ignores_operations():  # builds of 2.9 from before its release differ
        return ""
    force = "set_force_sum_reduction_for_comms"
    has_force = hasattr(import_module("torch.distributed.fsdp").FSDPModule, force)
    otherwise = f", or call {force}(True) on every module that fully_shard was applied to"
    return (
        "the gradients of the model would be wrong: it is sharded by fully_shard over gloo, and "
        f"there torch {torch.__version__} adds up the gradients of the ranks instead of averaging "
        f"them. Install torch 2.9 or newer{otherwise if has_force else ''}."
    )


def torch_release() -> tuple[int, int]:
    """Return (major, minor) version of the installed torch."""
    major, minor = torch.__version__.split(".")[:2]
    return int(major), int(minor)


def _averages_over_gloo(part: torch.nn.Module) -> bool:
    """Return whether ``fully_shard`` requests an average from gloo for the gradients of ``part``.
    Float16 and float64 it divides itself. Names as in torch 2.7 to 2.9.
    """
    state = getattr(part, "_get_fsdp_state", None)
    group = getattr(state(), "_fsdp_param_group", None) if state is not None else None
    ranks = getattr(getattr(group, "mesh_info", None), "shard_process_group", None)
    if group is None or ranks is None or ranks.size() == 1:
        return False
    if (
        getattr(group, "force_sum_reduction_for_comms", False)
        or getattr(group, "gradient_divide_factor", None) == 1  # the script wants the sum
        or getattr(group, "reduce_scatter_reduce_op", None) == dist.ReduceOp.SUM  # the same, 2.7
    ):
        return False
    policy = group.mp_policy
    dtypes = {
        policy.reduce_dtype or policy.param_dtype or parameter.sharded_param.dtype
        for parameter in group.fsdp_params
        if parameter.sharded_param.requires_grad
    }
    if not dtypes & {torch.float32, torch.bfloat16}:
        return False
    backend = ranks._get_backend(group.device)  # noqa: SLF001 (there is no public way)
    backend = getattr(backend, "wrapped_pg", backend)  # with TORCH_DISTRIBUTED_DEBUG=DETAIL
    return isinstance(backend, getattr(dist, "ProcessGroupGloo", ()))


@cache
def gloo_ignores_operations() -> bool:
    """Return whether the reduce_scatter of gloo adds up, whatever operation is requested: then it
    accepts one that floats do not have. No other rank takes part.
    """
    gloo: Any = dist.ProcessGroupGloo(dist.HashStore(), 0, 1, timedelta(seconds=10))
    options: Any = dist.ReduceScatterOptions()
    options.reduceOp = dist.ReduceOp.BAND
    try:
        gloo._reduce_scatter_base(torch.zeros(1), torch.zeros(1), options).wait()  # noqa: SLF001
    except RuntimeError:
        return False
    return True


# --- attributes of modules (malletrain.training.module_attributes) ---


def in_place_changes(tensor: torch.Tensor) -> int:
    """Return autograd's count of in-place changes of ``tensor``; 0 for a tensor that was made in
    ``torch.inference_mode()``, which has no such count.
    """
    return 0 if tensor.is_inference() else int(tensor._version)  # noqa: SLF001 (no public way)


# --- tensors in dicts of scripts (malletrain.training.dict_tensors) ---


def has_plain_memory(tensor: torch.Tensor) -> bool:
    """Return whether ``tensor`` is an ordinary one with memory: dense, not nested, not quantized,
    not meta.
    """
    is_special = tensor.is_nested or tensor.is_quantized or tensor.is_meta
    return tensor.layout is torch.strided and not is_special


def is_allocated_by_torch(tensor: torch.Tensor) -> bool:
    """Return whether ``tensor`` has memory of torch's own allocator. False if another library
    (``from_numpy``) or a file has it, and from the first call of ``tensor.numpy()`` on.
    """
    return has_plain_memory(tensor) and tensor.untyped_storage().resizable()


def owns_memory(tensor: torch.Tensor) -> bool:
    """Return whether ``tensor`` uses all of its memory, is no view of another tensor and no result
    of autograd, and is not shared with other processes.
    """
    if not has_plain_memory(tensor) or not tensor.is_leaf:
        return False
    storage = tensor.untyped_storage()
    return (
        tensor._base is None  # noqa: SLF001 (no public way)
        and storage.nbytes() == tensor.nbytes
        and not (tensor.device.type == "cpu" and tensor.is_shared())
    )


# --- parameters and gradient scalers (malletrain.elastic.training) ---


def versions(tensors: Iterable[torch.Tensor]) -> list[int]:
    """Return autograd's count of in-place changes for each of ``tensors``."""
    return [tensor._version for tensor in tensors]  # noqa: SLF001 (there is no public way)


def forget_unscaling(scaler: Any) -> None:
    """Clear the scaler's record that gradients were unscaled in this step, so that the step can be
    repeated.

    Raises:
        RuntimeError: the scaler does not store the record where known versions of torch do.
    """
    states = getattr(scaler, "_per_optimizer_states", None)
    if states is None:
        raise RuntimeError(
            f"A step with a {type(scaler).__name__} cannot be repeated: torch {torch.__version__} "
            "keeps its state elsewhere. Train without a gradient scaler, or in restart mode."
        )
    states.clear()


# --- TorchElastic's agent (malletrain.launch.restart) ---


class News(Protocol):
    """Source of events for the agent while its workers run."""

    def wait_for_news(self, seconds: float) -> None:
        """Wait for at most ``seconds``, or until there is an event."""

    def num_nodes_waiting(self) -> int:
        """Return a number other than 0 if a new round must start."""

    def succeeded(self) -> bool:
        """Note that all workers have succeeded. Return whether they are needed again."""

    def some_ended(self) -> None:
        """Note that some workers have succeeded while the others run."""

    def note_failures(self, failures: tuple[Failure, ...]) -> None:
        """Note that workers have failed."""


def node_agent(
    spec: WorkerSpec, news: News, stop_grace_s: float, stop_signal: signal.Signals
) -> LocalElasticAgent:
    """Create TorchElastic's agent for one node. It restarts the workers for every round until the
    job leaves the node.

    Args:
        spec: specification of the workers.
        news: source of events, such as new rounds.
        stop_grace_s: time between SIGTERM and SIGKILL of a worker, seconds.
        stop_signal: signal that stops the processes that represent workers.

    Raises:
        RuntimeError: the installed torch lacks private names.
    """
    from torch.distributed.elastic.agent.server.api import WorkerGroup, WorkerState
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
    from torch.distributed.elastic.events import Event, EventSource
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs

    from malletrain.protocol.messages import Failure

    require("restart mode")

    class NodeAgent(LocalElasticAgent):
        _failed_first: frozenset[int] = frozenset()

        def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
            ids: dict[int, Any] = super()._start_workers(worker_group)
            context = self._pcontext
            assert context is not None
            close = context.close
            self._failed_first = frozenset()

            def close_in_time(death_sig: signal.Signals | None = None, timeout: float = 0) -> None:
                # Without the private name, siblings also count as failed.
                first = frozenset(getattr(context, "_failures", ()))
                self._failed_first = self._failed_first or first
                close(stop_signal, stop_grace_s)  # type: ignore[arg-type]

            # All stops of workers call this method. TorchElastic leaves up to 30 s between SIGTERM
            # and SIGKILL; and when one worker fails it stops its siblings and counts them as failed
            # too.
            context.close = close_in_time  # type: ignore[method-assign]
            return ids

        def _construct_event(self, state: str, source: EventSource, *_: Any, **__: Any) -> Event:
            # These events have no reader, and TorchElastic's own code does a name lookup of this
            # host for each of them.
            return Event(f"torchelastic.worker.status.{state}", source)

        def _invoke_run(self, role: str = "") -> RunResult:
            group = self._worker_group
            self._initialize_workers(group)
            while True:
                news.wait_for_news(group.spec.monitor_interval)
                result: RunResult = self._monitor_workers(group)
                group.state = result.state
                if result.state is WorkerState.SUCCEEDED:
                    if not news.succeeded():
                        return result
                    self._restart_workers(group)
                elif result.state is WorkerState.HEALTHY:
                    # Without the private name it is known only when all have ended.
                    runs = getattr(self._pcontext, "_running_local_ranks", None)
                    if runs is not None and len(runs) < group.spec.local_world_size:
                        news.some_ended()
                    if news.num_nodes_waiting():
                        self._restart_workers(group)
                else:
                    news.note_failures(self._own_failures(result))
                    self._remaining_restarts -= 1
                    self._restart_workers(group)

        def _own_failures(self, result: RunResult) -> tuple[Failure, ...]:
            """Return the workers that failed by themselves, without the siblings that were stopped
            because of them.
            """
            now, failed = time.time(), self._failed_first
            workers = self._worker_group.workers
            first = [w.global_rank for w in workers if w.local_rank in failed]
            ranks = [rank for rank in sorted(result.failures) if not first or rank in first]
            return tuple(Failure(rank, result.failures[rank].exitcode, now) for rank in ranks)

    logs = DefaultLogsSpecs(log_dir=os.devnull)
    return NodeAgent(spec, logs_specs=logs, exit_barrier_timeout=0)
