"""What the documentation tells its readers to do, page by page, and how that is done here in seconds.

A page's commands and blocks of Python run one after the other in one folder. A command that takes long is changed by `changes`;
one that needs a network, large data or a GPU is in `dry`, and gets --dry-run; files that a page takes for granted `files` puts there.
"""

import json
import re
import shlex
import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

import edm2
import sample
from edm2.cli.dataset import load_digits
from edm2.dataset_zip import write_zip
from edm2.frechet import Moments
from edm2.latents import LatentEncoder
from edm2.references import Reference, write_reference
from tests.command_lines import ROOT, call, small_net
from tests.conftest import tiny_net
from tests.dataset_files import encode, make, pixels
from tests.vae_files import save_tiny

# Commands that are not run, by how they begin or what is in them, and why. Each must be somewhere in the documentation.
NOT_RUN = {
    r"^make ": "makes an environment of its own, and takes minutes",
    r"^(export MASTER_ADDR|#SBATCH|srun|\[ \$\?) ?": "is for a cluster",
    r"^python -m (bench|tests) ?": "takes minutes, or needs a GPU; it has tests of its own",
    r"…": "is abbreviated",
}


@dataclass(frozen=True)
class Page:
    """How a page is run. Every change must apply to one of its commands, or of its blocks of Python, everything in `dry` be in a
    command, once or more."""

    changes: tuple[tuple[str, str], ...] = ()
    python: tuple[tuple[str, str], ...] = ()
    dry: tuple[str, ...] = ()
    files: Callable[[Path, Path], None] = lambda folder, run: None


class Step(NamedTuple):
    """A command, or a block of Python."""

    kind: str
    text: str


def pages() -> dict[str, Path]:
    """By name."""
    return {path.stem: path for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))}


def steps(path: Path) -> Iterator[Step]:
    """Of a page, in order; a command without its comment and on one line. Commands also stand in the last column of tables."""
    found = re.findall(r"^```(sh|python)\n(.*?)^```$|^\|[^\n]*\|([^|\n]+)\|$", path.read_text(), re.MULTILINE | re.DOTALL)
    for kind, block, cell in found:
        if kind == "python":
            yield Step(kind, block)
        elif cell:
            yield from (Step("sh", words) for words in re.findall(r"`((?:python|torchrun) [^`]+)`", cell))
        else:
            lines = (re.sub(r"(^| )# .*", "", line).strip() for line in block.replace("\\\n", " ").splitlines())
            yield from (Step(kind, " ".join(line.split())) for line in lines if line)


def not_run(command: str) -> str | None:
    """Why, or None if it is."""
    return next((pattern for pattern in NOT_RUN if re.search(pattern, command)), None)


def changed(text: str, changes: Iterable[tuple[str, str]]) -> str:
    for old, new in changes:
        text = text.replace(old, new)
    return text


def shortened(page: Page, command: str) -> list[str]:
    """Its words, as they run here."""
    command = changed(command, page.changes)
    return shlex.split(command) + ["--dry-run"] * any(part in command for part in page.dry)


def network_files(folder: Path, run: Path) -> None:
    """NET, a network of the digits that can guide itself, and a GUIDE."""
    shutil.copy(sorted(run.glob("*-0.100.safetensors"))[-1], folder / "NET")
    shutil.copy(sorted(run.glob("*-0.100.safetensors"))[0], folder / "GUIDE")


def readme_files(folder: Path, run: Path) -> None:
    """Also a run, a few images and latents of the published sizes, networks as they would be after training and import, and some
    reference."""
    network_files(folder, run)
    shutil.copy(folder / "NET", folder / "network-snapshot-0000115.200-0.100.safetensors")
    shutil.copytree(run, folder / "out" / "run")
    images = {f"{i}.png": encode(pixels(i, 64, 64, 3)) for i in range(2)}
    for name in ("data.zip", "mine.zip"):
        make(folder / name, images, [[name, i] for i, name in enumerate(images)])
    (folder / "datasets" / "img512-sd.zip").mkdir(parents=True)  # a folder is as good
    np.save(folder / "datasets" / "img512-sd.zip" / "0.npy", np.ones((8, 64, 64), np.float32))
    (folder / "datasets" / "img512-sd.zip" / "dataset.json").write_text(json.dumps({"labels": [["0.npy", 0]]}))
    write_reference(folder / "img512.npz", Reference({"fid": Moments(np.zeros(2), np.eye(2), 2)}))
    (folder / "networks").mkdir()
    edm2.save_snapshot(folder / "networks" / "edm2-img512-s-2147483-0.025.safetensors", small_net(5))
    (folder / "out" / "img512-s").mkdir()
    edm2.save_snapshot(
        folder / "out" / "img512-s" / "network-snapshot-2147483-0.100.safetensors", tiny_net(1000, img_channels=4), encoder=LatentEncoder()
    )


def sampling_files(folder: Path, run: Path) -> None:
    """Networks of pixels and of latents, with a VAE; a run."""
    network_files(folder, run)
    (folder / "NET").rename(folder / "net.safetensors")
    (folder / "GUIDE").rename(folder / "guide.safetensors")
    edm2.save_snapshot(folder / "latents.safetensors", tiny_net(img_channels=4), encoder=LatentEncoder())
    save_tiny(folder / "vae")
    shutil.copytree(run, folder / "out" / "main")


def training_files(folder: Path, run: Path) -> None:
    """Photos in folders of classes; a VAE."""
    make(folder / "photos", {f"{c}/{i}.png": encode(pixels(i, 70, 64 + i, 3)) for c in ("cat", "dog") for i in range(4)})
    save_tiny(folder / "vae")
    run_files(folder, run)


def metrics_files(folder: Path, run: Path) -> None:
    """What lies in the place of ImageNet, and of a run on it: the digits."""
    (folder / "datasets").mkdir()
    write_zip(folder / "datasets" / "img512.zip", *load_digits())
    shutil.copytree(run, folder / "out" / "img512-s")
    network_files(folder, run)
    samples = f"--net={folder}/NET", f"--outdir={folder}/out/samples", "--seeds=0-9", "--steps=1"
    assert call(sample.main, *samples).exit_code == 0


def migrating_files(folder: Path, run: Path) -> None:
    """What the capital letters stand for: SRC a folder of photos, ZIP the digits, DIR a run."""
    training_files(folder, run)
    network_files(folder, run)
    (folder / "photos").rename(folder / "SRC")
    (folder / "out").rename(folder / "runs")
    (folder / "runs" / "run").rename(folder / "DIR")
    write_zip(folder / "ZIP", *load_digits())


def run_files(folder: Path, run: Path) -> None:
    """A run."""
    shutil.copytree(run, folder / "out" / "run")


ARRAYS = """
from edm2.cli.dataset import load_digits
images, labels = load_digits()
images, x, c = images[:, None], torch.randn(2, 3, 64, 64), torch.eye(1000)[:2]
"""
PAGES = {
    "training": Page(
        changes=(
            ("--preset=edm2-img64-xs --batch=256 --batch-gpu=32 --dur", "--preset=digits --batch=8 --batch-gpu=4 --dur"),
            ("--duration=32Mi --rampup=1Mi --snapshot=1Mi", "--duration=8 --rampup=8 --status=8 --snapshot=0 --samples=0 --channels=16"),
            ("--checkpoint=4Mi", "--checkpoint=8"),
            ("dataset encode data/mine512.zip", "dataset encode --vae=vae data/mine512.zip"),
            ("dataset decode data/latents.zip", "dataset decode --vae=vae data/latents.zip"),
            ("--resolution=512", "--resolution=32"),
            ("--outdir=out/digits --data", "--outdir=out/digits --duration=768 --snapshot=768 --data"),
            ("--data=out/digits.zip --preset=digits", "--data=out/digits.zip --preset=digits --channels=16 --samples=0 --status=768"),
            ("0000115.200", "0000000.768"),
            ("--duration=12800 --lr=0.004 --rampup=1280", "--duration=768 --snapshot=768 --lr=0.004 --rampup=128"),
            ("calibrate out/digits", "calibrate out/run"),  # which is long enough
            ("--steps=18", "--steps=1"),
        ),
        files=training_files,
    ),
    "README": Page(
        changes=(("--steps=18", "--steps=2"), ("--std=0.05,0.10,0.15,0.20", "--std=0.05,0.20 --seeds=0-9 --steps=2")),
        python=(
            ("snapshot = ", f"{ARRAYS}\nsnapshot = "),
            ("num_steps=18", "num_steps=2"),
            ("seeds=range(100)", "seeds=range(3)"),
            ('"cuda"', '"cpu"'),
            ("num_inference_steps=18", "num_inference_steps=2"),
            ("duration=64 * 500", "channels=16, samples=0, duration=64 * 2"),
            ('"edm2-img64-s", img', '"edm2-img64-s", model_channels=64, img'),
        ),
        dry=("img512-sd.zip", "network-snapshot-2147483", "data.zip --preset=edm2", "mine.zip", "import edm2-img512", "--ref=img512.npz"),
        files=readme_files,
    ),
    "guidance": Page(
        changes=(
            ("--duration=28800 --snapshot=640", "--duration=768 --snapshot=256"),
            ("--duration=7680 --snapshot=640", "--duration=768 --snapshot=256"),
            ("0000028.800", "0000000.768"),
            ("--gnet-kimg=16", "--gnet-kimg=0.512"),
            ("--std=0.1 --steps=8", "--std=0.1 --steps=2 --seeds=0-9"),
            ("--guidance=1.15,1.5,2", "--guidance=1.15"),
            ("--steps=18", "--steps=2"),
        ),
    ),
    "metrics": Page(
        changes=(
            ("--num=100 --runs=3 --steps=4", "--num=20 --runs=2 --steps=1"),
            ("--seeds=0-99 --steps=4", "--seeds=0-19 --steps=1"),
            ("--images=out/tiny-samples --ref=out/digits.npz --num=100", "--images=out/tiny-samples --ref=out/digits.npz --num=20"),
            ("--dest=out/img512.npz", "--dest=out/img512.npz --metrics=frechet-small"),
            ("--std=0.10,0.13 --ref=out/img512.npz --runs=3", "--std=0.10,0.13 --ref=out/img512.npz --runs=2 --num=10 --steps=1"),
            ("--num=10000", "--num=10"),
        ),
        dry=("--preset=edm2-img512-s-guid-fid",),
        files=metrics_files,
    ),
    "migrating": Page(
        changes=(
            ("--resolution=512x512", "--resolution=32x32"),
            ("encode SRC DEST.zip", "encode --vae=vae DEST.zip LATENTS.zip"),
            ("--net=URL --gnet=URL --guidance=1.4", "--net=NET --gnet=GUIDE --guidance=1.4 --seeds=0-3 --steps=1"),
            ("--dest=REF.npz", "--dest=REF.npz --metrics=frechet-small"),
            ("--images=DIR --ref=REF", "--images=DIR --ref=REF.npz --num=4"),
            ("--ref=REF --seed=0 --num=50000", "--ref=REF.npz --seed=0 --num=8 --steps=1"),
        ),
        dry=("torchrun --standalone --nproc_per_node=8 train.py", "--preset=edm2-img512-s-guid-fid"),
        files=migrating_files,
    ),
    "post-hoc-ema": Page(
        changes=(
            ("--outkimg=57.6", "--outkimg=5"),
            ("--duration=40960", "--duration=768 --status=128 --snapshot=768 --samples=0"),
            ("calibrate out/wide", "calibrate out/run"),  # which is long enough
        ),
        files=run_files,
    ),
    "sampling": Page(
        changes=(
            *((f"--std=0.1 --steps={n}", "--std=0.1 --steps=1 --seeds=0-9") for n in (4, 8, 18, 32)),
            ("--steps=18", "--steps=2"),
            ("--seeds=0-49999", "--seeds=0-4 --steps=2"),
        ),
        files=sampling_files,
    ),
    "sweep": Page(
        changes=(
            ("--duration=28800 --snapshot=640", "--duration=768 --snapshot=256"),
            ("--std=0.025,0.040,0.065,0.100,0.150,0.220 --steps=8", "--std=0.1,0.2 --steps=2 --seeds=0-19"),
            ("--seeds=1000-1999", "--seeds=1000-1019"),
            ("--steps=8 --guidance=1,1.15 ", "--steps=2 --guidance=1,1.15 "),
        ),
    ),
}


def page_of(name: str) -> Page:
    """Of one that nobody has said anything about, all is run as it stands."""
    return PAGES.get(name, Page())
