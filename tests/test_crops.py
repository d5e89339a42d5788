"""The crops of `edm2 dataset convert`."""

import numpy as np
import pytest
from PIL import Image

from edm2.conversion import center_crop, center_crop_dhariwal, center_crop_wide
from tests.dataset_files import pixels


@pytest.mark.parametrize(("size", "halvings"), [((8, 8), 0), ((8, 30), 0), ((15, 16), 0), ((16, 16), 1), ((70, 64), 3), ((5, 7), 0)])
def test_center_crop_sizes_and_halvings(monkeypatch, size, halvings):
    filters = []
    resize = Image.Image.resize
    monkeypatch.setattr(Image.Image, "resize", lambda s, size, f: filters.append(f) or resize(s, size, f))
    image = center_crop_dhariwal(Image.new("RGB", size, (10, 200, 77)), 8, 8)
    assert filters[:halvings] == [Image.Resampling.BOX] * halvings and set(filters[halvings:]) == {Image.Resampling.BICUBIC}
    assert image.size == (8, 8)
    assert (np.asarray(image) == (10, 200, 77)).all()


@pytest.mark.parametrize("wide", [True, False])
@pytest.mark.parametrize("aspect", [1, 1.3, 1.98, 2.02, 3, 5])
@pytest.mark.parametrize(("target", "short"), [(33, 60), (40, 40), (64, 50), (16, 150)])
def test_the_crop_changes_nothing_of_the_scaling(target, short, aspect, wide):
    """To the bit: scaled as a whole, then cropped."""
    height, width = sorted((short, round(short * aspect)), reverse=not wide)
    seed = round(100 * aspect)
    image = whole = Image.fromarray(pixels(seed, height, width, 3))
    while min(whole.size) >= 2 * target:
        whole = whole.resize((whole.width // 2, whole.height // 2), Image.Resampling.BOX)
    scale = target / min(whole.size)
    whole = whole.resize((round(whole.width * scale), round(whole.height * scale)), Image.Resampling.BICUBIC)
    left, top = (whole.width - target) // 2, (whole.height - target) // 2
    np.testing.assert_array_equal(center_crop_dhariwal(image, target, target), np.asarray(whole)[top : top + target, left : left + target])


def test_center_crop_takes_the_centre():
    image = pixels(0, 8, 13)  # the short side fits: nothing but a crop
    np.testing.assert_array_equal(center_crop_dhariwal(Image.fromarray(image), 8, 8), image[:, 2:10])
    np.testing.assert_array_equal(center_crop_dhariwal(Image.fromarray(image.T), 8, 8), image.T[2:10])
    blocks = pixels(1, 8, 8).repeat(4, 0).repeat(4, 1)  # box halving undoes repetition exactly
    np.testing.assert_array_equal(center_crop_dhariwal(Image.fromarray(blocks), 8, 8), blocks[::4, ::4])


def test_other_crops():
    """Of the whole if it has the wanted shape, else of the centre; wide ones with black above and below."""
    image = pixels(0, 6, 8)
    np.testing.assert_array_equal(center_crop(Image.fromarray(image), 8, 6), image)
    np.testing.assert_array_equal(center_crop(Image.fromarray(image), 6, 6), image[:, 1:7])
    np.testing.assert_array_equal(center_crop(Image.fromarray(image.T), 6, 6), image.T[1:7])
    wide = np.asarray(center_crop_wide(Image.fromarray(image), 8, 6))
    np.testing.assert_array_equal(wide, np.pad(image, ((1, 1), (0, 0))))
    assert center_crop(Image.fromarray(pixels(0, 50, 30, 3)), 10, 20).size == (10, 20)
