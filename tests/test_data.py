"""Datasets, the order of training, batches."""

import itertools
import os
import pickle
import signal
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from edm2.data import ImageDataset, batches, data_order
from edm2.image_files import ImageFiles
from tests.dataset_files import PNG, fails, pixels

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")  # machines with one core
ROOT = Path(__file__).parent.parent



# ImageDataset


def test_items_and_bounds(numbered):
    dataset = ImageDataset(numbered)
    items = list(dataset)  # ends by IndexError
    assert len(items) == len(dataset) == 10 and dataset.names == [f"{i}.png" for i in range(10)]
    for i, (image, label) in enumerate(items):
        np.testing.assert_array_equal(image, pixels(i, 4, 6, 3).transpose(2, 0, 1))
        np.testing.assert_array_equal(label, np.eye(3)[i % 3])
    for i in (-1, 10):
        with pytest.raises(IndexError, match="0..9"):
            dataset.image(i)


@pytest.mark.parametrize("load", [False, True])
def test_mirror(numbered, load):
    plain, dataset = ImageDataset(numbered), ImageDataset(numbered, mirror=True)
    if load:
        dataset.load()
    assert len(dataset) == 20 and dataset.nbytes == plain.nbytes
    for i in range(10):
        np.testing.assert_array_equal(dataset.image(i), plain.image(i))
        np.testing.assert_array_equal(dataset.image(10 + i), plain.image(i)[:, :, ::-1])
        np.testing.assert_array_equal(dataset.label(10 + i), plain.label(i))
    np.testing.assert_array_equal(dataset.images([13, 3]), [plain.image(3)[:, :, ::-1], plain.image(3)])


def test_loaded_images_cannot_be_changed_from_outside(numbered):
    dataset = ImageDataset(numbered)
    dataset.load()
    dataset.images([0])[:] = 0
    dataset.image(1)[:] = 0
    np.testing.assert_array_equal(dataset.images([0, 1]), ImageDataset(numbered).images([0, 1]))


def test_pickle_and_fork_open_the_zip_anew(numbered, monkeypatch):
    files = ImageFiles(numbered)
    copy = pickle.loads(pickle.dumps(files))
    assert copy._zip is None and copy.read("3.png") == files.read("3.png")
    parent = files._open_zip()
    assert files._open_zip() is parent
    pid = os.getpid()
    monkeypatch.setattr(os, "getpid", lambda: pid + 1)
    assert files._open_zip() is not parent


# The order of training


def test_order_is_frozen():
    # A resumed run, or one on another machine, must see the same images: these numbers never change.
    assert data_order(10, 3, 8, 12).tolist() == [7, 6, 5, 1, 3, 0, 6, 9, 8, 7, 2, 4]
    assert data_order(1797, -1, 10**9, 4).tolist() == [849, 1493, 456, 190]
    assert data_order(5, 0, 3, 0).tolist() == []


@given(st.integers(1, 40), st.integers(-(2**40), 2**40), st.integers(0, 10**6))
@settings(deadline=None)
def test_each_epoch_is_a_permutation(size, seed, epoch):
    order = data_order(size, seed, epoch * size, size)
    assert order.dtype == np.int64 and sorted(order) == list(range(size))


@given(st.integers(1, 40), st.integers(0, 9), st.integers(0, 10**4), st.lists(st.integers(0, 70), max_size=6))
@settings(deadline=None)
def test_order_does_not_depend_on_chunking(size, seed, start, counts):
    starts = itertools.accumulate(counts, initial=start)
    chunks = [data_order(size, seed, s, c) for s, c in zip(starts, counts)]
    whole = data_order(size, seed, start, sum(counts))
    assert whole.shape == (sum(counts),)
    np.testing.assert_array_equal(np.concatenate([*chunks, np.empty(0, int)]), whole)


def test_seeds_and_epochs_differ():
    first = {(s, e): tuple(data_order(50, s, 50 * e, 50)) for s in range(5) for e in range(5)}
    assert len(set(first.values())) == 25


def test_changing_the_order_in_place_does_not_change_the_stream():
    expected = data_order(10, 4, 0, 10).tolist()
    data_order(10, 4, 0, 10)[:] = 0
    assert data_order(10, 4, 0, 10).tolist() == expected


# Batches


def take(iterator, n: int):
    items = list(itertools.islice(iterator, n))
    iterator.close()
    return torch.cat([images for images, _ in items]), torch.cat([labels for _, labels in items])


def assert_equal(a, b):
    for x, y in zip(a, b, strict=True):
        assert x.dtype == y.dtype
        torch.testing.assert_close(x, y, rtol=0, atol=0)


@pytest.mark.parametrize("mirror", [False, True])
@pytest.mark.parametrize("options", [{}, {"cache_bytes": 0, "workers": 0}, {"cache_bytes": 0, "workers": 2}])
def test_batches_follow_the_order(numbered, options, mirror):
    dataset = ImageDataset(numbered, mirror=mirror)
    images, labels = take(batches(dataset, 5, 3, 8, **options), 4)  # more than an epoch
    order = data_order(len(dataset), 5, 3, 32)
    assert images.shape == (32, 3, 4, 6) and images.dtype == torch.uint8
    assert labels.shape == (32, 3) and labels.dtype == torch.float32
    reference = ImageDataset(numbered, mirror=mirror)
    for i, image, label in zip(order, images.numpy(), labels.numpy(), strict=True):
        np.testing.assert_array_equal(image, reference.image(i))
        np.testing.assert_array_equal(label, reference.label(i))


def test_cache_is_used_only_where_it_fits(numbered, monkeypatch):
    dataset = ImageDataset(numbered)
    next(batches(dataset, 0, 0, 2, workers=0, cache_bytes=dataset.nbytes - 1))
    assert dataset._loaded is None
    stream = batches(dataset, 0, 0, 2, workers=2, cache_bytes=dataset.nbytes)
    monkeypatch.setattr(ImageDataset, "_read", lambda *_: pytest.fail("read from disk"))
    next(stream)


def test_batches_do_not_touch_the_global_random_state(numbered):
    before = torch.get_rng_state(), np.random.get_state()[1].copy()
    take(batches(ImageDataset(numbered), 0, 0, 4, cache_bytes=0, workers=1), 2)
    assert torch.equal(torch.get_rng_state(), before[0]) and (np.random.get_state()[1] == before[1]).all()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("options", [{}, {"cache_bytes": 0, "workers": 2}])
def test_batches_are_pinned(numbered, options):
    stream = batches(ImageDataset(numbered), 0, 0, 4, **options)
    assert all(tensor.is_pinned() for tensor in next(stream))
    stream.close()


@pytest.mark.parametrize("micro", [None, 2, 1])
@pytest.mark.parametrize("world", [2, 4])
def test_ranks_share_a_global_batch(numbered, world, micro):
    dataset = ImageDataset(numbered)
    one = batches(dataset, 1, 0, 8)
    per_batch = 1 if micro is None else 8 // world // micro
    ranks = [batches(dataset, 1, 0, 8, rank, world, micro) for rank in range(world)]
    for _ in range(3):
        parts = [next(rank) for rank in ranks for _ in range(per_batch)]
        assert_equal([torch.cat(part) for part in zip(*parts)], next(one))


@pytest.mark.parametrize("skip", [1, 3])
def test_resume(numbered, skip):
    dataset = ImageDataset(numbered)
    whole = take(batches(dataset, 2, 0, 4, rank=1, world_size=2), 6)
    rest = take(batches(dataset, 2, 4 * skip, 4, rank=1, world_size=2), 6 - skip)
    assert_equal(rest, [t[2 * skip :] for t in whole])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 0}, "batch size 0 must be a positive multiple of the 1 processes"),
        ({"batch_size": 6, "world_size": 4}, "batch size 6 must be a positive multiple of the 4"),
        ({"batch_size": 8, "micro_batch": 3}, "micro batch of 3 does not divide the 8 images"),
        ({"batch_size": 8, "world_size": 4, "micro_batch": 4}, "micro batch of 4 does not divide the 2 images"),
        ({"batch_size": 8, "micro_batch": 0}, "micro batch of 0"),
    ],
)
def test_sizes_that_do_not_divide(numbered, options, message):
    with fails(message):  # at the call, not at the first batch
        batches(ImageDataset(numbered), 0, 0, **options)


@pytest.mark.parametrize("workers", [0, 2])
def test_damaged_file_met_while_training(numbered, workers):
    with zipfile.ZipFile(numbered, "a") as archive:
        archive.writestr("x.png", PNG[:1000])
    stream = batches(ImageDataset(numbered, use_labels=False), 0, 0, 11, cache_bytes=0, workers=workers)
    with fails("cannot read .*numbered.zip/x.png: .*truncated"):
        next(stream)


SCRIPT = """
import signal, sys
from edm2.data import ImageDataset, batches
signal.signal(signal.SIGTERM, signal.SIG_IGN)
stream = batches(ImageDataset(sys.argv[1]), 0, 0, 2, cache_bytes=0, workers=1)
next(stream)
print("started", flush=True)
input()
print(sum(len(next(stream)[0]) for _ in range(20)))
"""


def test_workers_outlive_a_signal_to_all_but_not_their_process(numbered):
    """Which saves itself first, and here holds on to its stream until the interpreter is gone."""
    pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    process = subprocess.Popen([sys.executable, "-c", SCRIPT, str(numbered)], cwd=ROOT, start_new_session=True, **pipes)
    assert process.stdout.readline() == "started\n"
    os.killpg(process.pid, signal.SIGTERM)
    assert process.communicate("\n", timeout=60) == ("40\n", "") and process.returncode == 0
