"""Networks of the official release: Python pickles that carry program text, of which none is executed here.

The text is left out; what remains says all: each module's parameters, buffers and modules, and the arguments that it was made
with. The networks are under CC BY-NC-SA 4.0.
"""

import io
import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import torch
from torch import Tensor

from edm2.arguments import check_arguments
from edm2.errors import UserError
from edm2.latents import Encoder, LatentEncoder, RGBEncoder, check_channels
from edm2.names import time_and_width
from edm2.network import Precond
from edm2.pickled import DAMAGE, Function, Object, Refused, Span, read_pickle
from edm2.pickled_arrays import Array, array_names, sizes
from edm2.piecewise import OpenSnapshot
from edm2.snapshot import Snapshot

LICENCE = "the network is NVIDIA's, under CC BY-NC-SA 4.0 (https://creativecommons.org/licenses/by-nc-sa/4.0/): not for commercial use"
POSITIONAL = "img_resolution", "img_channels", "label_dim", "use_fp16", "sigma_data", "logvar_channels"  # arguments of Precond


def load_official_snapshot(path: str | Path) -> Snapshot:
    """The network of an official pickle; parameters become fp32. Nothing in the file is executed.

    UserError, with what it asks for, for a file that is more than data, that is damaged, or of another network.
    """
    found = read_official(path)
    with torch.device("meta"):
        net = Precond(**found.config)
    net.load_state_dict({name: tensor.float() for name, tensor in found.tensors.items()}, assign=True)
    return Snapshot(net.eval(), found.config, found.encoder, found.meta)


def read_official(path: str | Path) -> OpenSnapshot[Tensor]:
    """See `load_official_snapshot`; keeps the types of the tensors, mostly fp16, and makes no network."""
    with open_official(path) as found:
        tensors = {name: piece.read().view(piece.shape) for name, piece in found.tensors.items()}
        return OpenSnapshot(found.config, tensors, found.encoder, found.meta)


@contextmanager
def open_official(path: str | Path) -> Iterator[OpenSnapshot["Piece"]]:
    """`read_official` without the numbers of the tensors, which can be read while the file is open."""
    path = Path(path)
    try:
        size = path.stat().st_size
        with open(path, "rb") as file:
            found = read_network(file, size)
            if (told := time_and_width(path.name)) is not None:
                found.meta |= dict(zip(("nimg", "std"), told))
            found.meta["file"] = path.name
            yield found
    except Refused as e:
        words = "".join(c if c.isprintable() else "?" for c in str(e))[:400]  # some are the file's own
        raise UserError(f"{path} is refused: {words}") from e
    except OSError as e:
        raise UserError(f"cannot read {path}: {e.strerror or e}") from e
    except MemoryError as e:
        raise UserError(f"{path} is refused: there is too little memory for it") from e


def read_network(file: BinaryIO, size: int) -> OpenSnapshot["Piece"]:
    """From the pickle in `file`, of `size` bytes. Refused for what is none."""
    try:
        return _network(read_pickle(file, size, _allowed(size)))
    except DAMAGE as e:
        raise Refused(f"damaged: its parts do not fit together ({type(e).__name__})") from e


def _network(data: Any) -> OpenSnapshot["Piece"]:
    if not isinstance(data, dict) or not isinstance(data.get("ema"), _Persistent):
        raise Refused("it holds no network (`ema`)")
    net = data["ema"]
    config = _config(net)
    tensors = dict(_tensors(net, set()))
    _check(config, tensors)
    encoder = _encoder(data.get("encoder"))
    try:
        check_channels(encoder, config["img_channels"])
    except ValueError as e:
        raise Refused(f"damaged: {e}") from e
    meta = {"dataset_kwargs": _plain(data.get("dataset_kwargs")), "loss": _plain(_state_of(data.get("loss_fn"))), "licence": LICENCE}
    return OpenSnapshot(config, tensors, encoder, meta)


class _Persistent(Object):
    """An instance of a class whose program text the file carries, without the text."""

    def __init__(self, meta: dict[str, Any]):
        if meta["type"] != "class":
            raise Refused("it carries a module of program text")
        if not isinstance(meta["class_name"], str) or not isinstance(meta["state"], dict):
            raise Refused("damaged: an object without a class or a state")
        super().__init__(meta["class_name"])
        self.build(meta["state"])


class Storage:
    """Numbers in the file."""

    def __init__(self, source: bytes | Span, start: int, dtype: torch.dtype, count: int):
        self.source, self.start, self.dtype, self.count = source, start, dtype, count

    def read(self, first: int, count: int) -> Tensor:
        start, size = self.start + first * self.dtype.itemsize, count * self.dtype.itemsize
        data = self.source.read(start, size) if isinstance(self.source, Span) else self.source[start : start + size]
        if len(data) != size:
            raise Refused("damaged: it ends too early")
        return torch.frombuffer(bytearray(data), dtype=self.dtype) if count else torch.empty(0, dtype=self.dtype)


class Piece(NamedTuple):
    """A tensor in the file: contiguous numbers of a storage."""

    storage: Storage
    first: int
    shape: tuple[int, ...]

    @property
    def dtype(self) -> torch.dtype:
        return self.storage.dtype

    def read(self, start: int = 0, count: int | None = None) -> Tensor:
        """Its numbers from `start` on, `count` of them or all, in one row. Refused if they are not finite."""
        x = self.storage.read(self.first + start, math.prod(self.shape) - start if count is None else count)
        if not x.isfinite().all():
            raise Refused("damaged: numbers that are not finite")
        return x


class _Storages:
    """What tensors are cut from: files within the file, of at most its size in all."""

    def __init__(self, size: int):
        self.left = self.left_as_text = size

    def load(self, source: bytes | Span) -> Storage:
        """A file as `torch.save` wrote it before it wrote archives: four pickles, the count, the numbers."""
        length = source.length if isinstance(source, Span) else len(source)
        self.left -= length
        if self.left < 0:
            raise Refused("damaged: more tensors than there is room for")
        data = source.read(0, min(length, HEAD)) if isinstance(source, Span) else source
        file = io.BytesIO(data)

        def part(allowed: Mapping = MappingProxyType({}), persistent: Callable[[Any], Any] | None = None) -> Any:
            return read_pickle(file, len(data) - file.tell(), allowed, persistent)

        try:
            if part() != MAGIC or part() != VERSION or part().get("little_endian") is not True:
                raise Refused("it is of another kind")
            dtype, key, count = part({("torch", name): lambda: None for name in STORAGES}, _stored)
            if part() != [key] or int.from_bytes(file.read(8), "little") != count or length - file.tell() != count * dtype.itemsize:
                raise Refused("its numbers are not those that it promises")
        except Refused as e:
            raise Refused(f"a storage cannot be read ({e})") from e
        return Storage(source, file.tell(), dtype, count)

    def encoded(self, text: str, kind: str) -> bytes:
        """How bytes are written in protocol 2."""
        if not isinstance(text, str) or kind != "latin1":
            raise Refused("damaged: bytes that are none")
        self.left_as_text -= len(text)
        if self.left_as_text < 0:
            raise Refused("damaged: more bytes than there is room for")
        return text.encode("latin1")


HEAD = 2**16  # bytes, of which what stands before a storage's numbers takes some three hundred
MAGIC, VERSION = 0x1950A86A20F9469CFC6C, 1001
STORAGES = {"HalfStorage": torch.float16, "FloatStorage": torch.float32, "BFloat16Storage": torch.bfloat16}


def _stored(what: Any) -> tuple[torch.dtype, str, int]:
    """Type, name and count of a storage's numbers."""
    word, kind, key, where, count, view = what
    name = kind.name.removeprefix("torch.") if isinstance(kind, Function) else ""
    (count,) = sizes((count,))
    if word != "storage" or name not in STORAGES or not isinstance(key, str) or not isinstance(where, str) or view is not None:
        raise Refused("it is of another kind")
    return STORAGES[name], key, count


def _tensor(storage: Storage, offset: int, size: tuple, stride: tuple, *_: Any) -> Piece:
    """Contiguous, within its storage."""
    shape = sizes(size)
    count, (first,) = math.prod(shape), sizes((offset,))
    dense = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
    if any(a != b for a, b, n in zip(sizes(stride), dense, shape, strict=True) if n > 1):
        raise Refused("a tensor that is not contiguous")
    if first + count > storage.count:
        raise Refused("damaged: a tensor beyond its storage")
    return Piece(storage, first, shape)


def _parameter(tensor: Piece, *_: Any) -> Piece:
    if not isinstance(tensor, Piece):
        raise Refused("damaged: a parameter that is no tensor")
    return tensor


def _allowed(size: int) -> dict[tuple[str, str], Callable[..., Any]]:
    """All that such a file may name."""
    storages = _Storages(size)
    return array_names(2**16) | {
        ("torch_utils.persistence", "_reconstruct_persistent_obj"): _Persistent,
        ("dnnlib.util", "EasyDict"): lambda: {},
        ("collections", "OrderedDict"): lambda: {},
        ("torch.nn.modules.container", "ModuleDict"): lambda: Object("ModuleDict"),
        ("torch._utils", "_rebuild_parameter"): _parameter,
        ("torch._utils", "_rebuild_tensor_v2"): _tensor,
        ("torch.storage", "_load_from_bytes"): storages.load,
        ("_codecs", "encode"): storages.encoded,
    }


def _state_of(x: Any) -> dict[str, Any]:
    return x.state if isinstance(x, Object) and isinstance(x.state, dict) else {}


def _part(module: Object, name: str) -> dict[str, Any]:
    """One of a module's dictionaries."""
    part = _state_of(module).get(name)
    if not isinstance(part, dict) or not all(isinstance(key, str) for key in part):
        raise Refused(f"damaged: a {module.kind} without its {name}")
    return part


def _tensors(module: Object, seen: set[int], prefix: str = "") -> Iterator[tuple[str, Piece]]:
    """Parameters and buffers of a module and of those in it, by name."""
    if id(module) in seen:
        raise Refused("damaged: it has a module twice")
    seen.add(id(module))
    for name, tensor in (_part(module, "_parameters") | _part(module, "_buffers")).items():
        if isinstance(tensor, Piece):
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
    config = dict(zip(POSITIONAL, arguments)) | {name: x for name, x in keywords.items() if not name.startswith("_")}
    config |= {name: state[name] for name in ("img_resolution", "img_channels", "label_dim", "use_fp16", "sigma_data") if name in state}
    try:
        check_arguments(config)
    except ValueError as e:
        raise Refused(f"damaged, or a network of another kind: {e}") from e
    return {name: list(value) if isinstance(value, tuple) else value for name, value in config.items()}


def _check(config: dict[str, Any], tensors: dict[str, Piece]) -> None:
    """Refused unless these are the tensors of the network of this configuration."""
    try:
        with torch.device("meta"):
            expected = {name: x.shape for name, x in Precond(**config).state_dict().items()}
    except DAMAGE as e:
        raise Refused(f"its configuration makes no network ({(str(e).splitlines() or [type(e).__name__])[0][:200]})") from e
    found = {name: x.shape for name, x in tensors.items()}
    unlike = sorted(name for name in expected.keys() | found.keys() if expected.get(name) != found.get(name))
    if unlike:
        name = unlike[0]
        shapes = (list(where[name]) if name in where else "nothing" for where in (expected, found))
        raise Refused("{} should be {} and is {}; {} others differ too".format(name, *shapes, len(unlike) - 1))
    places = sorted((id(x.storage), x.first, math.prod(x.shape)) for x in tensors.values())
    if any(a == c and first + count > second for (a, first, count), (c, second, _) in zip(places, places[1:])):
        raise Refused("damaged: tensors that share their numbers")


def _encoder(encoder: Any) -> Encoder:
    """Refused for one that this project does not have."""
    kind, state = encoder.kind if isinstance(encoder, Object) else "none", _state_of(encoder)
    if kind == "StandardRGBEncoder":
        return RGBEncoder()
    if kind != "StabilityVAEEncoder":
        raise Refused(f"it has an encoder that this project does not know ({kind[:100]})")
    scale, bias = (x.array.astype(np.float64).reshape(-1) for x in (state.get("scale"), state.get("bias")) if isinstance(x, Array))
    name = state.get("vae_name")
    if not isinstance(name, str) or len(scale) != len(bias) or not (np.isfinite(scale) & (scale > 0) & np.isfinite(bias)).all():
        raise Refused("damaged: an encoder without its statistics")
    usual = LatentEncoder(vae=name)
    mean, std = -bias / scale, usual.final_std / scale
    if len(scale) == len(usual.raw_std) and np.allclose(mean, usual.raw_mean, 1e-5, 1e-5) and np.allclose(std, usual.raw_std, 1e-5):
        return usual
    return LatentEncoder(mean.tolist(), std.tolist(), usual.final_std, name)


def _plain(x: Any, left: list[int] | None = None, depth: int = 0) -> Any:
    """What of it JSON can hold, a network's own bookkeeping left out; of much no more than a thousand things."""
    left = [1000] if left is None else left
    left[0] -= 1
    if left[0] < 0:
        return None
    if isinstance(x, dict) and depth < 4:
        kept = itertools.islice(((k, v) for k, v in x.items() if not k.startswith("_") and not isinstance(v, Object | Piece)), 100)
        return {k[:100]: _plain(v, left, depth + 1) for k, v in kept}
    if isinstance(x, list | tuple) and depth < 4:
        return [_plain(v, left, depth + 1) for v in x[:100]]
    if isinstance(x, str):
        return x[:1000]
    return x if isinstance(x, bool | int | float) and abs(x) < 2**63 else None  # NaN is not, nor are infinities
