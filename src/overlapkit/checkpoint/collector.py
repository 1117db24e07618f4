"""A pause of the garbage collector, while very many small objects are made that all live to the end of it.

They make it look through every object of the process, again and again, where it finds nothing: up to 0.2 of
the 0.65 s of CPU time in which 5,000 tensors were restored.
"""

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def collector_paused() -> Iterator[None]:
    """No garbage is collected in this block. Whoever had turned the collector off finds it off."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
