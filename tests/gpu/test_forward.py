"""The CUDA forward against fp64: shapes, degenerate inputs, settings, EP sizes on one GPU, captured graphs."""

import itertools

import pytest
import torch

pytestmark = pytest.mark.gpu

TOLERANCE = 1e-2


def build(lib, ranks, tokens, hidden, inter, experts, topk, shared=0, seed=0, ids=None, **settings):
    """Group, per-rank inputs and the fp64 result of every rank. Ids are global; some routes are masked."""
    import driver

    weights = driver.make_weights(ranks, experts, hidden, inter, shared, seed=seed)
    if shared:
        for w in weights:
            w.shared = weights[0].shared
    group = driver.Group(weights, topk, max(max(tokens), 1), driver.Settings(**settings), lib=lib)
    g = torch.Generator(device="cuda").manual_seed(seed + 1)
    xs, idss, ws, scales, expected = [], [], [], [], []
    table = [(w.gate_up[e], w.down[e]) for w in weights for e in range(experts)]
    for r, n in enumerate(tokens):
        x = torch.randn(n, hidden, generator=g, device="cuda", dtype=torch.bfloat16)
        if ids is None:
            i, w = driver.make_routes(n, topk, ranks * experts, seed=seed + 10 + r)
            i = i.to(torch.int64)
            if n > 4:
                i[::5, 0] = -1
        else:
            i, w = ids(r, n), torch.rand(n, topk, generator=g, device="cuda")
        scale = torch.rand(n, generator=g, device="cuda") if shared else None
        xs.append(x), idss.append(i), ws.append(w), scales.append(scale)
        expected.append(driver.reference(x, i, w, table, weights[0].shared, scale, settings.get("swiglu_limit", 0.0)))
    return group, xs, idss, ws, scales, expected


def forward(group, xs, ids, ws, scales, **how):
    for b in group.ranks:
        for name in ("out", "routed", "ring_x", "ring_gate_up", "ring_h", "shared_y", "shared_h", "shared_gate_up"):
            b[name].fill_(float("nan"))
    out = group.forward(xs, ids, ws, scales if scales[0] is not None else None, **how)
    torch.cuda.synchronize()
    assert group.record[0] == 0, group.record.tolist()
    return [o.clone() for o in out]


def close(outs, expected):
    import driver

    for r, (o, e) in enumerate(zip(outs, expected, strict=True)):
        assert torch.isfinite(o).all(), f"rank {r}: outputs not written"
        assert driver.relative_error(o, e) < TOLERANCE, (r, driver.relative_error(o, e))


CASES = {
    "one tile": dict(ranks=1, tokens=[128], hidden=256, inter=128, experts=1, topk=1),
    "one token": dict(ranks=1, tokens=[1], hidden=256, inter=128, experts=8, topk=4),
    "widths of 64": dict(ranks=1, tokens=[333], hidden=320, inter=192, experts=5, topk=3, shared=64),
    "q30b": dict(ranks=1, tokens=[1500], hidden=2048, inter=768, experts=128, topk=8),
    "air": dict(ranks=1, tokens=[700], hidden=4096, inter=1408, experts=32, topk=8, shared=1408),
    "kimi": dict(ranks=1, tokens=[1100], hidden=7168, inter=2048, experts=6, topk=6, shared=2048, swiglu_limit=1.0),
    "top 16": dict(ranks=1, tokens=[130], hidden=256, inter=128, experts=32, topk=16),
    "no tokens": dict(ranks=1, tokens=[0], hidden=256, inter=128, experts=4, topk=2, shared=128),
    "small ring": dict(
        ranks=1, tokens=[2000], hidden=512, inter=256, experts=8, topk=4, shared=192, ring_tiles=8, minibatch_tiles=3
    ),
    "smallest ring": dict(ranks=1, tokens=[2000], hidden=512, inter=256, experts=8, topk=4, ring_tiles=2),
    "two ranks": dict(ranks=2, tokens=[900, 517], hidden=1024, inter=384, experts=6, topk=4, shared=320),
    "a rank without tokens": dict(ranks=2, tokens=[700, 0], hidden=512, inter=256, experts=4, topk=2),
    "all on one rank": dict(ranks=4, tokens=[0, 1200, 0, 0], hidden=512, inter=256, experts=3, topk=2, shared=256),
    "four ranks, ring": dict(ranks=4, tokens=[300, 1, 700, 64], hidden=512, inter=256, experts=4, topk=8, ring_tiles=5),
    "clamped": dict(ranks=2, tokens=[200, 300], hidden=512, inter=256, experts=4, topk=2, swiglu_limit=0.25),
}


@pytest.mark.parametrize("comm_sms", (0, 2, 8, 32))
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.replace(" ", "-"))
def test_against_fp64(lib, case, comm_sms):
    if comm_sms == 32 and CASES[case]["ranks"] == 4:
        comm_sms = 30  # of 32
    group, *inputs, expected = build(lib, **CASES[case], comm_sms=comm_sms)
    close(forward(group, *inputs), expected)


def test_no_cluster_left_to_compute(lib):
    for comm_sms in (-2, 3, 8, 1000):
        group, *inputs, _ = build(
            lib, ranks=1, tokens=[200], hidden=256, inter=128, experts=4, topk=2, comm_sms=comm_sms, sm_limit=8
        )
        with pytest.raises(RuntimeError, match=r"CUDA error 1$"):
            forward(group, *inputs)


def test_every_route_to_one_expert_and_repeated_experts(lib):
    def ids(r, n):
        i = torch.full((n, 4), 5, device="cuda", dtype=torch.int64)
        i[:, 1] = 5 if r else -1
        i[:, 2], i[:, 3] = 1 << 40, 7  # out of any rank's range: masked
        return i

    group, *inputs, expected = build(lib, ranks=2, tokens=[300, 150], hidden=512, inter=256, experts=4, topk=4, ids=ids)
    close(forward(group, *inputs), expected)


def test_bits_do_not_depend_on_settings(lib):
    shape = dict(ranks=2, tokens=[800, 611], hidden=1024, inter=384, experts=6, topk=4, shared=320)
    baseline = None
    for settings in (
        dict(),
        dict(),
        dict(minibatch_tiles=1),
        dict(minibatch_tiles=5),
        dict(ring_tiles=2),
        dict(ring_tiles=3),
        dict(ring_tiles=9),
        dict(lead_tiles=1, minibatch_tiles=2),
        dict(lead_tiles=1, minibatch_tiles=2, ring_tiles=6),
        dict(sm_limit=8),
        dict(store_gate_up=False),
        dict(comm_sms=2),
        dict(comm_sms=8),
        dict(comm_sms=32),
        dict(comm_sms=64),  # of 66 with two ranks in one launch: one cluster computes
        dict(comm_sms=2, sm_limit=8),
        dict(comm_sms=8, ring_tiles=2),
        dict(comm_sms=32, ring_tiles=9, lead_tiles=1, minibatch_tiles=2),
    ):
        group, *inputs, expected = build(lib, **shape, **settings)
        for one_launch in (True, False):
            outs = forward(group, *inputs, one_launch=one_launch)
            if baseline is None:
                baseline = outs
                close(outs, expected)
            assert all(torch.equal(a, b) for a, b in zip(outs, baseline, strict=True)), (settings, one_launch)


def test_bits_do_not_depend_on_the_number_of_ranks(lib):
    """The same 12 experts and 1,000 tokens on 1, 2 and 4 ranks."""
    import driver

    hidden, inter, shared, topk, tokens = 1024, 384, 320, 4, 1000
    whole = driver.make_weights(1, 12, hidden, inter, shared, seed=3)[0]
    x = torch.randn(tokens, hidden, device="cuda", dtype=torch.bfloat16)
    ids, w = driver.make_routes(tokens, topk, 12, seed=4)
    results = []
    for ranks in (1, 2, 4):
        share = 12 // ranks
        weights = [
            driver.Weights(
                whole.gate_up[r * share : (r + 1) * share].contiguous(),
                whole.down[r * share : (r + 1) * share].contiguous(),
                whole.shared,
            )
            for r in range(ranks)
        ]
        cuts = [0, 1000] if ranks == 1 else [0, 700, 1000] if ranks == 2 else [0, 100, 101, 640, 1000]
        group = driver.Group(weights, topk, 1000, driver.Settings(), lib=lib)
        part = lambda t: [t[a:b].contiguous() for a, b in itertools.pairwise(cuts)]
        outs = forward(group, part(x), part(ids), part(w), [None])
        results.append(torch.cat(outs))
    assert torch.isfinite(results[0]).all()
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


# Of each expert. Last tiles of at most 64 rows and of more, one behind the other, and experts without rows.
ROWS = (1, 64, 0, 65, 128, 129, 63, 0, 192, 193, 37, 5)


def short_tiles(ranks):
    """What `build` takes for experts with ROWS, in tokens of all ranks. The second route of a token is masked."""
    order = torch.randperm(sum(ROWS), generator=torch.Generator().manual_seed(7))
    parts = torch.arange(len(ROWS)).repeat_interleave(torch.tensor(ROWS))[order].tensor_split(ranks)
    ids = lambda r, n: torch.stack([parts[r], torch.full((n,), -1)], 1).cuda()
    return dict(ranks=ranks, tokens=[len(p) for p in parts], experts=len(ROWS) // ranks, topk=2, ids=ids)


@pytest.mark.parametrize("shared", (0, 192))
@pytest.mark.parametrize("ranks", (1, 2, 4))
def test_short_tiles(lib, ranks, shared):
    """An expert begins 64 rows behind the last tile of another where the ring holds everything, and 128 in others."""
    shape = dict(**short_tiles(ranks), hidden=512, inter=320, shared=shared)
    group, *inputs, expected = build(lib, **shape)
    baseline, least = forward(group, *inputs), group.ring_tiles  # of a ring that holds everything
    close(baseline, expected)
    for settings in (
        dict(ring_tiles=least + 9),
        dict(ring_tiles=least - 1),
        dict(ring_tiles=2),
        dict(ring_tiles=3, comm_sms=8),
        dict(comm_sms=8),
        dict(sm_limit=8),
        dict(minibatch_tiles=1, lead_tiles=1),
        dict(store_gate_up=False),
    ):
        group, *_ = build(lib, **shape, **settings)
        for one_launch in (True, False):
            outs = forward(group, *inputs, one_launch=one_launch)
            assert all(torch.equal(a, b) for a, b in zip(outs, baseline, strict=True)), (settings, one_launch)


@pytest.mark.parametrize("comm_sms", (0, 8))
@pytest.mark.parametrize("shared", (0, 192))
def test_padding_rows_are_zero_and_gate_up_is_kept(lib, shared, comm_sms):
    """What the backward relies on: gate and up of every row, zeros up to where the next expert begins."""
    shape = dict(**short_tiles(1), hidden=512, inter=192, shared=shared)
    group, xs, ids, ws, scales, expected = build(lib, **shape, comm_sms=comm_sms)
    close(forward(group, xs, ids, ws, scales), expected)
    b, weights = group.ranks[0], group.weights[0]
    names, begin = ("ring_x", "ring_gate_up", "ring_h"), 0
    for e, n in enumerate(ROWS):
        end = begin + -(-n // 64) * 64
        x, kept, h = (b[name][begin:end] for name in names)
        want = x.double() @ weights.gate_up[e].double().T
        assert n == 0 or (kept.double() - want).norm() / want.norm() < TOLERANCE
        assert not kept[n:].any() and not x[n:].any() and not h[n:].any()
        begin = end
    assert all(b[name][begin:].numel() and b[name][begin:].isnan().all() for name in names)


def test_tiles_of_a_ring_have_128_rows(lib):
    """The ring ends with its first tiles, each in a slot of its own, padded with zeros."""
    group, xs, ids, ws, scales, expected = build(lib, **short_tiles(1), hidden=512, inter=192, ring_tiles=9)
    close(forward(group, xs, ids, ws, scales), expected)
    b, weights, tile = group.ranks[0], group.weights[0], 0
    for e, n in enumerate(ROWS):
        end = min(tile + -(-n // 128), 9)
        x, kept = (b[name][tile * 128 : end * 128] for name in ("ring_x", "ring_gate_up"))
        want = x.double() @ weights.gate_up[e].double().T
        assert want.numel() == 0 or (kept.double() - want).norm() / want.norm() < TOLERANCE
        assert not kept[n:].any() and not x[n:].any()
        tile = end
    assert tile == 9 < group.header()["tiles"]


@pytest.mark.parametrize("comm_sms", (0, 8))
def test_graph_replays_with_new_routes(lib, comm_sms):
    """Eager, three replays of one captured graph with new inputs, eager."""
    import driver

    shape = dict(ranks=1, tokens=[900], hidden=512, inter=256, experts=8, topk=4, shared=128)
    group, xs, ids, ws, *_ = build(lib, **shape, comm_sms=comm_sms)
    x, i, w = xs[0].clone(), ids[0].clone(), ws[0].clone()
    run = lambda: group.forward_single(x, i, w)
    assert (
        driver.relative_error(
            run(),
            driver.reference(
                x,
                i,
                w,
                list(zip(group.weights[0].gate_up, group.weights[0].down, strict=True)),
                group.weights[0].shared,
            ),
        )
        < TOLERANCE
    )
    torch.cuda.synchronize()
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        out = run()
    for seed in range(3):
        new_ids, new_w = driver.make_routes(900, 4, 8, seed=100 + seed)
        x.normal_(), i.copy_(new_ids), w.copy_(new_w)
        out.fill_(float("nan"))
        captured.replay()
        want = driver.reference(
            x, i, w, list(zip(group.weights[0].gate_up, group.weights[0].down, strict=True)), group.weights[0].shared
        )
        assert driver.relative_error(out, want) < TOLERANCE
        replayed = out.clone()
        assert torch.equal(run(), replayed)


def test_no_host_sync(lib):
    group, xs, ids, ws, *_ = build(lib, ranks=1, tokens=[300], hidden=512, inter=256, experts=8, topk=4)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        group.forward_single(xs[0], ids[0], ws[0])
    finally:
        torch.cuda.set_sync_debug_mode("default")
