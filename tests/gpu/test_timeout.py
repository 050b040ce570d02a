"""A rank that never comes, and a wait inside the megakernel that nobody ends: both stop in time and leave a record."""

import time

import pytest
import torch

pytestmark = pytest.mark.gpu

COMPUTE_TICKETS, DISPATCH_TICKETS = 0, 128  # bytes in scratch
WAIT_DISPATCHED, WAIT_SLOT = 4, 6


def group_of(lib, ranks, hidden=512, **settings):
    import driver

    return driver.Group(
        driver.make_weights(ranks, 4, hidden, 256), 2, 4096, driver.Settings(timeout_s=0.3, **settings), lib=lib
    )


def test_missing_rank(lib):
    group = group_of(lib, 2)
    x = torch.randn(4096, 512, device="cuda", dtype=torch.bfloat16)
    ids = torch.zeros(4096, 2, dtype=torch.int64, device="cuda")
    w = torch.ones(4096, 2, device="cuda")
    group.prologue(0, x, ids, w)
    start = time.monotonic()
    group.barrier(0, 1)  # rank 1 never arrives
    a = group.args(0, 4096)
    group.schedule(a)
    group.megakernel(a)
    out = group.epilogue(0, 4096)
    torch.cuda.synchronize()
    assert 0.2 < time.monotonic() - start < 3
    set_, rank, phase, waiting_for, expected, seen = group.record[:6].tolist()
    assert (set_, rank, phase, waiting_for, expected, seen) == (1, 0, 1, 1, 1, 0)
    assert torch.isnan(out).all()
    assert group.ranks[1]["abort_word"].item() == 1, "the peer learns of it"


@pytest.mark.parametrize("comm_sms", (0, 8))
@pytest.mark.parametrize("ranks", (1, 2))
@pytest.mark.parametrize(
    "gone, phase", [(DISPATCH_TICKETS, WAIT_DISPATCHED), (COMPUTE_TICKETS, WAIT_SLOT)], ids=["rows", "tasks"]
)
def test_stalled_megakernel_stops(lib, ranks, comm_sms, gone, phase):
    """Without dispatch tickets rows never land; without tasks no slot gets free, and pulls of long rows stop midway."""
    hidden = 4096
    group = group_of(lib, ranks, hidden, comm_sms=comm_sms, ring_tiles=16)
    args = []
    for r in range(ranks):
        x = torch.randn(4096, hidden, device="cuda", dtype=torch.bfloat16)
        ids = torch.randint(0, 4 * ranks, (4096, 2), device="cuda")
        group.prologue(r, x, ids, torch.ones(4096, 2, device="cuda"))
    for r in range(ranks):
        args.append(group.args(r, 4096))
        group.schedule(args[r])
        group.ranks[r]["scratch"][gone : gone + 4].view(torch.int32).fill_(1 << 24)
    start = time.monotonic()
    group.megakernel(*args)
    out = group.epilogue(0, 4096)
    torch.cuda.synchronize()
    assert time.monotonic() - start < 3
    assert group.record[0] == 1 and group.record[2] == phase, group.record.tolist()
    assert torch.isnan(out).all()
    # The device is usable afterwards.
    assert (torch.ones(8, device="cuda") + 1).sum().item() == 16
