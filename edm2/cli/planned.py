"""What a command would do, told without a download, without weights and without a GPU: `--dry-run` of sample.py and `edm2 import`."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import click

from edm2 import summary
from edm2.errors import UserError
from edm2.guidance import check_fits
from edm2.latents import Encoder, LatentEncoder, RGBEncoder
from edm2.network import Precond
from edm2.networks import file_at_hand, open_pieces
from edm2.pickled import DAMAGE
from edm2.published import Published
from edm2.sampler import Heun
from edm2.samples import SampleFolder


class Header(NamedTuple):
    """What a network's file says of it besides its weights."""

    config: dict[str, Any]
    encoder: Encoder
    guides_itself: bool


def read_header(path: Path) -> Header:
    """UserError as `open_snapshot`, but for what is found in the tensors."""
    with open_pieces(path) as found:
        return Header(found.config, found.encoder or RGBEncoder(), bool(found.meta.get("label_dropout")))


def where(source: str, cache: Path) -> str:
    """A file, or an address and what would become of it."""
    path = file_at_hand(source, cache)
    if path is None:
        return f"{source}, to be downloaded to {cache}"
    return str(path) if str(path) == source else f"{source}, which is {path}"


class SamplingPlan:
    """What sample.py would do with these networks: `lines` tell it. UserError for what would be refused, as far as headers show:
    those of networks that are still to be downloaded do not."""

    def __init__(self, files: Published, cache: Path, heun: Heun, vae: str | None, latents: bool):
        self.files, self.cache, self.heun, self.vae, self.latents = files, cache, heun, vae, latents
        self.net, self.guide = (self._header(source) for source in (files.net, files.gnet))
        self.guided = heun.guidance != 1
        if self.guided and files.gnet is None and self.net is not None and not self.net.guides_itself:
            raise UserError(
                f"--guidance {heun.guidance} needs a guide network: give --gnet (only one trained with --label-dropout guides itself)"
            )
        if self.net is not None and self.guide is not None:
            check_fits(self.net.config, self.guide.config, files.net, files.gnet)
        if vae and latents:
            raise UserError("--vae decodes latents, --latents does not: give one of them")
        if self.net is not None and not isinstance(self.net.encoder, LatentEncoder) and (vae or latents):
            raise UserError(f"{'--latents' if latents else '--vae'}: {files.net} makes pixels")

    def check_classes(self, classes: Sequence[int] | None) -> None:
        """UserError for one that the network does not know."""
        if classes is None or self.net is None:
            return
        known = self.net.config["label_dim"]
        if not known:
            raise UserError("the network is unconditional: it takes no class")
        for each in classes:
            if each >= known:
                raise UserError(f"class {each} is out of range: the network knows 0 to {known - 1}")

    def lines(self, seeds: Sequence[int], outdir: Path, subdirs: bool) -> dict[str, str]:
        """By name."""
        return self.facts() | {"images": self._images(seeds, outdir, subdirs)}

    def facts(self) -> dict[str, str]:
        """Of networks and cost."""
        facts = {"network": where(self.files.net, self.cache)}
        own, guides = self.evaluations()
        if self.guided:
            facts["guide"] = "the network itself, without labels" if self.files.gnet is None else where(self.files.gnet, self.cache)
            steps = sum(step.guidance is not None for step in self.heun.steps())
            facts["guidance"] = f"{self.heun.guidance:g} in {steps} of {self.heun.num_steps} steps"
        facts["evaluations"] = f"{own} of the network" + (f" and {guides} of the guide" if self.guided else "") + " for each image"
        if (cost := self.multiply_adds()) is not None:
            facts["multiply-adds"] = f"{cost / 1e9:.3f} G for each image, without decoding"
        if (decoder := self.decoder()) is not None:
            facts["decoder"] = decoder
        return facts

    def evaluations(self) -> tuple[int, int]:
        """Of the network and of its guide, for one image."""
        found = self.heun.evaluations()
        return len(found), sum(guided for _, guided in found)

    def multiply_adds(self) -> int | None:
        """Of one image, as far as headers tell."""
        guide = self.net if self.files.gnet is None else self.guide
        if self.net is None or (self.guided and guide is None):
            return None
        own, guides = self.evaluations()
        return own * _multiply_adds(self.net, self.files.net) + (guides * _multiply_adds(guide, self.files.gnet) if guides else 0)

    def decoder(self) -> str | None:
        """Of latents; None of pixels, and where a header would have to tell."""
        if self.latents:
            return "none: latents are written"
        if self.net is None:
            return self.vae
        return (self.vae or self.net.encoder.vae) if isinstance(self.net.encoder, LatentEncoder) else None

    def _header(self, source: str | None) -> Header | None:
        path = None if source is None else file_at_hand(source, self.cache)
        return None if path is None else read_header(path)

    def _images(self, seeds: Sequence[int], outdir: Path, subdirs: bool) -> str:
        folder = SampleFolder(outdir, subdirs, LatentEncoder() if self.latents else RGBEncoder(), {})
        there = sum(folder.file(seed).exists() for seed in seeds)
        text = f"{len(seeds)}, in {outdir}"
        return text + (f"; {there} files of their names are there, and stay if they were made likewise" if there else "")


def _multiply_adds(header: Header, name: str | None) -> int:
    try:
        return summary.multiply_adds(partial(Precond, **header.config))
    except DAMAGE as e:
        raise UserError(f"{name} has a configuration that makes no network ({e})") from e


def tell(facts: dict[str, str]) -> None:
    """A line for each."""
    for name, value in facts.items():
        click.echo(f"{name:<16} {value}")
