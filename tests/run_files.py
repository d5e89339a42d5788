"""The folders of training runs: made without training, averaged, listed, compared."""

import json
from pathlib import Path

import torch

import edm2
from edm2 import phema
from edm2.config import TrainingConfig
from edm2.distributed import Processes
from edm2.latents import RGBEncoder
from edm2.trainer import Trainer
from tests.command_lines import small_net


def make_run(folder: Path, data: Path, seed: int = 0, label_dropout: float = 0.1, label_dim: int = 5, encoder=None) -> Path:
    """Three times, two widths, weights that differ."""
    folder.mkdir()
    random = torch.Generator().manual_seed(seed)
    for nimg in (1000, 2000, 3000):
        for std in (0.05, 0.1):
            net = small_net(label_dim)
            with torch.no_grad():
                for p in net.parameters():
                    p.add_(0.3 * torch.randn(p.shape, generator=random))
            meta = {"nimg": nimg, "std": std, "label_dropout": label_dropout}
            name = f"network-snapshot-{nimg / 1000:011.3f}-{std:.3f}.safetensors"
            edm2.save_snapshot(folder / name, net, encoder=encoder or RGBEncoder(), meta=meta, dtype=torch.float32)
    (folder / "training_options.json").write_text(json.dumps({"data": str(data)}))
    return folder


def average(run: Path, std: float, nimg: int | None = None) -> edm2.Precond:
    """By reading and combining all snapshots."""
    snapshots = [edm2.load_snapshot(path) for path in sorted(run.glob("*.safetensors"))]
    (tensors,) = phema.reconstruct(snapshots, [std], nimg)
    net = snapshots[0].net
    net.load_state_dict(tensors, strict=False)
    return net


def names(outdir) -> set[str]:
    return {path.name for path in Path(outdir).iterdir()}


def equal(a, b) -> bool:
    """Nested states, bit for bit."""
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(equal, a, b))
    return a == b


def run_steps(config: TrainingConfig, steps: int = 3) -> Trainer:
    """After so many steps, with nothing written."""
    trainer = Trainer(config, Processes(0, 1, torch.device("cpu")))
    trainer.start()
    for _ in range(steps):
        trainer.step()
    return trainer
