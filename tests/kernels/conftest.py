from collections.abc import Iterator

import pytest
import torch

from tests.interpreter import interpreter


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture
def interpreted() -> Iterator[None]:
    """Kernels run in Triton's interpreter, and fresh memory holds NaN, so that what is not written shows."""
    torch.use_deterministic_algorithms(True)  # makes torch fill what torch.empty and its like return
    try:
        with interpreter():
            assert torch.empty(3).isnan().all()
            yield
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.fixture(params=["interpreted", "plain"])
def path(request: pytest.FixtureRequest) -> str:
    """Both forms of every function on the CPU: its kernel in the interpreter, and torch's operations."""
    if request.param == "interpreted":
        request.getfixturevalue("interpreted")
    return str(request.param)
