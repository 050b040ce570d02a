"""Progress of the CUDA forward without a GPU: its task order has every wait behind the tasks it waits for.

Clusters take compute tasks, and one warp in each CTA takes dispatch tickets; one cluster and one warp are the strictest
case. The waits are those that csrc/cuda/tasks.cuh states: gate+up(t) needs x of t and down of t + ring, down(t) needs
gate+up(t), dispatch(t) needs gate+up(t + ring) and gate+up(t + lead).
"""

from __future__ import annotations

import ctypes
from collections import defaultdict
from graphlib import CycleError, TopologicalSorter

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

GATE_UP, DOWN, SHARED_GATE_UP, SHARED_DOWN = range(4)


@pytest.fixture(scope="module")
def cuda(compile_cpp):
    return ctypes.CDLL(str(compile_cpp("cuda_shim.cpp", "-O2", "-shared", "-fPIC")))


def units_of(expert_tiles):
    """(tiles, first position) of each unit: experts from the last, an odd one's last tile first, then pairs."""
    end = total = sum(expert_tiles)
    for count in reversed(expert_tiles):
        begin, tile = end - count, end
        if count % 2:
            tile -= 1
            yield [tile], total - 1 - tile
        for low in range(tile - 2, begin - 1, -2):
            yield [low, low + 1], total - 2 - low
        end = begin


def place(order, base, units, columns, kind, by_unit, cuda):
    """Puts the tasks of a minibatch into `order`: position -> (kind, tiles, columns)."""
    pairs = sum(len(tiles) == 2 for tiles in units)
    singles, before = len(units) - pairs, [0, 0]
    for tiles in units:
        two = len(tiles) == 2
        for column in range(0, columns, 1 if two else 2):
            position = base + cuda.cuda_position(pairs, singles, columns, by_unit, two, column, before[1], before[0])
            assert position not in order, "two tasks in one place"
            covered = [column] if two else [c for c in (column, column + 1) if c < columns]
            order[position] = (kind, tiles, covered)
        before[two] += 1


def task_order(cuda, expert_tiles, minibatch, ring, columns, shared_tiles, by_unit=False):
    tiles = sum(expert_tiles)
    chosen = (ctypes.c_int * 2)()
    cuda.cuda_lag(minibatch, ring, chosen)
    size, lag = chosen
    count = -(-tiles // size)
    members = defaultdict(list)
    for unit, first in units_of(expert_tiles):
        members[first // size].append(unit)
    shared = [list(range(t, min(t + 2, shared_tiles))) for t in range(0, shared_tiles, 2)]
    before = {}
    for kind in (GATE_UP, DOWN):
        before[kind] = (ctypes.c_int * (count + 1))()
        for m in range(count):
            pairs = sum(len(unit) == 2 for unit in members[m])
            tasks = cuda.cuda_tasks_of(pairs, len(members[m]) - pairs, columns[kind])
            before[kind][m + 1] = before[kind][m] + tasks
    sizes = [
        cuda.cuda_tasks_of(shared_tiles // 2, shared_tiles % 2, columns[kind]) for kind in (SHARED_GATE_UP, SHARED_DOWN)
    ]

    def base(kind, m):
        return cuda.cuda_base(kind, m, *sizes, lag, count, before[GATE_UP], before[DOWN])

    order: dict[int, tuple] = {}
    place(order, 0, shared, columns[SHARED_GATE_UP], SHARED_GATE_UP, by_unit, cuda)
    place(order, base(SHARED_DOWN, 0), shared, columns[SHARED_DOWN], SHARED_DOWN, by_unit, cuda)
    for m in range(count):
        for kind in (GATE_UP, DOWN):
            place(order, base(kind, m), members[m], columns[kind], kind, by_unit, cuda)
    assert sorted(order) == list(range(before[GATE_UP][count] + before[DOWN][count] + sum(sizes)))
    return [order[i] for i in range(len(order))]


def check_progress(order, tiles, ring, lead=None):
    graph = TopologicalSorter()
    producers = defaultdict(list)
    for i, (kind, held, _) in enumerate(order):
        for tile in held:
            producers[kind, tile].append(i)
    for i, (kind, held, _) in enumerate(order):
        needs = [i - 1] if i else []
        for tile in held:
            if kind == GATE_UP:
                needs += [("dispatch", tile), *producers[DOWN, tile + ring]]
            elif kind == DOWN:
                needs += producers[GATE_UP, tile]
            elif kind == SHARED_DOWN:
                needs += producers[SHARED_GATE_UP, tile]
        graph.add(i, *needs)
    for tile in range(tiles):
        later = [("dispatch", tile + 1)] if tile + 1 < tiles else []
        ahead = producers[GATE_UP, tile + (ring if lead is None else lead)]
        graph.add(("dispatch", tile), *later, *producers[GATE_UP, tile + ring], *ahead)
    try:
        graph.prepare()
    except CycleError as error:
        pytest.fail(f"tasks wait for each other: {[order[n] if isinstance(n, int) else n for n in error.args[1]]}")


shapes = st.tuples(
    st.lists(st.one_of(st.just(0), st.integers(0, 7)), min_size=1, max_size=8),
    st.integers(0, 12),  # minibatch
    st.integers(2, 24),  # ring
    st.tuples(*[st.integers(1, 5)] * 4),  # column tiles of each kind
    st.integers(0, 5),  # shared tiles
    st.booleans(),  # by unit
)


@settings(deadline=None, database=None, max_examples=400, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(shapes)
def test_the_order_names_every_task_once_and_makes_progress(cuda, shape):
    expert_tiles, minibatch, ring, columns, shared_tiles, by_unit = shape
    order = task_order(cuda, expert_tiles, minibatch, ring, columns, shared_tiles, by_unit)
    tiles = sum(expert_tiles)
    covered = defaultdict(int)
    for kind, held, covers in order:
        for tile in held:
            for column in covers:
                covered[kind, tile, column] += 1
    counts = {GATE_UP: tiles, DOWN: tiles, SHARED_GATE_UP: shared_tiles, SHARED_DOWN: shared_tiles}
    expected = {(kind, t, c) for kind, n in counts.items() for t in range(n) for c in range(columns[kind])}
    assert set(covered) == expected and set(covered.values()) <= {1}
    chosen = (ctypes.c_int * 2)()
    cuda.cuda_lag(minibatch, ring, chosen)
    for wanted in (0, 1, 5):
        lead = cuda.cuda_lead(wanted, chosen[0], ring)
        assert 1 <= lead <= ring
        check_progress(order, tiles, ring, lead)


def test_a_ring_too_small_for_the_lag_is_noticed(cuda):
    """The minibatches chosen for a ring of 9, in one two tiles smaller: the check above must see the cycle."""
    order = task_order(cuda, [40], 4, 9, (2, 2, 1, 1), 0)
    check_progress(order, 40, 9)
    with pytest.raises(pytest.fail.Exception, match="wait for each other"):
        check_progress(order, 40, 7)
