"""EMA mathematics against the official tool's values, published numbers and direct tracking."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import edm2
from edm2 import phema
from tests.conftest import Golden, relative_error, tiny_net

FLOAT64 = 1e-10


def test_golden():
    g = {key: value.numpy() for key, value in Golden("phema").group("").items()}
    assert relative_error(phema.std_to_exp(g["stds"]), g["exps"]) < FLOAT64
    assert relative_error(phema.exp_to_std(g["exp_in"]), g["exp_to_std"]) < FLOAT64
    correlation = phema.power_function_correlation(g["corr_a_ofs"], g["corr_a_std"], g["corr_b_ofs"], g["corr_b_std"])
    assert relative_error(correlation, g["corr"]) < FLOAT64
    for case in ("few", "many"):
        arguments = (g[f"{case}/{key}"] for key in ("in_ofs", "in_std", "out_ofs", "out_std"))
        assert relative_error(phema.solve_posthoc_coefficients(*arguments), g[f"{case}/coef"]) < FLOAT64


def test_golden_beta():
    g = {key: value.numpy() for key, value in Golden("phema").group("").items()}
    betas = [phema.power_function_beta(std, g["beta_t_next"], g["beta_t_delta"]) for std in (0.05, 0.10, 0.15)]
    assert relative_error(np.stack(betas), g["beta"]) < FLOAT64


def test_published_exponents():
    table = {
        0.010: 96.9948978, 0.015: 63.6589342, 0.020: 46.9895822, 0.025: 36.9868397, 0.03: 30.3173716,
        0.05: 16.9721986, 0.075: 10.2891164, 0.10: 6.9372039, 0.13: 4.6035968, 0.15: 3.5578688,
        0.20: 1.8262138, 0.25: 0.7198240, 0.28: 0.1693440,
    }  # fmt: skip
    assert phema.std_to_exp(list(table)).tolist() == pytest.approx(list(table.values()), rel=1e-7)


@given(st.floats(0.005, 0.288))
def test_exponent_inverts_width(std):
    assert phema.exp_to_std(phema.std_to_exp(std)) == pytest.approx(std, rel=1e-9)


@pytest.mark.parametrize("std", [0, -0.1, 0.2887, 1, float("nan")])
def test_impossible_widths(std):
    with pytest.raises(ValueError, match="sigma_rel must lie in"):
        phema.std_to_exp(std)


def test_published_betas():
    images = np.array([2048, 4096, 2**23, 2**31])
    expected = [0, 0.0040800317, 0.9980638463, 0.9999924305]
    assert phema.power_function_beta(0.10, images, 2048).tolist() == pytest.approx(expected, rel=1e-8)
    expected = [0, 3.8889211e-6, 0.9956213349, 0.9999828605]
    assert phema.power_function_beta(0.05, images, 2048).tolist() == pytest.approx(expected, rel=1e-7)


def test_published_inner_products():
    inner = phema.power_function_correlation
    assert inner(1, 0.05, 1, 0.05) == pytest.approx(9.2432535239)
    assert inner(1, 0.05, 1, 0.10) == pytest.approx(5.7267132475)
    assert inner(0.5, 0.05, 1, 0.10) == pytest.approx(0.0467303427, rel=1e-8)
    assert inner(1, 0.10, 0.5, 0.05) == pytest.approx(0.0467303427, rel=1e-8)


@given(st.floats(0.1, 1), st.floats(0.02, 0.28), st.floats(0.1, 1), st.floats(0.02, 0.28))
def test_inner_product_is_the_integral(t_a, std_a, t_b, std_b):
    """∫ p_a p_b dt with p(t) = (γ+1)·t^γ / T^(γ+1) on [0, T], by quadrature."""
    ends, exps = np.array([t_a, t_b]), phema.std_to_exp([std_a, std_b])
    x, weights = np.polynomial.legendre.leggauss(200)
    t = (x[:, None] + 1) / 2 * ends.min()
    density = ((exps + 1) / ends * (t / ends) ** exps).prod(axis=1)
    integral = (weights * density).sum() * ends.min() / 2
    assert phema.power_function_correlation(t_a, std_a, t_b, std_b) == pytest.approx(integral, rel=1e-6, abs=1e-250)


def test_published_coefficients():
    times, stds = np.repeat(np.arange(1, 9), 2), np.tile([0.05, 0.10], 8)
    table = {
        0.03: (-0.1771689617, 0.5766506098, 2.3289138060, -1.7334349988),
        0.15: (-0.0858081390, 0.1986636001, -0.1730427924, 0.9406542163),
        0.25: (-0.1183532296, 0.2647567707, -0.1507524500, 0.5432043608),
    }
    for std, expected in table.items():
        coefficients = phema.solve_posthoc_coefficients(times / 8, stds, 1, std)
        assert coefficients[-4:, 0].tolist() == pytest.approx(expected, rel=1e-7)
        assert coefficients.sum() == pytest.approx(1)


def track(theta, std, delta=1):
    """A power-function EMA of a sequence, step by step."""
    average = 0.0
    for n, value in enumerate(theta, start=1):
        beta = phema.power_function_beta(std, n * delta, delta)
        average = beta * average + (1 - beta) * value
    return average


def test_published_tracking():
    for count, expected in {10: (9.829586952, 9.315390399, 8.662824621), 100: (95.214159533, 89.304204277, 82.503693545)}.items():
        averages = [track(np.arange(1, count + 1), std) for std in (0.05, 0.10, 0.15)]
        assert averages == pytest.approx(expected, rel=1e-9)
    wave = np.sin(np.arange(1, 1025) / 50)
    averages = [track(wave, std) for std in (0.03, 0.05, 0.10, 0.15, 0.25)]
    assert averages == pytest.approx([0.743042833, 0.480676774, 0.146500197, 0.053401268, 0.012424306], rel=1e-7)


@pytest.mark.parametrize(
    ("spacing", "expected"), [(64, (0.746600539, 0.053553865, 0.004408543)), (128, (0.7876888, 0.0555443, 0.007642454))]
)
def test_published_reconstruction(spacing, expected):
    wave = np.sin(np.arange(1, 1025) / 50)
    snapshots = [
        (n, std, {"w": torch.tensor([track(wave[:n], std)])})
        for n in range(spacing, 1025, spacing)
        for std in (0.05, 0.10)
    ]
    averages = [tensors["w"].item() for tensors in phema.reconstruct(snapshots, [0.03, 0.15, 0.25])]
    assert averages == pytest.approx(expected, rel=2e-5)  # sums in fp32


@pytest.mark.parametrize(
    ("std", "expected"),
    [(0.15, (2.489e-2, 2.775e-3, 2.063e-4, 1.352e-5, 8.551e-7)), (0.03, (4.010e-1, 1.604e-1, 2.375e-2, 1.976e-3, 1.335e-4)),
     (0.25, (1.376e-1, 3.476e-2, 7.144e-3, 1.366e-3, 2.548e-4))],
)  # fmt: skip
def test_published_errors_of_fit(std, expected):
    """∫(Σ x_i p_i − p)² dt of coefficients that are not divided by their sum, and of those that are, which is a little larger."""
    for n, value in zip((4, 8, 16, 32, 64), expected):
        times, stds = np.repeat(np.arange(1, n + 1) / n, 2), np.tile([0.05, 0.10], n)
        norm = phema.power_function_correlation(1, std, 1, std)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(phema, "solve_posthoc_coefficients", undivided)
            assert phema.fit(times, stds, 1, std).error[0] ** 2 * norm == pytest.approx(value, rel=1e-3)
        found = phema.fit(times, stds, 1, std)
        assert value * 0.999 < found.error[0] ** 2 * norm < value * 1.4
        assert found.amplification[0] == pytest.approx(np.linalg.norm(found.coefficients))


@pytest.mark.parametrize("times", [[10, 10], [0, 10], [-1, 10]])
def test_averages_that_cannot_be_fitted(times):
    with pytest.raises(ValueError, match="not positive, or two of one time and width"):
        phema.fit(times, [0.05, 0.05], 10, [0.07])


def undivided(in_ofs, in_std, out_ofs, out_std):
    inner = phema.power_function_correlation
    A = inner(in_ofs[:, None], in_std[:, None], in_ofs, in_std)
    return np.linalg.solve(A, inner(in_ofs[:, None], in_std[:, None], out_ofs, out_std))


@pytest.mark.parametrize("std", [0.03, 0.05, 0.08, 0.12, 0.16, 0.2, 0.25])
def test_random_walks(std):
    """Of 4,096 steps, tracked directly and from 64 fp32 snapshots (32 times, two widths): what the paper's method promises."""
    walk = np.cumsum(np.random.RandomState(0).randn(4096, 256), axis=0)
    stored = [(0.05, track_all(walk, 0.05)), (0.1, track_all(walk, 0.1))]
    snapshots = [(n, width, {"w": torch.tensor(of[n - 1], dtype=torch.float32)}) for n in range(128, 4097, 128) for width, of in stored]
    (found,) = phema.reconstruct(snapshots, [std])
    assert relative_error(found["w"].double(), torch.from_numpy(track_all(walk, std)[-1])) < (1e-3 if std <= 0.2 else 1e-2)


def track_all(walk, std):
    """`track` after every step."""
    averages, average = [], 0.0
    for n, beta in enumerate(phema.power_function_beta(std, np.arange(1, len(walk) + 1), 1)):
        average = beta * average + (1 - beta) * walk[n]
        averages.append(average)
    return np.stack(averages)


def snapshot(nimg, std, shape=(3,)):
    return phema.StoredAverage(nimg, std, {"w": torch.full(shape, float(nimg)), "b": torch.ones(2).half()})


def test_reconstructing_what_is_stored_returns_it():
    snapshots = [snapshot(n, std) for n in (100, 200, 300) for std in (0.05, 0.10)]
    (average,) = phema.reconstruct(snapshots, [0.10], out_nimg=200)
    torch.testing.assert_close(average["w"], torch.full((3,), 200.0))
    torch.testing.assert_close(average["b"], torch.ones(2))
    assert average["b"].dtype == torch.float32


def test_reconstructing_from_files(tmp_path):
    """What `load_snapshot` returns will do: here two averages of one network, which any combination returns."""
    net = tiny_net()
    for std in (0.05, 0.10):
        edm2.save_snapshot(tmp_path / f"{std}", net, meta={"nimg": 1024, "std": std}, dtype=torch.float32)
    snapshots = [edm2.load_snapshot(tmp_path / f"{std}") for std in (0.05, 0.10)]
    for average in phema.reconstruct(snapshots, [0.07, 0.12]):
        for name, p in net.named_parameters():
            torch.testing.assert_close(average[name], p.detach(), rtol=1e-4, atol=1e-5)
    snapshots[0].meta.pop("std")
    with pytest.raises(ValueError, match="does not say its images seen"):
        phema.reconstruct(snapshots, [0.07])


@pytest.mark.parametrize(
    ("snapshots", "out_nimg", "message"),
    [
        ([], None, "no snapshots"),
        ([snapshot(100, 0.05)], 150, "no snapshot at 150"),
        ([snapshot(100, 0.05), snapshot(100, 0.05)], None, "same time and sigma_rel"),
        ([snapshot(100, 0.05), snapshot(200, 0.05, (4,))], None, "different networks"),
    ],
)
def test_snapshots_that_do_not_fit(snapshots, out_nimg, message):
    with pytest.raises(ValueError, match=message):
        phema.reconstruct(snapshots, [0.1], out_nimg)
