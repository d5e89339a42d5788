"""What a run begins with: its dataset and the encoder of that, and the weights of another network."""

import warnings
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from edm2.config import TrainingConfig
from edm2.data import Dataset, ImageDataset
from edm2.errors import UserError
from edm2.latents import STATISTICS, Encoder, LatentEncoder, LatentFacts, RGBEncoder, differences, encoder_for
from edm2.network import Precond
from edm2.networks import open_snapshot


def open_dataset(config: TrainingConfig, dataset: Dataset | None = None) -> tuple[Dataset, Encoder, tuple[int, int, int]]:
    """The dataset of a run (that which is given), its encoder, and the shape `(C, H, W)` of what the network sees. UserError if
    unfit."""
    if dataset is None:
        dataset = ImageDataset(config.data, use_labels=config.cond, mirror=config.mirror)
        if config.mirror and dataset.dtype != np.uint8:
            raise UserError("--mirror is for pixels: mirrored latents are not those of a mirrored image")
    channels, height, width = dataset.image_shape
    if height != width:
        raise UserError(f"{config.data or 'the dataset'} holds images of {width}x{height}; training needs square ones")
    facts, stats = _told(dataset), config.latent_stats
    known = stats in (None, *STATISTICS)
    encoder, net_channels = encoder_for(channels, dataset.dtype, config.pixel_range, facts, stats if known else None)
    encoder = encoder if known else _standardised_as(encoder, stats)
    if facts is not None:
        _note_statistics(encoder, facts)
    return dataset, encoder, (net_channels, height, width)


def check_alike(held_out: Dataset, dataset: Dataset) -> None:
    """UserError if held-out images are of another kind than those to train on."""
    kinds = [(tuple(each.image_shape), str(each.dtype)) for each in (held_out, dataset)]
    if kinds[0] != kinds[1]:
        raise UserError("the held-out images are {} of {}, those to train on {} of {}".format(*kinds[0], *kinds[1]))
    told = [_told(each) for each in (held_out, dataset)]
    key = "vae_sha256" if all(facts is not None and facts.vae_sha256 for facts in told) else "vae"
    made = [facts and (getattr(facts, key), facts.pixel_range) for facts in told]
    if made[0] != made[1]:
        raise UserError("the held-out latents are of {}, those to train on of {}".format(*(m or "a VAE that is not told" for m in made)))


def start_from(net: Precond, path: str, encoder: Encoder) -> str | None:
    """Copy the weights of a snapshot into `net`; the class embedding stays as drawn where the label count differs.

    Returns the licence that the snapshot tells of. UserError if the networks differ otherwise, or what they are fed with.
    """
    snapshot = open_snapshot(path)
    source = snapshot.net.state_dict()
    target = net.state_dict()
    if net.label_dim != source.get("unet.emb_label.weight", torch.empty(0, 0)).shape[1]:
        source.pop("unet.emb_label.weight", None)
        if net.label_dim:
            source["unet.emb_label.weight"] = target["unet.emb_label.weight"]
    unlike = [k for k in sorted(source.keys() | target.keys()) if _shape(source, k) != _shape(target, k)]
    if unlike:
        raise UserError(f"--init {path} is another network: {unlike[0]} differs, and {len(unlike) - 1} more")
    others = {} if snapshot.encoder is None else differences(snapshot.encoder, encoder)
    if others:
        remedy = f"; give --latent-stats={path}" if others.keys() <= {"raw_mean", "raw_std"} else ""
        raise UserError(f"--init {path} was trained on other data than these ({'; '.join(others.values())}){remedy}")
    net.load_state_dict(source)
    return snapshot.meta.get("licence")


def _standardised_as(encoder: Encoder, path: str) -> Encoder:
    """With the statistics of the snapshot `path`. UserError for one of another VAE or range."""
    theirs = open_snapshot(path).encoder or RGBEncoder()
    others = [text for key, text in differences(theirs, encoder).items() if key not in ("raw_mean", "raw_std")]
    if others:
        raise UserError(f"--latent-stats {path}: its latents are others ({'; '.join(others)})")
    return theirs


def _note_statistics(encoder: LatentEncoder, facts: LatentFacts) -> None:
    """A warning if the latents will be far from mean 0 and standard deviation 0.5."""
    scale = encoder.final_std / np.array(encoder.raw_std)
    mean, std = (np.array(facts.raw_mean) - encoder.raw_mean) * scale, np.array(facts.raw_std) * scale
    if abs(mean).max() > 0.5 or std.min() < 0.25 or std.max() > 1:
        told = f"means {np.round(mean, 2).tolist()} and standard deviations {np.round(std, 2).tolist()}, and not 0 and 0.5"
        warnings.warn(f"the latents will have {told}; --latent-stats=data takes the dataset's own statistics", stacklevel=3)


def _told(dataset: Dataset) -> LatentFacts | None:
    return getattr(dataset, "latents", None)


def _shape(tensors: Mapping[str, Tensor], key: str) -> torch.Size | None:
    return tensors[key].shape if key in tensors else None
