"""Files of a dataset: formats, labels, damage, writing."""

import io
import json
import os
import zipfile

import numpy as np
import pytest
from PIL import Image

from edm2.data import ImageDataset, batches
from edm2.dataset_zip import encode_png, write_zip
from edm2.image_files import ImageFiles
from tests.dataset_files import PNG, encode, fails, make, pixels

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
    shape = (8, 3, 5) if dtype == np.float32 else (3, 4, 5)
    array = np.random.RandomState(0).uniform(0, 255, shape).astype(dtype)
    fortran = encode(np.asfortranarray(array + 1), "npy")
    dataset = ImageDataset(make(path, {"a.npy": encode(array, "npy"), "b.npy": fortran}), use_labels=False)
    assert dataset.image_shape == shape and dataset.dtype == dtype and dataset.nbytes == 2 * array.nbytes
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


@pytest.mark.parametrize("damage", ["cut", "text", "empty", "version"])
def test_corrupt_zip(numbered, damage):
    data, entry = numbered.read_bytes(), b"PK\x01\x02\x14\x03"
    future = data.replace(entry + b"\x14", entry + b"\xff")  # of a version to come
    assert future != data
    numbered.write_bytes({"cut": data[:-30], "text": b"hello", "empty": b"", "version": future}[damage])
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
        ("x.npy", encode(pixels(0, 2, 4, 4), "npy"), r"pixels of 1 or 3 channels, or latents, got uint8 \[2, 4, 4\]"),
        ("x.npy", encode(pixels(0, 3, 0, 4), "npy"), r"or latents, got uint8 \[3, 0, 4\]"),
        ("x.npy", encode(np.zeros((0, 4, 4), np.float32), "npy"), r"or latents, got float32 \[0, 4, 4\]"),
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


# Writing


@pytest.mark.parametrize("name", ["../b.png", "a/../../b.png", "/b.png", "\\\\b\\c.png", "C:\\b.png", "..\\b.png", "../notes.txt"])
def test_names_that_lead_out(tmp_path, name):
    make(tmp_path / "a.zip", {"a.png": PNG, name: PNG})
    with fails("a.zip holds .* which is no path inside it; remove or rename that"):
        ImageFiles(tmp_path / "a.zip")
    make(tmp_path / "b.zip", {"a.png": PNG, "a..b/..c.png": PNG, "b..png": PNG})
    assert ImageFiles(tmp_path / "b.zip").names == ["a.png", "b..png"]


def test_folders_are_read_to_their_end(tmp_path, monkeypatch):
    """Also behind links; one that cannot be is told, and one without an end."""
    folder = make(tmp_path / "a", {"b/0.png": PNG, "c/d/1.png": PNG})
    make(tmp_path / "other", {"2.png": PNG})
    (folder / "c" / "link").symlink_to(tmp_path / "other")
    (folder / "e").symlink_to(folder / "c")
    assert ImageFiles(folder).names == ["b/0.png", "c/d/1.png", "c/link/2.png", "e/d/1.png", "e/link/2.png"]
    own = os.scandir

    def refused(path):
        if str(path).endswith("c/d"):
            raise PermissionError(13, "Permission denied", str(path))
        return own(path)

    with monkeypatch.context() as patch, fails("cannot read .*a/c/d: Permission denied"):
        patch.setattr(os, "scandir", refused)
        ImageFiles(folder)
    (tmp_path / "other" / "back").symlink_to(folder / "c")
    with fails("a/c/link/back is a link to a folder that it is in"):
        ImageFiles(folder)


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


@pytest.mark.parametrize("shape", [(300, 300), (200, 130, 3), (300, 300, 1)])
def test_large_images_are_not_compressed(tmp_path, shape):
    """And read by others all the same."""
    image = pixels(0, *shape)
    data = encode_png(image)
    assert image.size < len(data) < image.size + 2000
    found = Image.open(io.BytesIO(data))
    found.verify()
    np.testing.assert_array_equal(np.asarray(Image.open(io.BytesIO(data))), image[..., 0] if image.shape[-1] == 1 else image)
