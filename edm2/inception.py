"""Features of FID: Inception-v3 as its TensorFlow graph of 2015 computes them, by torch-fidelity, an optional dependency.

That is the network that published FIDs are of. Its weights are read as tensors alone.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch

from edm2.download import fetch
from edm2.errors import UserError
from edm2.extras import optional_imports
from edm2.features import in_parts, rgb
from edm2.files import sha256, user_path

URL = "https://github.com/toshas/torch-fidelity/releases/download/v0.2.0/weights-inception-2015-12-05-6726825d.pth"
NAME = URL.rsplit("/", 1)[-1]
CHECKSUM = NAME.removesuffix(".pth").rsplit("-", 1)[-1]  # how the file's SHA-256 begins


class InceptionFeatures:
    """`Features` of 2048 numbers, of images of any size. `checksum` is the SHA-256 of its weights.

    They are downloaded to `folder` unless they are there. UserError without torch-fidelity, and for weights that cannot be had or are
    others.
    """

    def __init__(self, folder: str | Path, device: torch.device | str = "cpu"):
        module = _module()
        path = weights_file(folder)
        self.device, self.checksum = device, sha256(path)
        if not self.checksum.startswith(CHECKSUM):
            raise UserError(f"{path} is another file than expected: its SHA-256 begins with {self.checksum[:8]}, not {CHECKSUM}; remove it")
        with _served(module, _read(path)):
            try:
                self.net = module.FeatureExtractorInceptionV3("inception-v3-compat", ["2048"]).to(device)
            except (AttributeError, RuntimeError, TypeError) as e:
                raise UserError(f"{path} does not fit torch-fidelity's Inception-v3 ({str(e).splitlines()[0][:200]})") from e

    @torch.no_grad()
    def __call__(self, images: np.ndarray) -> np.ndarray:
        """uint8 `[N, H, W, C]` → fp32 `[N, 2048]`."""
        return in_parts(lambda part: self.net(rgb(part, self.device))[0], images)


def weights_file(folder: str | Path) -> Path:
    """In `folder`, after a download if need be. UserError that says where to put it by hand."""
    try:
        return fetch(URL, folder, known=lambda start: start[:1] == b"\x80" or start[:2] == b"PK")
    except UserError as e:
        raise UserError(f"fid needs weights: {e}; or put that file into {user_path(folder)} yourself (--networks: another folder)") from e


def _module() -> ModuleType:
    with optional_imports("fid needs torch-fidelity", "metrics"):
        return import_module("torch_fidelity.feature_extractor_inceptionv3")


def _read(path: Path) -> dict[str, Any]:
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as e:  # of a damaged file it raises almost anything
        raise UserError(f"{path} is damaged; remove it and fetch it anew") from e


@contextmanager
def _served(module: ModuleType, weights: dict[str, Any]) -> Iterator[None]:
    """What the module would download: by itself it unpickles anything."""
    own = module.load_state_dict_from_url
    module.load_state_dict_from_url = lambda *_, **__: weights
    try:
        yield
    finally:
        module.load_state_dict_from_url = own
