"""The network of a cell, and its training, on images that can be told apart."""

from __future__ import annotations

import gzip
import struct

import numpy as np
import pytest
import torch
from nas import NasError
from nas.codes import encode
from nas.images import IMAGES, LABELS, read_idx, subsets
from nas.network import CellNetwork
from nas.sizes import PRESETS
from nas.train import arguments, main, train

from malletrain.sim.nas import network, random_cell


def idx(path, array):
    head = struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape)
    path.write_bytes(gzip.compress(head + array.astype(np.uint8).tobytes()))


def quarters(path):
    """400 images in the folder: the brightness of a quarter says which of four classes it is."""
    rng = np.random.default_rng(0)
    labels = rng.integers(4, size=400)
    images = rng.integers(60, size=(400, 28, 28))
    for image, label in zip(images, labels, strict=True):
        image[14 * (label // 2) :, 14 * (label % 2) :][:14, :14] += 180
    idx(path / IMAGES, images)
    idx(path / LABELS, labels)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("images")
    quarters(path)
    return path


@pytest.fixture(autouse=True)
def one_process(monkeypatch):
    """This training has no other ranks, whatever ran in this process before."""
    monkeypatch.delenv("RANK", raising=False)


@pytest.mark.parametrize("seed", range(3))
def test_a_network_has_as_many_parameters_as_its_cell_says(seed):
    cell = random_cell(np.random.default_rng(seed))
    size = PRESETS["cpu"]
    model = CellNetwork(cell, size)
    expected = network(
        cell, size=28, classes=10, planes=1, stem=size.stem, per_stack=size.per_stack
    )
    assert sum(p.numel() for p in model.parameters()) == expected.parameters
    assert model(torch.zeros(2, 1, 28, 28)).shape == (2, 10)


@pytest.mark.thorough
def test_a_cell_learns(folder):
    edges, ops = encode(random_cell(np.random.default_rng(4)))
    words = ["--edges", edges, "--ops", ops, "--data", folder, "--train", 200, "--validation", 100]
    args = arguments([str(w) for w in (*words, "--epochs", 3, "--batch-size", 20)])
    assert train(args) > 0.8  # chance is 0.25


def test_training_and_validation_have_no_image_in_common(folder):
    a, b = subsets(folder, 250, 150)
    rows = [t.reshape(len(t), -1).numpy().tobytes() for t in (a.tensors[0], b.tensors[0])]
    assert len(a) + len(b) == 400
    size = 28 * 28 * 4
    pictures = [{r[k : k + size] for k in range(0, len(r), size)} for r in rows]
    assert not pictures[0] & pictures[1]


def test_what_is_wrong_is_a_sentence(folder, tmp_path, capsys):
    with pytest.raises(NasError, match="has 400 images to train on; 399 and 2 are more"):
        subsets(folder, 399, 2)
    (tmp_path / IMAGES).write_bytes(gzip.compress(b"not images"))
    with pytest.raises(NasError, match="is no IDX file"):
        read_idx(tmp_path / IMAGES)
    with pytest.raises(SystemExit):
        main(["--edges", "32768", "--ops", "0", "--data", str(tmp_path / "none")])
    assert "Give the folder with Fashion-MNIST as --data" in capsys.readouterr().err
