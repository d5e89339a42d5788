"""The state of a training run on disk, and the folder of a run: options, checkpoints, file names."""

import json
import re
import warnings
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from edm2.errors import UserError
from edm2.files import LEFTOVER, make_folder, replacing
from edm2.names import kimg_name

OPTIONS = "training_options.json"
ADDED = {"label_dropout": 0.0, "pixel_range": None, "latent_stats": None}  # options that older runs do not record
LEFTOVERS = f".*.{LEFTOVER}", ".tmp??????"  # of this project; of safetensors, which writes beside what it then replaces
RUN_FILES = "training-state-*.pt", "network-snapshot-*.safetensors", "stats.jsonl"


def save_checkpoint(outdir: Path, nimg: int, state: dict[str, Any]) -> Path:
    """Write a training state (tensors, numbers, strings and containers of them)."""
    path = outdir / f"training-state-{kimg_name(nimg)}.pt"
    with replacing(path) as temporary:
        try:
            torch.save(state, temporary)
        except RuntimeError as e:  # its form of OSError
            raise UserError(f"cannot write {path}: {str(e).splitlines()[0]}") from e
        with zipfile.ZipFile(temporary) as file:  # which holds a checksum of each tensor
            if file.testzip() is not None:
                raise UserError(f"{path} was not written as it should be: is the disk damaged?")
    return path


def drop_old_checkpoints(outdir: Path, keep: int) -> None:
    """Delete all but the newest `keep` training states (0: none is deleted)."""
    for path in _checkpoints(outdir)[keep:] if keep else []:
        path.unlink(missing_ok=True)


def remove_leftovers(outdir: Path) -> None:
    """Delete what a process that was killed had begun to write."""
    for pattern in LEFTOVERS:
        for path in outdir.glob(pattern):
            path.unlink(missing_ok=True)


def load_newest_checkpoint(outdir: Path) -> dict[str, Any] | None:
    """The newest readable training state in `outdir`, on the CPU, or None where there is none.

    A damaged one is named in a warning and skipped. UserError if there are some and none can be read: beginning anew
    would overwrite the run.
    """
    paths = _checkpoints(outdir)
    for path in paths:
        try:
            state = torch.load(path, map_location="cpu", weights_only=True)
            known = {key: state[key] for key in ("nimg", "elapsed", "net", "optimizer")}
            return known | {key: state.get(key) for key in ("licence", "encoder")}
        except MemoryError:
            raise
        except Exception as e:  # a damaged file makes the reader raise almost anything
            reason = (str(e).splitlines() or [type(e).__name__])[0]
            warnings.warn(f"{path} cannot be read ({reason}); trying the one before", stacklevel=2)
    if paths:
        raise UserError(f"none of the {len(paths)} training states in {outdir} can be read; move them away to begin anew")
    return None


def _checkpoints(outdir: Path) -> list[Path]:
    """The newest first."""
    return sorted(outdir.glob("training-state-*.pt"), key=_kimg, reverse=True)


def _kimg(path: Path) -> float:
    match = re.fullmatch(r"training-state-(\d+(\.\d+)?)\.pt", path.name)
    return float(match[1]) if match else -1.0


def check_options(outdir: Path, options: dict[str, Any], may_differ: Iterable[str]) -> None:
    """UserError if the folder holds a run with other options, with the differences, or one whose options are lost.

    Options named in `may_differ` do not change what a run computes and are not compared.
    """
    if (outdir / OPTIONS).exists():
        there = ADDED | _read_options(outdir / OPTIONS)
        there.setdefault("precision", "fp16" if there.get("fp16", True) else "fp32")
        here = _as_json(options)
        for each in (there, here):  # the default was this once
            each["pixel_range"] = None if each.get("pixel_range") == [0, 1] else each.get("pixel_range")
        differences = _differences(there, here, set(may_differ))
        if differences:
            raise UserError(f"{outdir} holds another run ({'; '.join(differences)}); choose another --outdir")
    elif outdir.is_dir():
        left = [path.name for pattern in RUN_FILES for path in outdir.glob(pattern)]
        if left:
            raise UserError(f"{outdir} holds {left[0]} of a run, but no {OPTIONS}; choose another --outdir")


def write_options(outdir: Path, options: dict[str, Any]) -> None:
    """Record a run's options in its folder."""
    with replacing(make_folder(outdir) / OPTIONS) as temporary:
        temporary.write_text(json.dumps(options, indent=4) + "\n")


def _as_json(options: dict[str, Any]) -> dict[str, Any]:
    return json.loads(json.dumps(options))


def _read_options(path: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(path.read_text()))
    except (OSError, TypeError, ValueError) as e:
        raise UserError(f"{path} cannot be read ({e}); choose another --outdir") from e


def _differences(old: dict[str, Any], new: dict[str, Any], ignored: set[str]) -> list[str]:
    keys = sorted((old.keys() | new.keys()) - ignored)
    return [f"{key}: {old.get(key)} there, {new.get(key)} here" for key in keys if old.get(key) != new.get(key)]
