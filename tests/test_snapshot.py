"""Networks and encoders on disk."""

import json

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

import edm2
from edm2.latents import LatentEncoder, RGBEncoder, encoder_for, encoder_from_config
from tests.conftest import relative_error, tiny_net


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_round_trip(tmp_path, dtype):
    net, path = tiny_net(dropout=0.1, img_channels=4), tmp_path / "a.safetensors"
    edm2.save_snapshot(path, net, encoder=LatentEncoder(), meta={"nimg": 1024, "std": 0.05}, dtype=dtype)
    loaded = edm2.load_snapshot(path)
    assert loaded.meta == {"nimg": 1024, "std": 0.05}
    assert loaded.encoder.config() == LatentEncoder().config()
    assert loaded.config == json.loads(json.dumps(net.config)) and not loaded.net.training
    for name, tensor in net.state_dict().items():
        stored = tensor if "freqs" in name or "phases" in name else tensor.to(dtype).float()
        torch.testing.assert_close(loaded.net.state_dict()[name], stored, rtol=0, atol=0)
    x = torch.randn(2, 4, 8, 8)
    assert relative_error(loaded.net(x, 1.0), net(x, 1.0)) < (1e-2 if dtype == torch.float16 else 1e-7)


def test_an_encoder_of_another_network(tmp_path):
    edm2.save_snapshot(tmp_path / "a", tiny_net(), encoder=LatentEncoder())
    with pytest.raises(edm2.UserError, match="its encoder is for 4 channels and its network for 2"):
        edm2.load_snapshot(tmp_path / "a")


@pytest.mark.parametrize("part", [{"config": "[]"}, {"meta": "5"}, {"meta": "[" * 100_000}, {"config": "{"}])
def test_damaged_headers(tmp_path, part):
    edm2.save_snapshot(tmp_path / "a", tiny_net())
    with safe_open(tmp_path / "a", framework="pt") as file:
        tensors, metadata = {name: file.get_tensor(name) for name in file.keys()}, file.metadata()
    save_file(tensors, tmp_path / "b", metadata | part)
    with pytest.raises(edm2.UserError, match="has a damaged header"):
        edm2.load_snapshot(tmp_path / "b")


def test_defaults_are_half_precision_and_buffers_stay_full(tmp_path):
    edm2.save_snapshot(tmp_path / "a", tiny_net())
    with safe_open(tmp_path / "a", framework="pt") as file:
        dtypes = {name: file.get_tensor(name).dtype for name in file.keys()}
    assert {dtype for name, dtype in dtypes.items() if "fourier" in name} == {torch.float32}
    assert {dtype for name, dtype in dtypes.items() if "fourier" not in name} == {torch.float16}
    assert edm2.load_snapshot(tmp_path / "a").encoder is None


def test_a_failed_write_leaves_the_old_file(tmp_path):
    path = tmp_path / "a.safetensors"
    edm2.save_snapshot(path, tiny_net())
    before = path.read_bytes()
    with pytest.raises(TypeError):
        edm2.save_snapshot(path, tiny_net(), meta={"no": object()})
    assert path.read_bytes() == before and [p.name for p in tmp_path.iterdir()] == ["a.safetensors"]
    with pytest.raises(edm2.UserError, match="cannot write .*missing"):
        edm2.save_snapshot(tmp_path / "missing" / "a", tiny_net())


ODD = [
    ("num_blocks", 10**9), ("dtype", "float16"), ("sigma_data", "x"), ("sigma_data", float("nan")), ("clip_act", "x"),
    ("attn_balance", "0.3"), ("resample_filter", ["a", "b"]), ("use_fp16", "no"), ("dropout", "x"),
]  # fmt: skip


class TestBadFiles:
    def refused(self, path, message):
        with pytest.raises(edm2.UserError, match=message) as error:
            edm2.load_snapshot(path)
        assert str(path) in str(error.value) and "\n" not in str(error.value)

    def test_missing(self, tmp_path):
        self.refused(tmp_path / "a", "does not exist")

    @pytest.mark.parametrize("keep", [0, 4, 100, 5000, -1])
    def test_truncated(self, tmp_path, keep):
        path = tmp_path / "a"
        edm2.save_snapshot(path, tiny_net())
        path.write_bytes(path.read_bytes()[:keep])
        self.refused(path, "truncated or no safetensors")

    @pytest.mark.parametrize("content", [b"\x80\x04}q\x00.", b"hello, world, hello", bytes(1000), b"\xff" * 64])
    def test_foreign(self, tmp_path, content):
        (tmp_path / "a").write_bytes(content)
        self.refused(tmp_path / "a", "truncated or no safetensors")

    @pytest.mark.parametrize("metadata", [None, {"edm2": "999"}])
    def test_other_safetensors(self, tmp_path, metadata):
        save_file({"w": torch.ones(2)}, tmp_path / "a", metadata)
        self.refused(tmp_path / "a", "not a snapshot of this project")

    @pytest.mark.parametrize("more", [{}, {"config": "{", "encoder": "null", "meta": "{}"}])
    def test_damaged_header(self, tmp_path, more):
        save_file({"w": torch.ones(2)}, tmp_path / "a", {"edm2": "1", **more})
        self.refused(tmp_path / "a", "damaged header")

    @pytest.mark.parametrize(
        ("change", "value"),
        [
            ("config", {"nonsense": 1}),
            ("config", {}),
            ("config", {**tiny_net().config, "channel_mult": []}),
            ("config", {**tiny_net().config, "channels_per_head": 0}),
            ("encoder", {"type": "x"}),
            ("encoder", {"type": "vae-latents", "raw_std": [0.0, 0.0]}),
            ("encoder", {"type": "vae-latents", "vae": 5}),
            *(("config", {**tiny_net().config, name: value}) for name, value in ODD),
            ("config", {**tiny_net().config, "model_channels": 16}),
        ],
    )
    def test_contradictory(self, tmp_path, change, value):
        header = {"config": tiny_net().config, "encoder": None, "meta": {}, change: value}
        metadata = {"edm2": "1", **{key: json.dumps(v) for key, v in header.items()}}
        save_file(tiny_net().state_dict(), tmp_path / "a", metadata)
        self.refused(tmp_path / "a", "does not fit its own configuration")


class TestEncoders:
    def test_pixels_survive(self):
        x = torch.arange(256, dtype=torch.uint8).reshape(1, 1, 16, 16)
        latent = RGBEncoder().encode(x)
        assert latent.min() == -1 and latent.max() == 1
        torch.testing.assert_close(RGBEncoder().decode(latent), x)
        assert RGBEncoder().decode(torch.tensor([-3.0, 3.0])).tolist() == [0, 255]

    def test_published_latent_statistics(self):
        encoder = LatentEncoder()
        scale, bias = encoder.scale.flatten().tolist(), encoder.bias.flatten().tolist()
        assert scale == pytest.approx([0.119904071, 0.108225107, 0.134770885, 0.152439028], rel=1e-6)
        assert bias == pytest.approx([-0.696642637, -0.351731598, -0.016172506, 0.327743918], rel=1e-6)

    def test_latents_are_drawn_and_standardised(self):
        torch.manual_seed(0)
        mean = torch.randn(64, 4, 8, 8) * 3 + torch.tensor([5.81, 3.25, 0.12, -2.15]).reshape(4, 1, 1)
        spread = (torch.tensor([4.17, 4.62, 3.71, 3.28]) ** 2 - 9).sqrt().reshape(4, 1, 1).expand_as(mean)
        encoder, normal = LatentEncoder(), torch.randn(64, 4, 8, 8)
        latents = encoder.encode(torch.cat([mean, spread], 1), normal)
        assert latents.mean((0, 2, 3)).abs().max() < 0.03
        torch.testing.assert_close(latents.std((0, 2, 3)), torch.full((4,), 0.5), rtol=0.03, atol=0)
        torch.testing.assert_close(encoder.decode(latents), mean + spread * normal)

    def test_choice(self):
        assert [encoder_for(c, np.uint8)[1] for c in (1, 3)] == [1, 3]
        encoder, channels = encoder_for(8, np.dtype(np.float32))
        assert channels == 4 and encoder.draws_noise
        with pytest.raises(edm2.UserError, match="8 channels"):
            encoder_for(4, np.dtype(np.float32))
        with pytest.raises(ValueError, match="unknown encoder"):
            encoder_from_config({"type": "x"})
