"""One set of photographs for all tests of the image loaders."""

from pathlib import Path

import pytest

from tests.input.images.photos import write_photos


@pytest.fixture(scope="session")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of 3 classes, 40 files in all."""
    folder = tmp_path_factory.mktemp("photos")
    write_photos(folder, 40)
    return folder
