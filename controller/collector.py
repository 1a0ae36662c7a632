"""How a controller has Python's garbage collected.

A step of many rows makes objects by the hundred (names of blocks, tokens on their way to text), few of which outlive it
by much, and none of which is part of a cycle. Python's collector looks at the young objects whenever there are 700 more
than there were, and so at these, again and again, for nothing: a quarter of what a commit of 1,024 rows took when each
token was an effect by itself. So it looks more rarely; what cycles there are (exceptions, tasks) wait a little longer.
What was there before serving began is not looked at any more.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

YOUNG = 50_000  # objects more than at the last look


@contextmanager
def rare_collections() -> Iterator[None]:
    """For as long as the block lasts."""
    before = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()
