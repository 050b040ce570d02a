"""The CUDA backward against fp64: all gradients, degenerate inputs, windows and replay, settings, EP sizes."""

import itertools

import pytest
import torch

from tests.gpu.test_forward import short_tiles

pytestmark = pytest.mark.gpu

TOLERANCE = 1e-2


def build(lib, ranks, tokens, hidden, inter, experts, topk, shared=0, seed=0, ids=None, zero_weights=False, **settings):
    """Group and per-rank inputs: x, ids, weights, scales, dOut. Ids are global; some routes are masked."""
    import driver

    weights = driver.make_weights(ranks, experts, hidden, inter, shared, seed=seed)
    group = driver.Group(weights, topk, max(max(tokens), 1), driver.Settings(**settings), lib=lib)
    g = torch.Generator(device="cuda").manual_seed(seed + 1)
    xs, idss, ws, scales, douts = [], [], [], [], []
    for r, n in enumerate(tokens):
        i, w = driver.make_routes(n, topk, ranks * experts, seed=seed + 10 + r)
        if ids is not None:
            i = ids(r, n)
        elif n > 4:
            i[::5, 0] = -1
        if zero_weights:
            w[::2, 0] = 0.0
        xs.append(torch.randn(n, hidden, generator=g, device="cuda", dtype=torch.bfloat16))
        douts.append(torch.randn(n, hidden, generator=g, device="cuda", dtype=torch.bfloat16))
        scales.append(torch.rand(n, generator=g, device="cuda") if shared else None)
        idss.append(i.to(torch.int64)), ws.append(w)
    return group, xs, idss, ws, scales, douts


def reference(group, xs, ids, ws, scales, douts, dtype=torch.float64):
    """Gradients of plain PyTorch, by rank; experts' over all ranks' tokens, the shared expert's over the rank's own."""
    import driver

    leaf = lambda t: t.detach().to(dtype).requires_grad_()
    experts = [(leaf(w.gate_up[e]), leaf(w.down[e])) for w in group.weights for e in range(group.L)]
    results = []
    for r, x in enumerate(xs):
        x, weight = leaf(x), leaf(ws[r])
        scale = leaf(scales[r]) if scales[r] is not None else None
        shared = [leaf(t) for t in group.weights[r].shared] if group.S else None
        out = driver.reference(x, ids[r], weight, experts, shared, scale, group.settings.swiglu_limit, dtype)
        if out.requires_grad:  # a token reached an expert
            out.backward(douts[r].to(dtype))
        of = lambda t: torch.zeros_like(t) if t.grad is None else t.grad
        result = {"dx": of(x), "d_weight": of(weight)}
        if shared:
            names = ("d_shared_gate", "d_shared_up", "d_shared_down")
            result |= {name: of(t) for name, t in zip(names, shared, strict=True)}
            result["d_shared_scale"] = of(scale)
        results.append(result)
    for r, result in enumerate(results):
        mine = experts[r * group.L : (r + 1) * group.L]
        grads = [[torch.zeros_like(t) if t.grad is None else t.grad for t in e] for e in mine]
        result["d_gate_up_proj"] = torch.stack([g[0] for g in grads])
        result["d_down_proj"] = torch.stack([g[1] for g in grads])
    return results


def forward(group, xs, ids, ws, scales):
    for b in group.ranks:
        for name in ("out", "routed", "ring_x", "ring_gate_up", "ring_h", "shared_y", "shared_h", "shared_gate_up"):
            b[name].fill_(float("nan"))
    group.forward(xs, ids, ws, scales if scales[0] is not None else None)


def gradients(group, xs, ids, ws, scales, douts, one_launch=True, again=False, **how):
    from driver_backward import Backward

    forward(group, xs, ids, ws, scales)
    backward = Backward(group, **how)
    scales = scales if scales[0] is not None else None
    for _ in range(2 if again else 1):
        for b in group.ranks:
            b["routed"].fill_(float("nan"))
        got = backward.backward(xs, douts, ws, scales, one_launch)
    torch.cuda.synchronize()
    assert group.record[0] == 0, group.record.tolist()
    return [{name: t.clone() for name, t in rank.items()} for rank in got]


def close(got, expected, tolerance=TOLERANCE):
    import driver

    for r, (mine, theirs) in enumerate(zip(got, expected, strict=True)):
        for name, t in mine.items():
            assert torch.isfinite(t).all(), f"rank {r}: {name} not written everywhere"
            error = driver.relative_error(t, theirs[name])
            assert error < tolerance, (r, name, error)


def same(got, expected, names=None):
    for r, (mine, theirs) in enumerate(zip(got, expected, strict=True)):
        for name in names or mine:
            assert torch.equal(mine[name], theirs[name]), (r, name)


CASES = {
    "one tile": dict(ranks=1, tokens=[128], hidden=256, inter=128, experts=1, topk=1),
    "one token": dict(ranks=1, tokens=[1], hidden=256, inter=128, experts=8, topk=4),
    "widths of 64": dict(ranks=1, tokens=[333], hidden=320, inter=192, experts=5, topk=3, shared=64),
    "q30b": dict(ranks=1, tokens=[1500], hidden=2048, inter=768, experts=128, topk=8),
    "air": dict(ranks=1, tokens=[700], hidden=4096, inter=1408, experts=32, topk=8, shared=1408),
    "kimi": dict(ranks=1, tokens=[1100], hidden=7168, inter=2048, experts=6, topk=6, shared=2048, swiglu_limit=20.0),
    "top 16": dict(ranks=1, tokens=[130], hidden=256, inter=128, experts=32, topk=16),
    "no tokens": dict(ranks=1, tokens=[0], hidden=256, inter=128, experts=4, topk=2, shared=128),
    "zero weights": dict(ranks=1, tokens=[500], hidden=512, inter=256, experts=8, topk=4, zero_weights=True),
    "five macrobatches": dict(
        ranks=1, tokens=[2000], hidden=512, inter=256, experts=6, topk=3, shared=192, ring_tiles=11
    ),
    "smallest ring": dict(ranks=1, tokens=[900], hidden=512, inter=256, experts=3, topk=2, ring_tiles=2),
    "two ranks": dict(ranks=2, tokens=[900, 517], hidden=1024, inter=384, experts=6, topk=4, shared=320),
    "a rank without tokens": dict(ranks=2, tokens=[700, 0], hidden=512, inter=256, experts=4, topk=2),
    "all on one rank": dict(ranks=4, tokens=[0, 1200, 0, 0], hidden=512, inter=256, experts=3, topk=2, shared=256),
    "four ranks, ring": dict(ranks=4, tokens=[300, 1, 700, 64], hidden=512, inter=256, experts=4, topk=8, ring_tiles=5),
}


@pytest.mark.parametrize("comm_sms", (0, 2, 8, 32))
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.replace(" ", "-"))
def test_against_fp64(lib, case, comm_sms):
    if comm_sms == 32 and CASES[case]["ranks"] == 4:
        comm_sms = 30  # of 32
    group, *inputs = build(lib, **CASES[case], comm_sms=comm_sms)
    close(gradients(group, *inputs, comm_sms=comm_sms), reference(group, *inputs))


# A bf16 gate or up near the limit crosses it by rounding, in plain PyTorch too: only the comparison with it tells.
@pytest.mark.parametrize("clamp", [dict(), dict(swiglu_limit=0.25), dict(swiglu_limit=1.0)], ids=str)
def test_not_worse_than_plain_bf16(lib, clamp):
    import driver

    shape = dict(ranks=1, tokens=[1500], hidden=1024, inter=512, experts=8, topk=4, shared=512)
    group, *inputs = build(lib, **shape, **clamp)
    exact, plain = reference(group, *inputs)[0], reference(group, *inputs, dtype=torch.bfloat16)[0]
    for name, t in gradients(group, *inputs)[0].items():
        assert torch.isfinite(t).all(), name
        ours, theirs = driver.relative_error(t, exact[name]), driver.relative_error(plain[name], exact[name])
        assert ours <= 1.5 * theirs, (name, ours, theirs)


def test_every_route_to_one_expert_and_repeated_experts(lib):
    def ids(r, n):
        i = torch.full((n, 4), 5, device="cuda", dtype=torch.int64)
        i[:, 1] = 5 if r else -1
        i[:, 2], i[:, 3] = 1 << 40, 7  # out of any rank's range: masked
        return i

    group, *inputs = build(lib, ranks=2, tokens=[300, 150], hidden=512, inter=256, experts=4, topk=4, ids=ids)
    got, expected = gradients(group, *inputs), reference(group, *inputs)
    close(got, expected)
    assert not got[0]["d_gate_up_proj"].any() and not got[1]["d_down_proj"][0].any()
    assert not got[0]["d_weight"][:, 1].any() and not got[1]["d_weight"][:, 2].any()


def test_bits_do_not_depend_on_settings(lib):
    shape = dict(ranks=2, tokens=[800, 611], hidden=1024, inter=384, experts=6, topk=4, shared=320)
    baseline = None
    for settings, how in (
        (dict(), dict()),
        (dict(), dict(again=True)),
        (dict(), dict(chunk_units=1)),
        (dict(), dict(chunk_units=100)),
        (dict(), dict(window_tiles=16)),  # several macrobatches, everything kept
        (dict(), dict(reuses_ring=True)),
        (dict(), dict(reuses_ring=True, window_tiles=16)),
        (dict(ring_tiles=10), dict(reuses_ring=True)),
        (dict(ring_tiles=2), dict(reuses_ring=True, window_tiles=1)),
        (dict(ring_tiles=9, lead_tiles=1), dict(reuses_ring=True, chunk_units=2, window_tiles=3)),
        (dict(ring_tiles=10), dict(reuses_ring=True, window_tiles=5, comm_sms=8)),
        (dict(ring_tiles=20), dict()),
        (dict(ring_tiles=10), dict(window_tiles=5)),
        (dict(ring_tiles=7), dict()),
        (dict(ring_tiles=2), dict(window_tiles=1)),
        (dict(ring_tiles=9, lead_tiles=1), dict(chunk_units=2)),
        (dict(sm_limit=8), dict()),
        (dict(), dict(comm_sms=2)),
        (dict(), dict(comm_sms=8)),
        (dict(), dict(comm_sms=32)),
        (dict(), dict(comm_sms=64)),  # of 66 with two ranks in one launch: one cluster computes
        (dict(sm_limit=8), dict(comm_sms=2)),
        (dict(ring_tiles=10), dict(window_tiles=5, comm_sms=8)),
        (dict(ring_tiles=2), dict(window_tiles=1, comm_sms=2)),
        (dict(ring_tiles=9, lead_tiles=1), dict(chunk_units=2, comm_sms=32)),
    ):
        group, *inputs = build(lib, **shape, **settings)
        if baseline is None:
            expected = reference(group, *inputs)
        for one_launch in (True, False):
            got = gradients(group, *inputs, one_launch=one_launch, **how)
            if baseline is None:
                baseline = got
                close(got, expected)
            same(got, baseline)


@pytest.mark.parametrize("shared", (0, 192))
@pytest.mark.parametrize("ranks", (1, 2))
def test_short_tiles(lib, ranks, shared):
    """An expert begins 64 rows behind the last tile of another where ring and window hold everything, or the ring."""
    from driver_backward import Wants

    shape = dict(**short_tiles(ranks), hidden=512, inter=320, shared=shared)
    group, *inputs = build(lib, **shape)
    baseline, least = gradients(group, *inputs), group.ring_tiles  # of a ring that holds everything
    close(baseline, reference(group, *inputs))
    for settings, how in (
        (dict(), dict(again=True)),
        (dict(), dict(reuses_ring=True)),
        (dict(), dict(window_tiles=least + 20)),
        (dict(), dict(window_tiles=least)),
        (dict(), dict(window_tiles=3)),
        (dict(), dict(window_tiles=1, reuses_ring=True)),
        (dict(), dict(comm_sms=8)),
        (dict(), dict(comm_sms=8, window_tiles=4, reuses_ring=True)),
        (dict(), dict(chunk_units=1)),
        (dict(), dict(wants=Wants(experts=False))),
        (dict(sm_limit=8), dict(reuses_ring=True)),
        (dict(ring_tiles=least + 9), dict()),
        (dict(ring_tiles=least + 9), dict(window_tiles=5, reuses_ring=True)),
        (dict(ring_tiles=least - 1), dict()),
        (dict(ring_tiles=6), dict(window_tiles=3)),
        (dict(ring_tiles=4), dict(window_tiles=2, reuses_ring=True)),
        (dict(ring_tiles=2), dict(window_tiles=1, comm_sms=8)),
    ):
        group, *_ = build(lib, **shape, **settings)
        for one_launch in (True, False):
            same(gradients(group, *inputs, one_launch=one_launch, **how), baseline)


def test_bits_do_not_depend_on_the_number_of_ranks(lib):
    from driver import Group, Settings, Weights

    group, xs, ids, ws, _, douts = build(
        lib, ranks=4, tokens=[200, 100, 50, 300], hidden=512, inter=256, experts=2, topk=4
    )
    baseline = gradients(group, xs, ids, ws, [None] * 4, douts)
    join = lambda name: torch.cat([rank[name] for rank in baseline])
    for ranks in (1, 2):
        per = 4 // ranks
        part = lambda ts, r: torch.cat(ts[r * per : (r + 1) * per])
        weights = [
            Weights(part([w.gate_up for w in group.weights], r), part([w.down for w in group.weights], r))
            for r in range(ranks)
        ]
        regrouped = [[part(ts, r) for r in range(ranks)] for ts in (xs, ids, ws)]
        other = Group(weights, 4, max(x.shape[0] for x in regrouped[0]), Settings(), lib=lib)
        got = gradients(other, *regrouped, [None] * ranks, [part(douts, r) for r in range(ranks)])
        for name in ("dx", "d_weight"):
            assert torch.equal(torch.cat([rank[name] for rank in got]), join(name)), (ranks, name)


def test_what_is_not_wanted_is_left_alone(lib):
    from driver_backward import Wants

    shape = dict(ranks=1, tokens=[600], hidden=512, inter=256, experts=5, topk=3, shared=192, ring_tiles=9)
    group, *inputs = build(lib, **shape)
    everything = gradients(group, *inputs)
    for dx, experts, shared in itertools.product((True, False), repeat=3):
        got = gradients(group, *inputs, wants=Wants(dx, experts, shared))
        assert ("dx" in got[0], "d_down_proj" in got[0], "d_shared_up" in got[0]) == (dx, experts, shared)
        same(got, everything, got[0])
        same(
            gradients(group, *inputs, wants=Wants(dx, experts, shared), reuses_ring=True, window_tiles=3),
            everything,
            got[0],
        )


def test_fp32_carry_of_an_expert_across_macrobatches(lib):
    """One expert over many macrobatches: the sum is rounded once, whatever the window."""
    ids = lambda r, n: torch.zeros(n, 1, device="cuda", dtype=torch.int64)
    results = []
    for window in (16, 4, 2, 1):
        group, *inputs = build(lib, ranks=1, tokens=[2048], hidden=512, inter=192, experts=2, topk=1, ids=ids)
        results.append(gradients(group, *inputs, window_tiles=window))
        same(results[-1], results[0])
    close(results[0], reference(group, *inputs))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("ring", [dict(), dict(ring_tiles=7)], ids=["ring", "replay"])
def test_sums_have_the_bits_of_adding_afterwards(lib, dtype, ring):
    """What is there has every exponent, subnormals included, and the gradient's own size, where sums tie."""
    ids = lambda r, n: torch.randint(0, 10, (n, 4), device="cuda")  # of 12 experts: two have no tokens
    group, *inputs = build(lib, ranks=2, tokens=[800, 611], hidden=320, inter=192, experts=6, topk=4, ids=ids, **ring)
    grads, sums, wants = gradients(group, *inputs), [], []
    for rank in grads:
        sums.append({})
        for name in ("d_gate_up_proj", "d_down_proj"):
            sizes = torch.full(rank[name].shape, 1.0, device="cuda")
            sizes[:, ::2] = torch.exp2(torch.randint(-149, 60, sizes[:, ::2].shape, device="cuda").double()).float()
            sums[-1][name] = (torch.randn_like(sizes) * sizes * rank[name].float().std()).to(dtype)
        wants.append({name: t.clone().add_(rank[name]) for name, t in sums[-1].items()})
    assert any((t != 0).logical_and(t.abs() < 2.0**-126).any() for rank in sums for t in rank.values())
    same(gradients(group, *inputs, sums=sums), wants, ("d_gate_up_proj", "d_down_proj"))


@pytest.mark.parametrize("comm_sms", (0, 8))
def test_captured_graph_with_new_routes(lib, comm_sms):
    from driver_backward import Backward

    shape = dict(ranks=1, tokens=[700], hidden=512, inter=256, experts=8, topk=4, shared=256)
    group, xs, ids, ws, scales, douts = build(lib, **shape, comm_sms=comm_sms)
    backward = Backward(group, comm_sms=comm_sms)

    def step():
        group.forward_single(xs[0], ids[0], ws[0], scales[0], args=group.args(0, 700, xs[0]))
        return backward.backward(xs, douts, ws, scales)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = step()
    import driver

    for seed in (100, 101, 102):
        i, w = driver.make_routes(700, 4, 8, seed=seed)
        ids[0].copy_(i), ws[0].copy_(w)
        for t in got[0].values():
            t.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        assert group.record[0] == 0, group.record.tolist()
        close(got, reference(group, xs, ids, ws, scales, douts))
