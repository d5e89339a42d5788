"""Reference statistics: what images are compared with, in one file.

Ours is an `.npz` of numbers alone: for each metric `{metric}.mean` and `{metric}.covariance`, the weights of the small
classifier if that is one of them, and `facts` as JSON in UTF-8. Two other forms are read: `.npz` files with `mu` and `sigma`, which
are FID's, and pickles of the official release, a dict of such pairs by metric. Nothing in a file is executed.
"""

import io
import json
import math
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from edm2.errors import UserError
from edm2.features import SIZES, SmallClassifier
from edm2.files import make_folder, replacing, sha256, user_path
from edm2.frechet import Moments
from edm2.pickled import Refused, read_pickle
from edm2.pickled_arrays import Array, array_names

FORMAT = 1
LARGEST = 2**32  # bytes of a file and of what is in it; FID's statistics take 2**25
WIDEST = 2**13  # features
CLASSIFIER = "frechet-small.classifier."  # how the names of its weights begin
SYMMETRY = 1e-6  # of the largest number in a covariance


@dataclass(frozen=True)
class Reference:
    """Statistics by metric. `facts`: of the dataset (its name, number of images, image_shape) and by metric of its features;
    of files in other forms none are known. `name` is for messages, `sha256` that of the file."""

    moments: dict[str, Moments]
    facts: dict[str, Any] = field(default_factory=dict)
    classifier: SmallClassifier | None = None
    name: str = "the reference"
    sha256: str = ""

    def of(self, metric: str) -> Moments:
        """UserError that names those it has if it lacks this one."""
        if metric not in self.moments:
            raise UserError(f"{self.name} has no statistics of {metric}, but of {', '.join(self.moments)}")
        return self.moments[metric]

    def checksum(self, metric: str) -> str:
        """Of what made its features: weights, or a file of the user's own; empty if it is not known."""
        known = self.facts.get("features")
        made = known.get(metric) if isinstance(known, dict) else None
        return made[:16] if isinstance(made, str) else ""

    @property
    def image_shape(self) -> tuple[int, ...] | None:
        """(C, H, W) of its images, if that is known."""
        shape = self.facts.get("image_shape")
        known = isinstance(shape, list) and len(shape) == 3 and all(type(n) is int for n in shape)
        return tuple(shape) if known else None


def write_reference(path: str | Path, reference: Reference) -> None:
    """Equal statistics give equal bytes. The file appears only when complete; UserError if it cannot be written."""
    arrays: dict[str, np.ndarray] = {}
    for metric, moments in reference.moments.items():
        arrays |= {f"{metric}.mean": moments.mean, f"{metric}.covariance": moments.covariance}
    facts = {**reference.facts, "format": FORMAT, "counts": {metric: moments.count for metric, moments in reference.moments.items()}}
    if reference.classifier is not None:
        facts["classes"] = reference.classifier.out.out_features
        arrays |= {CLASSIFIER + name: x.cpu().numpy() for name, x in reference.classifier.state_dict().items()}
    arrays["facts"] = np.frombuffer(json.dumps(facts).encode(), np.uint8)
    make_folder(Path(path).parent)
    with replacing(path) as temporary, zipfile.ZipFile(temporary, "w", zipfile.ZIP_STORED) as archive:
        for name, array in arrays.items():
            with archive.open(zipfile.ZipInfo(f"{name}.npy"), "w", force_zip64=True) as file:  # dated 1980
                np.lib.format.write_array(file, np.asanyarray(array), allow_pickle=False)


def read_reference(path: str | Path) -> Reference:
    """A file in any of the three forms. UserError for what is none, is damaged or hostile."""
    path = user_path(path)
    with _named(path):
        with open(path, "rb") as file:
            start, size = file.read(2), path.stat().st_size
        if size > LARGEST:
            raise Refused(f"of {size / 2**30:.1f} GiB")
        if start == b"PK":
            moments, facts, classifier = _ours(_arrays(path))
        elif start[:1] == b"\x80":
            moments, facts, classifier = _official(path, size), {}, None
        else:
            raise Refused("neither an .npz file nor a pickle of the official release")
        for metric, found in moments.items():
            _check(metric, found)
        return Reference(moments, facts, classifier, str(path), sha256(path))


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """One line for whatever is wrong with it."""
    try:
        yield
    except UserError:
        raise
    except OSError as e:
        raise UserError(f"cannot read {path}: {e.strerror or e}") from e
    except MemoryError as e:
        raise UserError(f"{path} is refused: there is too little memory for it") from e
    except Exception as e:  # of a damaged one the readers raise almost anything
        words = "".join(c if c.isprintable() else "?" for c in str(e))[:300] or type(e).__name__  # some are the file's own
        raise UserError(f"{path} is refused, it is no reference statistics: {words}") from e


def _arrays(path: Path) -> dict[str, np.ndarray]:
    """Of numbers, by name."""
    with zipfile.ZipFile(path) as archive:
        entries = archive.infolist()
        if len(entries) > 1000 or sum(entry.file_size for entry in entries) > LARGEST:
            raise Refused("it holds more than such a file can")
        return {entry.filename.removesuffix(".npy"): _array(archive.read(entry)) for entry in entries}


def _array(data: bytes) -> np.ndarray:
    """The header is compared with what follows before anything is allocated by it."""
    file = io.BytesIO(data)
    version = np.lib.format.read_magic(file)
    read = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}[version]
    shape, by_columns, dtype = read(file)
    if dtype.kind not in "fiu" or math.prod(shape) * dtype.itemsize != len(data) - file.tell():
        raise Refused("an array of other things than numbers, or of another length than it says")
    return np.frombuffer(data, dtype, offset=file.tell()).reshape(shape, order="F" if by_columns else "C")


def _ours(arrays: dict[str, np.ndarray]) -> tuple[dict[str, Moments], dict[str, Any], SmallClassifier | None]:
    if "facts" not in arrays:
        return {"fid": _pair(arrays)}, {}, None
    facts = json.loads(arrays.pop("facts").tobytes())
    if facts.get("format") != FORMAT:
        raise Refused(f"its format is {facts.get('format')!r}, and this version reads {FORMAT}")
    moments = {m: Moments(_floats(arrays[f"{m}.mean"]), _floats(arrays[f"{m}.covariance"]), n) for m, n in facts["counts"].items()}
    if not moments or not all(type(found.count) is int and found.count > 1 for found in moments.values()):
        raise Refused("it has no statistics, or of fewer than two images")
    return moments, facts, _classifier(facts, arrays) if "classes" in facts else None


def _classifier(facts: dict[str, Any], arrays: dict[str, np.ndarray]) -> SmallClassifier:
    shape, classes = tuple(facts["image_shape"]), facts["classes"]
    if len(shape) != 3 or not all(type(n) is int for n in (*shape, classes)) or not 0 < shape[0] <= 64 or not 0 < classes <= 2**20:
        raise Refused("a classifier of no images or classes")
    if not SIZES[0] <= min(shape[1:]) <= max(shape[1:]) <= SIZES[1]:
        raise Refused("a classifier of images of another size than it can have")
    net = SmallClassifier(shape, classes).eval()
    weights = {name.removeprefix(CLASSIFIER): _floats(x) for name, x in arrays.items() if name.startswith(CLASSIFIER)}
    if not all(np.isfinite(x).all() for x in weights.values()):
        raise Refused("a classifier whose weights are not finite")
    net.load_state_dict({name: torch.from_numpy(x.astype(np.float32)) for name, x in weights.items()})
    return net


def _official(path: Path, size: int) -> dict[str, Moments]:
    with open(path, "rb") as file:
        data = read_pickle(file, size, array_names(size))
    if not isinstance(data, dict) or not data:
        raise Refused("a pickle that holds no statistics")
    pairs = {"fid": data} if "mu" in data else data
    return {metric: _pair(pair) for metric, pair in pairs.items()}


def _pair(found: Any) -> Moments:
    if not isinstance(found, Mapping) or not {"mu", "sigma"} <= found.keys():
        raise Refused("neither facts nor pairs of mu and sigma")
    return Moments(*(_floats(found[name].array if isinstance(found[name], Array) else found[name]) for name in ("mu", "sigma")))


def _floats(x: Any) -> np.ndarray:
    if not isinstance(x, np.ndarray) or x.dtype.kind != "f":
        raise Refused("statistics that are no numbers")
    return x.astype(np.float64)


def _check(metric: str, moments: Moments) -> None:
    mean, covariance, _ = moments
    if not isinstance(metric, str) or not metric.isprintable() or not 0 < len(metric) < 200:
        raise Refused("a metric whose name is none")
    if mean.ndim != 1 or not 0 < len(mean) <= WIDEST or covariance.shape != (len(mean),) * 2:
        raise Refused(f"{metric} has a mean {list(mean.shape)} and a covariance {list(covariance.shape)}")
    if not np.isfinite(mean).all() or not np.isfinite(covariance).all():
        raise Refused(f"{metric} has numbers that are not finite")
    largest = np.abs(covariance).max()
    if np.abs(covariance - covariance.T).max() > SYMMETRY * largest or covariance.diagonal().min() < 0:
        raise Refused(f"{metric} has a covariance that is none")
