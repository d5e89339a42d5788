"""The network against the official implementation's values, published sizes and the deterministic network."""

import math
from importlib.util import find_spec

import numpy as np
import pytest
import torch

import edm2
from bench.baseline import Baseline
from edm2.layers import MPFourier
from edm2.network import Block
from edm2.summary import multiply_adds, parameter_count, saved_bytes
from edm2.weights import StepWeights
from tests.conftest import Golden, relative_error, tiny_net

FORWARD, GRADIENT = 1e-5, 1e-4
needs_triton = pytest.mark.skipif(not find_spec("triton"), reason="without Triton every forward prepares its weights, and saves them")
SIZES = "xxs xs s m l xl xxl".split()


def block_output(y):
    """Blocks of the encoder also return their input."""
    return y[0] if isinstance(y, tuple) else y


@pytest.mark.parametrize("name", ["network_cond", "network_uncond_rgb"])
class TestGolden:
    def test_evaluation(self, name):
        golden = Golden(name)
        net = golden.net().eval()
        rms = {}
        stages = {key: module for key, module in net.unet.named_modules() if key.count(".") == 1 or key == "out_conv"}
        for key, module in stages.items():
            module.register_forward_hook(lambda _, __, y, key=key: rms.update({key: block_output(y).square().mean().sqrt()}))
        x = golden["images"] + golden["noise"]
        denoised, logvar = net(x, golden["sigma"], golden.get("labels"), return_logvar=True)
        assert relative_error(denoised, golden["eval_denoised"]) < FORWARD
        assert relative_error(logvar, golden["eval_logvar"]) < FORWARD
        for key, expected in golden.group("eval_block_rms/unet.").items():
            assert relative_error(rms[key], expected) < FORWARD, key

    def test_training(self, name):
        golden = Golden(name)
        net = golden.net().train()
        edm2.force_weight_norm_(net)
        forced = golden.group("after_forward/")
        for key, weight in net.named_parameters():
            assert relative_error(weight, forced[key]) < FORWARD, key
        batch = golden["images"], golden["sigma"], golden["noise"], golden.get("labels")
        loss = edm2.denoising_loss(net, *batch)
        assert relative_error(loss, golden["train_loss"]) < FORWARD
        denoised = net(golden["images"] + golden["noise"], golden["sigma"], golden.get("labels"))
        assert relative_error(denoised, golden["train_denoised"]) < FORWARD
        (loss.sum() / len(loss)).backward()
        for key, weight in net.named_parameters():
            assert relative_error(weight.grad, golden[f"grad/{key}"]) < GRADIENT, key


class TestDeterministicNetwork:
    """Published sums of a network whose weights come from NumPy's frozen generators."""

    @pytest.fixture()
    def net(self):
        net = edm2.Precond(
            16, 3, 10, model_channels=64, channel_mult=(1, 2), num_blocks=1, attn_resolutions=(8,), dropout=0
        )  # fmt: skip
        state = {}
        for k, (name, p) in enumerate(net.named_parameters()):
            fill = np.random.RandomState(1000 + k).randn(p.numel()).reshape(p.shape)
            state[name] = torch.tensor({"emb_gain": 0.5, "out_gain": 1.0}.get(name.split(".")[-1], fill))
        for k, (name, b) in enumerate(net.named_buffers()):
            random = np.random.RandomState(2000 + k)
            draws = random.randn(b.numel()) if name.endswith("freqs") else random.rand(b.numel())
            state[name] = torch.tensor(2 * np.pi * draws)
        net.load_state_dict(state)
        assert len(list(net.parameters())) == 59 and sum(p.numel() for p in net.parameters()) == 2_889_035
        return net

    @pytest.fixture()
    def batch(self):
        y = torch.tensor(0.5 * np.random.RandomState(2).randn(2, 3, 16, 16), dtype=torch.float32)
        e = torch.tensor(np.random.RandomState(3).randn(2, 3, 16, 16), dtype=torch.float32)
        sigma = torch.tensor([0.3, 5.0]).reshape(2, 1, 1, 1)
        return y, sigma, e * sigma, torch.tensor([3, 7])

    def test_evaluation(self, net, batch):
        y, sigma, noise, labels = batch
        D, u = net.eval()(y + noise, sigma, labels, return_logvar=True)
        assert D.sum().item() == pytest.approx(-102.6704, rel=1e-5)
        assert D.square().sum().item() == pytest.approx(274.3463, rel=1e-5)
        assert relative_error(D[0, 0, 0, :4], [0.2388562, 0.0200152, -0.8830371, 0.0443299]) < 1e-5
        assert relative_error(D[1, 2, 15, -4:], [0.0812705, -0.3993703, 0.4271340, -0.1834696]) < 1e-5
        assert u.flatten().tolist() == pytest.approx([-0.5098834, 1.3864082], rel=1e-5)
        D = net(y + noise, sigma)
        assert D.sum().item() == pytest.approx(-137.47987, rel=1e-5)
        assert D.square().sum().item() == pytest.approx(279.35888, rel=1e-5)

    def test_training_step(self, net, batch):
        y, sigma, noise, labels = batch
        edm2.force_weight_norm_(net.train())
        for p in net.parameters():
            if p.ndim:
                assert p.norm().item() == pytest.approx(0.9999 * math.sqrt(p.numel()), rel=1e-5)
        optimizer = edm2.EDM2Optimizer(net)
        D, u = net(y + noise, sigma, labels, return_logvar=True)
        assert D.sum().item() == pytest.approx(-102.66927, rel=1e-5)
        weight = (sigma**2 + 0.25) / (0.5 * sigma) ** 2
        mse = (weight * (D - y) ** 2).mean(dim=(1, 2, 3)).tolist()
        assert mse == pytest.approx([1.7089258, 1.5237991], rel=1e-5)
        loss = edm2.denoising_loss(net, y, sigma, noise, labels).sum()
        assert loss.item() == pytest.approx(3151.0588, rel=1e-5)
        (loss / 2).backward()
        norms = {
            "unet.out_gain": 881.551, "unet.emb_noise.weight": 28.815, "unet.emb_label.weight": 25.1676,
            "unet.enc.16x16_conv.weight": 90.3055, "unet.enc.8x8_block0.attn_qkv.weight": 11.8298,
            "unet.enc.8x8_block0.attn_proj.weight": 9.79026, "unet.enc.8x8_block0.conv_skip.weight": 32.5616,
            "unet.dec.8x8_block0.conv_res0.weight": 10.2476, "unet.dec.16x16_block1.conv_res1.weight": 37.1369,
            "unet.dec.16x16_block1.emb_gain": 64.4501, "unet.out_conv.weight": 83.2754, "logvar_linear.weight": 796.43,
        }  # fmt: skip
        grads = {name: p.grad.norm().item() for name, p in net.named_parameters()}
        assert {name: grads[name] for name in norms} == pytest.approx(norms, rel=1e-4)

        optimizer.step(lr=0.01, next_nimg=2, batch_size=2)
        D, u = net(y + noise, sigma, labels, return_logvar=True)  # the first step of Adam is sign-like, hence 1e-3
        assert D.sum().item() == pytest.approx(613.5147, rel=1e-3)
        assert D.square().sum().item() == pytest.approx(727.4913, rel=1e-3)
        assert edm2.denoising_loss(net, y, sigma, noise, labels).sum().item() == pytest.approx(5687.094, rel=1e-3)
        assert u.flatten().tolist() == pytest.approx([-0.4035251, 1.3611840], rel=1e-3)


COUNTS = {  # 512-conditional, 64-conditional, 512-unconditional
    "xxs": (31_309_029, 31_307_877, 31_053_029),
    "xs": (124_713_253, 124_710_949, 124_201_253),
    "s": (280_212_837, 280_209_381, 279_444_837),
    "m": (497_807_781, 497_803_173, 496_783_781),
    "l": (777_498_085, 777_492_325, 776_218_085),
    "xl": (1_119_283_749, 1_119_276_837, 1_117_747_749),
    "xxl": (1_523_164_773, 1_523_156_709, 1_521_372_773),
}
GIGA_MACS = dict(zip(SIZES, (11.345, 44.951, 100.819, 178.947, 279.337, 401.988, 546.900)))


@pytest.mark.parametrize("size", SIZES)
def test_parameter_counts(size):
    variants = (4, 1000), (3, 1000), (4, 0)
    counts = [parameter_count(lambda v=v: edm2.build(f"edm2-img512-{size}", 64, *v)) for v in variants]
    assert tuple(counts) == COUNTS[size]


@pytest.mark.parametrize("size", SIZES)
def test_multiply_adds(size):
    macs = multiply_adds(lambda: edm2.build(f"edm2-img512-{size}", 64, 4, 1000))
    assert macs / 1e9 == pytest.approx(GIGA_MACS[size], rel=1e-3)


def test_presets():
    assert sum(name.startswith("edm2-img") for name in edm2.PRESETS) == 12 and "digits" in edm2.PRESETS
    row = edm2.PRESETS["edm2-img512-xxl"]
    assert (row.channels, row.lr, row.decay, row.dropout, row.duration) == (448, 0.0065, 70000, 0.10, 896 * 2**20)
    assert (row.P_mean, row.P_std, row.batch, row.rampup_Mimg) == (-0.4, 1.0, 2048, 10)
    row = edm2.PRESETS["edm2-img64-s"]
    assert (row.channels, row.lr, row.decay, row.dropout, row.duration) == (192, 0.0100, 35000, 0, 2**30)
    assert (row.P_mean, row.P_std, row.snapshot, row.checkpoint) == (-0.8, 1.6, 8 * 2**20, 128 * 2**20)


def test_unknown_preset_names_the_near_ones():
    with pytest.raises(edm2.UserError, match="unknown preset 'edm2-img512-xx'.*edm2-img512-xxl"):
        edm2.build("edm2-img512-xx", 64, 4, 1000)


def test_published_parameter_names_and_shapes():
    with torch.device("meta"):
        state = edm2.build("edm2-img512-s", 64, 4, 1000).state_dict()
    expected = {
        "unet.out_gain": (), "unet.emb_noise.weight": (768, 192), "unet.emb_label.weight": (768, 1000),
        "unet.emb_fourier.freqs": (192,), "unet.emb_fourier.phases": (192,), "logvar_fourier.freqs": (128,),
        "logvar_linear.weight": (1, 128), "unet.out_conv.weight": (4, 192, 3, 3),
        "unet.enc.64x64_conv.weight": (192, 5, 3, 3), "unet.enc.32x32_down.conv_res0.weight": (192, 192, 3, 3),
        "unet.enc.16x16_block2.attn_qkv.weight": (1728, 576, 1, 1), "unet.dec.8x8_in0.attn_proj.weight": (768, 768, 1, 1),
        "unet.dec.64x64_block3.emb_gain": (), "unet.dec.16x16_up.emb_linear.weight": (768, 768),
    }  # fmt: skip
    assert {key: tuple(state[key].shape) for key in expected} == expected
    assert not any("attn" in key for key in state if "8x8_in1" in key or "_up." in key or "_down." in key)
    widths = [state[f"unet.dec.{r}x{r}_block{i}.conv_res0.weight"].shape[1] for r in (8, 16, 32, 64) for i in range(4)]
    assert widths == [1536, 1536, 1536, 1344, 1344, 1152, 1152, 960, 960, 768, 768, 576, 576, 384, 384, 384]
    block = [key.split("8x8_block0.")[1] for key in state if "enc.8x8_block0." in key]
    order = "emb_gain conv_res0 emb_linear conv_res1 conv_skip attn_qkv attn_proj".split()
    assert [key.split(".")[0] for key in block] == order


def test_initial_output_is_the_skip():
    net = tiny_net(gains=0.0)
    x, sigma = torch.randn(3, 2, 8, 8), torch.tensor([0.1, 1, 10])
    c_skip = 0.25 / (sigma**2 + 0.25)
    torch.testing.assert_close(net(x, sigma, torch.eye(5)[:3]), c_skip.reshape(3, 1, 1, 1) * x, rtol=0, atol=0)


def test_preconditioning_constants():
    """D = c_skip·x + c_out·F: recovered from a network whose raw output is replaced by a constant."""
    net = tiny_net()
    seen = {}

    class Raw(torch.nn.Module):
        granularity = 2

        def modulation(self, c_noise, labels, dtype):
            seen.update(c_noise=c_noise)

        def forward(self, x, modulation):
            seen.update(x=x)
            return torch.ones_like(x)

    net.unet = Raw()
    table = {  # σ: c_skip, c_out, c_in, c_noise
        0.1: (0.9615384615, 0.0980580676, 1.9611613514, -0.5756462732),
        0.5: (0.5, 0.3535533906, 1.4142135624, -0.1732867951),
        1.0: (0.2, 0.4472135955, 0.894427191, 0.0),
        80.0: (3.906097e-5, 0.4999902347, 0.0124997559, 1.0955066587),
    }
    for sigma, (c_skip, c_out, c_in, c_noise) in table.items():
        at_zero = net(torch.zeros(1, 2, 8, 8), sigma).unique().item()
        at_one = net(torch.ones(1, 2, 8, 8), sigma).unique().item()
        assert at_zero == pytest.approx(c_out, rel=1e-6)
        assert at_one - at_zero == pytest.approx(c_skip, rel=1e-6, abs=1e-7)
        assert seen["x"][..., :2].unique().item() == pytest.approx(c_in, rel=1e-6)
        assert torch.equal(seen["x"][..., 2:], torch.eye(6)[0].expand(1, 8, 8, 6))  # a channel of ones, then zeros
        assert seen["c_noise"].item() == pytest.approx(c_noise, rel=1e-6)


class TestCall:
    def test_sigma_forms_agree(self):
        net, x = tiny_net(), torch.randn(2, 2, 8, 8)
        expected = net(x, torch.tensor([0.7, 0.7]))
        for sigma in (0.7, torch.tensor(0.7), torch.full((2, 1, 1, 1), 0.7), torch.tensor([0.7])):
            torch.testing.assert_close(net(x, sigma), expected, rtol=0, atol=0)

    def test_label_forms_agree(self):
        net, x = tiny_net(), torch.randn(2, 2, 8, 8)
        vectors = net(x, 1.0, torch.eye(5)[[3, 1]])
        torch.testing.assert_close(net(x, 1.0, torch.tensor([3, 1])), vectors, rtol=0, atol=0)
        torch.testing.assert_close(net(x, 1.0), net(x, 1.0, torch.zeros(2, 5)), rtol=0, atol=0)
        assert relative_error(net(x, 1.0), vectors) > 1e-3

    def test_unconditional_ignores_labels(self):
        net, x = tiny_net(label_dim=0), torch.randn(2, 2, 8, 8)
        torch.testing.assert_close(net(x, 1.0, torch.eye(5)[:2]), net(x, 1.0), rtol=0, atol=0)

    def test_any_divisible_size(self):
        net = tiny_net(num_blocks=2)
        x = torch.randn(1, 2, 6, 14)
        assert net(x, 1.0).shape == x.shape

    def test_batch_of_none(self):
        assert tiny_net()(torch.zeros(0, 2, 8, 8), torch.zeros(0)).shape == (0, 2, 8, 8)

    def test_forward_writes_to_no_parameter(self):
        net = tiny_net().train()
        before = {name: p.clone() for name, p in net.state_dict().items()}
        net(torch.randn(2, 2, 8, 8), 1.0, return_logvar=True)
        for name, p in net.state_dict().items():
            torch.testing.assert_close(p, before[name], rtol=0, atol=0)

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
    def test_dtype_is_honoured_on_the_cpu(self, dtype):
        net, x = tiny_net(), torch.randn(2, 2, 8, 8)
        full = net(x, 1.0)
        net.dtype = dtype
        seen = []
        net.unet.out_conv.register_forward_pre_hook(lambda _, args: seen.append(args[0].dtype))
        half = net(x, 1.0)
        assert seen == [dtype] and half.dtype == torch.float32
        assert 1e-6 < relative_error(half, full) < (2e-2 if dtype == torch.bfloat16 else 2e-3)
        torch.testing.assert_close(net(x, 1.0, force_fp32=True), full, rtol=0, atol=0)

    def test_use_fp16_computes_in_fp32_on_the_cpu(self):
        net = tiny_net(use_fp16=True)
        seen = []
        net.unet.out_conv.register_forward_pre_hook(lambda _, args: seen.append(args[0].dtype))
        net(torch.randn(1, 2, 8, 8), 1.0)
        assert seen == [torch.float32]

    @pytest.mark.parametrize(
        ("args", "message"),
        [
            ((torch.zeros(1, 3, 8, 8), 1.0), r"x: expected \[N, 2, H, W\].*\[1, 3, 8, 8\]"),
            ((torch.zeros(1, 2, 7, 8), 1.0), "multiples of 2"),
            ((torch.zeros(3, 2, 8, 8), torch.ones(2)), "sigma: expected a scalar or 3 values"),
            ((torch.zeros(3, 2, 8, 8), 1.0, torch.zeros(3, 4)), r"class_labels: expected \[3, 5\]"),
        ],
    )
    def test_bad_input(self, args, message):
        with pytest.raises(ValueError, match=message):
            tiny_net()(*args)


def test_options_of_the_network():
    variants = [
        dict(channel_mult=(1, 1.5, 2)),
        dict(channel_mult_noise=2, channel_mult_emb=3),
        dict(resample_filter=(1, 3, 3, 1)),
        dict(clip_act=None, res_balance=0.4, attn_balance=0.2, concat_balance=0.3, label_balance=0.6),
        dict(channel_mult=(2, 1)),
        dict(channel_mult=(1,), attn_resolutions=()),
        dict(attn_resolutions=(8, 4), dropout=0.2),
    ]
    for kwargs in variants:
        net = tiny_net(**kwargs).train()
        y = net(torch.randn(2, 2, 8, 8), 1.0, torch.tensor([0, 4]))
        y.square().sum().backward()
        assert y.isfinite().all() and all(p.grad is not None and p.grad.isfinite().all() for p in net.unet.parameters())


def test_impossible_networks():
    with pytest.raises(ValueError, match="not a multiple of 8"):
        edm2.build("edm2-img512-s", 36, 4, 0)
    with pytest.raises(ValueError, match="32 channels cannot attend in heads of 64"):
        Block(32, 32, 32, attention=True)
    for options in (dict(flavor="enc"), dict(flavor="dec", resample_mode="up"), dict(flavor="dec", out_channels=24)):
        with pytest.raises(ValueError, match="skip_channels 8: only a block of the decoder"):
            Block(**dict(in_channels=24, out_channels=16, emb_channels=16, skip_channels=8) | options)


def test_a_skip_has_the_width_that_its_block_was_made_for():
    block = Block(24, 16, 16, "dec", skip_channels=8)
    x, m = torch.zeros(1, 2, 2, 16), torch.zeros(1, 16)
    assert block(x, m, torch.zeros(1, 2, 2, 8)).shape == (1, 2, 2, 16)
    for given, skip in ((0, None), (16, x)):
        with pytest.raises(ValueError, match=f"skip: expected 8 channels, got {given}"):
            block(x, m, skip)
    with pytest.raises(ValueError, match="skip: expected 0 channels, got 16"):
        Block(16, 16, 16, "dec")(x, m, x)


def test_activations_are_clipped():
    net = tiny_net(clip_act=0.5)
    block = net.unet.enc["8x8_block0"]
    y = block(torch.randn(1, 8, 8, 8) * 100, block.modulation(torch.randn(1, 16)))
    assert y.abs().max() == 0.5


@pytest.mark.parametrize("options", [{}, {"dropout": 1e-12}, {"resample_filter": (1, 3, 3, 1)}], ids=["plain", "by parts", "filter"])
def test_clip_is_differentiated_once(options):
    """By whoever reads a block's output: gradients are those of a network whose blocks clip themselves."""
    net = tiny_net(clip_act=0.6, num_blocks=2, **options).train()
    outputs = []
    for block in net.unet.blocks():
        block.register_forward_hook(lambda block, args, y: outputs.append(block_output(y).detach()))
    generator = torch.Generator().manual_seed(1)
    x, labels, weights = torch.randn(3, 2, 8, 8, generator=generator), torch.eye(5)[:3], torch.randn(3, 2, 8, 8, generator=generator)
    grads = []
    for model in (net, Baseline(net)):
        net.zero_grad()
        (model(x, torch.tensor([0.3, 1.0, 3.0]), labels) * weights).sum().backward()
        grads.append({name: p.grad for name, p in net.unet.named_parameters()})
    assert all(0.05 < (y.abs() == 0.6).float().mean() < 0.9 for y in outputs)
    assert max(relative_error(grads[0][name], g) for name, g in grads[1].items()) < GRADIENT


def test_dropout_only_in_training():
    net, x = tiny_net(dropout=0.5), torch.randn(1, 2, 8, 8)
    torch.testing.assert_close(net(x, 1.0), net(x, 1.0), rtol=0, atol=0)
    net.train()
    assert relative_error(net(x, 1.0), net(x, 1.0)) > 1e-3


def test_fourier_features():
    golden = Golden("primitives").group("fourier/")
    fourier = MPFourier(8)
    fourier.load_state_dict({"freqs": golden["freqs"], "phases": golden["phases"]})
    assert relative_error(fourier(golden["in"]), golden["y"]) < 1e-6
    torch.manual_seed(0)
    assert MPFourier(4096)(torch.tensor([0.3])).square().mean().item() == pytest.approx(1, abs=0.05)


@pytest.mark.parametrize("batch", [1, 3])
def test_gradients_of_the_image_and_the_noise_level(batch):
    """As methods of guidance take them from the denoiser."""
    net = tiny_net().requires_grad_(False)
    x = torch.randn(3, 2, 8, 8, generator=torch.Generator().manual_seed(1)).requires_grad_()
    sigma, labels = torch.linspace(0.3, 2, batch).requires_grad_(), torch.eye(5)[:3]
    actual, expected = (torch.autograd.grad(model(x, sigma, labels).sin().sum(), (x, sigma)) for model in (net, Baseline(net)))
    for a, b in zip(actual, expected):
        assert relative_error(a, b) < GRADIENT


def test_gradient_is_orthogonal_to_the_weight():
    net = tiny_net().train()
    edm2.EDM2Loss()(net, torch.randn(4, 2, 8, 8), torch.eye(5)[:4]).sum().backward()
    for name, w in net.named_parameters():
        if w.ndim:
            cosine = (w * w.grad).sum() / (w.norm() * w.grad.norm())
            assert abs(cosine) < 2e-4, name


@needs_triton
def test_saved_bytes_are_those_of_activations():
    """In proportion to the images: neither raw weights nor those prepared for the step count."""
    net = tiny_net(dtype=torch.float16).train()
    weights, counts = StepWeights(net), []
    for n in (1, 3):
        with weights.prepared(), saved_bytes(net) as saved:
            edm2.denoising_loss(net, torch.zeros(n, 2, 8, 8), torch.ones(n), torch.zeros(n, 2, 8, 8), torch.eye(n, 5))
        counts.append(saved())
    assert counts[1] == 3 * counts[0] > 0


@needs_triton
def test_weights_are_prepared_within_the_step_only():
    """Or an evaluation after the optimizer's step would see the old ones."""
    net, x = tiny_net(), torch.ones(1, 2, 8, 8)
    weights = StepWeights(net)
    with torch.no_grad():
        with weights.prepared():
            before = net(x, 1.0)
        first = net.unet.enc["8x8_conv"].weight
        first.copy_(first.roll(1, 0))
        assert relative_error(before, net(x, 1.0)) > 1e-3
        with pytest.raises(KeyError), weights.prepared():
            raise KeyError
        assert all(getattr(module, "prepared", None) is None for module in net.modules()) and net.unet.prepared_modulation is None
