"""Pixels ↔ latents: a tiny VAE with random weights, written by diffusers and read as any other."""

import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import huggingface_hub.constants as hub
import pytest
import torch
from safetensors.torch import load_file, save_file

import edm2
from edm2.latents import RAW_STATISTICS, LatentEncoder, RGBEncoder, encoder_for, encoder_from_config
from edm2.vae import AT_ONCE, load_vae
from tests.command_lines import without
from tests.conftest import tiny_net
from tests.dataset_files import fails
from tests.vae_files import WEIGHTS, plain, save_tiny

ROOT = Path(__file__).parent.parent
RANGES = list(RAW_STATISTICS)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("vae") / "tiny")


@pytest.fixture()
def copy(saved, tmp_path):
    """The files of the VAE, to be spoilt."""
    for file in saved.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    return tmp_path


@pytest.fixture()
def logged(monkeypatch):
    """What diffusers would print."""
    records, handler = [], logging.Handler()
    monkeypatch.setattr(handler, "emit", records.append)
    monkeypatch.setattr(logging.getLogger("diffusers"), "handlers", [handler])
    return records


def test_others_are_not_fetched_unasked():
    with pytest.raises(edm2.UserError, match="its latents are those of the VAE 'somebody/else'; give that"):
        load_vae(LatentEncoder(vae="somebody/else"))


def latents(n: int) -> torch.Tensor:
    return 0.5 * torch.randn(n, 4, 4, 4, generator=torch.Generator().manual_seed(1))


def pixels(n: int, channels: int = 3, side: int = 16) -> torch.Tensor:
    return torch.randint(256, (n, channels, side, side), dtype=torch.uint8, generator=torch.Generator().manual_seed(2))


class TestValues:
    @pytest.mark.parametrize("pixel_range", RANGES)
    def test_decode(self, saved, pixel_range):
        x, (mean, std) = latents(3), (torch.tensor(row).reshape(4, 1, 1) for row in RAW_STATISTICS[pixel_range])
        y = plain(saved).decode(x / 0.5 * std + mean).sample
        expected = y.clamp(0, 1) * 255 if pixel_range == (0, 1) else (y * 127.5 + 128).clamp(0, 255)
        actual = load_vae(LatentEncoder(pixel_range=pixel_range), saved).decode(x)
        assert actual.dtype == torch.uint8 and actual.shape == (3, 3, 16, 16)
        assert (actual - (expected - 0.5)).abs().max() < 0.51 and (expected == 0).any() and (expected == 255).any() and expected.std() > 50

    @pytest.mark.parametrize("pixel_range", RANGES)
    def test_encode_pixels(self, saved, pixel_range):
        x = pixels(3)
        expected = plain(saved).encode(x / 255 if pixel_range == (0, 1) else x / 127.5 - 1).latent_dist
        encoder = load_vae(LatentEncoder(pixel_range=pixel_range), saved)
        actual = encoder.encode_pixels(x)
        assert actual.dtype == torch.float32 and actual.shape == (3, 8, 4, 4) and actual.is_contiguous()
        torch.testing.assert_close(actual, torch.cat([expected.mean, expected.std], 1), rtol=1e-4, atol=1e-5)
        assert encoder_for(8, actual.numpy().dtype, pixel_range)[0].config() == encoder.config()

    def test_all_values_survive_a_perfect_vae(self, saved, monkeypatch):
        """Every value comes back, in both ranges: encoding and decoding mean the same range."""
        x = torch.arange(256, dtype=torch.uint8).expand(1, 3, 4, 256)
        for pixel_range in RANGES:
            encoder = load_vae(LatentEncoder(pixel_range=pixel_range), saved)
            seen = []
            monkeypatch.setattr(encoder.vae, "encode", lambda x, seen=seen, call=encoder.vae.encode: seen.append(x) or call(x))
            encoder.encode_pixels(x)
            low, high = pixel_range
            assert (seen[0].min(), seen[0].max()) == (low, high)
            y = type("Output", (), {"sample": seen[0] + 1e-6})
            monkeypatch.setattr(encoder.vae, "decode", lambda x, y=y: y)
            torch.testing.assert_close(encoder.decode(torch.zeros(1, 4, 1, 64)), x)

    def test_it_is_the_encoder_of_its_latents(self, saved, tmp_path):
        plain_encoder = LatentEncoder(pixel_range=(-1, 1))
        encoder = load_vae(plain_encoder, str(saved))
        assert (encoder.kind, encoder.config()) == (plain_encoder.kind, plain_encoder.config())
        assert encoder.draws_noise and encoder.makes_pixels
        moments, normal = torch.rand(2, 8, 4, 4), torch.randn(2, 4, 4, 4)
        torch.testing.assert_close(encoder.encode(moments, normal), plain_encoder.encode(moments, normal), rtol=0, atol=0)
        edm2.save_snapshot(tmp_path / "net", tiny_net(img_channels=4), encoder=encoder)
        loaded = edm2.load_snapshot(tmp_path / "net").encoder
        assert type(loaded) is LatentEncoder and loaded.config() == plain_encoder.config()

    def test_images_are_generated(self, saved):
        encoder = load_vae(LatentEncoder(), saved)
        (batch,) = edm2.generate_images(tiny_net(img_channels=4), [3, 4], encoder=encoder, num_steps=2)
        assert batch.images.shape == (2, 32, 32, 3) and batch.images.std() > 0
        torch.testing.assert_close(torch.from_numpy(batch.images).permute(0, 3, 1, 2), encoder.decode(batch.latents))

    def test_names_of_older_files(self, saved, copy):
        """As `sd-vae-ft-mse` has them: attention's weights under the names of 2022."""
        old = {"to_q": "query", "to_k": "key", "to_v": "value", "to_out.0": "proj_attn"}
        weights = load_file(copy / WEIGHTS)
        for new, name in old.items():
            weights = {key.replace(f".{new}.", f".{name}."): value for key, value in weights.items()}
        assert any("query" in key for key in weights)
        save_file(weights, copy / WEIGHTS, {"format": "pt"})
        x = latents(1)
        torch.testing.assert_close(load_vae(LatentEncoder(), copy).decode(x), load_vae(LatentEncoder(), saved).decode(x))


class TestBatches:
    @pytest.mark.parametrize("size", [1, 4])
    def test_bits_do_not_depend_on_the_images_beside(self, saved, size, monkeypatch):
        monkeypatch.setitem(AT_ONCE, "cpu", size)
        encoder, x, y = load_vae(LatentEncoder(), saved), latents(6), pixels(6)
        images, moments = encoder.decode(x), encoder.encode_pixels(y)
        for part in (slice(0, 1), slice(1, 3), slice(2, 6), slice(0, 5)):
            assert torch.equal(encoder.decode(x[part]), images[part])
            assert torch.equal(encoder.encode_pixels(y[part]), moments[part])

    @pytest.mark.parametrize(("fast", "sizes"), [(False, [4, 4]), (True, [4, 2])])
    def test_the_vae_sees_one_size(self, saved, fast, sizes, monkeypatch):
        """And cuDNN's settings with it, which are as they were afterwards."""
        monkeypatch.setitem(AT_ONCE, "cpu", 4)
        monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
        monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
        encoder, seen = load_vae(LatentEncoder(), saved, fast=fast), []

        def settings():
            cudnn = torch.backends.cudnn
            return cudnn.enabled, cudnn.benchmark, cudnn.deterministic, cudnn.allow_tf32

        before = settings()
        for part in (encoder.vae.encoder, encoder.vae.decoder):
            part.register_forward_pre_hook(lambda module, args: seen.append((len(args[0]), settings())))
        assert encoder.decode(latents(6)).shape == (6, 3, 16, 16) and encoder.encode_pixels(pixels(6)).shape == (6, 8, 4, 4)
        assert seen == [(n, before if fast else (True, False, True, False)) for n in 2 * sizes]
        assert settings() == before

    def test_weights_are_in_channels_last(self, saved, logged):
        weight = load_vae(LatentEncoder(), saved).vae.decoder.conv_in.weight
        assert weight.is_contiguous(memory_format=torch.channels_last) and weight.dtype == torch.float32 and not weight.requires_grad
        assert not logged

    @pytest.mark.gpu
    def test_bits_on_a_gpu(self, saved):
        """In fp16; values within its precision."""
        encoder, x = load_vae(LatentEncoder(), saved, "cuda"), latents(19).cuda()
        images = encoder.decode(x)
        assert encoder.vae.dtype == torch.float16 and all(torch.equal(encoder.decode(x[i : i + 3]), images[i : i + 3]) for i in range(16))
        exact = load_vae(LatentEncoder(), saved).decode(x.cpu())
        assert (images.cpu().float() - exact.float()).abs().mean() < 1
        moments = encoder.encode_pixels(pixels(19).cuda())
        assert all(torch.equal(encoder.encode_pixels(pixels(19)[i : i + 3]), moments[i : i + 3]) for i in range(16))


def change_config(**values):
    def spoil(folder):
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | values))

    return spoil


def cut(folder):
    (folder / WEIGHTS).write_bytes((folder / WEIGHTS).read_bytes()[:-100])


class TestErrors:
    @pytest.mark.parametrize(
        ("spoil", "words"),
        [
            (lambda folder: (folder / "config.json").unlink(), "holds no VAE: it has no config.json; --vae takes a folder with"),
            (lambda folder: (folder / WEIGHTS).unlink(), f"holds no VAE: it has no {WEIGHTS}"),
            (lambda folder: (folder / "config.json").write_text("{"), "is damaged .*; fetch it anew"),
            (lambda folder: (folder / "config.json").write_text("[]"), "is damaged"),
            (lambda folder: (folder / "config.json").write_bytes(b"\xff"), "is damaged"),
            (lambda folder: (folder / WEIGHTS).write_bytes(b"hello, world" * 9), "is damaged"),
            (cut, "is damaged"),
            (change_config(_class_name="UNet2DModel"), "holds a UNet2DModel; --vae takes an AutoencoderKL"),
            (change_config(norm_num_groups=3), "is damaged .*divisible"),
            (change_config(block_out_channels=[8, 16, 32]), "is damaged"),
            (change_config(layers_per_block=2), "is damaged .it has no decoder.up_blocks"),
        ],
    )
    def test_bad_folders(self, copy, spoil, words, logged):
        """One line, and none beside it."""
        spoil(copy)
        with fails(words) as error:
            load_vae(LatentEncoder(), copy)
        assert str(copy) in str(error.value) and not logged
        assert logging.getLogger("diffusers").isEnabledFor(logging.WARNING)

    @pytest.mark.parametrize("path", ["/no/such/folder", "folder", "a/b/c", "./vae", "~/vae"])
    def test_no_folder(self, path):
        with fails(f"{path} is no folder; --vae takes a folder with config.json and {WEIGHTS}, or a name on huggingface.co"):
            load_vae(LatentEncoder(), path)

    @pytest.mark.parametrize("path", [None, "someone/else"])
    def test_no_network(self, path, tmp_path, monkeypatch):
        monkeypatch.setattr(hub, "HF_HUB_OFFLINE", True)
        monkeypatch.setattr(hub, "HF_HUB_CACHE", str(tmp_path))
        name = path or "stabilityai/sd-vae-ft-mse"
        with fails(f"the VAE {name} cannot be downloaded .*; give a folder that holds it with --vae"):
            load_vae(LatentEncoder(), path)

    def test_a_name_is_downloaded(self, saved, monkeypatch):
        """The official one, unless another is given; nothing that could execute code."""
        asked = []
        monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *args, **kwargs: asked.append((args, kwargs)) or str(saved))
        load_vae(LatentEncoder())
        load_vae(LatentEncoder(vae="some/vae"), "other/one")
        assert asked == [((name,), {"allow_patterns": ("config.json", WEIGHTS)}) for name in ("stabilityai/sd-vae-ft-mse", "other/one")]

    def test_other_channels(self, saved, tmp_path):
        with fails("the VAE makes latents of 8 channels, and these have 4; give their own VAE with --vae"):
            load_vae(LatentEncoder(), save_tiny(tmp_path / "eight", 8))

    @pytest.mark.parametrize("x", [pixels(1, 1), pixels(1, 3, 18), pixels(1).float(), pixels(1)[0]])
    def test_other_pixels(self, saved, x):
        with fails(r"takes uint8 RGB images \[N, 3, H, W\] whose sides are multiples of 4, got"):
            load_vae(LatentEncoder(), saved).encode_pixels(x)

    def test_without_diffusers(self, saved, monkeypatch):
        monkeypatch.setitem(sys.modules, "diffusers", None)
        kernels = sys.modules["kernels"]
        with fails(r"decoding latents needs diffusers .*: pip install 'edm2-triton\[vae\]'"):
            load_vae(LatentEncoder(), saved)
        assert sys.modules["kernels"] is kernels


class TestRecordedFacts:
    """Which VAE, and in which range: known to every snapshot."""

    @pytest.mark.parametrize("pixel_range", RANGES)
    def test_round_trip(self, tmp_path, pixel_range):
        encoder = LatentEncoder(vae="some/vae", pixel_range=pixel_range)
        assert (encoder.raw_mean, encoder.raw_std) == RAW_STATISTICS[pixel_range]
        edm2.save_snapshot(tmp_path / "net", tiny_net(img_channels=4), encoder=encoder)
        loaded = edm2.load_snapshot(tmp_path / "net").encoder
        assert loaded.config() == encoder.config() and (loaded.vae, loaded.pixel_range) == ("some/vae", pixel_range)
        assert encoder_from_config(json.loads(json.dumps(encoder.config()))).config() == encoder.config()

    def test_before_they_were_recorded(self):
        (mean, std), kind = RAW_STATISTICS[0, 1], LatentEncoder.kind
        encoder = encoder_from_config({"type": kind, "raw_mean": list(mean), "raw_std": list(std), "final_std": 0.5})
        assert encoder.config() == LatentEncoder().config() and encoder.pixel_range == (0, 1)
        assert encoder.vae == "stabilityai/sd-vae-ft-mse"

    def test_published_statistics(self):
        """arXiv 2410.11081, appendix G.1."""
        encoder = LatentEncoder(pixel_range=[-1.0, 1.0])
        assert encoder.raw_mean == (1.56, -0.695, 0.483, 0.729) and encoder.raw_std == (5.27, 5.91, 4.21, 4.31)
        assert LatentEncoder((0.0,), (1.0,), pixel_range=(-1, 1)).raw_mean == (0.0,)

    @pytest.mark.parametrize("bad", [(0, 255), (1, 0), "0,1", 1, None, (0,), [[0], [1]]])
    def test_other_ranges(self, bad, tmp_path):
        with fails(r"the pixel range .* is neither \(0, 1\) nor \(-1, 1\)"):
            LatentEncoder(pixel_range=bad)
        with pytest.raises(ValueError, match="pixel range"):
            encoder_from_config(LatentEncoder().config() | {"pixel_range": bad})

    def test_pixels_have_no_range(self):
        assert type(encoder_for(3, torch.zeros(0, dtype=torch.uint8).numpy().dtype, [0, 1])[0]) is RGBEncoder
        with fails("--pixel-range and --latent-stats are for datasets of VAE latents"):
            encoder_for(3, torch.zeros(0, dtype=torch.uint8).numpy().dtype, (-1, 1))


BESIDE_OUR_KERNELS = """
import kernels, edm2
from edm2.latents import LatentEncoder
from edm2.vae import load_vae
import sys, torch
from pathlib import Path
encoder = load_vae(LatentEncoder(), sys.argv[1])
assert encoder.decode(torch.zeros(1, 4, 4, 4)).shape == (1, 3, 16, 16)
from diffusers.utils import is_kernels_available
print(Path(kernels.__file__).parent, sys.modules["kernels"] is kernels, is_kernels_available())
"""


@pytest.mark.parametrize("installed", [False, True])
def test_our_kernels_are_not_taken_for_hugging_faces(saved, tmp_path, installed):
    """Without transformers, in the project's folder; with `installed` its distribution `kernels` lies behind it on the path.

    With transformers, diffusers would then import the names of that distribution from our package, and fail.
    """
    if installed:
        (tmp_path / "kernels-0.18.2.dist-info").mkdir()
        (tmp_path / "kernels-0.18.2.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: kernels\nVersion: 0.18.2\n")
    command = [sys.executable, "-W", "error", "-c", without("transformers") + BESIDE_OUR_KERNELS, str(saved)]
    result = subprocess.run(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(tmp_path)}, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == [str(ROOT / "kernels"), "True", "False"]
