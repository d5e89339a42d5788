"""`python -m edm2 metrics`: how good samples are."""

from functools import partial
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch

from edm2.backends import full_precision
from edm2.cli.dataset import refuse_existing
from edm2.cli.metrics_gen import gen
from edm2.cli.parameters import ImageCount, IntList, Names
from edm2.cli.results import Results, note_programs
from edm2.data import ImageDataset
from edm2.distributed import is_first, processes
from edm2.errors import UserError
from edm2.extras import optional_imports
from edm2.files import check_writable
from edm2.generate import generate_images
from edm2.image_files import ImageFiles
from edm2.measuring import make_reference, measure_images, metrics_of, open_measures
from edm2.metrics import check_metrics, open_labelled
from edm2.networks import CACHE, network_file, open_snapshot
from edm2.references import read_reference, write_reference

WEIGHTS = "Where the weights of fid and fd_dinov2 are kept, and what is given by address."
BATCH, WORKERS = "Images at a time.", "Processes that read ahead.  [2 for a dataset of more than a GiB decoded, else none]"


@click.group()
def metrics() -> None:
    """Measure samples. On several GPUs: `torchrun --standalone --nproc_per_node=8 -m -- edm2 metrics …`."""


metrics.add_command(gen)


@metrics.command()
@click.option("--data", metavar="ZIP|DIR", required=True, type=click.Path(path_type=Path), help="Dataset of pixels.")
@click.option("--dest", metavar="FILE.npz", required=True, type=click.Path(dir_okay=False, path_type=Path), help="Where to.")
@click.option("--metrics", "names", type=Names(), default="fid,fd_dinov2", show_default=True,
              help="Also frechet-small, or features of your own: package.module:function.")  # fmt: skip
@click.option("--networks", metavar="DIR", default=CACHE, show_default=True, help=WEIGHTS)
@click.option("--batch", metavar="INT", type=click.IntRange(min=1), default=32, show_default=True, help=BATCH)
@click.option("--workers", metavar="INT", type=click.IntRange(min=0), help=WORKERS)
@click.option("--overwrite", is_flag=True, help="Replace an existing file.")
def ref(data: Path, dest: Path, names: list[str], networks: str, batch: int, workers: int | None, overwrite: bool) -> None:
    """Statistics of all images of a dataset, for `calc` and `gen`."""
    full_precision()
    check_metrics(names)
    if dest.suffix != ".npz":
        raise UserError(f"--dest {dest}: the name of a reference ends with .npz")
    refuse_existing(dest, overwrite)
    dataset = open_labelled(data)
    if is_first():
        check_writable(dest)
    with processes() as procs:
        reference = make_reference(dataset, names, procs, networks, batch, workers)
        procs.first(lambda: write_reference(dest, reference))
        if reference is not None:
            click.echo(f"wrote {dest}: {', '.join(reference.moments)} of {len(dataset)} images")


@metrics.command()
@click.option("--images", metavar="DIR|ZIP", required=True, type=click.Path(path_type=Path), help="Images, also in sub-folders.")
@click.option("--ref", metavar="FILE|URL", required=True, help="Reference statistics: of `ref`, or of the official release.")
@click.option("--metrics", "names", type=Names(), help="Which.  [those of REF, but for features of your own]")
@click.option("--num", type=ImageCount(), default=50000, show_default=True, help="How many images.")
@click.option("--seed", "seeds", metavar="LIST", type=IntList(), default="0", show_default=True,
              help="Draws them from more than so many; several: several times.")  # fmt: skip
@click.option("--networks", metavar="DIR", default=CACHE, show_default=True, help=WEIGHTS)
@click.option("--batch", metavar="INT", type=click.IntRange(min=1), default=32, show_default=True, help=BATCH)
@click.option("--workers", metavar="INT", type=click.IntRange(min=0), help=WORKERS)
@click.option("--json", "out", metavar="FILE", type=click.Path(dir_okay=False, path_type=Path),
              help="Also keep all results there; what it holds already is not measured again.")  # fmt: skip
def calc(
    images: Path, ref: str, names: list[str] | None, num: int, seeds: list[int], networks: str, out: Path | None, **reading: Any
) -> None:  # fmt: skip
    """Metrics of images in a folder or ZIP."""
    full_precision()
    if num < 2:
        raise UserError("--num: metrics need two images at least")
    dataset = ImageDataset(images, use_labels=False)
    reference = read_reference(network_file(ref, networks))
    with processes() as procs:
        measures = open_measures(reference, names or metrics_of(reference), procs, networks)
        note_programs(reference, measures)
        results = Results(out, reference, measures, procs)
        facts = {"images": str(images), "images_identity": ImageFiles(images).identity()[:16], "num": num}
        for seed in subsets(seeds, num, len(dataset)):
            told = f"{num} images" if seed is None else f"{num} images, seed {seed}"
            measure = partial(measure_images, dataset, procs=procs, num=num, seed=seed or 0, **reading)
            results.measure(str(images), facts | {"seed": seed}, told, measure)
        results.summarise(str(images))


def subsets(seeds: list[int], num: int, there: int) -> list[int | None]:
    """The seeds, each once, that draw `num` images; None, which draws nothing, where there are no more than that."""
    if num != there:
        return list(dict.fromkeys(seeds))
    if len(seeds) > 1 and is_first():
        click.echo(f"Note: --num={num} is all images there are, and --seed draws none of them: they are measured once.")
    return [None]


@metrics.command()
@click.option("--net", required=True, type=click.Path(path_type=Path), help="Network snapshot.")
@click.option("--data", required=True, type=click.Path(path_type=Path), help="Labelled dataset it was trained on.")
@click.option("--seeds", type=IntList(), default="0-499", show_default=True, help="One sample per seed.")
@click.option("--steps", type=click.IntRange(min=1), default=18, show_default=True, help="Sampling steps.")
@click.option("--batch", type=click.IntRange(min=1), default=100, show_default=True, help="Images at a time.")
def recognise(net: Path, data: Path, seeds: list[int], steps: int, batch: int) -> None:
    """Share of samples that an independent classifier assigns to the class they were made for.

    The classifier is a support vector machine on the pixels, trained on the whole dataset: meant for small images.
    The classes are asked for in turn.
    """
    full_precision()
    snapshot = open_snapshot(net, "cuda" if torch.cuda.is_available() else "cpu")
    dataset = ImageDataset(data)
    size = (snapshot.net.img_channels, snapshot.net.img_resolution, snapshot.net.img_resolution)
    if snapshot.net.label_dim != dataset.label_dim or size != dataset.image_shape:
        raise UserError(f"{net} and {data} differ in image size or number of classes")
    classes = range(dataset.label_dim)
    samples = generate_images(snapshot.net, seeds, class_idx=classes, max_batch_size=batch, num_steps=steps)
    images = np.concatenate([batch.images for batch in samples])
    asked = np.resize(classes, len(images))
    classifier, held_out = _classifier(dataset)
    share = np.mean(classifier.predict(_pixels(images)) == asked)
    click.echo(
        f"recognised: {share:.1%} of {len(images)} samples "
        f"(the classifier itself recognises {held_out:.1%} of held-out real images)"
    )


def _classifier(dataset: ImageDataset):
    """The machine trained on all real images, and its accuracy under 5-fold cross-validation."""
    with optional_imports("this metric needs scikit-learn", "digits"):
        from sklearn.model_selection import cross_val_score
        from sklearn.svm import SVC
    everything = range(len(dataset))
    x = _pixels(dataset.images(everything).transpose(0, 2, 3, 1))
    y = dataset.labels(everything).argmax(axis=1)
    machine = SVC(gamma="scale", C=10)
    return machine.fit(x, y), cross_val_score(machine, x, y, cv=5).mean()


def _pixels(images: np.ndarray) -> np.ndarray:
    """uint8 `[N, H, W, C]` → `[N, H·W·C]` in [0, 1]."""
    return images.reshape(len(images), -1) / 255
