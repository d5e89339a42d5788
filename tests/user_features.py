"""Features as a user would write them, and some that are none."""

import numpy as np

NUMBER = 3


def pixels(images: np.ndarray) -> np.ndarray:
    """Of a few pixels; of grey images and others alike."""
    assert images.dtype == np.uint8 and images.ndim == 4
    return images[:, ::3, ::3].reshape(len(images), -1) / 255


def nothing(images: np.ndarray) -> np.ndarray:
    return np.full((len(images), 3), np.nan)


def fails(images: np.ndarray) -> np.ndarray:
    raise KeyError("of mine")


def huge(images: np.ndarray) -> np.ndarray:
    """Finite, and their squares are not."""
    return pixels(images) * 1e200
