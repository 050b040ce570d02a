"""The backend that this folder's tests run on."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.kernel import layers


@pytest.fixture(scope="module", autouse=True)
def on_backend() -> Iterator[None]:
    layers.use(layers.CPU)
    yield
