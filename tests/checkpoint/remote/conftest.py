"""An empty store for each test, which is asked again without a pause."""

import pytest

from overlapkit.checkpoint.remote.store import Store
from tests.checkpoint.remote.injected import put_back


@pytest.fixture(autouse=True)
def empty_store(monkeypatch):
    monkeypatch.setattr(Store, "pauses_s", (0.0, 0.0, 0.0))
    put_back({})
    yield
    put_back({})
