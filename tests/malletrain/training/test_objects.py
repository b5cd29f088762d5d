"""What a snapshot is made of: states without wrappings, and those that do not fit."""

import pytest
import torch
from torch import nn
from torch.utils.data.dataloader import _SingleProcessDataLoaderIter

import malletrain
from malletrain import Snapshot, SnapshotError
from malletrain.training import snapshot_file
from malletrain.training.objects import check_object
from tests.malletrain.training.worker_side import as_plain_script

pytestmark = pytest.mark.slow


@pytest.fixture
def plain(monkeypatch):
    with as_plain_script(monkeypatch):
        yield


@pytest.mark.usefixtures("plain")
def test_wrappings_come_and_go(tmp_path):
    path = tmp_path / "x.pt"
    inner = nn.Linear(3, 3)
    compiled = torch.compile(inner)
    Snapshot(path, model=nn.DataParallel(compiled)).save()
    assert set(snapshot_file.read(str(path))["objects"]["model"]) == {"weight", "bias"}
    bare = nn.Linear(3, 3)
    assert Snapshot(path, model=bare).restore()
    assert torch.equal(bare.weight, inner.weight)
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    try:
        other = nn.Linear(3, 3)
        assert Snapshot(path, model=nn.parallel.DistributedDataParallel(other)).restore()
    finally:
        torch.distributed.destroy_process_group()
    assert torch.equal(other.weight, inner.weight)


@pytest.mark.usefixtures("plain")
def test_a_state_that_does_not_fit_names_the_object(tmp_path):
    path = tmp_path / "x.pt"
    Snapshot(path, net=nn.Linear(2, 2)).save()
    with pytest.raises(
        SnapshotError,
        match=f"state of 'net' in snapshot {path} does not fit the script's Linear: .*size "
        "mismatch",
    ):
        Snapshot(path, net=nn.Linear(2, 3)).restore()
    sampler = malletrain.ElasticSampler(20, batch_size=5, rank=0, world_size=1)
    Snapshot(path, sampler=sampler).save()
    with pytest.raises(SnapshotError, match="dataset of 20 samples, but this one has 30"):
        Snapshot(
            path, sampler=malletrain.ElasticSampler(30, batch_size=5, rank=0, world_size=1)
        ).restore()


@pytest.mark.usefixtures("plain")
def test_objects_that_came_or_went_are_told(tmp_path, capsys):
    path = tmp_path / "x.pt"
    facts = {"a": 1, "b": torch.ones(2)}
    Snapshot(path, facts=facts, old={"x": 1}).save()
    mine = {"a": 0, "c": 3}
    assert Snapshot(path, facts=mine, new={"y": 1}).restore()
    assert mine["a"] == 1
    assert mine["c"] == 3
    assert torch.equal(mine["b"], torch.ones(2))
    errors = capsys.readouterr().err
    assert "holds nothing called 'new'" in errors
    assert "also holds 'old'" in errors


class FSDPModule(nn.Linear):
    """As torch's."""


def test_a_sharded_module_is_for_restart_mode():
    module = FSDPModule(1, 1)
    check_object("Snapshot", "model", module, sharded=True)
    with pytest.raises(TypeError, match=r"elastic\.Run: model is a FSDPModule.* restart mode"):
        check_object("elastic.Run", "model", module)


class WarmUpAround(torch.optim.lr_scheduler.LRScheduler):
    """A warm-up of two steps, then another scheduler's rates: its state has that scheduler."""

    def __init__(self, optimizer):
        self.after = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        self.others = [torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)]
        super().__init__(optimizer)

    def get_lr(self):
        return [0.1 * self.last_epoch]

    def step(self, epoch=None):
        if self.last_epoch < 2:
            super().step(epoch)
        else:
            self.after.step()


@pytest.mark.usefixtures("plain")
def test_a_scheduler_within_a_scheduler_goes_on_with_the_scripts_optimizer(tmp_path):
    def made():
        optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=1.0)
        return optimizer, WarmUpAround(optimizer)

    def rates(optimizer, scheduler, steps):
        for _ in range(steps):
            optimizer.step()
            scheduler.step()
            yield optimizer.param_groups[0]["lr"]

    optimizer, scheduler = made()
    list(rates(optimizer, scheduler, 4))
    Snapshot(tmp_path / "x.pt", optimizer=optimizer, scheduler=scheduler).save()
    resumed, other = made()
    after, others = other.after, other.others
    assert Snapshot(tmp_path / "x.pt", optimizer=resumed, scheduler=other).restore()
    assert list(rates(resumed, other, 2)) == list(rates(optimizer, scheduler, 2))
    assert (other.after, other.others) == (after, others)
    assert torch.load(tmp_path / "x.pt", weights_only=True)  # no object in it


@pytest.mark.parametrize("owner", ["Snapshot", "elastic.Run"])
def test_a_metric_of_one_rank_is_refused(owner):
    torchmetrics = pytest.importorskip("torchmetrics")
    mean = torchmetrics.MeanMetric()
    for metric in (mean, torchmetrics.MetricCollection([mean])):
        with pytest.raises(TypeError, match=f"{owner}: mean is a M.* the sums in a dict"):
            check_object(owner, "mean", metric)


def test_metrics_within_a_model_are_told(capsys):
    torchmetrics = pytest.importorskip("torchmetrics")
    check_object("Snapshot", "measured", nn.Linear(1, 1))
    assert not capsys.readouterr().err
    model = nn.ModuleDict({"net": nn.Linear(1, 1), "error": torchmetrics.MeanSquaredError()})
    check_object("Snapshot", "measured", nn.DataParallel(model))
    assert "measured has metrics in it (error), which add up" in capsys.readouterr().err


class StatefulDataLoader(torch.utils.data.DataLoader):
    """As that of torchdata, which counts the batches of this rank."""

    done = 0

    def state_dict(self):
        return {"done": self.done}

    def load_state_dict(self, state):
        self.done = state["done"]


class IteratorOfState(_SingleProcessDataLoaderIter):
    """As that of torchdata, which starts the sampler in a method that has no loader."""

    def __init__(self, loader):
        super().__init__(loader)
        self._begin()

    def _begin(self):
        self._sampler_iter = iter(self._index_sampler)


def test_an_iterator_of_torchdata_reads_an_elastic_sampler():
    sampler = malletrain.ElasticSampler(8, global_batch_size=4, shuffle=False, rank=0, world_size=1)
    loader = torch.utils.data.DataLoader(torch.arange(8), batch_sampler=sampler)
    assert [batch.tolist() for batch in IteratorOfState(loader)] == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_a_loader_over_an_elastic_sampler_is_refused():
    sampler = malletrain.ElasticSampler(8, global_batch_size=4, rank=0, world_size=1)
    loader = StatefulDataLoader(torch.arange(8), batch_sampler=sampler)
    for owner in ("Snapshot", "elastic.Run"):
        with pytest.raises(TypeError, match="would leave out the same batches again"):
            check_object(owner, "loader", loader)


@pytest.mark.usefixtures("plain")
@pytest.mark.parametrize(("ranks", "is_told"), [("1", False), ("2", True)])
def test_the_position_of_one_rank_is_told_where_their_number_changes(
    tmp_path, monkeypatch, capsys, ranks, is_told
):
    Snapshot(tmp_path / "x.pt", loader=StatefulDataLoader(torch.arange(8))).save()
    monkeypatch.setenv("WORLD_SIZE", ranks)
    monkeypatch.setenv("RANK", "0")
    assert Snapshot(tmp_path / "x.pt", loader=StatefulDataLoader(torch.arange(8))).restore()
    log = capsys.readouterr().err
    assert ("the position of one of 1 ranks, and there are 2 now" in log) is is_told
