"""Shared by all tests: offline, GPU tests only where a GPU is, checkpoints built once. Timeouts: pyproject.toml."""

from __future__ import annotations

import os

# Before any Hugging Face import: those libraries read these once.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("OMP_NUM_THREADS", "1")

from collections.abc import Callable
from pathlib import Path

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    import torch

    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu") is not None:
            item.add_marker(pytest.mark.skip(reason="no CUDA GPU here"))


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`checkpoints("qwen3_moe")` -> folder of a tiny random checkpoint of that kind, built on first use."""
    from tests.checkpoints import build

    root: Path = tmp_path_factory.mktemp("checkpoints")
    return lambda kind, name=None, **overrides: build(kind, root, name, **overrides)
