"""The optimizer and the learning rate against the official implementation's values and their own rules."""

import pytest
import torch

import edm2
from edm2.layers import normalized_weights
from edm2.weights import StepWeights
from kernels.jit import recording
from tests.conftest import Golden, relative_error, tiny_net

TRAINING = 1e-5


def test_golden_training():
    """Four steps: loss, learning rate, weights and both averages."""
    golden = Golden("training_cond")
    net = golden.net().train()
    edm2.force_weight_norm_(net)
    optimizer = edm2.EDM2Optimizer(net)
    batch, steps = int(golden["batch_size"]), int(golden["steps"])
    schedule = [float(golden[f"lr/{key}"]) for key in ("ref_lr", "ref_batches", "rampup_Mimg")]
    for i in range(steps):
        lr = edm2.learning_rate_schedule(i * batch, batch, *schedule)
        assert lr == pytest.approx(float(golden["lrs"][i]), rel=1e-12)
        draws = (golden[key][i] for key in ("images", "sigma", "noise", "labels"))
        loss = edm2.denoising_loss(net, *draws)
        assert loss.mean().item() == pytest.approx(float(golden["losses"][i]), rel=TRAINING)
        optimizer.zero_grad()
        (loss.sum() / batch).backward()
        optimizer.step(lr, (i + 1) * batch, batch)
    expected = golden.net(weights="final/")
    edm2.force_weight_norm_(expected)
    for name, tensor in expected.state_dict().items():
        assert relative_error(net.state_dict()[name], tensor) < TRAINING, name
    for std in (0.05, 0.10):
        average = optimizer.ema(std)
        for name, tensor in golden.group(f"ema-{std:.3f}/").items():
            assert relative_error(average[name], tensor) < TRAINING, (std, name)


def test_golden_learning_rates():
    golden = Golden("phema")
    rates = [edm2.learning_rate_schedule(*row) for row in golden["lr_args"].tolist()]
    assert rates == pytest.approx(golden["lr"].tolist(), rel=1e-12)


def test_published_learning_rates():
    images = [0, 2048, 5e6, 1e7, 143_360_000, 2**28, 2**30, 2**31]
    expected = [0, 2.048e-6, 0.005, 0.01, 0.01, 0.0073079246, 0.0036539623, 0.0025837415]
    assert [edm2.learning_rate_schedule(n, 2048, 0.01, 70000) for n in images] == pytest.approx(expected, rel=1e-8)
    assert edm2.learning_rate_schedule(2**31, 2048, 0.01, 35000) == pytest.approx(0.0018269812, rel=1e-7)


def fill_gradients(net, value=None):
    generator = torch.Generator().manual_seed(0)
    for p in net.parameters():
        p.grad = torch.randn(p.shape, generator=generator) if value is None else torch.full_like(p, value)


def test_order_of_a_step():
    """Adam, then averages, then normalisation: from one parameter's own arithmetic."""
    net = tiny_net().train()
    edm2.force_weight_norm_(net)
    optimizer = edm2.EDM2Optimizer(net, betas=(0.8, 0.95), eps=1e-6, ema_stds=(0.07,))
    w = net.unet.out_conv.weight
    x, m, v, average = w.detach().double(), 0, 0, 0
    for step in (1, 2, 3):
        fill_gradients(net)
        g = w.grad.double()
        optimizer.step(0.01, step * 4, 4)
        m, v = 0.8 * m + 0.2 * g, 0.95 * v + 0.05 * g**2
        x = x - 0.01 * (m / (1 - 0.8**step)) / ((v / (1 - 0.95**step)).sqrt() + 1e-6)
        beta = float(edm2.phema.power_function_beta(0.07, step * 4, 4))
        average = beta * average + (1 - beta) * x
        x = x / (1e-4 + x.square().mean(dim=(1, 2, 3), keepdim=True).sqrt())
        assert relative_error(w, x) < 1e-6
        assert relative_error(optimizer.ema(0.07)["unet.out_conv.weight"], average) < 1e-6


def test_every_weight_is_normalised_and_no_gain():
    net = tiny_net(gains=0.5).train()
    optimizer = edm2.EDM2Optimizer(net)
    fill_gradients(net, 0.0)
    optimizer.step(0.01, 4, 4)
    for name, p in net.named_parameters():
        if p.ndim:
            rms = p.square().flatten(1).mean(dim=1).sqrt()
            torch.testing.assert_close(rms, torch.ones_like(rms), rtol=1e-3, atol=0)
        else:
            assert p.item() == 0.5, name


def test_nonfinite_gradients_are_counted_and_zeroed():
    nets = [tiny_net().train(), tiny_net().train()]
    optimizers = [edm2.EDM2Optimizer(net) for net in nets]
    for net in nets:
        fill_gradients(net)
    nets[0].unet.out_conv.weight.grad[0, 0, 0] = torch.tensor([float("nan"), float("inf"), -float("inf")])
    nets[0].unet.out_gain.grad.fill_(float("nan"))
    nets[1].unet.out_conv.weight.grad[0, 0, 0] = 0
    nets[1].unet.out_gain.grad.fill_(0)
    for optimizer in optimizers:
        optimizer.step(0.01, 4, 4)
    assert [int(optimizer.nonfinite) for optimizer in optimizers] == [4, 0]
    for (name, a), b in zip(nets[0].named_parameters(), nets[1].parameters()):
        torch.testing.assert_close(a, b, rtol=0, atol=0, msg=name)
    fill_gradients(nets[0])
    optimizers[0].step(0.01, 8, 4)
    assert int(optimizers[0].nonfinite) == 0


def test_state_survives():
    nets = [tiny_net().train() for _ in range(2)]
    optimizers = [edm2.EDM2Optimizer(net) for net in nets]
    for step in (1, 2):
        fill_gradients(nets[0])
        optimizers[0].step(0.01, step * 4, 4)
    nets[1].load_state_dict(nets[0].state_dict())
    optimizers[1].load_state_dict(optimizers[0].state_dict())
    for net, optimizer in zip(nets, optimizers):
        fill_gradients(net)
        optimizer.step(0.01, 12, 4)
    for a, b in zip(nets[0].parameters(), nets[1].parameters()):
        torch.testing.assert_close(a, b, rtol=0, atol=0)
    for std in (0.05, 0.10):
        for name, average in optimizers[0].ema(std).items():
            torch.testing.assert_close(average, optimizers[1].ema(std)[name], rtol=0, atol=0)


def test_state_of_other_averages_is_refused():
    state = edm2.EDM2Optimizer(tiny_net(), ema_stds=(0.05,)).state_dict()
    with pytest.raises(ValueError, match="averages"):
        edm2.EDM2Optimizer(tiny_net()).load_state_dict(state)


def test_averages_are_not_the_weights_themselves():
    net = tiny_net().train()
    optimizer = edm2.EDM2Optimizer(net)
    for step in (1, 2, 3):
        fill_gradients(net)
        optimizer.step(0.01, step * 4, 4)
    for std in (0.05, 0.10):
        assert relative_error(optimizer.ema(std)["unet.out_conv.weight"], net.unet.out_conv.weight) > 1e-6


@pytest.mark.parametrize("stds", [(), (0.05, 0.10)])
def test_one_launch_that_moves_each_tensor_once(stds):
    """Reads w, g, m, v and the averages, writes all but g: 44 bytes per parameter with two averages."""
    net = tiny_net().train()
    optimizer, launches = edm2.EDM2Optimizer(net, ema_stds=stds), []
    with recording(launches.append):
        for step in (1, 2):
            fill_gradients(net)
            optimizer.step(0.01 * step, step * 4, 4)
    first, second = launches
    parameters = sum(p.numel() for p in net.parameters())
    rows, tensors, roles = first.grid[0], len(list(net.parameters())), 6 + len(stds)
    tables = rows * (8 + 4) + tensors * (40 + 8 * roles + 8) + 4 * len(stds)
    assert first.bytes == parameters * (28 + 8 * len(stds)) + tables
    assert first.flops == 0 and rows == sum(len(p) if p.ndim else 1 for p in net.parameters())
    assert second.options == first.options and second.grid == first.grid, "a schedule compiles the kernel anew"
    for args in (first.args, second.args):
        assert all(isinstance(x, torch.Tensor) for x in args)
    assert [(x.dtype, x.shape) for x in first.args] == [(x.dtype, x.shape) for x in second.args]


def test_the_same_launch_prepares_convolutions():
    """2 bytes per parameter in half precision and the rows' lengths; only the others are prepared in the next step."""
    net = tiny_net(dtype=torch.float16).train()
    weights, launches = StepWeights(net), []
    optimizers = [edm2.EDM2Optimizer(net), edm2.EDM2Optimizer(net, weights=weights)]
    with recording(launches.append):
        for optimizer in optimizers:
            fill_gradients(net)
            optimizer.step(0.01, 4, 4)
        steps = len(launches)
        with weights.prepared():
            pass
    up = net.unet.dec["8x8_up"].conv_res0.weight
    aside = net.unet.out_conv.weight, net.unet.enc["8x8_conv"].weight, up  # a gain; an odd number of channels; sums of taps
    normalized = normalized_weights(net)
    convolutions = [p for p in normalized if p.ndim == 4 and all(p is not x for x in aside)]
    plain, fused = launches[:steps]
    assert fused.bytes - plain.bytes == sum(2 * p.numel() + 4 * len(p) for p in convolutions)
    assert sum(launch.grid[0] for launch in launches[steps:]) == sum(map(len, normalized)) - sum(map(len, convolutions))
