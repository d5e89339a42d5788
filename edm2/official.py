"""Networks of the official release: Python pickles that carry program text, of which none is executed here.

The text is left out; what remains says all: each module's parameters, buffers and modules, and the arguments that it was made
with. The networks are under CC BY-NC-SA 4.0.
"""

import io
import math
import re
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor

from edm2.errors import UserError
from edm2.latents import Encoder, LatentEncoder, RGBEncoder
from edm2.network import Precond
from edm2.pickled import DAMAGE, Object, Refused, Span, read_pickle
from edm2.snapshot import Snapshot

LICENCE = "the network is NVIDIA's, under CC BY-NC-SA 4.0 (https://creativecommons.org/licenses/by-nc-sa/4.0/): not for commercial use"
FILE_NAME = re.compile(r"(?P<kimg>\d{7})-(?P<std>\d\.\d{3})\.pkl$")
POSITIONAL = "img_resolution", "img_channels", "label_dim", "use_fp16", "sigma_data", "logvar_channels"  # arguments of Precond
LARGEST = {"img_resolution": 2**13, "img_channels": 2**10, "label_dim": 2**20, "model_channels": 2**14, "num_blocks": 2**5}
LEVELS = 8  # of resolutions


@dataclass
class OfficialSnapshot:
    """What a pickle holds, tensors as they are there, mostly fp16, by the names of this project's network, which are the same."""

    config: dict[str, Any]
    tensors: dict[str, Tensor]
    encoder: Encoder
    meta: dict[str, Any]


def load_official_snapshot(path: str | Path) -> Snapshot:
    """The network of an official pickle; parameters become fp32. Nothing in the file is executed.

    UserError, with what it asks for, for a file that is more than data, that is damaged, or of another network.
    """
    found = read_official(path)
    with torch.device("meta"):
        net = Precond(**found.config)
    net.load_state_dict({name: tensor.float() for name, tensor in found.tensors.items()}, assign=True)
    return Snapshot(net.eval(), found.config, found.encoder, found.meta)


def read_official(path: str | Path) -> OfficialSnapshot:
    """See `load_official_snapshot`; keeps the types of the tensors, and makes no network."""
    path = Path(path)
    try:
        size = path.stat().st_size
        with open(path, "rb") as file:
            found = read_network(file, size)
    except Refused as e:
        words = "".join(c if c.isprintable() else "?" for c in str(e))[:400]  # some are the file's own
        raise UserError(f"{path} is refused: {words}") from e
    except OSError as e:
        raise UserError(f"cannot read {path}: {e.strerror or e}") from e
    if match := FILE_NAME.search(path.name):
        found.meta |= {"nimg": int(match["kimg"]) * 1000, "std": float(match["std"])}
    found.meta["file"] = path.name
    return found


def read_network(file: BinaryIO, size: int) -> OfficialSnapshot:
    """From the pickle in `file`, of `size` bytes. Refused for what is none."""
    try:
        return _network(read_pickle(file, size, _allowed(size)))
    except DAMAGE as e:
        raise Refused(f"damaged: its parts do not fit together ({type(e).__name__})") from e


def _network(data: Any) -> OfficialSnapshot:
    if not isinstance(data, dict) or not isinstance(data.get("ema"), _Persistent):
        raise Refused("it holds no network (`ema`)")
    net = data["ema"]
    config = _config(net)
    tensors = dict(_tensors(net, set()))
    _check(config, tensors)
    meta = {"dataset_kwargs": _plain(data.get("dataset_kwargs")), "loss": _plain(_state_of(data.get("loss_fn"))), "licence": LICENCE}
    return OfficialSnapshot(config, tensors, _encoder(data.get("encoder")), meta)


class _Persistent(Object):
    """An instance of a class whose program text the file carries, without the text."""

    def __init__(self, meta: dict[str, Any]):
        if meta["type"] != "class":
            raise Refused("it carries a module of program text")
        if not isinstance(meta["class_name"], str) or not isinstance(meta["state"], dict):
            raise Refused("damaged: an object without a class or a state")
        super().__init__(meta["class_name"])
        self.build(meta["state"])


class _DType(Object):
    """Of numbers, little-endian."""

    def __init__(self, name: str, *_: Any):
        super().__init__("numpy.dtype")
        if name not in ("b1", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8"):
            raise Refused("an array of other things than numbers")
        self.dtype = np.dtype(name)

    def build(self, state: Any) -> None:
        super().build(state)
        if state[1] not in ("<", "|", "="):
            raise Refused("an array that is not little-endian")


class _Array(Object):
    def __init__(self, *_: Any):
        super().__init__("numpy.ndarray")
        self.array = np.empty(0)

    def build(self, state: Any) -> None:
        super().build(state)
        _, shape, dtype, by_columns, data = state
        if by_columns or not isinstance(dtype, _DType):
            raise Refused("an array in a form that this reader does not know")
        self.array = np.frombuffer(_bytes(data), dtype.dtype).reshape(_sizes(shape))


def _bytes(x: bytes | Span) -> bytes:
    if not isinstance(x, bytes | Span):
        raise Refused("damaged: bytes that are none")
    return x.read() if isinstance(x, Span) else x


def _encoded(text: str, kind: str) -> bytes:
    """How bytes are written in protocol 2."""
    if not isinstance(text, str) or kind != "latin1":
        raise Refused("damaged: bytes that are none")
    return text.encode("latin1")


class _Storages:
    """What tensors are cut from: files within the file, of at most its size in all."""

    def __init__(self, size: int):
        self.left = size

    def load(self, source: bytes | Span) -> Tensor:
        length = source.length if isinstance(source, Span) else len(source)
        if length > self.left:
            raise Refused("damaged: more tensors than there is room for")
        self.left -= length
        data = _bytes(source)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of a form of storage that is going away
                storage = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
                flat = torch.empty(0, dtype=storage.dtype).set_(storage.untyped())
        except Exception as e:  # a damaged one makes the reader raise almost anything
            raise Refused(f"a storage cannot be read ({(str(e).splitlines() or [type(e).__name__])[0][:200]})") from e
        if flat.nbytes > len(data):
            raise Refused("damaged: a storage larger than its bytes")
        return flat


def _tensor(storage: Tensor, offset: int, size: tuple, stride: tuple, *_: Any) -> Tensor:
    """Contiguous, within its storage."""
    shape = _sizes(size)
    count, (first,) = math.prod(shape), _sizes((offset,))
    dense = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
    if any(a != b for a, b, n in zip(_sizes(stride), dense, shape, strict=True) if n > 1):
        raise Refused("a tensor that is not contiguous")
    if first + count > len(storage):
        raise Refused("damaged: a tensor beyond its storage")
    return storage[first : first + count].view(shape)


def _sizes(sizes: Any) -> tuple[int, ...]:
    if not isinstance(sizes, tuple) or len(sizes) > 16 or not all(type(n) is int and 0 <= n < 2**48 for n in sizes):
        raise Refused("damaged: sizes that are none")
    return sizes


def _parameter(tensor: Tensor, *_: Any) -> Tensor:
    if not isinstance(tensor, Tensor):
        raise Refused("damaged: a parameter that is no tensor")
    return tensor


def _allowed(size: int) -> dict[tuple[str, str], Callable[..., Any]]:
    """All that such a file may name."""
    storages = _Storages(size)
    names: dict[tuple[str, str], Callable[..., Any]] = {
        ("torch_utils.persistence", "_reconstruct_persistent_obj"): _Persistent,
        ("dnnlib.util", "EasyDict"): lambda: {},
        ("collections", "OrderedDict"): lambda: {},
        ("torch.nn.modules.container", "ModuleDict"): lambda: Object("ModuleDict"),
        ("torch._utils", "_rebuild_parameter"): _parameter,
        ("torch._utils", "_rebuild_tensor_v2"): _tensor,
        ("torch.storage", "_load_from_bytes"): storages.load,
        ("_codecs", "encode"): _encoded,
        ("numpy", "dtype"): _DType,
        ("numpy", "ndarray"): _Array,
    }
    for module in ("numpy.core.multiarray", "numpy._core.multiarray"):
        names[module, "_reconstruct"] = _Array
    return names


def _state_of(x: Any) -> dict[str, Any]:
    return x.state if isinstance(x, Object) and isinstance(x.state, dict) else {}


def _part(module: Object, name: str) -> dict[str, Any]:
    """One of a module's dictionaries."""
    part = _state_of(module).get(name)
    if not isinstance(part, dict) or not all(isinstance(key, str) for key in part):
        raise Refused(f"damaged: a {module.kind} without its {name}")
    return part


def _tensors(module: Object, seen: set[int], prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    """Parameters and buffers of a module and of those in it, by name."""
    if id(module) in seen:
        raise Refused("damaged: it has a module twice")
    seen.add(id(module))
    for name, tensor in (_part(module, "_parameters") | _part(module, "_buffers")).items():
        if isinstance(tensor, Tensor):
            yield prefix + name, tensor
    for name, child in _part(module, "_modules").items():
        if child is not None:
            if not isinstance(child, Object):
                raise Refused("damaged: a module that is none")
            yield from _tensors(child, seen, f"{prefix}{name}.")


def _config(net: _Persistent) -> dict[str, Any]:
    """Arguments of `Precond`: those that the network was made with, those that it has kept."""
    state = net.state
    arguments, keywords = state.get("_init_args", ()), state.get("_init_kwargs", {})
    if not isinstance(arguments, tuple) or len(arguments) > len(POSITIONAL) or not isinstance(keywords, dict):
        raise Refused("damaged: a network without the arguments that it was made with")
    config = dict(zip(POSITIONAL, arguments)) | _plain(keywords)
    config |= {name: state[name] for name in ("img_resolution", "img_channels", "label_dim", "use_fp16", "sigma_data") if name in state}
    for name, most in LARGEST.items():
        value = config.get(name, 0)
        if type(value) is not int or not 0 <= value <= most:
            raise Refused(f"damaged: {name} is no integer up to {most}")
    if any(isinstance(value, list) and len(value) > LEVELS for value in config.values()) or "dtype" in config:
        raise Refused("a network of another kind than those of the official release")
    return config


def _check(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """Refused unless these are the tensors of the network of this configuration."""
    try:
        with torch.device("meta"):
            expected = {name: x.shape for name, x in Precond(**config).state_dict().items()}
    except DAMAGE as e:
        raise Refused(f"its configuration makes no network ({(str(e).splitlines() or [type(e).__name__])[0][:200]})") from e
    found = {name: x.shape for name, x in tensors.items() if x.is_floating_point()}
    unlike = sorted(name for name in expected.keys() | found.keys() if expected.get(name) != found.get(name))
    if unlike:
        name = unlike[0]
        sizes = (list(where[name]) if name in where else "nothing" for where in (expected, found))
        raise Refused("{} should be {} and is {}; {} others differ too".format(name, *sizes, len(unlike) - 1))


def _encoder(encoder: Any) -> Encoder:
    """Refused for one that this project does not have."""
    kind, state = encoder.kind if isinstance(encoder, Object) else "none", _state_of(encoder)
    if kind == "StandardRGBEncoder":
        return RGBEncoder()
    if kind != "StabilityVAEEncoder":
        raise Refused(f"it has an encoder that this project does not know ({kind[:100]})")
    scale, bias = (x.array.astype(np.float64).reshape(-1) for x in (state.get("scale"), state.get("bias")) if isinstance(x, _Array))
    name = state.get("vae_name")
    if not isinstance(name, str) or len(scale) != len(bias) or not (np.isfinite(scale) & (scale > 0) & np.isfinite(bias)).all():
        raise Refused("damaged: an encoder without its statistics")
    usual = LatentEncoder(vae=name)
    mean, std = -bias / scale, usual.final_std / scale
    if len(scale) == len(usual.raw_std) and np.allclose(mean, usual.raw_mean, 1e-5, 1e-5) and np.allclose(std, usual.raw_std, 1e-5):
        return usual
    return LatentEncoder(mean.tolist(), std.tolist(), usual.final_std, name)


def _plain(x: Any, depth: int = 0) -> Any:
    """What of it JSON can hold, a network's own bookkeeping left out."""
    if isinstance(x, dict) and depth < 4:
        return {str(k): _plain(v, depth + 1) for k, v in x.items() if not str(k).startswith("_") and not isinstance(v, Object | Tensor)}
    if isinstance(x, list | tuple) and depth < 4 and len(x) <= 64:
        return [_plain(v, depth + 1) for v in x]
    if isinstance(x, str):
        return x[:1000]
    return x if x is None or isinstance(x, bool) or isinstance(x, int) and abs(x) < 2**63 or isinstance(x, float) else None
