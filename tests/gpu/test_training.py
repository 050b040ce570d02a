"""Training steps in a row on the CUDA kernel while every free byte of the allocator is NaN."""

import pytest
import torch

from tests.kernel.test_training import fill_free_memory, loaded, test_poisoned_memory_changes_no_bit  # noqa: F401

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("on_backend"), pytest.mark.timeout(90)]


def test_nothing_is_left_out_of_the_poison():
    """Whatever the allocator hands out next, without asking the driver for more, is NaN."""
    sizes = (64, 5000, 1 << 18, 300_000, 1 << 21)  # fp32 values: of small segments, of large ones
    held = [torch.ones(size, device="cuda") for size in sizes]
    del held
    reserved = torch.cuda.memory_reserved()
    fill_free_memory()
    assert torch.cuda.memory_reserved() == reserved
    held = [torch.empty(size, device="cuda") for size in sizes]
    assert torch.cuda.memory_reserved() == reserved
    assert all(tensor.isnan().all() for tensor in held)
