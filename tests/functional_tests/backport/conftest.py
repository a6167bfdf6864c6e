"""Released wheels for the backport's tests, fetched once through pip into a cache folder."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.functional_tests.backport.releases import DEFAULT_FOLDER, CannotFetch, original


@pytest.fixture(scope="session")
def release_at() -> Callable[[str], Path]:
    """The unpacked release of a version; skips the test where it cannot be had."""

    found: dict[str, Path | CannotFetch] = {}

    def unpacked(version: str) -> Path:
        if version not in found:
            try:
                found[version] = original(version, DEFAULT_FOLDER)
            except CannotFetch as reason:
                found[version] = reason
        tree = found[version]
        if isinstance(tree, CannotFetch):
            pytest.skip(str(tree))
        return tree

    return unpacked
