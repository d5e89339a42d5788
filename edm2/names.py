"""Names of a run's files, which the official release's scripts know too."""

import re


def kimg_name(nimg: int) -> str:
    """`nimg` as thousands of images in 7 digits, as the official release names files.

    A multiple of 1024 can be told from its thousands alone; other counts get three decimals.
    """
    kimg = nimg // 1000
    return f"{kimg:07d}" if count_of(kimg) == nimg else f"{kimg:07d}.{nimg % 1000:03d}"


def count_of(kimg: int) -> int:
    """Images, of so many thousands in a name: the multiple of 1024 at or above them."""
    return (1000 * kimg + 999) // 1024 * 1024


def snapshot_name(nimg: int, std: float, prefix: str = "network-snapshot") -> str:
    """File name of the average of σ_rel `std` after `nimg` images."""
    return f"{prefix}-{kimg_name(nimg)}-{std:.3f}.safetensors"


def time_and_width(name: str) -> tuple[int, float] | None:
    """Images and σ_rel by the end of an official file's name, `…-{thousands of images}-{σ_rel}.pkl`; None if it does not say."""
    match = re.search(r"(\d{7})-(\d\.\d{3})\.pkl$", name)
    return None if match is None else (count_of(int(match[1])), float(match[2]))
