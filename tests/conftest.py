"""Shared by all tests: offline, a timeout for each, GPU tests only where a GPU is, checkpoints built once."""

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

DEFAULT_TIMEOUT_S = 180


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "gpu: needs a CUDA GPU; skipped where there is none")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    import torch

    skip_gpu = None if torch.cuda.is_available() else pytest.mark.skip(reason="no CUDA GPU here")
    for item in items:
        if item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(DEFAULT_TIMEOUT_S))
        if skip_gpu is not None and item.get_closest_marker("gpu") is not None:
            item.add_marker(skip_gpu)


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`checkpoints("qwen3_moe")` -> folder of a tiny random checkpoint of that kind, built on first use."""
    from tests.checkpoints import build

    root: Path = tmp_path_factory.mktemp("checkpoints")
    return lambda kind, name=None, **overrides: build(kind, root, name, **overrides)
