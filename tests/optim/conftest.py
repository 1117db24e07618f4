from collections.abc import Iterator

import pytest
import torch

from tests.interpreter import interpreter


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture
def interpreted() -> Iterator[None]:
    """Kernels run in Triton's interpreter."""
    with interpreter():
        yield


@pytest.fixture(params=["interpreted", "plain"])
def path(request: pytest.FixtureRequest) -> str:
    """Both forms on the CPU: the kernel in the interpreter, and torch's operations."""
    if request.param == "interpreted":
        request.getfixturevalue("interpreted")
    return str(request.param)
