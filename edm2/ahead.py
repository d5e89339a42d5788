"""Work done by others a little ahead of who asks for it, in order."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future
from typing import TypeVar

Item, Made = TypeVar("Item"), TypeVar("Made")


def in_order(pool: Executor, make: Callable[[Item], Made], items: Iterable[Item], ahead: int) -> Iterator[Made]:
    """`make` of each item by the pool, of which at most `ahead` are on their way: they may be gigabytes. The pool is shut down at
    the end, and where whoever asks goes away."""
    coming: deque[Future[Made]] = deque()
    try:
        for item in items:
            coming.append(pool.submit(make, item))
            if len(coming) > ahead:
                yield coming.popleft().result()
        while coming:
            yield coming.popleft().result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
