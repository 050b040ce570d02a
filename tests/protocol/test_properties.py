"""Properties of the pure functions in csrc/common that every kernel relies on, over generated inputs."""

from __future__ import annotations

import ctypes
from collections import Counter as Multiset
from collections import defaultdict, deque
from dataclasses import dataclass

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.protocol.test_simulator import COUNTERS, OPS, WAITS

MAX_WAITS = 3
NO_TILE = -1
# The shared library is compiled once and has no state.
relaxed = settings(
    deadline=None, database=None, max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


class Settings(ctypes.Structure):
    _fields_ = [
        *[(name, ctypes.c_int64) for name in ("tiles", "ring", "saved", "minibatch", "h", "y", "lag", "shared_tiles")],
        *[(name, ctypes.c_int64) for name in ("gate_up", "down", "shared", "dgrad_down", "dgrad_up", "wgrad")],
        *[(name, ctypes.c_int64) for name in ("shared_dgrad", "shared_wgrad")],
        *[(name, ctypes.c_int64) for name in ("want_dgrad", "want_wgrad", "want_shared_wgrad", "experts")],
        ("prefix", ctypes.POINTER(ctypes.c_int64)),
    ]


class Record(ctypes.Structure):
    _fields_ = [
        *[(name, ctypes.c_int64) for name in ("op", "index", "part", "macrobatch", "counter", "counter_index")],
        ("wait_count", ctypes.c_int64),
        ("waits", ctypes.c_int64 * 4 * MAX_WAITS),
        *[(name, ctypes.c_int64) for name in ("begin", "end", "last")],
    ]


@pytest.fixture(scope="module")
def common(compile_cpp):
    """csrc/common through ctypes; every function returns int64."""
    library = ctypes.CDLL(str(compile_cpp("common_shim.cpp", "-O2", "-shared", "-fPIC", "-Wconversion")))

    class Common:
        def __getattr__(self, name):
            function = getattr(library, f"shim_{name}")
            function.restype = ctypes.c_int64
            return lambda *a: function(*(ctypes.c_int64(x) if isinstance(x, int) else x for x in a))

        def array(self, name, length, *arguments):
            out = (ctypes.c_int64 * length)()
            getattr(self, name)(*arguments, out)
            return list(out)

    assert Common().record_size() == ctypes.sizeof(Record)
    return Common()


def int64s(values):
    return (ctypes.c_int64 * len(values))(*values)


# ---- schedule.h ----


@relaxed
@given(st.lists(st.lists(st.integers(0, 9), min_size=3, max_size=3), min_size=1, max_size=8))
def test_rows_of_an_expert_are_sorted_by_ordinal_then_rank(common, counts):
    ranks, experts = len(counts), 3
    flat = int64s([count for row in counts for count in row])
    for expert in range(experts):
        routes = [(ordinal, rank) for rank in range(ranks) for ordinal in range(counts[rank][expert])]
        column = ctypes.cast(ctypes.byref(flat, 8 * expert), ctypes.POINTER(ctypes.c_int64))
        rows = {(o, r): common.row_in_expert(o, r, column, ranks, experts) for o, r in routes}
        assert rows == {route: row for row, route in enumerate(sorted(routes))}


expert_tiles = st.lists(st.one_of(st.just(0), st.integers(0, 5)), min_size=1, max_size=9)


def prefix_of(tiles):
    return [sum(tiles[:i]) for i in range(len(tiles) + 1)]


@relaxed
@given(expert_tiles)
def test_a_tile_belongs_to_the_expert_whose_region_holds_it(common, tiles):
    prefix = prefix_of(tiles)
    owners = [expert for expert, count in enumerate(tiles) for _ in range(count)]
    found = [common.expert_of_tile(int64s(prefix), len(tiles), tile) for tile in range(prefix[-1])]
    assert found == owners


@relaxed
@given(st.lists(st.integers(0, 700), min_size=1, max_size=12))
def test_tiles_hold_every_row_and_most_tiles_bounds_them(common, rows):
    size = common.tile_rows()
    tiles = [-(-count // size) for count in rows]
    for count, used, first in zip(rows, tiles, prefix_of(tiles), strict=False):
        held = [common.rows_in_tile(first + i, first, count) for i in range(used)]
        assert sum(held) == count
        assert all(value == size for value in held[:-1]) and all(0 < value <= size for value in held[-1:])
    assert sum(tiles) <= common.most_tiles(sum(rows), len(rows))


@relaxed
@given(st.integers(0, 10**7), st.integers(1, 500))
def test_most_tiles_is_tight(common, routes, experts):
    """The worst routing, one row in every expert and the rest in one of them, needs almost as many tiles."""
    size, used = common.tile_rows(), min(routes, experts)
    worst = used + (routes - used) // size
    assert worst <= common.most_tiles(routes, experts) <= worst + -(-used // size)


# Ranks up to 71; a route is token * K + slot with K up to 16, and the low half holds 2^32 of them.
@relaxed
@given(st.integers(0, 71), st.integers(0, 2**32 - 1))
def test_a_table_entry_holds_any_rank_and_route(common, rank, route):
    row = common.pack_row(rank, route)
    assert row >= 0
    assert (common.row_rank(row), common.row_route(row)) == (rank, route)


# ---- ring.h ----


@relaxed
@given(st.integers(1, 40), st.integers(1, 45))
def test_slots_change_hands_as_both_orders_say(common, tiles, size):
    ring = {tile: common.array("ring", 7, tiles, size, tile) for tile in range(tiles)}
    holder: dict[int, int] = {}
    for tile in reversed(range(tiles)):  # the forward
        slot, previous, *_ = ring[tile]
        assert 0 <= slot < size and previous == holder.get(slot, NO_TILE)
        holder[slot] = tile
    assert set(holder.values()) == set(range(min(tiles, size)))
    holder = {}
    for tile in range(tiles):  # the backward
        slot, _, previous, *_ = ring[tile]
        assert previous == holder.get(slot, NO_TILE)
        holder[slot] = tile
    for tile in range(tiles):
        *_, macrobatch, begin, end, macrobatches = ring[tile]
        assert begin <= tile < end <= begin + size and 0 <= macrobatch < macrobatches
        assert begin == macrobatch * size and macrobatches == -(-tiles // size)


@relaxed
@given(st.integers(0, 400), st.integers(1, 200), st.integers(1, 64))
def test_backward_window(common, tiles, saved, most):
    """No macrobatch of the window holds both tiles that survived and tiles that are replayed."""
    window = common.backward_window(tiles, saved, most)
    assert 1 <= window <= saved
    if tiles > saved:
        assert saved % window == 0
        assert window == saved or most / 4 <= window <= most
    else:
        assert window == min(saved, most)


@st.composite
def minibatches(draw):
    ring = draw(st.integers(1, 20))
    return draw(st.integers(1, 50)), ring, draw(st.integers(1, ring))


@relaxed
@given(minibatches())
def test_minibatches_partition_macrobatches(common, shape):
    tiles, ring, size = shape
    members = defaultdict(list)
    for tile in range(tiles):
        members[common.minibatch_of(*shape, tile)].append(tile)
    count = common.minibatch_count(*shape)
    assert all(0 <= minibatch < count for minibatch in members)
    for minibatch in range(count):
        held = members[minibatch]
        assert common.minibatch_target(*shape, minibatch) == len(held) <= size
        assert held == list(range(held[0], held[0] + len(held))) if held else True
        assert len({tile // ring for tile in held}) <= 1, "a minibatch straddles two macrobatches"


# ---- tasks.h and waits.h ----


@dataclass
class Call:
    settings: Settings
    prefix: list[int]

    def __repr__(self):
        named = {name: getattr(self.settings, name) for name, _ in Settings._fields_ if name != "prefix"}
        return f"Call({named}, prefix={self.prefix})"

    def tasks(self, common, backward: bool, comm: bool) -> list[Record]:
        out = (Record * common.count(ctypes.byref(self.settings), int(backward), int(comm)))()
        common.tasks(ctypes.byref(self.settings), int(backward), int(comm), out)
        return list(out)


@st.composite
def calls(draw):
    prefix = prefix_of(draw(expert_tiles))
    tiles = prefix[-1]
    ring = draw(st.integers(1, tiles + 2))
    saved = ring * draw(st.integers(1, 3)) if draw(st.booleans()) else tiles + draw(st.integers(0, 3))
    values = [
        tiles,
        ring,
        max(saved, ring),
        draw(st.integers(1, ring)),
        draw(st.integers(1, tiles + 2)),
        draw(st.integers(1, tiles + 2)),
    ]
    values += [draw(st.integers(0, tiles + 2)), draw(st.integers(0, 3))]  # lag, shared tiles
    values += [draw(st.integers(1, 3)) for _ in range(8)]
    values += [draw(st.integers(0, 1)) for _ in range(3)]
    return Call(Settings(*values, len(prefix) - 1, int64s(prefix)), prefix)


def expected_forward(s):
    comm = [(op, t, 0, 0) for op in ("Dispatch", "Combine") for t in range(s.tiles)]
    compute = [("Shared", t, p, 0) for t in range(s.shared_tiles) for p in range(s.shared)]
    for op, parts in (("GateUp", s.gate_up), ("Down", s.down)):
        compute += [(op, t, p, 0) for t in range(s.tiles) for p in range(parts)]
    return comm, compute


def expected_backward(s, prefix):
    comm = [(op, t, 0, 0) for op in ("Pull", *(["Push"] if s.want_dgrad else [])) for t in range(s.tiles)]
    compute = [("SharedDgrad", t, p, 0) for t in range(s.shared_tiles) for p in range(s.shared_dgrad)]
    if s.shared_tiles and s.want_shared_wgrad:
        compute += [("SharedWgrad", 0, p, 0) for p in range(s.shared_wgrad)]
    compute += [("Replay", t, p, 0) for t in range(s.saved, s.tiles) for p in range(s.gate_up)]
    compute += [("DgradDown", t, p, 0) for t in range(s.tiles) for p in range(s.dgrad_down)]
    if s.want_dgrad:
        compute += [("DgradUp", t, p, 0) for t in range(s.tiles) for p in range(s.dgrad_up)]
    if s.want_wgrad:
        pairs = {(e, t // s.ring) for e in range(s.experts) for t in range(prefix[e], prefix[e + 1])}
        compute += [("Wgrad", e, p, m) for e, m in pairs for p in range(s.wgrad)]
    return comm, compute


NAMES = {value: name for name, value in OPS.items()}


@relaxed
@given(calls())
def test_task_orders_name_every_task_once(common, call):
    s, prefix = call.settings, call.prefix
    for backward, expected in ((False, expected_forward(s)), (True, expected_backward(s, prefix))):
        for comm, tasks in ((True, expected[0]), (False, expected[1])):
            listed = Multiset((NAMES[r.op], r.index, r.part, r.macrobatch) for r in call.tasks(common, backward, comm))
            # An expert without tiles may get a wgrad task that sums nothing.
            for task in [t for t in listed if t[0] == "Wgrad" and prefix[t[1]] == prefix[t[1] + 1]]:
                assert listed.pop(task) == 1
            assert listed == Multiset(tasks)


def producers(tasks, wait):
    """Tasks that a wait stands for: of each index, the first `target` in the order that signal its counter."""
    counter, begin, end, target = wait
    for index in range(begin, end):
        signalling = [i for i, r in tasks if (r.counter, r.counter_index) == (counter, index)]
        assert 0 < target <= len(signalling), f"a wait for {target} of {len(signalling)} signals never holds"
        yield from signalling[:target]


@relaxed
@given(calls(), st.booleans())
def test_some_total_order_has_every_wait_behind_its_producers(common, call, backward):
    """With one worker a role, tasks run in their role's order; with the waits that must leave no cycle. More workers
    only drop constraints, so nothing can deadlock."""
    roles = [call.tasks(common, backward, comm) for comm in (True, False)]
    nodes = list(enumerate([record for role in roles for record in role]))
    needs: dict[int, set[int]] = {i: set() for i, _ in nodes}
    for i in range(1, len(nodes)):
        if i != len(roles[0]):
            needs[i].add(i - 1)
    for i, record in nodes:
        for w in range(record.wait_count):
            counter = next(name for name, value in COUNTERS.items() if value == record.waits[w][0])
            assert (NAMES[record.op], counter) in WAITS, "test_simulator.WAITS lacks it"
            needs[i].update(producers(nodes, record.waits[w]))
    unlocks = defaultdict(list)
    for i, before in needs.items():
        for j in before:
            unlocks[j].append(i)
    missing = {i: len(before) for i, before in needs.items()}
    ready, ordered = deque(i for i, count in missing.items() if count == 0), 0
    while ready:
        ordered += 1
        for i in unlocks[ready.popleft()]:
            missing[i] -= 1
            if missing[i] == 0:
                ready.append(i)
    stuck = [NAMES[nodes[i][1].op] + str(nodes[i][1].index) for i, count in missing.items() if count]
    assert ordered == len(nodes), f"tasks that wait for each other: {stuck[:6]}"


@relaxed
@given(calls())
def test_weight_gradients_take_their_tiles_in_order_and_round_once(common, call):
    call.settings.want_wgrad = 1
    seen = defaultdict(list)
    for record in call.tasks(common, True, False):
        if NAMES[record.op] == "Wgrad":
            assert record.macrobatch * call.settings.ring <= record.begin or record.begin == record.end
            seen[record.index, record.part].append((list(range(record.begin, record.end)), bool(record.last)))
    for expert in range(call.settings.experts):
        for part in range(call.settings.wgrad):
            rounds = seen[expert, part]
            tiles = [tile for held, _ in rounds for tile in held]
            assert tiles == list(range(call.prefix[expert], call.prefix[expert + 1]))
            assert not any(last for _, last in rounds[:-1])
            assert not tiles or rounds[-1][1]


# ---- widths of indices: 200k rows of 12,288 columns and beyond ----


@pytest.mark.parametrize(("rows", "columns"), [(200_000, 12_288), (2**24, 2**14)])
def test_indices_pass_two_to_the_31(common, rows, columns):
    size = common.tile_rows()
    tiles = -(-rows // size)
    for tile in (0, tiles // 2, tiles - 1):
        assert common.ring_offset(tiles, tiles, tile, columns) == tile * size * columns
    row = common.pack_row(71, rows * 16 - 1)
    assert common.route_offset(row, columns) == (rows * 16 - 1) * columns > 2**31
    counts = int64s([rows * 16] * 72)
    assert common.row_in_expert(rows * 16 - 1, 71, counts, 72, 1) == rows * 16 * 72 - 1
    assert common.most_tiles(rows * 16 * 72, 384) == rows * 16 * 72 // size + 384


def test_task_orders_at_200k_rows(common):
    """Counts of tasks stay exact with parts: 1,563 tiles of 96 column blocks, in a ring that divides nothing."""
    tiles = -(-200_000 // common.tile_rows())
    call = Call(
        Settings(tiles, 97, 97, 7, 5, 3, 4, 0, 96, 96, 1, 2, 2, 2, 1, 1, 1, 1, 0, 1, int64s([0, tiles])), [0, tiles]
    )
    assert common.count(ctypes.byref(call.settings), 0, 0) == tiles * 192
    last = call.tasks(common, False, False)[-1]
    assert (NAMES[last.op], last.index, last.part) == ("Down", 0, 95)
    wgrad = [r for r in call.tasks(common, True, False) if NAMES[r.op] == "Wgrad"]
    assert [r.macrobatch for r in wgrad[::2]] == list(range(-(-tiles // 97)))


# ---- layout.h ----


@relaxed
@given(st.integers(0, 2**22), st.integers(1, 16), st.integers(1, 256).map(lambda n: 64 * n), st.sampled_from([2, 4]))
def test_symmetric_buffers_do_not_overlap(common, tokens, top_k, hidden, element):
    x, dy, routed, ids0, ids1, weight, dweight, total = common.array("layout", 8, tokens, top_k, hidden, element)
    rows, routes = tokens * hidden * element, tokens * top_k * 4
    sizes = {x: rows, dy: rows, routed: rows * top_k, ids0: routes, ids1: routes, weight: routes, dweight: routes}
    if tokens:
        assert len(sizes) == 7
    end = 0
    for offset, size in sorted(sizes.items()):
        assert offset >= end and offset % 256 == 0
        end = offset + size
    assert end <= total < end + 256 * 7
