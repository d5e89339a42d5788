import io
import itertools
import json
import os
import pickle
import sys
import zipfile

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

import edm2.cli.dataset as cli
from edm2.data import ImageDataset, batches, data_order
from edm2.errors import UserError
from edm2.image_files import ImageFiles, write_zip

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")  # machines with one core


def encode(pixels: np.ndarray, fmt: str = "png", **options) -> bytes:
    buffer = io.BytesIO()
    if fmt == "npy":
        np.save(buffer, pixels, **options)
    else:
        Image.fromarray(pixels).save(buffer, fmt, **options)
    return buffer.getvalue()


def pixels(seed: int, *shape: int) -> np.ndarray:
    return np.random.RandomState(seed).randint(0, 256, shape).astype(np.uint8)


def make(path, files: dict[str, bytes], labels="absent"):
    """A dataset of the given files: a ZIP if the path says so, else a folder."""
    if labels != "absent":
        files = {**files, "dataset.json": json.dumps({"labels": labels}).encode()}
    if path.suffix == ".zip":
        with zipfile.ZipFile(path, "w") as archive:
            for name, data in files.items():
                archive.writestr(name, data)
    else:
        for name, data in files.items():
            (path / name).parent.mkdir(parents=True, exist_ok=True)
            (path / name).write_bytes(data)
    return path


def fails(message: str):
    """Expects a UserError of one line that contains `message`."""
    return pytest.raises(UserError, match=rf"(?s)\A(?!.*\n).*{message}")


@pytest.fixture(params=["folder", "file.zip"])
def path(request, tmp_path):
    return tmp_path / request.param


@pytest.fixture
def numbered(tmp_path):
    """A ZIP of 10 RGB images of 4 x 6 pixels (width 6) with labels i % 3."""
    names = [f"{i}.png" for i in range(10)]
    files = {name: encode(pixels(i, 4, 6, 3)) for i, name in enumerate(names)}
    return make(tmp_path / "numbered.zip", files, [[name, i % 3] for i, name in enumerate(names)])


# Files and formats


def test_files_are_sorted_and_others_ignored(path):
    image = encode(pixels(0, 4, 4))
    names = ["b.png", "a/z.png", "a/b/c.PNG", "c.npy"]
    ignored = [".hidden.png", ".dir/x.png", "a/._z.png", "readme.txt", "stats.npz", "noextension"]
    make(path, dict.fromkeys(names + ignored, image), labels=None)
    assert ImageFiles(path).names == ["a/b/c.PNG", "a/z.png", "b.png", "c.npy"]


@pytest.mark.parametrize("shape", [(4, 6), (4, 6, 3)])
@pytest.mark.parametrize("fmt", ["png", "bmp", "tiff"])
def test_lossless_images(path, fmt, shape):
    image = pixels(1, *shape)
    dataset = ImageDataset(make(path, {f"x.{fmt}": encode(image, fmt)}), use_labels=False)
    expected = image.transpose(2, 0, 1) if image.ndim == 3 else image[None]
    assert dataset.image_shape == (len(expected), 4, 6) and dataset.dtype == np.uint8
    assert dataset.image(0).dtype == np.uint8
    np.testing.assert_array_equal(dataset.image(0), expected)


@pytest.mark.parametrize("channels", [1, 3])
def test_jpeg(path, channels):
    image = np.full((8, 8, channels), 100, np.uint8).squeeze()
    dataset = ImageDataset(make(path, {"x.jpg": encode(image, "jpeg")}), use_labels=False)
    assert dataset.image_shape == (channels, 8, 8)
    np.testing.assert_allclose(dataset.image(0).astype(int), 100, atol=2)


def test_palette_and_alpha_become_rgb_and_grey(tmp_path):
    palette = Image.new("P", (2, 1))
    palette.putpalette([10, 20, 30, 40, 50, 60])
    palette.putdata([0, 1])
    opaque, transparent = io.BytesIO(), io.BytesIO()
    palette.save(opaque, "png")
    palette.save(transparent, "png", transparency=bytes([10, 128]))
    rgba = np.array([[[10, 20, 30, 0], [40, 50, 60, 255]]], np.uint8)
    files = {"a.png": opaque.getvalue(), "b.png": transparent.getvalue(), "c.png": encode(rgba)}
    dataset = ImageDataset(make(tmp_path / "rgb", files), use_labels=False)
    for i in range(3):
        np.testing.assert_array_equal(dataset.image(i), [[[10, 40]], [[20, 50]], [[30, 60]]])
    grey = {"la.png": encode(rgba[..., 2:]), "one.png": encode(np.array([[False, True]]))}
    dataset = ImageDataset(make(tmp_path / "grey", grey), use_labels=False)
    np.testing.assert_array_equal(dataset.images([0, 1])[:, 0, 0], [[30, 60], [0, 255]])


@pytest.mark.parametrize("dtype", [np.float32, np.uint8])
def test_npy_is_kept_as_stored(path, dtype):
    array = np.random.RandomState(0).uniform(0, 255, (8, 3, 5)).astype(dtype)
    fortran = encode(np.asfortranarray(array + 1), "npy")
    dataset = ImageDataset(make(path, {"a.npy": encode(array, "npy"), "b.npy": fortran}), use_labels=False)
    assert dataset.image_shape == (8, 3, 5) and dataset.dtype == dtype and dataset.nbytes == 2 * array.nbytes
    np.testing.assert_array_equal(dataset.images([0, 1]), [array, array + 1])
    images, labels = next(batches(dataset, 0, 0, 2))
    assert images.numpy().dtype == dtype and labels.shape == (2, 0)


# Labels


def test_class_indices_become_one_hot(path):
    image = encode(pixels(0, 4, 4))
    make(path, {"a.png": image, "d/b.png": image}, [["d\\b.png", 3], ["gone.png", 7], ["a.png", 1]])
    dataset = ImageDataset(path)
    assert dataset.label_dim == 4
    np.testing.assert_array_equal(dataset.labels([0, 1]), [[0, 1, 0, 0], [0, 0, 0, 1]])
    assert dataset.label(1).dtype == np.float32


def test_label_vectors(path):
    image = encode(pixels(0, 4, 4))
    dataset = ImageDataset(make(path, {"a.png": image, "b.png": image}, [["a.png", [0.5, 1]], ["b.png", [-2, 3e4]]]))
    assert dataset.label_dim == 2 and dataset.label(0).dtype == np.float32
    np.testing.assert_array_equal(dataset.labels([1, 0]), [[-2, 3e4], [0.5, 1]])


@pytest.mark.parametrize("labels", ["absent", None, [["other.png", -1]]])
def test_labels_are_ignored_on_request(path, labels):
    dataset = ImageDataset(make(path, {"a.png": encode(pixels(0, 4, 4))}, labels), use_labels=False)
    assert dataset.label_dim == 0 and dataset.label(0).shape == (0,) and dataset.labels([0, 0]).shape == (2, 0)


@pytest.mark.parametrize(("labels", "why"), [("absent", "no dataset.json"), (None, "null")])
def test_labels_wanted_but_absent(path, labels, why):
    make(path, {"a.png": encode(pixels(0, 4, 4))}, labels)
    with fails(f"--cond needs labels: .*{path.name}.*{why}"):
        ImageDataset(path)


@pytest.mark.parametrize(
    ("a", "b", "message"),
    [
        (0, -1, "b.png is -1; expected an integer from 0"),
        (0, 1.0, "b.png is 1.0; expected an integer"),
        (0, True, "b.png is True"),
        (0, 10**30, "b.png is 1000"),
        (0, [1.0], r"b.png is \[1.0\]"),
        ("cat", 0, "a.png is 'cat'"),
        ([], [], r"a.png is \[\]"),
        (None, 0, "a.png is None"),
        ([1.0, 2.0], [1.0], r"b.png is \[1.0\]; expected a list of 2 finite numbers"),
        ([1.0, 2.0], 3, "b.png is 3; expected a list of 2"),
        ([1.0], ["x"], r"b.png is \['x'\]"),
        ([1.0], [float("nan")], "b.png is .nan"),
        ([1.0], [1e39], "b.png is .1e"),
    ],
)
def test_bad_labels(tmp_path, a, b, message):
    image = encode(pixels(0, 4, 4))
    make(tmp_path / "d", {"a.png": image, "b.png": image}, [["a.png", a], ["b.png", b]])
    with fails(f"d/dataset.json: the label of {message}"):
        ImageDataset(tmp_path / "d")


def test_image_without_label(path):
    image = encode(pixels(0, 4, 4))
    make(path, {"a.png": image, "b.png": image}, [["a.png", 0]])
    with fails("dataset.json has no label for b.png"):
        ImageDataset(path)


@pytest.mark.parametrize(
    "text", ["{", "", "[]", "{}", '"x"', '{"labels": 3}', '{"labels": [1]}', '{"labels": [[1, 2]]}', "\xff"]
)
def test_malformed_json(path, text):
    make(path, {"a.png": encode(pixels(0, 4, 4)), "dataset.json": text.encode("latin1")})
    with fails("dataset.json is malformed; expected"):
        ImageDataset(path)


# Bad datasets


def test_missing_path(tmp_path):
    with fails("nowhere does not exist"):
        ImageDataset(tmp_path / "nowhere")


@pytest.mark.parametrize("damage", ["cut", "text", "empty"])
def test_corrupt_zip(numbered, damage):
    data = numbered.read_bytes()
    numbered.write_bytes({"cut": data[:-30], "text": b"hello", "empty": b""}[damage])
    with fails("numbered.zip is neither a folder nor a readable ZIP"):
        ImageDataset(numbered)


def test_bit_flip_in_zip(numbered):
    data = bytearray(numbered.read_bytes())
    with zipfile.ZipFile(numbered) as archive:
        data[archive.getinfo("3.png").header_offset + 80] ^= 1
    numbered.write_bytes(data)
    with fails("cannot read .*numbered.zip/3.png: .*CRC"):
        ImageDataset(numbered).load()


def test_empty(path):
    with fails("holds no images"):
        ImageDataset(make(path, {"readme.txt": b"hello"}, labels=None), use_labels=False)


@pytest.mark.parametrize(
    ("odd", "message"),
    [
        (encode(pixels(0, 4, 5)), "b.png is 5x4 with 1 channel .uint8. but a.png is 4x4 with 1 channel"),
        (encode(pixels(0, 4, 4, 3)), "b.png is 4x4 with 3 channels .*dataset convert"),
    ],
)
def test_mixed_sizes(path, odd, message):
    good = encode(pixels(0, 4, 4))
    dataset = ImageDataset(make(path, {"a.png": good, "b.png": odd, "c.png": good}), use_labels=False)
    for read in (lambda: dataset[1], dataset.load, lambda: batches(dataset, 0, 0, 2)):
        with fails(message):
            read()
    assert dataset.image(2).shape == (1, 4, 4)


def test_mixed_dtypes(tmp_path):
    files = {"a.npy": encode(np.zeros((1, 2, 2), np.float32), "npy"), "b.png": encode(pixels(0, 2, 2))}
    with fails("b.png is 2x2 with 1 channel .uint8. but a.npy is .*float32"):
        ImageDataset(make(tmp_path / "d", files), use_labels=False).load()


PNG = encode(pixels(0, 32, 32, 3))
JPEG = encode(pixels(0, 32, 32, 3), "jpeg")
NPY = encode(pixels(0, 1, 4, 4), "npy")


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("x.png", PNG[:1000], "truncated"),
        ("x.png", PNG[:50] + b"\0" * 20 + PNG[70:], "broken|CRC|checksum|image"),
        ("x.jpg", JPEG[: len(JPEG) // 2], "[Tt]runcated"),
        ("x.png", b"hello", "not an image; replace or remove it"),
        ("x.png", b"", "not an image"),
        ("x.png", encode(np.zeros((2, 2), np.uint16)), "I;16 pixels would lose precision"),
        ("x.npy", NPY[:-1], "reshape|read|data"),
        ("x.npy", b"hello", "magic string"),
        ("x.npy", b"", "EOF"),
        ("x.npy", encode(pixels(0, 4, 4), "npy"), r"expected uint8 or float32 \[C,H,W\], got uint8 \[4, 4\]"),
        ("x.npy", encode(np.zeros((1, 4, 4)), "npy"), "got float64"),
        ("x.npy", encode(np.array([[[{}]]]), "npy", allow_pickle=True), "Object arrays"),
    ],
)
def test_damaged_file(path, name, data, message):
    with fails(f"cannot read .*{path.name}/{name}: .*({message})"):
        ImageDataset(make(path, {name: data}), use_labels=False)


def test_encrypted_zip_entry(numbered):
    data = bytearray(numbered.read_bytes())
    for signature, offset in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):  # the flag that says so, in both headers
        data[data.index(signature) + offset] |= 1
    numbered.write_bytes(data)
    with fails("cannot read .*numbered.zip/0.png: .*(encrypted|password)"):
        ImageDataset(numbered)


def test_file_that_vanished(tmp_path):
    dataset = ImageDataset(make(tmp_path / "d", {"a.png": PNG, "b.png": PNG}), use_labels=False)
    (tmp_path / "d" / "b.png").unlink()
    with fails("cannot read .*d/b.png: .*No such file"):
        dataset.image(1)


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


# Writing


def test_write_zip_layout_and_determinism(tmp_path):
    images = [pixels(i, 4, 6, 3) for i in range(1001)]
    labels = [i % 7 for i in range(1001)]
    for name in ("a.zip", "b.zip"):
        write_zip(tmp_path / name, iter(images), labels)
    assert (tmp_path / "a.zip").read_bytes() == (tmp_path / "b.zip").read_bytes()
    assert sorted(os.listdir(tmp_path)) == ["a.zip", "b.zip"]
    with zipfile.ZipFile(tmp_path / "a.zip") as archive:
        assert {info.compress_type for info in archive.infolist()} == {zipfile.ZIP_STORED}
        entries = json.loads(archive.read("dataset.json"))["labels"]
        assert entries[0] == ["00000/img00000000.png", 0] and entries[-1] == ["00001/img00001000.png", 1000 % 7]
        assert set(archive.namelist()) == {name for name, _ in entries} | {"dataset.json"}
    dataset = ImageDataset(tmp_path / "a.zip")
    np.testing.assert_array_equal(dataset.images(range(1001)), np.stack(images).transpose(0, 3, 1, 2))
    np.testing.assert_array_equal(dataset.labels(range(1001)).argmax(1), labels)


@pytest.mark.parametrize("shape", [(4, 6), (4, 6, 1)])
def test_write_zip_grey_without_labels(tmp_path, shape):
    write_zip(tmp_path / "a.zip", [pixels(0, *shape)])
    dataset = ImageDataset(tmp_path / "a.zip", use_labels=False)
    np.testing.assert_array_equal(dataset.image(0)[0], pixels(0, 4, 6))
    with fails("null"):
        ImageDataset(tmp_path / "a.zip")


def interrupted():
    yield pixels(0, 4, 4)
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("images", "labels", "error"),
    [
        (interrupted(), None, KeyboardInterrupt),
        ([pixels(0, 4, 4)], [1, 2], ValueError),
        ([np.zeros((4, 4))], None, ValueError),
    ],
)
def test_write_zip_that_fails_leaves_the_old_file(tmp_path, images, labels, error):
    (tmp_path / "a.zip").write_bytes(b"old")
    with pytest.raises(error):
        write_zip(tmp_path / "a.zip", images, labels)
    assert os.listdir(tmp_path) == ["a.zip"] and (tmp_path / "a.zip").read_bytes() == b"old"


@pytest.mark.parametrize("folder", ["missing", "file"])
def test_write_zip_into_nowhere(tmp_path, folder):
    (tmp_path / "file").write_bytes(b"")
    with fails(f"cannot write .*{folder}/a.zip"):
        write_zip(tmp_path / folder / "a.zip", [pixels(0, 4, 4)])


# Command line


def run(*args) -> str:
    result = CliRunner().invoke(cli.dataset, [str(a) for a in args])
    if result.exception:
        raise result.exception
    return result.output


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    path = tmp_path_factory.mktemp("digits") / "digits.zip"
    run("digits", path)
    return path


def test_digits_are_exact(digits):
    from sklearn.datasets import load_digits

    dataset = ImageDataset(digits)
    assert (len(dataset), dataset.image_shape, dataset.dtype, dataset.label_dim) == (1797, (1, 8, 8), np.uint8, 10)
    data = load_digits()
    levels = [round(v * 255 / 16) for v in range(17)]
    np.testing.assert_array_equal(dataset.images(range(1797)), np.array(levels)[data.images.astype(int)][:, None])
    np.testing.assert_array_equal(dataset.labels(range(1797)), np.eye(10)[data.target])


def test_digits_again(digits, tmp_path):
    first = digits.read_bytes()
    run("digits", tmp_path / "again.zip")
    assert (tmp_path / "again.zip").read_bytes() == first
    stamp = digits.stat().st_mtime_ns
    assert "left as it is" in run("digits", digits) and digits.stat().st_mtime_ns == stamp


@pytest.mark.parametrize("other", ["text", "dataset", "labels"])
def test_digits_do_not_overwrite_other_files(digits, numbered, tmp_path, other):
    path = tmp_path / "out.zip"
    if other == "labels":
        images, labels = cli.load_digits()
        write_zip(path, images, labels[::-1])
    else:
        path.write_bytes(b"precious" if other == "text" else numbered.read_bytes())
    before = path.read_bytes()
    with fails("out.zip exists; .*--overwrite"):
        run("digits", path)
    assert path.read_bytes() == before
    run("digits", path, "--overwrite")
    assert path.read_bytes() == digits.read_bytes()


def test_digits_without_scikit_learn(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with fails(r"pip install 'edm2-triton\[digits\]'"):
        run("digits", tmp_path / "x.zip")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("size", "halvings"), [((8, 8), 0), ((8, 30), 0), ((15, 16), 0), ((16, 16), 1), ((70, 64), 3), ((5, 7), 0)]
)
def test_center_crop_sizes_and_halvings(monkeypatch, size, halvings):
    filters = []
    resize = Image.Image.resize
    monkeypatch.setattr(Image.Image, "resize", lambda s, size, f: filters.append(f) or resize(s, size, f))
    image = cli.center_crop(Image.new("RGB", size, (10, 200, 77)), 8)
    assert filters == [Image.Resampling.BOX] * halvings + [Image.Resampling.BICUBIC]
    assert image.size == (8, 8)
    assert (np.asarray(image) == (10, 200, 77)).all()


def test_center_crop_takes_the_centre():
    image = pixels(0, 8, 13)  # the short side fits: nothing but a crop
    np.testing.assert_array_equal(cli.center_crop(Image.fromarray(image), 8), image[:, 2:10])
    np.testing.assert_array_equal(cli.center_crop(Image.fromarray(image.T), 8), image.T[2:10])
    blocks = pixels(1, 8, 8).repeat(4, 0).repeat(4, 1)  # box halving undoes repetition exactly
    np.testing.assert_array_equal(cli.center_crop(Image.fromarray(blocks), 8), blocks[::4, ::4])


def photos(path):
    sizes = {"n02/b.png": (20, 9, 3), "n01/a.jpg": (8, 8, 3), "n02/a.png": (12, 16)}
    files = {name: encode(pixels(i, *s), name[-3:].replace("jpg", "jpeg")) for i, (name, s) in enumerate(sizes.items())}
    return make(path, files)


def test_convert_makes_a_dataset(path, tmp_path):
    out = tmp_path / "out.zip"
    assert "3 images" in run("convert", photos(path), out, "--resolution", 4, "--labels-from-folders")
    dataset = ImageDataset(out)
    assert dataset.image_shape == (3, 4, 4) and dataset.label_dim == 2
    np.testing.assert_array_equal(dataset.labels(range(3)).argmax(1), [0, 1, 1])
    source = ImageFiles(path)
    for i, name in enumerate(source.names):
        expected = cli.center_crop(source.image(name).convert("RGB"), 4)
        np.testing.assert_array_equal(dataset.image(i).transpose(1, 2, 0), expected)


def test_convert_keeps_size_labels_and_pixels(numbered, tmp_path):
    run("convert", numbered, tmp_path / "out.zip")
    old, new = ImageDataset(numbered), ImageDataset(tmp_path / "out.zip")
    np.testing.assert_array_equal(new.images(range(10)), old.images(range(10)))
    np.testing.assert_array_equal(new.labels(range(10)), old.labels(range(10)))


def test_convert_grey_without_labels(tmp_path):
    run("convert", photos(tmp_path / "d"), tmp_path / "out.zip", "--resolution", 8, "--grey")
    dataset = ImageDataset(tmp_path / "out.zip", use_labels=False)
    assert len(dataset) == 3 and dataset.image_shape == (1, 8, 8)


def test_convert_errors(tmp_path):
    source, out = photos(tmp_path / "d"), tmp_path / "out.zip"
    with fails("n02/a.png is 16x12 but n01/a.jpg is 8x8; give --resolution"):
        run("convert", source, out)
    assert not out.exists()
    make(source, {"loose.png": PNG})
    with fails("loose.png is in no sub-folder"):
        run("convert", source, out, "--labels-from-folders")
    out.write_bytes(b"precious")
    with fails("out.zip exists"):
        run("convert", source, out, "--resolution", 4)
    run("convert", source, out, "--resolution", 4, "--overwrite")
    assert len(ImageDataset(out, use_labels=False)) == 4
