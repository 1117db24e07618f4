"""Optional packages: imported where they are used, and named with their extra when they are missing."""

from importlib import import_module
from typing import Any


def require(module: str, extra: str) -> Any:
    """Import an optional package.

    Raises:
        ImportError: It is not installed; the message names the extra that brings it.
    """
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or module.split(".")[0] != error.name.split(".")[0]:
            raise  # the package is there and broken: its own error says more
        raise ImportError(f"{module} is not installed: pip install 'overlapkit[{extra}]'") from error
