"""The Python of every page runs."""

import ast
import asyncio
import contextlib
import inspect
from pathlib import Path

import pytest

from tests import forked
from tests.docs import settings
from tests.docs.test_code_blocks import BLOCKS as BY_LINE

BLOCKS: dict[str, str] = {}
"""Page and number of the block on it: a change of the text above it changes no name."""
for _place, _code in BY_LINE.items():
    _page = _place.partition(":")[0]
    BLOCKS[f"{_page} {sum(name.startswith(_page) for name in BLOCKS) + 1}"] = _code

ELSEWHERE = {
    "data-cache.md 2": "tests/docs/test_data_cache.py",
    "importance-sampling.md 1": "tests/docs/test_importance_sampling.py",
    "infinicache.md 1": "tests/jobscripts/infinicache/test_page.py",
    "infinicache.md 2": "tests/jobscripts/infinicache/test_page.py",
    "infinicache.md 3": "tests/jobscripts/infinicache/test_page.py",
    "python.md 1": "tests/integration/test_python.py",
    "llm-gateway.md 1": "tests/jobscripts/llm/test_gateway.py",
    "llm-gateway.md 2": "tests/jobscripts/llm/test_gateway_batches.py",
    "training-scripts.md 1": "tests/gpu",
    "federated.md 1": "test_a_task_has_what_the_interface_has",
}
"""Blocks that the test beside them runs, or that need a GPU."""

SETTINGS = {
    "changing-batch.md 1": (settings.training, "sampler.global_batch_size == 1024"),
    "changing-batch.md 2": (settings.training, "adaptive.scale_invariant_steps == 0"),
    "data-cache.md 1": (settings.cached_images, "len(list(loader)) == 3"),
    "data-cache.md 3": (settings.shards_in_memory, "[n for n, _ in enumerate(stream)] == [0]"),
    "first-job.md 1": (settings.training, "sampler.epoch == 90"),
    "layout.md 1": (settings.training, "len(loader) == 96"),
    "library-trainers.md 1": (settings.hugging_face, "trainer.state.global_step == 2"),
    "library-trainers.md 2": (settings.lightning, "trainer.global_step == 10"),
    "library-trainers.md 3": (settings.accelerate, "sampler.epoch == 10"),
    "live-mode.md 1": (settings.live, "run.steps_done == 1"),
    "live-mode.md 2": (settings.live, "warm_up() is None"),
    "live-mode.md 3": (settings.live, "True"),
    "llm.md 1": (settings.nothing, "len(open('requests.jsonl').readlines()) == 2"),
    "llm.md 2": (
        settings.nothing,
        "[type(c).__name__ for c in commands] == ['PostAttempt', 'DeliverTokens']",
    ),
    "llm.md 3": (settings.replica, "len(result.ids) == 4"),
    "services.md 1": (settings.client, "client.worth.call_count == 3"),
    "services.md 2": (settings.service, "not group.me.loading"),
    "services.md 3": (settings.service, "[str(a) for a in heard] == [group.me.address]"),
    "services.md 4": (settings.client, "client.members.call_count == 2"),
    "step-time.md 1": (settings.training, "batch[0].shape == (32, 4)"),
    "sweeps.md 1": (settings.metric, "True"),
    "sweeps.md 2": (settings.sweep, "run_sweep.call_args.args[0].job.nodes is not None"),
    "traces.md 1": (settings.trace, "len(part.names) == 1024 and gaps.complete.all()"),
    "traces.md 2": (settings.trace, "estimator.observed == 1500"),
    "tracking.md 1": (settings.mlflow_tracker, "mlflow.active_run() is not None"),
    "tracking.md 2": (settings.wandb_tracker, "wandb.run is not None"),
    "tracking.md 3": (settings.wandb_tracker, "wandb.run is not None"),
    "training-scripts.md 2": (settings.training, "(sampler.epoch, group, samples) == (90, 1, 32)"),
    "training-scripts.md 3": (settings.epochs_ends, "scheduler.last_epoch == 90"),
    "training-scripts.md 4": (settings.epochs_ends, "scheduler.last_epoch == 89"),
    "training-scripts.md 5": (settings.epochs_ends, "optimizer.param_groups[0]['lr'] == 0.01"),
    "training-scripts.md 6": (settings.shards, "stream.epoch == 3"),
    "web.md 1": (settings.client, "malletrain.Client().set_link.call_count == 1"),
}
"""Block: what it finds, and what holds after it."""


class Rest(ast.NodeTransformer):
    """Calls what the setting has for ``...``."""

    def visit_Expr(self, node):
        if isinstance(node.value, ast.Constant) and node.value.value is Ellipsis:
            call = ast.parse(f"{settings.REST}()").body[0]
            return ast.copy_location(call, node)
        return node


def run(place, setting, claim, folder):
    """Run a block in this process, which ends with an exception if the block or the claim fails."""
    import os

    os.chdir(folder)
    names = {"__name__": "__main__", settings.REST: lambda: None, **setting(Path(folder))}
    tree = ast.fix_missing_locations(Rest().visit(ast.parse(BLOCKS[place], place)))
    code = compile(tree, place, "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    if code.co_flags & inspect.CO_COROUTINE:
        asyncio.run(_run_within(names, code))
    else:
        exec(code, names)
    assert eval(claim, names), claim


async def _run_within(names, code):
    async with names.get(settings.AROUND, contextlib.nullcontext)():
        await eval(code, names)


def test_each_block_is_run_by_a_test():
    assert sorted(BLOCKS) == sorted([*ELSEWHERE, *SETTINGS])


@pytest.mark.slow
@pytest.mark.parametrize("place", SETTINGS)
def test_a_block_runs(place, tmp_path):
    if place.startswith("library-trainers.md"):
        pytest.importorskip("lightning")
    setting, claim = SETTINGS[place]
    output = tmp_path / "output"
    process = forked.CONTEXT.Process(
        target=forked.work, args=(run, {}, str(output), (place, setting, claim, str(tmp_path)))
    )
    process.start()
    process.join()
    assert process.exitcode == 0, output.read_text()


def test_a_block_that_is_wrong_is_noticed(tmp_path, monkeypatch):
    monkeypatch.setitem(BLOCKS, "wrong.md:1", "import malletrain\nmalletrain.no_such_name(1)\n")
    monkeypatch.chdir(tmp_path)  # restored afterwards
    with pytest.raises(AttributeError):
        run("wrong.md:1", settings.nothing, "True", tmp_path)


def test_a_task_has_what_the_interface_has():
    from fedcase.task import Task

    names = {}
    exec(BLOCKS["federated.md 1"], names)
    for name in (n for n in vars(Task) if not n.startswith("_")):
        mine = inspect.signature(getattr(names["MyTask"], name))
        assert list(mine.parameters) == list(inspect.signature(getattr(Task, name)).parameters)
