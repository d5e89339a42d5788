"""Networks on disk: one safetensors file that holds the tensors and, as JSON in its header, all else.

The header's metadata has four entries: `edm2` (version of this layout), `config` (arguments of `Precond`), `encoder`
(see `edm2.latents`) and `meta` (facts about the training run). Reading a file executes nothing in it.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import safetensors
import torch
from safetensors.torch import save_file
from torch import Tensor

from edm2.arguments import check_arguments
from edm2.errors import UserError
from edm2.files import replacing
from edm2.latents import Encoder, check_channels, encoder_from_config
from edm2.network import Precond

FORMAT = "1"
BUFFERS = "freqs", "phases"  # how the names of tensors end that are no parameters: Fourier features, which a run draws
T = TypeVar("T")


@dataclass
class Snapshot:
    """A network read from disk."""

    net: Precond
    config: dict[str, Any]
    encoder: Encoder | None
    meta: dict[str, Any]


def save_snapshot(
    path: str | Path,
    net: Precond,
    *,
    encoder: Encoder | None = None,
    meta: dict[str, Any] | None = None,
    dtype: torch.dtype = torch.float16,
) -> None:
    """Write `net` to `path`, its parameters as `dtype` and its Fourier buffers as fp32.

    `meta` is any JSON-serialisable dict. The file appears only when complete. UserError if it cannot be written.
    """
    write_tensors(path, dict(net.named_parameters()), net, encoder=encoder, meta=meta, dtype=dtype)


def write_tensors(
    path: str | Path,
    parameters: Mapping[str, Tensor],
    net: Precond,
    *,
    encoder: Encoder | None,
    meta: dict[str, Any] | None,
    dtype: torch.dtype,
) -> None:
    """`save_snapshot` with other parameters (an average, say) in the place of the network's own."""
    if net.folded is not None:
        raise ValueError("a folded network has no raw weights to save")
    tensors = {name: _stored(tensor, dtype) for name, tensor in parameters.items()}
    tensors |= {name: _stored(tensor, torch.float32) for name, tensor in net.named_buffers()}
    write_file(path, tensors, net.config, encoder=encoder, meta=meta)


def write_file(
    path: str | Path, tensors: dict[str, Tensor], config: dict[str, Any], *, encoder: Encoder | None, meta: dict[str, Any] | None
) -> None:
    """`save_snapshot` of tensors on the CPU as they are, for the network of `config`."""
    metadata = metadata_of(config, encoder, meta)
    with replacing(path) as temporary:
        try:
            save_file(tensors, temporary, metadata)
        except safetensors.SafetensorError as e:  # its form of OSError
            raise UserError(f"cannot write {path}: {e}") from e


def metadata_of(config: dict[str, Any], encoder: Encoder | None, meta: dict[str, Any] | None) -> dict[str, str]:
    """What a snapshot's header holds besides the tensors' places."""
    header = {"config": config, "encoder": encoder and encoder.config(), "meta": meta or {}}
    return {"edm2": FORMAT, **{key: json.dumps(value) for key, value in header.items()}}


def load_snapshot(path: str | Path, device: str | torch.device = "cpu") -> Snapshot:
    """Read a network; parameters become fp32. UserError if the file is missing, damaged or of another kind."""
    header, tensors = read_file(path, lambda file: {name: file.get_tensor(name) for name in file.keys()}, device)
    try:
        check_arguments(header["config"])
        with torch.device("meta"):
            net = Precond(**header["config"])
        net.load_state_dict({name: tensor.float() for name, tensor in tensors.items()}, assign=True)
        encoder = header["encoder"] and encoder_from_config(header["encoder"])
        if encoder:
            check_channels(encoder, net.img_channels)
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as e:
        reason = (str(e).splitlines() or [type(e).__name__])[0]
        raise UserError(f"{path} does not fit its own configuration ({reason}); it was not written by this project") from e
    return Snapshot(net.eval(), header["config"], encoder or None, header["meta"])


def _stored(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.detach().to("cpu", dtype).contiguous()


def read_file(path: str | Path, take: Callable[[Any], T], device: str | torch.device = "cpu") -> tuple[dict[str, Any], T]:
    """A snapshot's header, and what `take` makes of the opened file (a `safetensors.safe_open`). UserError if it is none."""
    if not Path(path).is_file():
        raise UserError(f"{path} is no file" if Path(path).exists() else f"snapshot {path} does not exist")
    try:
        with safetensors.safe_open(path, framework="pt", device=str(device)) as file:
            metadata = file.metadata() or {}
            taken = take(file)
    except (safetensors.SafetensorError, OSError, RuntimeError) as e:  # the latter where too many files are open
        raise UserError(f"{path} is truncated or no safetensors file ({e})") from e
    if metadata.get("edm2") != FORMAT:
        raise UserError(f"{path} is a safetensors file, but not a snapshot of this project (layout {FORMAT})")
    try:
        header = {key: json.loads(metadata[key], parse_constant=lambda _: None) for key in ("config", "encoder", "meta")}
        if not isinstance(header["config"], dict) or not isinstance(header["meta"], dict):
            raise ValueError("its parts are none")
        return header, taken
    except (KeyError, RecursionError, ValueError) as e:
        raise UserError(f"{path} has a damaged header ({e}); it was not written by this project") from e
