"""Fréchet distances against closed forms and SciPy's matrix square root."""

import numpy as np
import pytest

from edm2.frechet import Gaussian, frechet_distance


def features(n: int, d: int, seed: int = 0, mean: float = 0.0) -> np.ndarray:
    """`[n, d]`, correlated, of very different variances."""
    random = np.random.default_rng(seed)
    return random.standard_normal((n, d)) * np.logspace(0, -2, d) @ random.standard_normal((d, d)) + mean


@pytest.mark.parametrize("sizes", [(100,), (1, 99), (33, 0, 33, 34), (1,) * 100])
def test_mean_and_covariance(sizes):
    """However the features are cut in batches, in half precision or not, and far from zero."""
    for x in (features(100, 7), features(100, 7, mean=1e6), features(100, 7).astype(np.float16)):
        gaussian = Gaussian()
        for part in np.split(x, np.cumsum(sizes)[:-1]):
            gaussian.add(part)
        assert gaussian.count == 100
        np.testing.assert_allclose(gaussian.mean, x.astype(np.float64).mean(axis=0), rtol=1e-12)
        expected = np.cov(x.astype(np.float64), rowvar=False)  # N − 1
        np.testing.assert_allclose(gaussian.covariance, expected, rtol=1e-9, atol=1e-9)


def test_of_numbers():
    """In one dimension: (μ_a − μ_b)² + (σ_a − σ_b)²."""
    a, b = features(50, 1), features(70, 1, seed=1, mean=2.0) * 3
    expected = (a.mean() - b.mean()) ** 2 + (a.std(ddof=1) - b.std(ddof=1)) ** 2
    assert frechet_distance(Gaussian.of(a), Gaussian.of(b)) == pytest.approx(expected, rel=1e-12)


def test_of_commuting_covariances():
    """Of the same axes: |μ_a − μ_b|² + Σ (σ_a − σ_b)²; and whatever the order."""
    x = features(400, 5)
    centred = np.linalg.svd(x - x.mean(axis=0), full_matrices=False)[0] * np.sqrt(399)  # covariance 1
    axes = np.linalg.qr(features(5, 5, seed=1))[0]
    scales = np.array([3.0, 1, 0.5, 0.1, 0]), np.array([1.0, 1, 2, 0, 0])
    a, b = (Gaussian.of(centred * scale @ axes + i) for i, scale in enumerate(scales))
    expected = 5 + np.square(scales[0] - scales[1]).sum()
    assert frechet_distance(a, b) == pytest.approx(expected, rel=1e-8)  # a root of rounding in the last axis
    assert frechet_distance(b, a) == pytest.approx(expected, rel=1e-8)


@pytest.mark.parametrize(("sizes", "d"), [((1, 99), 7), ((40, 0, 60), 7), ((20, 30, 50), 64), ((100, 0), 7)])
def test_merged(sizes, d):
    """As if one had seen all; the others stay as they are."""
    x = features(100, d, mean=5)
    parts = [Gaussian.of(part) if len(part) else Gaussian() for part in np.split(x, np.cumsum(sizes)[:-1])]
    merged, before = Gaussian(), [part.mean.copy() for part in parts]
    for part in parts:
        merged.merge(part)
    assert merged.count == 100 and all(np.array_equal(part.mean, mean) for part, mean in zip(parts, before))
    np.testing.assert_allclose(merged.mean, x.mean(axis=0), rtol=1e-12)
    np.testing.assert_allclose(merged.covariance, np.cov(x, rowvar=False), rtol=1e-9, atol=1e-12)
    merged.add(x)
    assert merged.count == 200 and parts[0].count == sizes[0]
    with pytest.raises(ValueError, match=f"features of {d} and 3 numbers cannot be merged"):
        merged.merge(Gaussian.of(features(5, 3)))


def test_order_does_not_matter_where_there_are_few():
    """Of fewer samples than features a covariance has eigenvalues that are rounding, whose roots would be 1e-8 of the others."""
    reference, x = Gaussian.of(features(500, 64, seed=1)), features(20, 64)
    merged = Gaussian.of(x[::2])
    merged.merge(Gaussian.of(x[1::2]))
    assert frechet_distance(merged, reference) == pytest.approx(frechet_distance(Gaussian.of(x), reference), rel=1e-12)


FORMS = [((500, 507), 3), ((500, 507), 64), ((40, 47), 64), ((500, 47), 64), ((3, 2), 64), ((60, 700), 256)]


@pytest.mark.parametrize(("sizes", "d"), FORMS)
def test_against_scipy(sizes, d):
    """Also of fewer samples than features."""
    linalg = pytest.importorskip("scipy.linalg")
    a, b = (Gaussian.of(features(n, d, seed, mean=0.1 * seed)) for seed, n in enumerate(sizes))
    root = linalg.sqrtm(a.covariance @ b.covariance + 1e-12 * np.eye(d)).real
    expected = np.square(a.mean - b.mean).sum() + np.trace(a.covariance + b.covariance - 2 * root)
    assert frechet_distance(a, b) == pytest.approx(expected, rel=1e-6)


def test_of_the_same():
    """Nothing, also where there are fewer samples than dimensions; never less."""
    for n in (500, 20):
        gaussian = Gaussian.of(features(n, 64))
        assert 0 <= frechet_distance(gaussian, gaussian) < 1e-9 * np.trace(gaussian.covariance)


def test_what_does_not_fit():
    gaussian = Gaussian.of(features(10, 3))
    with pytest.raises(ValueError, match=r"expected \[N, 3\], got \[10, 4\]"):
        gaussian.add(features(10, 4))
    with pytest.raises(ValueError, match=r"expected \[N, d\], got \[3\]"):
        Gaussian().add(np.zeros(3))
    with pytest.raises(ValueError, match="not all finite"):
        gaussian.add(np.full((1, 3), np.nan))
    assert gaussian.count == 10
    with pytest.raises(ValueError, match="of 3 and 4 numbers"):
        frechet_distance(gaussian, Gaussian.of(features(10, 4)))
    with pytest.raises(ValueError, match="at least two"):
        Gaussian.of(features(1, 3)).covariance  # noqa: B018


@pytest.mark.parametrize("number", [np.nan, np.inf])
def test_moments_that_are_not_finite(number):
    """Are no distance of zero."""
    good = Gaussian.of(features(50, 3)).moments()
    covariance = good.covariance.copy()
    covariance[1, 1] = number
    for bad in (good._replace(mean=np.array([0, number, 0])), good._replace(covariance=covariance)):
        for pair in ((good, bad), (bad, good)):
            with pytest.raises(ValueError, match="not finite"):
                frechet_distance(*pair)
    far = good._replace(mean=np.array([1e200, 0, 0]))
    with pytest.raises(ValueError, match="the distance is not finite"):
        frechet_distance(good, far)


def test_features_that_are_too_large():
    """Added, merged, or far from each other; what was there stays."""
    gaussian, x = Gaussian.of(features(50, 3)), features(50, 3)
    before = gaussian.moments()
    with pytest.raises(ValueError, match="too large"):
        gaussian.add(x * 1e200)
    with pytest.raises(ValueError, match="too large"):
        gaussian.merge(Gaussian.of(np.full((2, 3), 1e200)))
    with pytest.raises(ValueError, match="too large"):
        Gaussian.of(np.array([[1.7e308], [1.7e308]]))
    after = gaussian.moments()
    np.testing.assert_array_equal(after.mean, before.mean)
    np.testing.assert_array_equal(after.covariance, before.covariance)
    assert after.count == before.count
