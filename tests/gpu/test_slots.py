"""The debug build that stamps every slot (csrc/cuda/slots.cuh): no reader ever finds another row than its own.

Roles dawdle at random there, so that they meet in orders that a full-speed kernel rarely shows.
"""

import functools
import os
import subprocess
from pathlib import Path

import pytest
import torch

from tests.gpu import test_backward, test_timeout

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

ROOT = Path(__file__).resolve().parents[2]
SLOT_MISMATCH = 10


@pytest.fixture(scope="session")
def stamped(tmp_path_factory):
    """`stamped(level)`: the library built with that MOK_DEBUG_SLOTS; 2 plants a fault."""

    @functools.cache
    def build(level):
        import driver

        folder = tmp_path_factory.mktemp(f"slots{level}")
        flags = f"{os.environ.get('MOK_NVCC_FLAGS', '')} -DMOK_DEBUG_SLOTS={level}"
        command = ["bash", ROOT / "benchmarks" / "build.sh", folder]
        subprocess.run(command, check=True, env=os.environ | {"MOK_NVCC_FLAGS": flags})
        return driver.load(str(folder / "libmok_cuda.so"))

    return build


SHAPES = {
    1: dict(ranks=1, tokens=[1500], hidden=512, inter=320, experts=6, topk=3, shared=192),
    2: dict(ranks=2, tokens=[900, 517], hidden=512, inter=384, experts=4, topk=4),
    4: dict(ranks=4, tokens=[300, 1, 700, 64], hidden=512, inter=256, experts=3, topk=4, shared=128),
}
# Of the forward, and of the backward.
SETTINGS = [
    (dict(), dict()),
    (dict(ring_tiles=2), dict(window_tiles=1)),
    (dict(ring_tiles=3), dict(chunk_units=1)),
    (dict(ring_tiles=10, minibatch_tiles=2), dict(window_tiles=5)),
    (dict(ring_tiles=7, lead_tiles=1, minibatch_tiles=1), dict(chunk_units=2)),
    (dict(), dict(window_tiles=4)),  # macrobatches, everything kept
    (dict(), dict(window_tiles=4, reuses_ring=True)),
    (dict(ring_tiles=4), dict(window_tiles=2, reuses_ring=True)),
    (dict(ring_tiles=7, lead_tiles=1, minibatch_tiles=1), dict(chunk_units=2, reuses_ring=True)),
    (dict(ring_tiles=2, comm_sms=2), dict(window_tiles=1, comm_sms=2)),
    (dict(ring_tiles=9, comm_sms=8), dict(window_tiles=3, comm_sms=8)),
    (dict(ring_tiles=5, sm_limit=16, comm_sms=2), dict(comm_sms=2)),
]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("ranks", SHAPES)
def test_every_slot_holds_what_its_readers_expect(stamped, ranks, settings):
    of_forward, of_backward = settings
    group, *inputs = test_backward.build(stamped(1), **SHAPES[ranks], **of_forward)
    expected = test_backward.reference(group, *inputs)
    for _ in range(3):
        test_backward.close(test_backward.gradients(group, *inputs, **of_backward), expected)


def test_stamps_are_there(stamped):
    """Without them the tests above would pass whatever happens."""
    group, *inputs = test_backward.build(stamped(1), **SHAPES[1], ring_tiles=4)
    test_backward.forward(group, *inputs[:4])
    torch.cuda.synchronize()
    tiles = group.header()["tiles"]
    words = group.ranks[0]["scratch"].view(torch.int32)
    # One row of x in each slot after another; the ring ends with tiles 0 to 3.
    row = torch.tensor([1, 2, 3, 4], device="cuda").repeat_interleave(128).int()
    assert tiles > 4 and (words.unfold(0, row.numel(), 64) == row).all(1).any()


@pytest.mark.parametrize("comm_sms", (0, 8))
def test_nothing_is_handed_over_after_a_failed_wait(stamped, comm_sms):
    """Here the word that names a part's stage begins as an address outside of the shared memory."""
    stalled = test_timeout.test_stalled_megakernel_stops
    for _ in range(5):
        stalled(stamped(1), 1, comm_sms, test_timeout.DISPATCH_TICKETS, test_timeout.WAIT_DISPATCHED)


@pytest.mark.parametrize("which", ("forward", "backward"))
@pytest.mark.parametrize("comm_sms", (0, 4))
def test_missing_wait_is_found(stamped, which, comm_sms):
    """Dispatch that does not wait for the slot it overwrites."""
    from driver_backward import Backward

    of_forward = dict(ring_tiles=2, comm_sms=comm_sms) if which == "forward" else dict()
    group, xs, ids, ws, scales, douts = test_backward.build(stamped(2), **SHAPES[1], **of_forward)
    test_backward.forward(group, xs, ids, ws, scales)
    torch.cuda.synchronize()
    if which == "backward":
        assert group.record[0] == 0, group.record.tolist()  # the ring holds everything: nothing to wait for
        Backward(group, window_tiles=2, comm_sms=comm_sms).backward(xs, douts, ws, scales)
        torch.cuda.synchronize()
    set_, _, phase, tile, expected, seen = group.record[:6].tolist()
    assert (set_, phase) == (1, SLOT_MISMATCH) and expected == tile + 1 != seen, group.record.tolist()
