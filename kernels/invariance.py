"""May an image's bits depend on the images beside it? Where kernels convolve, that is: in fp32 the library does, as it likes.

Sums are divided by the sizes of a layer and of its image alone, never by the number of images, but for one thing: of few
images' sums, small layers are evaluated in parts (`kernels.conv_tiles.parts`). Either whenever that is quicker, or, where the
same image shall have the same bits in any batch, for all numbers of images alike.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_invariant: ContextVar[bool] = ContextVar("batch_invariant", default=False)


def is_batch_invariant() -> bool:
    return _invariant.get()


@contextmanager
def batch_invariance(wanted: bool = True) -> Iterator[None]:
    """Within it, on one kind of GPU in half precision, an evaluation gives an image the same bits whatever the batch it is in."""
    before = _invariant.set(wanted)
    try:
        yield
    finally:
        _invariant.reset(before)
