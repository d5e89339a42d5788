"""Features of FD_DINOv2: the class token of DINOv2's ViT-L/14, by transformers, an optional dependency.

Images are seen at 224×224, where the network has embeddings of 37×37 positions: they are interpolated to 16×16 once, by the formula of
its authors. transformers interpolates otherwise, and here nothing.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from edm2.errors import UserError
from edm2.extras import optional_imports
from edm2.features import in_parts, rgb
from edm2.files import sha256, user_path

if TYPE_CHECKING:
    from transformers import Dinov2Model

REPOSITORY = "facebook/dinov2-large"
FILES = "config.json", "model.safetensors"
SIDE = 224  # pixels
OFFSET = 0.1  # of the authors' scale factor, against rounding; it moves the positions that are read
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet's pixels in [0, 1]
LARGE = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "patch_size": 14}


class DinoFeatures:
    """`Features`: the class token behind the last norm, of images of any size. `checksum` is the SHA-256 of the weights.

    `folder` holds a DINOv2 without registers, as transformers writes it. UserError without transformers, and for a folder that holds
    none.
    """

    def __init__(self, folder: str | Path, device: torch.device | str = "cpu"):
        folder = Path(folder)
        model = _read(folder)
        resize_positions(model)
        self.net, self.device, self.checksum = model.to(device).eval(), device, sha256(folder / FILES[1])
        self.mean, self.std = (torch.tensor(x, device=device).reshape(3, 1, 1) for x in (MEAN, STD))

    @torch.no_grad()
    def __call__(self, images: np.ndarray) -> np.ndarray:
        """uint8 `[N, H, W, C]` → fp32 `[N, d]`."""
        return in_parts(lambda part: self.net(self.as_input(rgb(part, self.device))).last_hidden_state[:, 0], images)

    def as_input(self, x: Tensor) -> Tensor:
        """uint8 `[N, 3, H, W]` → fp32 `[N, 3, 224, 224]`, standardised."""
        x = F.interpolate(x.float() / 255, (SIDE, SIDE), mode="bicubic", antialias=True)
        return (x - self.mean) / self.std


def large_features(folder: str | Path, device: torch.device | str = "cpu") -> DinoFeatures:
    """Of ViT-L/14, 1024 numbers, from the folder `dinov2-large` of `folder`, else of the hub's cache, which it is downloaded to.

    UserError as `DinoFeatures`, for another size, and where it cannot be downloaded.
    """
    here = user_path(folder) / REPOSITORY.split("/")[1]
    features = DinoFeatures(here if here.is_dir() else _downloaded(here), device)
    config = features.net.config
    for name, value in LARGE.items():
        if getattr(config, name) != value:
            raise UserError(f"the DINOv2 in {here} is no ViT-L/14: its {name} is {getattr(config, name)}, not {value}")
    return features


def resize_positions(model: "Dinov2Model") -> None:
    """Embeddings of positions for images of 224×224, as the authors' code interpolates them; in place."""
    embeddings = model.embeddings
    positions, side = embeddings.position_embeddings.detach().float(), SIDE // model.config.patch_size
    rows = round((positions.shape[1] - 1) ** 0.5)
    if rows != side:
        grid = positions[:, 1:].unflatten(1, (rows, rows)).permute(0, 3, 1, 2)
        grid = F.interpolate(grid, scale_factor=((side + OFFSET) / rows,) * 2, mode="bicubic", antialias=False)
        positions = torch.cat([positions[:, :1], grid.permute(0, 2, 3, 1).flatten(1, 2)], dim=1)
    embeddings.position_embeddings = nn.Parameter(positions, requires_grad=False)


def _downloaded(here: Path) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(REPOSITORY, allow_patterns=FILES))
    except Exception as e:  # a downloader raises almost anything
        reason = (str(e).splitlines() or [type(e).__name__])[0][:200]
        raise UserError(
            f"fd_dinov2 needs {REPOSITORY}, which cannot be downloaded ({reason}); or put its {' and '.join(FILES)} into {here} yourself "
            "(--networks: another folder)"
        ) from e


def _kind() -> type["Dinov2Model"]:
    with optional_imports("fd_dinov2 needs transformers", "metrics"):
        from transformers import Dinov2Model
    return Dinov2Model


def _read(folder: Path) -> "Dinov2Model":
    kind = _kind()
    missing = [name for name in FILES if not (folder / name).is_file()]
    if missing:
        raise UserError(f"{folder} holds no DINOv2: it has no {missing[0]}")
    with _damage_named(folder):
        model, info = kind.from_pretrained(folder, use_safetensors=True, output_loading_info=True, local_files_only=True)
        if model.config.model_type != "dinov2" or info["missing_keys"]:
            raise ValueError("it is of another kind" if model.config.model_type != "dinov2" else f"it has no {min(info['missing_keys'])}")
        if SIDE % model.config.patch_size:
            raise ValueError(f"its patches of {model.config.patch_size} pixels do not divide {SIDE}")
    return model.float()


@contextmanager
def _damage_named(folder: Path) -> Iterator[None]:
    """One line for whatever is wrong with the files, and not what transformers tells of them besides."""
    from transformers.utils import logging as bars

    logger = logging.getLogger("transformers")
    level, shown = logger.level, bars.is_progress_bar_enabled()
    logger.setLevel(logging.CRITICAL)
    bars.disable_progress_bar()
    try:
        yield
    except Exception as e:
        raise UserError(f"the DINOv2 in {folder} cannot be read ({(str(e).splitlines() or [type(e).__name__])[0][:200]})") from e
    finally:
        logger.setLevel(level)
        if shown:
            bars.enable_progress_bar()
