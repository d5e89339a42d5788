"""The small classifier whose features a sweep measures."""

import numpy as np
import pytest
import torch

from edm2 import features
from edm2.cli.dataset import load_digits
from edm2.data import ArrayDataset
from edm2.features import SmallClassifier, SmallFeatures, load_classifier, save_classifier, train_classifier


@pytest.fixture(scope="module")
def digits_data():
    images, labels = load_digits()
    return images[:, None], np.array(labels)


def test_the_classifier_recognises(digits_data, monkeypatch):
    """Of a fifth of the digits that it has not seen, more than 93 %; the same each time; no random number is taken."""
    monkeypatch.setattr(features, "STEPS", 150)
    images, labels = digits_data
    order = np.random.default_rng(0).permutation(len(images))
    seen, others = order[:1400], order[1400:]
    state = torch.get_rng_state()
    net = train_classifier(ArrayDataset(images[seen], labels[seen]))
    assert torch.equal(torch.get_rng_state(), state)
    with torch.no_grad():
        found = net(torch.from_numpy(images[others])).argmax(dim=1).numpy()
    assert np.mean(found == labels[others]) > 0.93
    of_all = SmallFeatures(net)(np.ascontiguousarray(images[seen].transpose(0, 2, 3, 1)))
    assert of_all.shape == (1400, 64) and of_all.var(axis=0, ddof=1).mean() == pytest.approx(1, rel=1e-3)


def test_the_same_each_time(digits_data, monkeypatch):
    monkeypatch.setattr(features, "STEPS", 3)
    dataset = ArrayDataset(*digits_data)
    first, again, other = (train_classifier(dataset, seed).state_dict() for seed in (0, 0, 1))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["out.weight"], other["out.weight"])


@pytest.mark.parametrize("size", [4, 5, 32, 64])
def test_sizes(size):
    net = SmallClassifier((3, size, size), 7)
    x = torch.zeros(2, 3, size, size, dtype=torch.uint8)
    assert net(x).shape == (2, 7) and net.features(x).shape == (2, 64)


def test_on_disk(tmp_path):
    torch.manual_seed(0)
    net, path = SmallClassifier((3, 8, 8), 5), tmp_path / "a.safetensors"
    save_classifier(path, net, {"data": "x"})
    read = load_classifier(path, (3, 8, 8), 5, {"data": "x"})
    assert all(torch.equal(a, b) for a, b in zip(read.state_dict().values(), net.state_dict().values()))
    assert load_classifier(path, (3, 8, 8), 5, {"data": "y"}) is None and load_classifier(path, (3, 8, 8), 6, {"data": "x"}) is None
    assert load_classifier(tmp_path / "b.safetensors", (3, 8, 8), 5, {"data": "x"}) is None
