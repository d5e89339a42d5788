"""`python -m edm2 dataset`: make datasets, and look at them. (Latents: `edm2.cli.latents`.)"""

import json
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import click
import numpy as np
from PIL import Image
from tqdm import tqdm

from edm2.backends import keep_freed_memory
from edm2.cli.parameters import Resolution
from edm2.conversion import TRANSFORMS, convert_dataset
from edm2.data import ImageDataset
from edm2.dataset_zip import write_zip
from edm2.errors import UserError
from edm2.extras import optional_imports
from edm2.files import make_folder
from edm2.image_files import ImageFiles
from edm2.inspection import faults
from edm2.latent_statistics import latent_statistics


@click.group()
def dataset() -> None:
    """Make datasets for training."""
    warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # of large photographs; of twice as many pixels it is an error


@dataset.command(short_help="Write scikit-learn's handwritten digits.")
@click.argument("dest", metavar="OUT.zip", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--overwrite", is_flag=True, help="Replace an existing file.")
def digits(dest: Path, overwrite: bool) -> None:
    """Write scikit-learn's 1,797 scanned digits (8x8, grey, 10 classes) as a dataset."""
    images, labels = load_digits()
    if dest.exists() and not overwrite and _holds(dest, images, labels):
        click.echo(f"{dest} already holds the digits; left as it is")
        return
    refuse_existing(dest, overwrite)
    make_folder(dest.parent)
    write_zip(dest, images, labels)
    click.echo(f"wrote {dest}: {len(images)} images")


@dataset.command(short_help="Make a dataset of any images.")
@click.argument("source", type=click.Path(path_type=Path))
@click.argument("dest", metavar="DEST.zip", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--resolution", type=Resolution(), help="Crop and scale to so many pixels.  [default: keep]")
@click.option("--transform", type=click.Choice(list(TRANSFORMS)), default="center-crop-dhariwal", show_default=True,
              help="How --resolution crops and scales.")  # fmt: skip
@click.option("--workers", type=click.IntRange(min=1), help="Processes.  [default: one for each core]")
@click.option("--grey", is_flag=True, help="Write one channel instead of RGB.")
@click.option("--upright", is_flag=True, help="Turn photographs as their EXIF data say; leave it out for ImageNet.")
@click.option("--labels-from-folders", is_flag=True, help="One class per folder, in order of name.")
@click.option("--overwrite", is_flag=True, help="Replace an existing file.")
def convert(
    source: Path, dest: Path, resolution: tuple[int, int] | None, transform: str, workers: int | None, grey: bool,
    upright: bool, labels_from_folders: bool, overwrite: bool,
) -> None:  # fmt: skip
    """Turn a folder or ZIP of images into a dataset of equally sized ones.

    center-crop-dhariwal resizes as ADM did for ImageNet: halve with a box filter while the short side is at least twice the
    target, bring it to the target bicubically, crop the centre. center-crop scales the largest area of the wanted shape WxH, and
    center-crop-wide then adds black above and below, to WxW. Labels come from SOURCE's dataset.json if it has one.

    After an interruption the same command goes on where it was.
    """
    refuse_existing(dest, overwrite)
    files = ImageFiles(source)
    classes, labels = files.class_names(), files.labels()
    if labels_from_folders:
        if labels is not None:
            raise UserError(f"--labels-from-folders: {files.where('dataset.json')} has labels already; leave the option out or remove it")
        classes, labels = folder_classes(files)
    if labels is None and not files.has_json:
        note_folders(files)
    keep_freed_memory()
    with resumable_bar(len(files.names)) as bar:
        resized = None if resolution is None else transform
        convert_dataset(files, dest, labels, "L" if grey else "RGB", resized, resolution, workers, bar.update, upright, classes)
    told = "no labels" if labels is None else "labels" if not classes else f"{len(classes)} classes: {shortened(classes)}"
    click.echo(f"wrote {dest}: {len(files.names)} images, {told}")


@dataset.command(short_help="Read every file, and name every fault.")
@click.argument("path", metavar="ZIP|DIR", type=click.Path(path_type=Path))
@click.option("--any-size", is_flag=True, help="Let images differ in size, and be grey or in colour: before `convert`.")
def check(path: Path, any_size: bool) -> None:
    """Read every file of a dataset, and name every fault: files that cannot be read, other sizes and types, labels that do not
    fit or belong to no file, latents that are none. The exit code is 1 if there is one."""
    count = len(ImageFiles(path).names)
    found = 0
    with files_bar(count) as bar:
        for line in faults(path, bar.update, any_size):
            tqdm.write(" ".join(line.split()))
            found += 1
    if found:
        raise UserError(f"{path}: {found} fault{'s' * (found > 1)} in {count} files")
    click.echo(f"{path}: {count} files, no fault")


@dataset.command(short_help="Tell the mean and standard deviation of VAE latents.")
@click.argument("path", metavar="ZIP|DIR", type=click.Path(path_type=Path))
def stats(path: Path) -> None:
    """Mean and standard deviation of a dataset of VAE latents by channel, as `edm2.latents.LatentEncoder` takes them for another
    VAE than the official one."""
    with files_bar(len(ImageFiles(path).names)) as bar:
        found = latent_statistics(path, bar.update)
    click.echo(json.dumps(found._asdict()))


def files_bar(total: int, shown: bool = True) -> tqdm:
    """On a terminal."""
    return tqdm(total=total, unit="img", disable=None if shown else True)


@contextmanager
def resumable_bar(total: int, shown: bool = True) -> Iterator[tqdm]:
    """Of what an interruption leaves to be gone on with."""
    with files_bar(total, shown) as bar:
        try:
            yield bar
        except KeyboardInterrupt:
            if shown:
                tqdm.write("Interrupted: what is done is kept, and the same command goes on.", file=sys.stderr)
            raise


def load_digits() -> tuple[np.ndarray, list[int]]:
    """Images uint8 [1797,8,8] and their labels 0..9, in scikit-learn's order; UserError without scikit-learn."""
    with optional_imports("the digits need scikit-learn", "digits"):
        from sklearn.datasets import load_digits
    data = load_digits()
    return np.round(data.images * (255 / 16)).astype(np.uint8), data.target.tolist()  # stored as 0..16


def folder_classes(files: ImageFiles) -> tuple[list[str], np.ndarray]:
    """Names of classes and indices int64 [n]: the folders at the top, below what all files have in common. UserError for a file in
    none."""
    folders = [name.split("/")[:-1] for name in files.names]
    common = len(os.path.commonprefix(folders))
    common -= all(len(folder) == common for folder in folders)  # all in one
    loose = next((name for name, folder in zip(files.names, folders) if len(folder) == max(common, 0)), None)
    if loose is not None:
        raise UserError(f"--labels-from-folders: {files.where(loose)} is in no sub-folder; move or remove it")
    classes, labels = np.unique([folder[common] for folder in folders], return_inverse=True)
    return classes.tolist(), labels


def note_folders(files: ImageFiles) -> None:
    """Where there are no labels, but folders that could be."""
    with suppress(UserError):
        classes, _ = folder_classes(files)
        told = f"{len(classes)} classes of the folders {shortened(classes)}"
        click.echo(f"Note: no labels; --labels-from-folders would make {told}", err=True)


def shortened(names: list[str]) -> str:
    """For messages."""
    return ", ".join(names if len(names) < 6 else [*names[:3], "...", names[-1]])


def refuse_existing(dest: Path, overwrite: bool) -> None:
    if dest.exists() and not overwrite:
        raise UserError(f"{dest} exists; choose another name or give --overwrite")


def _holds(path: Path, images: np.ndarray, labels: list[int]) -> bool:
    try:
        old = ImageDataset(path)
        if old.nbytes != images.nbytes:
            return False
        old.load()
    except UserError:
        return False
    everything = range(len(old))
    same_images = np.array_equal(old.images(everything), images[:, None])
    return same_images and np.array_equal(old.labels(everything), np.eye(10, dtype=np.float32)[labels])
