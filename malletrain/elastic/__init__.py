"""Live mode: a job changes its number of nodes without restarting processes. See docs/live-mode.md.

    import malletrain.elastic as elastic
    run = elastic.Run(model=model, optimizer=optimizer, sampler=sampler, snapshot="run.pt")
    net = run.ddp(model)
    for epoch in sampler.epochs(20):
        for images, labels in run.batches(loader):
            with run.step():
                optimizer.zero_grad()
                loss = cross_entropy(net(images), labels) * run.loss_weight
                loss.backward()
                optimizer.step()

The same script runs under ``malletrain submit --live``, under torchrun and under plain python.
"""

from malletrain.elastic.errors import ElasticError
from malletrain.elastic.run import Run, lr_linear, lr_sqrt
from malletrain.elastic.state import StateError
from malletrain.elastic.step import Step
from malletrain.training.ranks import max_world
from malletrain.training.snapshot import SnapshotError

__all__ = [
    "ElasticError",
    "Run",
    "SnapshotError",
    "StateError",
    "Step",
    "lr_linear",
    "lr_sqrt",
    "max_world",
]
