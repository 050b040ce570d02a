"""The CUDA backward's task order without a GPU: every output tile once, and every wait behind what it waits for.

One cluster takes all compute tasks and one warp all pulls, the strictest case. The waits are those that
csrc/cuda/backward_tasks.cuh states.
"""

from __future__ import annotations

import ctypes
from collections import defaultdict
from graphlib import CycleError, TopologicalSorter
from itertools import accumulate, pairwise
from typing import NamedTuple

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

REPLAY, DOWN, UP, SHARED_DOWN, SHARED_UP, WGRAD_GATE_UP, WGRAD_DOWN = range(7)


class Task(NamedTuple):
    kind: int
    two: int
    is_short: int
    first: int
    last: int
    replayed: int
    expert: int
    tile: int
    column: int
    row: int
    count: int

    def tiles(self):
        return list(range(self.tile, self.tile + (self.count or 1 + self.two)))

    def columns(self, width):
        return [c for c in range(self.column, self.column + 2 - self.two) if c < width]


class Shape(NamedTuple):
    rows: list  # of each expert
    window: int
    macrobatches_saved: int
    chunk: int
    tokens: int
    columns: tuple  # replay, down, up, shared down, shared up
    grids: tuple  # (row pairs, columns) of the weight gradients
    by_unit: bool = False

    @property
    def prefix(self):
        return [0, *accumulate(-(-r // 128) for r in self.rows)]

    @property
    def tiles(self):
        return self.prefix[-1]

    @property
    def saved(self):
        return self.window * self.macrobatches_saved


@pytest.fixture(scope="module")
def cuda(compile_cpp):
    return ctypes.CDLL(str(compile_cpp("cuda_shim.cpp", "-O2", "-shared", "-fPIC")))


def order_of(cuda, shape: Shape) -> list[Task]:
    prefix = shape.prefix
    units = [0, *accumulate((b - a + 1) // 2 for a, b in pairwise(prefix))]
    array = lambda values: (ctypes.c_int32 * len(values))(*values)  # noqa: E731
    sizes = [shape.tiles, len(shape.rows), shape.window, shape.saved, shape.chunk, shape.chunk, shape.tokens]
    sizes += [*shape.columns, shape.by_unit, *[n for grid in shape.grids for n in grid]]
    most = 20_000
    out = (ctypes.c_int32 * (11 * most))()
    count = cuda.cuda_backward_order(array(prefix), array(units), array(shape.rows), array(sizes), out, most)
    assert 0 <= count <= most
    return [Task(*out[11 * i : 11 * i + 11]) for i in range(count)]


def check_coverage(order: list[Task], shape: Shape) -> None:
    covered: dict = defaultdict(int)
    prefix = shape.prefix
    for task in order:
        if task.kind >= WGRAD_GATE_UP:
            for tile in task.tiles():
                covered[task.kind, tile if task.kind <= WGRAD_DOWN else None, task.row, task.column] += 1
            continue
        for tile in task.tiles():
            for column in task.columns(shape.columns[task.kind]):
                covered[task.kind, tile, column] += 1
        if task.kind <= UP:
            assert len({t // shape.window for t in task.tiles()}) == 1, "a unit straddles two macrobatches"
            last = task.tiles()[-1]
            rows = shape.rows[task.expert] - 128 * (last - prefix[task.expert])
            assert prefix[task.expert] <= task.tile and last < prefix[task.expert + 1]
            assert task.is_short == (rows <= 64) and task.replayed == (
                last // shape.window * shape.window >= shape.saved
            )
    expected = defaultdict(int)
    shared_tiles = -(-shape.tokens // 128) if shape.columns[SHARED_DOWN] else 0
    for tile in range(shape.tiles):
        kinds = [DOWN, UP] + ([REPLAY] if tile // shape.window * shape.window >= shape.saved else [])
        for kind in kinds:
            for column in range(shape.columns[kind]):
                expected[kind, tile, column] = 1
        for kind in (WGRAD_GATE_UP, WGRAD_DOWN):
            for pair in range(shape.grids[kind - WGRAD_GATE_UP][0]):
                for column in range(shape.grids[kind - WGRAD_GATE_UP][1]):
                    expected[kind, tile, 2 * pair, column] = 1
    for tile in range(shared_tiles):
        for kind in (SHARED_DOWN, SHARED_UP):
            for column in range(shape.columns[kind]):
                expected[kind, tile, column] = 1
    if shape.tokens:
        for i in (2, 3, 4):
            for pair in range(shape.grids[i][0]):
                for column in range(shape.grids[i][1]):
                    expected[WGRAD_GATE_UP + i, None, 2 * pair, column] = -(-shape.tokens // 128)
    assert dict(covered) == dict(expected)


def check_progress(cuda, order: list[Task], shape: Shape, lead: int) -> None:
    prefix, window = shape.prefix, shape.window
    producers: dict = defaultdict(list)
    rounds: dict = defaultdict(list)
    for i, task in enumerate(order):
        for tile in task.tiles():
            producers[task.kind, tile].append(i)
        if WGRAD_GATE_UP <= task.kind <= WGRAD_DOWN:
            rounds[task.expert, task.tile // window].append(i)
            assert task.first == (task.tile == prefix[task.expert])
            assert task.last == (task.tiles()[-1] == prefix[task.expert + 1] - 1)
    c_prefix = (ctypes.c_int32 * len(prefix))(*prefix)
    expert_of = lambda tile: max(e for e in range(len(shape.rows)) if prefix[e] <= tile)  # noqa: E731
    graph = TopologicalSorter()
    for i, task in enumerate(order):
        needs: list = [i - 1] if i else []
        for tile in task.tiles():
            if task.kind in (REPLAY, DOWN):
                # The slot of d_gate_up is the window's or, in the strictest case of a reused ring, no further away.
                needs += [("pull", tile), *producers[UP, tile - window]]
                needs += producers[REPLAY, tile] if task.kind == DOWN else []
            elif task.kind == UP or WGRAD_GATE_UP <= task.kind <= WGRAD_DOWN:
                needs += producers[DOWN, tile]
            elif task.kind == SHARED_UP or task.kind > WGRAD_DOWN:
                needs += producers[SHARED_DOWN, tile]
        if WGRAD_GATE_UP <= task.kind <= WGRAD_DOWN:
            macrobatch = task.tile // window
            if not task.first:
                needs += rounds[task.expert, macrobatch - 1]
            elif not task.last:
                before = cuda.cuda_carry_before(c_prefix, len(shape.rows), window, macrobatch)
                if before >= 0:
                    assert before != task.expert
                    needs += rounds[before, (prefix[before + 1] - 1) // window]
        graph.add(i, *needs)
    for tile in range(shape.tiles):
        needs = [("pull", tile - 1)] if tile else []
        if tile >= lead:
            needs += producers[DOWN, tile - lead]
        if tile >= window:
            e = expert_of(tile - window)
            needs += rounds[e, (tile - window) // window] or producers[DOWN, tile - window]
        graph.add(("pull", tile), *needs)
    try:
        graph.prepare()
    except CycleError as error:
        pytest.fail(f"tasks wait for each other: {[order[n] if isinstance(n, int) else n for n in error.args[1]]}")


def check_runs(cuda, order: list[Task], shape: Shape) -> None:
    """A weight gradient waits for a counter; what counts there are the tiles that it sums and no others."""
    c_prefix = (ctypes.c_int32 * len(shape.prefix))(*shape.prefix)
    counting = defaultdict(set)
    for task in order:
        if task.kind == DOWN:
            for tile in task.tiles():
                counting[cuda.cuda_run_of(c_prefix, shape.window, task.expert, tile)].add(tile)
    for task in order:
        if WGRAD_GATE_UP <= task.kind <= WGRAD_DOWN:
            assert counting[task.tile] == set(task.tiles())


def check_carry(order: list[Task], shape: Shape) -> None:
    """One carry: between its first store and its last load no other expert stores into it."""
    owner = None
    for task in order:
        if WGRAD_GATE_UP <= task.kind <= WGRAD_DOWN and not (task.first and task.last):
            if task.first:
                owner = task.expert
            assert owner == task.expert, "two experts share the carry"


def check_reused_ring(shape: Shape) -> None:
    """Where x, gate and up are pulled and computed again into the forward's ring, all readers of the slot are through.

    By the waits alone, whatever order tasks and pulls come to end in; not by the lead, which is no bound here.
    """
    prefix, window, ring = shape.prefix, shape.window, shape.saved
    expert_of = lambda tile: max(e for e in range(len(shape.rows)) if prefix[e] <= tile)  # noqa: E731
    wgrads, ups = any(shape.grids[i][0] for i in (0, 1)), shape.columns[UP] > 0

    def weight_gradient(tile):
        return ("wgrad", expert_of(tile), tile // window)

    def waits(node):
        kind, *of = node
        if kind == "wgrad":
            expert, macrobatch = of
            tiles = range(max(prefix[expert], macrobatch * window), min(prefix[expert + 1], (macrobatch + 1) * window))
            earlier = [("wgrad", expert, macrobatch - 1)] if prefix[expert] < macrobatch * window else []
            return [("down", t) for t in tiles] + earlier
        (tile,) = of
        if kind == "pull":
            if tile < window:
                return []
            return [weight_gradient(tile - window) if wgrads else ("down", tile - window)]
        if kind == "up":
            return [("down", tile)]
        needs = [("pull", tile)] + ([("up", tile - ring)] if ups and tile >= ring else [])
        return needs + ([("replay", tile)] if kind == "down" and tile >= ring else [])

    def behind(node, known):
        for earlier in waits(node):
            if earlier not in known:
                known.add(earlier)
                behind(earlier, known)
        return known

    for tile in range(ring, shape.tiles):
        old = tile - ring
        readers = {("down", old)} | ({("replay", old)} if old >= ring else set())
        readers |= {weight_gradient(old)} if wgrads else set()
        assert readers <= behind(("pull", tile), set())
        assert readers | ({("up", old)} if ups else set()) <= behind(("replay", tile), set())


grid = st.one_of(st.just((0, 0)), st.tuples(st.integers(1, 19), st.integers(1, 3)))
shapes = st.builds(
    Shape,
    st.lists(st.one_of(st.just(0), st.integers(1, 900)), min_size=1, max_size=8),
    st.integers(1, 14),
    st.integers(1, 4),
    st.integers(1, 6),
    st.integers(0, 700),
    st.tuples(st.integers(1, 4), st.integers(1, 4), st.integers(0, 4), st.integers(0, 3), st.integers(0, 3)),
    st.tuples(*[grid] * 5),
    st.booleans(),
)


@settings(deadline=None, database=None, max_examples=400, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(shapes)
def test_the_order_names_every_task_once_and_makes_progress(cuda, shape):
    if not shape.columns[SHARED_DOWN]:
        shape = shape._replace(columns=(*shape.columns[:3], 0, 0), grids=(*shape.grids[:2], *[(0, 0)] * 3))
    order = order_of(cuda, shape)
    check_coverage(order, shape)
    check_carry(order, shape)
    check_runs(cuda, order, shape)
    check_progress(cuda, order, shape, min(shape.window, 6 * shape.chunk + 2))
    check_reused_ring(shape)


def test_a_lead_too_short_for_the_chunks_is_noticed(cuda):
    shape = Shape([128 * 40], 40, 1, 4, 0, (2, 2, 2, 0, 0), ((1, 1), (1, 1), (0, 0), (0, 0), (0, 0)))
    order = order_of(cuda, shape)
    check_progress(cuda, order, shape, 8)
    with pytest.raises(pytest.fail.Exception, match="wait for each other"):
        check_progress(cuda, order, shape, 7)
