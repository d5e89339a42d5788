"""A network in a folder that a model hub can hold: safetensors, JSON, a card; `edm2.pipeline` reads it."""

import json
from pathlib import Path
from typing import Any

import torch

from edm2.errors import UserError
from edm2.files import make_folder, replacing
from edm2.official import LICENCE
from edm2.snapshot import Snapshot, write_tensors

NET, GUIDE, VAE, INDEX, CARD = "net.safetensors", "gnet.safetensors", "vae", "model_index.json", "README.md"
CC_BY_NC_SA = "cc-by-nc-sa-4.0"  # as hubs spell it: of the official release's networks, and of what is made of them


def export(
    folder: str | Path,
    snapshot: Snapshot,
    guide: Snapshot | None = None,
    guidance: float = 1.0,
    licence: str | None = None,
    dtype: torch.dtype = torch.float16,
) -> Path:
    """Write a network, and its guide with the strength that suits both, to `folder`: parameters as `dtype`, a card in Markdown.

    `licence` is the identifier of a licence, as hubs spell it; of official networks it is theirs. UserError for another, and
    where `folder` cannot be written to.
    """
    official = any("licence" in each.meta for each in (snapshot, guide) if each is not None)
    if official and licence not in (None, CC_BY_NC_SA):
        raise UserError(f"--license {licence}: {LICENCE}")
    folder = make_folder(folder)
    if any(folder.iterdir()) and not (folder / INDEX).exists():
        raise UserError(f"{folder} holds other things; choose a new folder")
    card = make_card(snapshot, guide, guidance, CC_BY_NC_SA if official else licence)
    if guide is None:
        (folder / GUIDE).unlink(missing_ok=True)  # an earlier export's
    for name, each in ((NET, snapshot), (GUIDE, guide)):
        if each is not None:
            parameters = dict(each.net.named_parameters())
            write_tensors(folder / name, parameters, each.net, encoder=each.encoder, meta=each.meta, dtype=dtype)
    components = ["net"] + ["gnet"] * (guide is not None)
    write_index(folder, components, guidance)
    with replacing(folder / CARD) as temporary:
        temporary.write_text(card, encoding="utf-8", errors="replace")
    return folder


def write_index(folder: Path, components: list[str], guidance: float, fast: bool = False) -> None:
    """What `EDM2Pipeline.from_pretrained` needs to know besides the components."""
    index = {"_class_name": "EDM2Pipeline", "components": components, "guidance_scale": guidance, "fast": fast}
    with replacing(folder / INDEX) as temporary:
        temporary.write_text(json.dumps(index, indent=2) + "\n")


def make_card(snapshot: Snapshot, guide: Snapshot | None, guidance: float, licence: str | None) -> str:
    """Markdown with a header that hubs understand."""
    config, meta = snapshot.config, snapshot.meta
    kind = "class-conditional" if config.get("label_dim") else "unconditional"
    size, channels = config["img_resolution"], config["img_channels"]
    of = "VAE latents" if snapshot.encoder is not None and not snapshot.encoder.makes_pixels else "pixels"
    header = {"license": licence, "library_name": "edm2-triton", "pipeline_tag": "unconditional-image-generation"}
    lines = ["---", *(f"{key}: {value}" for key, value in header.items() if value), "tags:", "- diffusion", "- edm2", "---", ""]
    lines += [f"# EDM2, {kind}, {size}×{size}×{channels} {of}", ""]
    lines += ['A network of Karras et al., "Analyzing and Improving the Training Dynamics of Diffusion Models" (CVPR 2024).', ""]
    lines += _table(_facts(snapshot) | ({"guide": f"`{GUIDE}`, of strength {guidance:g}"} if guide is not None else {}))
    lines += ["", "```python", "from edm2.pipeline import EDM2Pipeline", "", 'pipe = EDM2Pipeline.from_pretrained("DIR").to("cuda")']
    lines += ["images = pipe(" + ("class_labels=[0], " if config.get("label_dim") else "") + "num_inference_steps=32).images", "```", ""]
    lines += [f"Note: {LICENCE}.", ""] if "licence" in meta or guide is not None and "licence" in guide.meta else []
    return "\n".join(lines)


def _facts(snapshot: Snapshot) -> dict[str, Any]:
    parameters = sum(p.numel() for p in snapshot.net.parameters())
    named = {"preset": "preset", "nimg": "training images", "std": "average's width σ_rel", "file": "from"}
    facts = {words: snapshot.meta[key] for key, words in named.items() if key in snapshot.meta}
    return {"parameters": parameters} | facts


def _table(facts: dict[str, Any]) -> list[str]:
    shown = {name: f"{value:,}" if type(value) is int else _one_cell(str(value)) for name, value in facts.items()}
    return ["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in shown.items())]


def _one_cell(text: str) -> str:
    """The words may be a file's own."""
    return "".join(c if c.isprintable() else "?" for c in text[:200]).replace("|", r"\|")
