"""`python -m edm2 dataset`."""

import json
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from PIL import Image

import edm2.cli.dataset as cli
from edm2 import conversion
from edm2.conversion import TRANSFORMS, center_crop_dhariwal, convert_dataset
from edm2.data import ImageDataset
from edm2.dataset_writer import DatasetWriter
from edm2.dataset_zip import write_zip
from edm2.image_files import ImageFiles
from tests.dataset_files import PNG, encode, fails, make, pixels


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
        expected = center_crop_dhariwal(source.image(name).convert("RGB"), 4, 4)
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


def interrupt_at(monkeypatch, count: int) -> None:
    add = DatasetWriter.add

    def some(writer, *args):
        if writer.count == count:
            monkeypatch.setattr(DatasetWriter, "add", add)
            raise KeyboardInterrupt
        add(writer, *args)

    monkeypatch.setattr(DatasetWriter, "add", some)


@pytest.mark.parametrize("workers", [1, 3])
def test_convert_goes_on(numbered, tmp_path, monkeypatch, workers):
    """After an interruption, to the same bytes; anew with other options."""
    monkeypatch.setattr(conversion, "CHUNK", 3)
    run("convert", numbered, tmp_path / "whole.zip")
    interrupt_at(monkeypatch, 4)
    result = CliRunner().invoke(cli.dataset, ["convert", str(numbered), f"{tmp_path}/a.zip"])
    assert result.exit_code == 1 and "Interrupted: what is done is kept, and the same command goes on." in result.output
    told, files = [], ImageFiles(numbered)
    convert_dataset(files, tmp_path / "a.zip", files.labels(), workers=workers, progress=told.append)
    assert told == [4] + [1] * 6 and (tmp_path / "a.zip").read_bytes() == (tmp_path / "whole.zip").read_bytes()


@pytest.mark.parametrize("other", ["option", "file", "file in a ZIP"])
def test_convert_begins_anew(numbered, tmp_path, monkeypatch, other):
    source = numbered
    if other != "option":
        suffix = ".zip" if other == "file in a ZIP" else ""
        files = {name: ImageFiles(numbered).read(name) for name in ImageFiles(numbered).names}
        source = make(tmp_path / f"source{suffix}", files)
    interrupt_at(monkeypatch, 4)
    with pytest.raises(KeyboardInterrupt):
        convert_dataset(ImageFiles(source), tmp_path / "a.zip", mode="L" if other == "option" else "RGB")
    if other != "option":
        make(source, files | {ImageFiles(numbered).names[2]: ImageFiles(numbered).read(ImageFiles(numbered).names[3])})
    with pytest.warns(UserWarning, match="a.zip is begun anew: what was there was made otherwise, or of other files"):
        convert_dataset(ImageFiles(source), tmp_path / "a.zip")
    assert ImageDataset(tmp_path / "a.zip", use_labels=False).image_shape[0] == 3


def test_sizes_are_compared_after_an_interruption(tmp_path):
    source = make(tmp_path / "d", {f"{i}.png": encode(pixels(i, 8, 8 + (i > 5))) for i in range(10)})
    made = iter([0] * 6 + [1])

    def interrupt(_):
        if next(made):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert_dataset(ImageFiles(source), tmp_path / "a.zip", progress=interrupt)
    with fails("6.png is 9x8 but 0.png is 8x8"):
        convert_dataset(ImageFiles(source), tmp_path / "a.zip")
    assert os.listdir(tmp_path) == ["d"]


def test_a_hint_at_labels(tmp_path):
    files = {f"{c}/{i}.png": PNG for c in "abc" for i in range(2)}
    source = make(tmp_path / "d", files)
    note = "Note: no labels; --labels-from-folders would make 3 classes of the folders a, b, c"
    assert note in run("convert", source, tmp_path / "a.zip")
    told = run("convert", source, tmp_path / "b.zip", "--labels-from-folders")
    assert "Note" not in told and "6 images, 3 classes: a, b, c" in told
    assert json.loads(ImageFiles(tmp_path / "b.zip").read("dataset.json"))["classes"] == ["a", "b", "c"]
    assert "Note" not in run("convert", make(tmp_path / "e", files, None), tmp_path / "c.zip")


@pytest.mark.parametrize(
    ("names", "classes", "labels"),
    [
        (["cat/1.png", "cat/2020/1.png", "dog/1.png"], ["cat", "dog"], [0, 0, 1]),
        (["data/train/n01/1.png", "data/train/n02/1.png"], ["n01", "n02"], [0, 1]),
        (["train/n01/1.png", "val/n01/1.png"], ["train", "val"], [0, 1]),
        (["photos/cat/1.png", "photos/cat/2.png"], ["cat"], [0, 0]),
        (["cat/1.png"], ["cat"], [0]),
    ],
)
def test_classes_of_folders(tmp_path, names, classes, labels):
    found, indices = cli.folder_classes(ImageFiles(make(tmp_path / "d", dict.fromkeys(names, PNG))))
    assert (found, indices.tolist()) == (classes, labels)


@pytest.mark.parametrize("names", [["1.png"], ["cat/1.png", "2.png"], ["all/cat/1.png", "all/2.png"]])
def test_files_in_no_folder(tmp_path, names):
    with fails(f"{names[-1]} is in no sub-folder"):
        cli.folder_classes(ImageFiles(make(tmp_path / "d", dict.fromkeys(names, PNG))))


def test_workers_are_given_the_files_once(tmp_path, monkeypatch):
    """And with each piece of work only its names: a dataset may have a million."""
    source = make(tmp_path / "d", {f"{i:03}.png": PNG for i in range(64)})
    sent = []
    submit = conversion.ProcessPoolExecutor.submit
    monkeypatch.setattr(
        conversion.ProcessPoolExecutor, "submit", lambda pool, *args: sent.append(len(pickle.dumps(args))) or submit(pool, *args)
    )
    monkeypatch.setattr(conversion, "CHUNK", 2)
    files = ImageFiles(source)
    files.names += [f"{i:0200}.png" for i in range(100)]  # which the first chunks have nothing to do with
    images = conversion.converted(files, workers=2)
    assert next(images).width == 32 and max(sent[:5]) < 300
    images.close()


def test_a_worker_that_is_killed(tmp_path, monkeypatch):
    """One line, and the same command goes on."""
    source = ImageFiles(make(tmp_path / "d.zip", {f"{i:03}.png": encode(pixels(i, 8, 8)) for i in range(200)}))
    monkeypatch.setattr(conversion, "CHUNK", 1)
    monkeypatch.setattr(conversion, "AHEAD", 1)
    told = []

    def kill(_):
        told.append(1)
        if len(told) == 20:
            os.kill(multiprocessing.active_children()[0].pid, signal.SIGKILL)

    with fails("a process that converts images was killed .*; the same command goes on"):
        convert_dataset(source, tmp_path / "a.zip", workers=2, progress=kill)
    progress = []
    convert_dataset(source, tmp_path / "a.zip", workers=2, progress=progress.append)
    assert progress[0] >= 18 and sum(progress) == 200


def test_arrays_of_pixels(tmp_path):
    for i, shape in enumerate([(3, 6, 4), (1, 6, 4)]):
        source = make(tmp_path / f"{i}", {"0.npy": encode(pixels(i, *shape), "npy")})
        run("convert", source, tmp_path / f"{i}.zip", *(["--grey"] if shape[0] == 1 else []))
        np.testing.assert_array_equal(ImageDataset(tmp_path / f"{i}.zip", use_labels=False).image(0), pixels(i, *shape))
    source = make(tmp_path / "latents", {"0.npy": encode(np.ones((8, 4, 4), np.float32), "npy")})
    with fails("0.npy holds no pixels but float32: `dataset decode` makes images of latents"):
        run("convert", source, tmp_path / "a.zip")


def test_upright(tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned clockwise
    image = pixels(0, 4, 6, 3)
    source = make(tmp_path / "d", {"0.png": encode(image, exif=exif)})
    for options, expected in ([], image), (["--upright"], np.rot90(image, -1)):
        run("convert", source, tmp_path / "a.zip", "--overwrite", *options)
        np.testing.assert_array_equal(ImageDataset(tmp_path / "a.zip", use_labels=False).image(0).transpose(1, 2, 0), expected)


def test_names_of_classes_stay(tmp_path):
    """And labels are not replaced by folders."""
    source = make(tmp_path / "d", {f"{c}/{i}.png": encode(pixels(i, 4, 4, 3)) for c in ("katze groß", "hund") for i in range(2)})
    run("convert", source, tmp_path / "a.zip", "--labels-from-folders")
    assert "2 classes: hund, katze groß" in run("convert", tmp_path / "a.zip", tmp_path / "b.zip", "--resolution=2")
    facts = [json.loads(ImageFiles(tmp_path / f"{name}.zip").read("dataset.json")) for name in "ab"]
    assert facts[0] == facts[1] and facts[0]["classes"] == ["hund", "katze groß"]
    for there in (tmp_path / "a.zip", make(source, {}, [[f"{c}/{i}.png", 0] for c in ("katze groß", "hund") for i in range(2)])):
        with fails("--labels-from-folders: .*dataset.json has labels already"):
            run("convert", there, tmp_path / "c.zip", "--labels-from-folders")
    make(source, {"dataset.json": json.dumps({"labels": None, "classes": [3]}).encode()})  # of another program's
    run("convert", source, tmp_path / "c.zip", "--labels-from-folders")
    assert ImageFiles(source).class_names() is None and ImageFiles(tmp_path / "c.zip").class_names() == facts[0]["classes"]


@pytest.mark.parametrize("workers", [1, 2])
def test_large_photographs(tmp_path, monkeypatch, workers, capfd):
    """Are no attack; what Pillow refuses is named."""
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    files = {f"{i}.png": encode(pixels(i, 10, 11, 3)) for i in range(3)}
    run("convert", make(tmp_path / "d", files), tmp_path / "a.zip", f"--workers={workers}")
    assert len(ImageDataset(tmp_path / "a.zip", use_labels=False)) == 3 and "Warning" not in capfd.readouterr().err
    make(tmp_path / "d", {"3.png": encode(pixels(0, 10, 21, 3))})
    with fails("d/3.png: Image size .210 pixels. exceeds limit of 200 pixels"):
        run("convert", tmp_path / "d", tmp_path / "b.zip", f"--workers={workers}")


def test_a_signal_to_all(tmp_path):
    """As a terminal sends it, also to the workers: one line, no traceback, and the command goes on later."""
    source = make(tmp_path / "d.zip", {f"{i:04}.png": encode(pixels(i % 7, 64, 64, 3)) for i in range(3000)})
    command = [sys.executable, "-m", "edm2", "dataset", "convert", source, tmp_path / "a.zip", "--resolution=512", "--workers=2"]
    options = {"start_new_session": True, "stderr": subprocess.PIPE, "text": True, "cwd": Path(__file__).parent.parent}
    process = subprocess.Popen(command, preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL), **options)
    part = tmp_path / ".a.zip.part"
    while not part.exists() or part.stat().st_size < 2**20:
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGINT)
    error = process.communicate()[1]
    assert process.returncode == 1
    assert error.split("\n") == ["Interrupted: what is done is kept, and the same command goes on.", "", "Aborted!", ""]
    assert 0 < json.loads((tmp_path / ".a.zip.part.json").read_text())["count"] < 3000


def test_sizes(tmp_path):
    source = photos(tmp_path / "d")
    for size, transform, expected in (
        ("6x4", "center-crop", (3, 4, 6)),
        ("6x4", "center-crop-wide", (3, 6, 6)),
        ("5", "center-crop", (3, 5, 5)),
    ):
        run("convert", source, tmp_path / "out.zip", f"--resolution={size}", f"--transform={transform}", "--overwrite")
        assert ImageDataset(tmp_path / "out.zip", use_labels=False).image_shape == expected
    with fails("center-crop-dhariwal makes square images, and not 6x4"):
        run("convert", source, tmp_path / "a.zip", "--resolution=6x4")
    with fails("center-crop-wide is for images wider than high, and not 4x6"):
        run("convert", source, tmp_path / "a.zip", "--resolution=4x6", "--transform=center-crop-wide")
    for wrong in ("0", "4x", "x4", "4x4x4", "a"):
        assert "is no size" in CliRunner().invoke(cli.dataset, ["convert", str(source), "b.zip", f"--resolution={wrong}"]).output


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_any_number_of_processes_makes_the_same(tmp_path, transform, monkeypatch):
    """In order, and a damaged one is named."""
    monkeypatch.setattr(conversion, "CHUNK", 3)
    monkeypatch.setattr(conversion, "AHEAD", 2)
    files = {f"{i:03}.png": encode(pixels(i, 8 + i % 5, 9 + i % 7, 3), "png") for i in range(100)}
    source = make(tmp_path / "d.zip", files)
    for workers in (1, 3):
        run("convert", source, tmp_path / f"{workers}.zip", "--resolution=8", f"--transform={transform}", f"--workers={workers}")
    assert (tmp_path / "1.zip").read_bytes() == (tmp_path / "3.zip").read_bytes()
    make(tmp_path / "e.zip", files | {"050.png": b"text"})
    with fails("050.png: not an image"):
        run("convert", tmp_path / "e.zip", tmp_path / "f.zip", "--resolution=8", "--workers=3")
    assert not (tmp_path / "f.zip").exists()
