"""`python -m edm2 metrics`: how good samples are."""

from pathlib import Path

import click
import numpy as np
import torch

from edm2.backends import full_precision
from edm2.cli.common import IntList
from edm2.data import ImageDataset
from edm2.errors import UserError
from edm2.generate import generate_images
from edm2.networks import open_snapshot


@click.group()
def metrics() -> None:
    """Measure samples."""


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
    try:
        from sklearn.model_selection import cross_val_score
        from sklearn.svm import SVC
    except ImportError as e:
        raise UserError("this metric needs scikit-learn: pip install 'edm2-triton[digits]'") from e
    everything = range(len(dataset))
    x = _pixels(dataset.images(everything).transpose(0, 2, 3, 1))
    y = dataset.labels(everything).argmax(axis=1)
    machine = SVC(gamma="scale", C=10)
    return machine.fit(x, y), cross_val_score(machine, x, y, cv=5).mean()


def _pixels(images: np.ndarray) -> np.ndarray:
    """uint8 `[N, H, W, C]` → `[N, H·W·C]` in [0, 1]."""
    return images.reshape(len(images), -1) / 255
