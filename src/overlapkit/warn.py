"""Warnings that point at the user's line, however deep in this package they arise."""

import os
import sys
import warnings

_HERE = os.path.dirname(__file__) + os.sep


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """Warn as `warnings.warn` does, of the nearest line outside of this package.

    From Python 3.12 on `skip_file_prefixes` would do.
    """
    frame, level = sys._getframe(), 1
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_HERE):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, category, stacklevel=level)
