"""What a file or folder of this project, or of the official release, holds."""

import json
import math
from pathlib import Path
from typing import Any

from edm2.archive import is_archive, is_zip, read_archive
from edm2.checkpoint import OPTIONS
from edm2.data import ImageDataset
from edm2.errors import UserError
from edm2.files import user_path
from edm2.image_files import ImageFiles
from edm2.model_folder import GUIDE, INDEX, NET
from edm2.networks import is_pickle
from edm2.official import open_official
from edm2.references import read_reference
from edm2.snapshot import BUFFERS, read_file
from edm2.stats import read_stats

Facts = dict[str, Any]


def describe(path: str | Path) -> Facts:
    """Facts by name, the first what it is: a snapshot, an official pickle, a training state, the folder of a run or for a model hub, a
    dataset, statistics of one for metrics.

    Tensors are not loaded. UserError for anything else, and for what is damaged.
    """
    path = user_path(path)
    if not path.exists():
        raise UserError(f"{path} does not exist")
    if not path.is_file() and not path.is_dir():
        raise UserError(f"{path} is neither a file nor a folder")
    if path.is_dir():
        return _run(path) if (path / OPTIONS).exists() else _model_folder(path) if (path / INDEX).exists() else _dataset(path)
    if path.suffix == ".npz":
        return _reference(path)
    if is_pickle(path):
        return _official(path)
    if is_zip(path):
        return _state(path) if is_archive(path) else _dataset(path)
    try:
        return _snapshot(path)
    except UserError as e:
        if path.suffix == ".safetensors":
            raise
        raise UserError(f"{path} is no snapshot, pickle, training state, dataset, or statistics of one") from e


def _snapshot(path: Path) -> Facts:
    header, forms = read_file(path, lambda file: {name: _form(file.get_slice(name)) for name in file.keys()})
    sizes, types = {name: n for name, (n, _) in forms.items()}, {kind for name, (_, kind) in forms.items() if not name.endswith(BUFFERS)}
    facts = {"kind": "network snapshot", **_network(header["config"], sizes, types), "encoder": header["encoder"]}
    return facts | {name: x for name, x in header["meta"].items() if name not in facts}


def _model_folder(path: Path) -> Facts:
    """As `edm2 export` writes it."""
    try:
        strength = json.loads((path / INDEX).read_text())["guidance_scale"]
    except (OSError, LookupError, RecursionError, TypeError, ValueError) as e:
        raise UserError(f"{path / INDEX} cannot be read ({e})") from e
    guide = {"guide": GUIDE, "guidance": strength} if (path / GUIDE).exists() else {}
    return _snapshot(path / NET) | {"kind": "folder for a model hub"} | guide


def _form(tensor: Any) -> tuple[int, str]:
    """Numbers in a tensor of a file, and their type."""
    return math.prod(tensor.get_shape()), tensor.get_dtype()


def _reference(path: Path) -> Facts:
    reference = read_reference(path)
    metrics = {metric: f"{len(found.mean)} features of {found.count or 'unknown'} images" for metric, found in reference.moments.items()}
    told = {name: value for name, value in reference.facts.items() if name in ("dataset", "image_shape", "classes")}
    return {"kind": "reference statistics", "metrics": metrics, **told}


def _official(path: Path) -> Facts:
    try:
        return _official_network(path)
    except UserError as e:
        try:
            return _reference(path)
        except UserError:
            raise e from None


def _official_network(path: Path) -> Facts:
    with open_official(path) as found:
        sizes = {name: math.prod(x.shape) for name, x in found.tensors.items()}
    types = {str(x.dtype).removeprefix("torch.") for x in found.tensors.values()}
    return {
        "kind": "network pickle of the official release",
        **_network(found.config, sizes, types),
        "encoder": found.encoder.config(),
        **found.meta,
    }


def _network(config: Facts, sizes: dict[str, int], types: set[str]) -> Facts:
    parameters = sum(n for name, n in sizes.items() if not name.endswith(BUFFERS))
    return {"parameters": parameters, "stored as": ", ".join(sorted(types)), "config": config}


def _state(path: Path) -> Facts:
    try:
        state = read_archive(path)
        adam, averages = state["optimizer"]["adam"]["state"], state["optimizer"]["emas"]
        parameters = sum(math.prod(x.shape) for x in next(iter(averages.values())).values())
        steps = int(adam[0]["step"].value) if adam else 0
        facts = {"images": state["nimg"], "steps": steps, "seconds": state["elapsed"]}
        widths = sorted(averages)
        if not all(type(x) in (int, float) and abs(x) < 2**63 for x in (*facts.values(), *widths)):
            raise ValueError("images, seconds or widths are no numbers")
        return {"kind": "training state", "parameters": parameters, **facts, "averages of width": widths}
    except MemoryError:
        raise
    except Exception as e:  # the reader raises almost anything
        raise UserError(f"{path} is no training state of this project ({(str(e).splitlines() or [type(e).__name__])[0][:200]})") from e


def _run(path: Path) -> Facts:
    try:
        options = dict(json.loads((path / OPTIONS).read_text()))
    except (OSError, RecursionError, TypeError, ValueError) as e:
        raise UserError(f"{path / OPTIONS} cannot be read ({e})") from e
    stats = read_stats(path) if (path / "stats.jsonl").exists() else []
    last = {name: stats[-1].get(name) for name in ("Progress/kimg", "Loss/loss", "Timing/total_sec")} if stats else {}
    files = {name: sorted(x.name for x in path.glob(f"{pattern}*")) for name, pattern in FILES.items()}
    return {"kind": "training run", **last, **{name: _listed(names) for name, names in files.items()}, "options": options}


FILES = {"snapshots": "network-snapshot-", "training states": "training-state-"}


def _listed(names: list[str]) -> str:
    return f"{len(names)}, the last {names[-1]}" if names else "none"


def _dataset(path: Path) -> Facts:
    files = ImageFiles(path)
    dataset, classes = ImageDataset(path, use_labels=files.labels() is not None), files.class_names()
    channels, height, width = dataset.image_shape
    kind = "latents" if dataset.dtype.kind == "f" else "images"
    told = {} if dataset.latents is None else dataset.latents.to_json()
    return {
        "kind": "dataset", kind: len(dataset), "size": f"{width}x{height}, {channels} channels, {dataset.dtype}",
        "labels": dataset.label_dim or "none", **({"classes": classes} if classes else {}), "first": dataset.names[0],
        "bytes when decoded": dataset.nbytes, **told,
    }  # fmt: skip
