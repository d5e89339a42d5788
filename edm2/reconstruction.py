"""Averages of any width from a run's snapshots, file by file: each is read once, and only pieces of them are in memory."""

import shutil
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from tqdm import tqdm

from edm2.arguments import check_arguments
from edm2.errors import UserError
from edm2.files import make_folder, replacing
from edm2.names import kimg_name, snapshot_name
from edm2.network import Precond
from edm2.networks import open_pieces
from edm2.phema import MAX_STD, Fit, fit
from edm2.pickled import DAMAGE, Refused
from edm2.piecewise import OpenSnapshot, Writer
from edm2.snapshot import BUFFERS, metadata_of

SPARE = 100  # files that are open besides
AT_ONCE = 2**26  # numbers of all inputs and outputs
SUFFIXES = ".safetensors", ".pkl"


class Source(NamedTuple):
    """A stored average in a file: images seen and σ_rel; its network."""

    path: Path
    nimg: int
    std: float
    config: dict[str, Any]
    shapes: dict[str, tuple[int, ...]]
    features: bytes  # the Fourier features, which each run draws for itself, in half precision


@dataclass(frozen=True)
class Plan:
    """Which averages are made of which. `overrides` give the tensors whose names match a pattern another σ_rel; the last counts."""

    sources: list[Source]
    nimg: int
    stds: list[float]
    overrides: list[tuple[str, float]]

    def fit(self, stds: Sequence[float] | None = None) -> Fit:
        """Of the wanted averages, or of others of the same time. ValueError where a width is impossible."""
        times, widths = zip(*((source.nimg, source.std) for source in self.sources))
        return fit(times, widths, self.nimg, self.stds if stds is None else stds)

    def stds_of(self, name: str) -> tuple[float, ...]:
        """σ_rel of the tensor of this name in each of the wanted averages."""
        found = [std for pattern, std in self.overrides if fnmatchcase(name, pattern)]
        return (found[-1],) * len(self.stds) if found else tuple(self.stds)


def snapshot_files(folder: Path, prefix: str) -> list[Path]:
    """Snapshots and pickles in a folder whose names begin so. UserError if there are none."""
    if not folder.is_dir():
        raise UserError(f"{folder} is no folder")
    found = sorted(path for path in folder.iterdir() if path.name.startswith(prefix) and path.suffix in SUFFIXES)
    if not found:
        raise UserError(f"{folder} holds no {prefix}*{' or '.join(SUFFIXES)}; choose others with --inprefix")
    return found


def make_plan(
    paths: Sequence[Path],
    stds: Sequence[float],
    kimg: float | None = None,
    in_stds: Sequence[float] | None = None,
    overrides: Sequence[tuple[str, float]] = (),
) -> Plan:
    """Of snapshots (or pickles) of one network: those of the widths `in_stds` (default: all) up to the time `kimg`, thousands of
    images as in names (57: 57,344 images; default: the last), at which one must lie. Tensors are not read.
    UserError that names the file for what does not fit together.
    """
    sources = [source for source in map(_source, paths) if in_stds is None or any(abs(source.std - std) < 5e-4 for std in in_stds)]
    if not sources:
        raise UserError(f"none of the {len(paths)} snapshots is an average of σ_rel {', '.join(f'{std:g}' for std in in_stds or [])}")
    for std in in_stds or []:
        if not any(abs(source.std - std) < 5e-4 for source in sources):
            raise UserError(f"none of the snapshots is an average of σ_rel {std:g}")
    times = {float(kimg_name(source.nimg)): source.nimg for source in sorted(sources, key=lambda source: source.nimg)}
    if kimg is not None and kimg not in times:
        nearest = min(times, key=lambda time: abs(time - kimg))
        raise UserError(f"there is no snapshot at {kimg:g} thousand images; the nearest is at {nearest:g}")
    nimg = max(times.values()) if kimg is None else times[kimg]
    used = sorted((source for source in sources if source.nimg <= nimg), key=lambda source: (source.nimg, source.std))
    for a, b in zip(used, used[1:]):
        if (a.nimg, a.std) == (b.nimg, b.std):
            raise UserError(f"{a.path} and {b.path} are averages of one width at one time; keep one of them")
    for source in used:
        if (other := _difference(used[-1], source)) is not None:
            raise UserError(f"{source.path} is of another network than {used[-1].path}: {other}")
    plan = Plan(used, nimg, list(stds), list(overrides))
    check_widths([*plan.stds, *(std for _, std in plan.overrides)])
    for pattern, _ in plan.overrides:
        names, _ = _names(used[-1])
        if not any(fnmatchcase(name, pattern) for name in names):
            raise UserError(f"no parameter is called {pattern}; some are called {', '.join(names[:3])}")
    return plan


def check_widths(stds: Sequence[float]) -> None:
    """UserError for one that is impossible."""
    for std in stds:
        if not 0 < std < MAX_STD:
            raise UserError(f"σ_rel {std:g} is impossible: it lies between 0 and {MAX_STD:.6f}")


def missing(plan: Plan) -> list[str]:
    """Names of snapshots that other times have."""
    there, stds = {(source.nimg, source.std) for source in plan.sources}, sorted({source.std for source in plan.sources})
    return [snapshot_name(nimg, std) for nimg in sorted({nimg for nimg, _ in there}) for std in stds if (nimg, std) not in there]


def _source(path: Path) -> Source:
    with open_pieces(path) as found:
        nimg, std = found.meta.get("nimg"), found.meta.get("std")
        if type(nimg) is not int or nimg <= 0 or type(std) is not float or not 0 < std < MAX_STD:
            raise UserError(f"{path} does not say of how many images (nimg) and which width (std) it is the average")
        shapes = {name: piece.shape for name, piece in found.tensors.items()}
        features = [found.tensors[name].read().half() for name in sorted(shapes) if name.endswith(BUFFERS)]
        return Source(path, nimg, std, found.config, shapes, b"".join(x.numpy().tobytes() for x in features))


def _difference(a: Source, b: Source) -> str | None:
    for name in a.config.keys() | b.config.keys():
        if a.config.get(name) != b.config.get(name):
            return f"{name} is {b.config.get(name)} and not {a.config.get(name)}"
    if a.features != b.features:
        return "it belongs to another run, as its Fourier features tell"
    names = [name for name in a.shapes.keys() | b.shapes.keys() if a.shapes.get(name) != b.shapes.get(name)]
    return f"{min(names)} is {b.shapes.get(min(names))} and not {a.shapes.get(min(names))}" if names else None


def reconstruct_files(plan: Plan, outs: Sequence[Path], dtype: torch.dtype = torch.float16) -> None:
    """Write the averages of `plan` to `outs`, in its order: parameters as `dtype`, sums in fp32; buffers, encoder and facts are
    those of the last snapshot. The files appear together, when all are complete. UserError that names the file for damaged
    inputs and where `outs` cannot be written."""
    for folder in {path.parent for path in outs}:
        make_folder(folder)
    _allow_files(len(plan.sources) + len(outs) + SPARE)
    with ExitStack() as stack:
        inputs = [stack.enter_context(open_pieces(source.path)) for source in plan.sources]
        last = inputs[-1]
        parameters, buffers = _names(plan.sources[-1])
        forms = {name: (last.tensors[name].shape, torch.float32) for name in buffers}  # wide types first: they stay aligned
        forms |= {name: (last.tensors[name].shape, dtype) for name in parameters}
        _check_room(outs, forms)
        writers = []
        for out, std in zip(outs, plan.stds):
            temporary = stack.enter_context(replacing(out))
            metadata = metadata_of(last.config, last.encoder, last.meta | _facts(plan, std))
            writers.append(stack.enter_context(closing(Writer(temporary, forms, metadata))))

        def write(rows: Tensor) -> None:
            for writer, row in zip(writers, rows):
                writer.write(row)

        for name in buffers:
            write(last.tensors[name].read().float().expand(len(writers), -1))
        _combine(plan, inputs, parameters, dtype, write)
        for writer in writers:
            writer.finish()


def _names(source: Source) -> tuple[list[str], list[str]]:
    """Parameters and buffers, in the order of the file. UserError unless they are those of the network of its configuration."""
    try:
        check_arguments(source.config)
        with torch.device("meta"):
            net = Precond(**source.config)
    except DAMAGE as e:
        raise UserError(f"{source.path} has a configuration that makes no network ({e})") from e
    expected = {name: tuple(x.shape) for name, x in net.state_dict().items()}
    if expected != source.shapes:
        raise UserError(f"{source.path} does not fit its own configuration")
    parameters = {name for name, _ in net.named_parameters()}
    return [name for name in source.shapes if name in parameters], [name for name in source.shapes if name not in parameters]


def _facts(plan: Plan, std: float) -> dict[str, Any]:
    facts = {"nimg": plan.nimg, "std": std, "made_of": [[source.nimg, source.std] for source in plan.sources]}
    return facts | ({"std_by_tensor": dict(plan.overrides)} if plan.overrides else {})


def _check_room(outs: Sequence[Path], forms: dict[str, tuple[tuple[int, ...], torch.dtype]]) -> None:
    size = sum(torch.Size(shape).numel() * dtype.itemsize for shape, dtype in forms.values())
    for folder in {out.parent for out in outs}:
        needed, free = size * sum(out.parent == folder for out in outs), shutil.disk_usage(folder).free
        if needed > free:
            raise UserError(f"{folder} has {free / 2**20:,.1f} MiB free, and the averages take {needed / 2**20:,.1f} MiB")


def _allow_files(count: int) -> None:
    """To be open at a time, as far as the system lets us."""
    try:
        import resource
    except ImportError:  # Windows
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if resource.RLIM_INFINITY != soft < count:
        resource.setrlimit(resource.RLIMIT_NOFILE, (count if hard == resource.RLIM_INFINITY else min(count, hard), hard))


def _combine(plan: Plan, inputs: Sequence[OpenSnapshot], names: list[str], dtype: torch.dtype, write: Callable[[Tensor], None]) -> None:
    """Give `write` the wanted averages `[out, n]`, piece by piece, while the next are read and computed. It may not keep them."""
    ins, outs = len(inputs), len(plan.stds)
    at_once = max(AT_ONCE // (ins + outs), 1)
    pieces = [(name, start, size) for name in names for start, size in _cut(inputs[-1].tensors[name].shape, at_once)]
    largest = max(size for _, _, size in pieces)
    numbers, sums = [torch.empty(ins * largest) for _ in range(2)], torch.empty(outs * largest)  # anew each time, they cost more
    results = [torch.empty(outs * largest, dtype=dtype) for _ in range(2)]
    coefficients: dict[tuple[float, ...], Tensor] = {}
    with ThreadPoolExecutor(1) as reader, ThreadPoolExecutor(1) as writer, _bar(sum(size for _, _, size in pieces)) as bar:

        def read(i: int) -> Future[Tensor]:
            name, start, size = pieces[i]
            return reader.submit(_read, plan, inputs, name, start, numbers[i % 2][: ins * size].view(ins, size))

        coming, going = read(0), None
        for i, (name, _, size) in enumerate(pieces):
            rows = coming.result()
            coming = read(i + 1) if i + 1 < len(pieces) else None
            stds = plan.stds_of(name)
            if stds not in coefficients:
                coefficients[stds] = torch.from_numpy(plan.fit(stds).coefficients.T).float().contiguous()
            result = results[i % 2][: outs * size].view(outs, size)
            result.copy_(torch.mm(coefficients[stds], rows, out=sums[: outs * size].view(outs, size)))
            _check_numbers(plan, name, coefficients[stds], rows, result)
            if going is not None:
                going.result()
            going = writer.submit(write, result)
            bar.update(size)
        going.result()


def _bar(total: int) -> tqdm:
    return tqdm(total=total, unit=" parameters", unit_scale=True, disable=None)


def _cut(shape: tuple[int, ...], at_once: int) -> Iterator[tuple[int, int]]:
    """Where pieces of a tensor begin, and how many numbers they have."""
    count = torch.Size(shape).numel()
    for start in range(0, count, at_once):
        yield start, min(at_once, count - start)


def _read(plan: Plan, inputs: Sequence[OpenSnapshot], name: str, start: int, rows: Tensor) -> Tensor:
    """That piece of all inputs, into `rows` `[in, size]`."""
    for row, source, found in zip(rows, plan.sources, inputs):
        try:
            row.copy_(found.tensors[name].read(start, len(row)))
        except Refused as e:
            raise UserError(f"{source.path} is refused: {e}") from e
    return rows


def _check_numbers(plan: Plan, name: str, coefficients: Tensor, rows: Tensor, result: Tensor) -> None:
    """UserError unless all are finite; looked at only where they might not be."""
    largest = coefficients.abs() @ torch.linalg.vector_norm(rows, torch.inf, dim=1)
    if not (largest < torch.finfo(result.dtype).max).all() and not result.isfinite().all():
        for source, row in zip(plan.sources, rows):
            if not row.isfinite().all():
                raise UserError(f"{source.path} is damaged: {name} has numbers that are not finite")
        raise UserError(f"averages of {name} are too large for {result.dtype}; make them in fp32")
