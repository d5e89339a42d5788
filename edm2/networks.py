"""Networks wherever they are: snapshots of this project and official pickles, as files or by their addresses."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import safetensors
import torch
from torch import Tensor

from edm2.download import fetch, is_url, place
from edm2.errors import UserError
from edm2.files import check_sha256, sha256, user_path
from edm2.network import Precond
from edm2.official import load_official_snapshot, open_official, read_official
from edm2.pickled import DAMAGE
from edm2.piecewise import OpenSnapshot, open_tensors
from edm2.snapshot import Snapshot, load_snapshot, read_file, write_file

EVALUATED = 64  # pixels of the image that a network is tried with
CACHE = os.environ.get("EDM2_NETWORKS", "~/.cache/edm2")


def open_snapshot(source: str | Path, device: str | torch.device = "cpu", cache: str | Path = CACHE) -> Snapshot:
    """The network of a safetensors snapshot or an official pickle, a file or an address of http(s), which is downloaded to
    `cache` once. UserError as `load_snapshot`, `load_official_snapshot` and `fetch`."""
    path = network_file(source, cache)
    if not is_pickle(path):
        return load_snapshot(path, device)
    snapshot = load_official_snapshot(path)
    snapshot.net.to(device)
    return snapshot


@contextmanager
def open_pieces(path: Path) -> Iterator[OpenSnapshot]:
    """Of a snapshot or an official pickle, tensors to be read while it is open. UserError as `open_snapshot`, also for what is
    then found in them."""
    with open_official(path) if is_pickle(path) else open_tensors(path) as found:
        yield found


def network_file(source: str | Path, cache: str | Path = CACHE, checksum: str | None = None) -> Path:
    """The file itself, or what is at its address. UserError if it has not the SHA-256 `checksum`, and for an address of something
    that begins neither as a network does nor as a ZIP."""
    if is_url(source):
        return fetch(source, cache, checksum, _is_known)
    path = user_path(source)
    if checksum is not None:
        check_sha256(path, checksum)
    return path


def file_at_hand(source: str | Path, cache: str | Path = CACHE) -> Path | None:
    """`network_file` without a download: None for an address whose file is not in `cache`."""
    if not is_url(source):
        return user_path(source)
    path = place(source, cache)
    return path if path.is_file() else None


def _is_known(start: bytes) -> bool:
    return start[:1] == b"\x80" or start[8:9] == b"{" or start[:2] == b"PK"


def is_pickle(path: Path) -> bool:
    """Does it begin as pickles do, and not as safetensors files, with the length of a header and its first character?"""
    try:
        if not path.is_file():  # a pipe would wait
            return False
        with open(path, "rb") as file:
            start = file.read(9)
    except OSError:
        return False
    return start[:1] == b"\x80" and start[8:] != b"{"


def converted_file(source: Path, folder: Path) -> Path:
    """Where `convert` writes."""
    return folder / (source.name.removesuffix(".pkl") + ".safetensors")


def convert(source: Path, folder: Path) -> Path:
    """An official pickle as a snapshot in `folder`, under its own name; tensors keep their values. The path of what was written.

    What was written is compared, and the network evaluated once. UserError if it is no official pickle, or does not evaluate
    to numbers.
    """
    path, checksum = converted_file(source, folder), sha256(source)
    if not str(path).isprintable():
        raise UserError(f"{str(path)!r} is no name that other programs understand; rename {source.name!r}")
    if path.exists() and not _is_made_of(path, source, checksum):
        raise UserError(f"{path} is there already, and not made of {source.name}; give another --out")
    found = read_official(source)
    found.meta["sha256"] = checksum
    with torch.device("meta"):
        net = Precond(**found.config).eval()
    net.load_state_dict(found.tensors, assign=True)  # in their own types, half of the memory
    if not _evaluates(net, source):
        raise UserError(f"{source} holds a network that does not evaluate to finite numbers")
    tensors = {name: x.float() if name in dict(net.named_buffers()) else x for name, x in found.tensors.items()}
    write_file(path, tensors, found.config, encoder=found.encoder, meta=found.meta)
    _compare(path, tensors)
    return path


def _evaluates(net: Precond, source: Path) -> bool:
    """To finite numbers, for an image of no more pixels than are needed."""
    step = net.unet.granularity
    size = min(net.img_resolution, max(step, EVALUATED // step * step))
    noise = torch.randn(1, net.img_channels, size, size, generator=torch.Generator().manual_seed(0))
    try:
        with torch.no_grad():
            return bool(net(noise, 1.0).isfinite().all())
    except DAMAGE as e:
        reason = (str(e).splitlines() or [type(e).__name__])[0]
        raise UserError(f"{source} holds a network that cannot be evaluated ({reason[:200]})") from e


def _is_made_of(path: Path, source: Path, checksum: str) -> bool:
    """Is this snapshot an earlier conversion of the pickle of this checksum?"""
    with suppress(UserError):
        return not path.samefile(source) and read_file(path, lambda _: None)[0]["meta"].get("sha256") == checksum
    return False


def _compare(path: Path, tensors: dict[str, Tensor]) -> None:
    for name, x in tensors.items():
        with safetensors.safe_open(path, framework="pt") as file:  # anew: what was read of it stays in memory until it is closed
            if not torch.equal(file.get_tensor(name), x):
                raise UserError(f"{path} was not written as it should be: is the disk damaged?")
