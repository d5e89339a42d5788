"""Benchmark results as files hold them, with made-up times."""

import json
from pathlib import Path

CEILINGS = {"TFLOP/s": 700.0, "GB/s": 4000.0}


def measured(seconds: float, **facts) -> dict:
    return {"error": 0.0, "tolerance": 0.02, "median": seconds, "low": seconds * 0.98, "high": seconds * 1.03, "runs": 20, **facts}


def case(name: str, candidates: dict, flops: float = 0.0, bytes: float = 0.0, **facts) -> dict:
    """As `bench.runner` writes it, for an NVIDIA H200."""
    machine = {"device": "cuda", "name": "NVIDIA H200", "driver_version": "570.1", "torch": "2.13.0", "triton": "3.6.0", "commit": "abc"}
    for candidate in candidates.values():
        for unit, amount in (("TFLOP/s", flops / 1e12), ("GB/s", bytes / 1e9)):
            if amount and "median" in candidate:
                rate = amount / candidate["median"]
                candidate |= {unit: rate, f"share of {unit}": rate / CEILINGS[unit]}
        if "batch" in facts and "median" in candidate:
            candidate["images/s"] = facts["batch"] / candidate["median"]
    head = {"case": name, "group": name.split("/")[0], **facts, "flops": flops, "bytes": bytes}
    return head | {"candidates": candidates, "machine": machine, "ceilings": CEILINGS}


def train(size: str, batch: int, times: dict[str, float | None], mode: str | None = None) -> dict:
    """Milliseconds of each candidate, None for one that ran out of memory."""
    candidates = {}
    for name, ms in times.items():
        shares = {"data": 0.02, "forward": 0.3, "backward": 0.58, "optimizer": 0.1}
        parts = {phase: share * ms / 1e3 for phase, share in shares.items()} if ms else {}
        oom = {"error": 0.0, "tolerance": 0.02, "failure": "CUDA out of memory. Tried to allocate 2.00 GiB | GPU 0 has 139 GiB."}
        candidates[name] = measured(ms / 1e3, parts=parts, peak_memory=30 * 2**30, MFU=0.2) if ms else oom
    preset = f"edm2-img512-{size}"
    name = "/".join(["train", preset, f"n{batch}", *([mode] if mode else [])])
    return case(name, candidates, flops=1e14, preset=preset, batch=batch, **({"mode": mode} if mode else {}))


def kernels() -> list[dict]:
    """Some hundred, as many as one run measures; one fails."""
    found = [case("kernels/copy", {"copy": measured(5e-4)}, bytes=2e9)]
    found.append(case("kernels/gemm/square", {"cuBLAS": measured(1.6e-3)}, 1.1e12, 4e8))
    for n in (256, 8):
        for res, c in ((64, 192), (32, 384), (16, 576), (8, 768)):
            for k in (3, 1):
                shape, flops, traffic = f"n{n}-{res}x{res}-{c}-{c}", 2.0 * n * res**2 * c * c * k * k, 4.0 * (n * res**2 * c)
                least = flops / min(700e12, flops / traffic * 4e12)  # seconds at the roof
                for i, kind in enumerate(("forward", "dgrad", "wgrad")):
                    times = {"cuDNN": measured(least / (0.8 - 0.2 * i)), "edm2": measured(least / (0.25 + 0.01 * res + n / 5120))}
                    found.append(case(f"kernels/conv{k}x{k}/{kind}/{shape}", times, flops, traffic))
                found.append(case(f"kernels/gemm/as-conv{k}x{k}/{shape}", {"cuBLAS": measured(flops / 650e12)}, flops, traffic))
    for backward, name in enumerate(("forward", "backward")):
        times = {"eager": measured(3e-3), "compile": measured(1e-3), "edm2": measured(4e-4 * (1 + backward))}
        found.append(case(f"kernels/cosine_attention/{name}/n256-256x9", times, 4e10, 3e8))
        times = {"eager": measured(2e-3), "compile": measured(9e-4), "edm2": measured(8e-4)}
        found += [case(f"kernels/cat_silu/{name}/n256-{shape}", times, 0.0, 2.4e9) for shape in ("64x64-384-192", "32x32-384-384")]
    found.append(case("kernels/attention/n256-256x9", {"SDPA": measured(1e-3)}, 2e11, 3e8))
    return [*found, case("kernels/attention/n8-64x12", {"SDPA": {"failure": "no kernel | image"}}, 1e9, 1e7)]


def equivalence(losses: dict[str, list[float | None]], **facts) -> dict:
    """Losses of each step by candidate, of which the last is the mean over the last; `facts` of this project."""
    candidates = {name: {"error": 0.0, "tolerance": 0.005, "loss": own[-1], "losses": own} for name, own in losses.items()}
    candidates["edm2"] |= facts
    size = {"preset": "edm2-img512-xxs", "batch": 32, "steps": 2, "last": 1, "dtype": "float16"}
    return case("equivalence/edm2-img512-xxs/n32", candidates, **size)


def all_results() -> list[dict]:
    names = "eager", "eager channels-last", "compile", "edm2"
    times = {"xs": (500, 400, 300, 250), "s": (1000, 800, 650, 500), "m": (None, 1500, 1300, 900), "xl": (4000, 3500, None, 2100)}
    training = [train(size, 256, dict(zip(names, own))) for size, own in times.items()]
    training += [train("s", 64, dict(zip(names, (260, 220, 180, 130)))), train("m", 64, dict(zip(names, (500, 420, 350, 240))))]
    training += [train("s", 256, {"eager channels-last": 810, "compile max-autotune": 600}, "max-autotune")]
    size = {"preset": "edm2-img512-s", "batch": 8}
    others = [
        case("sample/edm2-img512-s/n8", {"eager": measured(0.04), "edm2": measured(0.016)}, 1e12, **size),
        case("data/latents/n256", {"edm2": measured(0.05)}, batch=256),
        case("difference/edm2-img512-s/n64", {"eager": measured(3, error=1e-3), "edm2": measured(2, error=8e-4)}, **size),
        equivalence({"eager": [1.0, 0.5], "edm2": [1.0, 0.501]}, error=0.002),
        case("block/edm2-img512-s/64x64/n8", {"eager": measured(0.01), "edm2": measured(0.005)}, **size),
        case("optimizer/edm2-img512-s", {"eager": measured(0.02), "edm2": measured(0.005)}, bytes=1.3e10, preset="edm2-img512-s"),
    ]
    return training + others + kernels()


def store(root: Path, cases: list[dict], machine: str = "nvidia-h200") -> Path:
    folder = root / "bench" / "results" / machine
    folder.mkdir(exist_ok=True)
    for result in cases:
        (folder / f"{result['case'].replace('/', '_')}.json").write_text(json.dumps(result))
    return folder


def pictures(root: Path) -> set[str]:
    return {path.stem for path in (root / "docs" / "bench").rglob("*.png")}
