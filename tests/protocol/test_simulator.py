"""No deadlock, no overwrite of a slot in use, every row once: in adversarial interleavings of the real task orders.

The second half asks whether the simulator would notice: with each deliberate mistake it must find a violation.
"""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

INTERLEAVINGS = 50_000
COMMON = Path(__file__).parents[2] / "csrc" / "common"


def enumerators(header: str, name: str) -> dict[str, int]:
    """Names and values of an `enum class` whose enumerators have no explicit values."""
    body = re.search(rf"enum class {name} : int32_t \{{(.*?)\}};", (COMMON / header).read_text(), re.DOTALL)
    assert body is not None
    return {match: value for value, match in enumerate(re.findall(r"^\s*k(\w+),", body[1], re.MULTILINE))}


OPS = enumerators("tasks.h", "Op")
COUNTERS = enumerators("waits.h", "Counter")


@pytest.fixture(scope="module")
def simulate(compile_cpp: Callable[..., Path]) -> Callable[..., dict]:
    program = compile_cpp("simulator.cpp", "-O2")

    def run(interleavings: int, *arguments: object) -> dict:
        command = [str(program), str(interleavings), "1", *map(str, arguments)]
        result = subprocess.run(command, capture_output=True, text=True, timeout=150)
        assert result.returncode in (0, 1), result.stderr or f"simulator ended with {result.returncode}"
        report = json.loads(result.stdout)
        assert (report["violation"] is not None) == (result.returncode == 1)
        return report

    return run


def test_invariants_hold_in_every_interleaving(simulate):
    report = simulate(INTERLEAVINGS)
    assert report["violation"] is None, report
    assert report["interleavings"] >= 10_000
    rare = {name: count for name, count in report["coverage"].items() if count < INTERLEAVINGS // 50}
    assert not rare, f"of {INTERLEAVINGS} interleavings these kinds were simulated in less than 2 %: {rare}"


# Each mistake and the violation it leads to.
MISTAKES = {
    "slot-freed-early": "^x: overwritten",
    "lag-equals-ring": "^deadlock$",
    "lag-ignores-minibatch": "^deadlock$",
    "partial-macrobatch": "^deadlock$",
    "short-target": "read of another tile's data|read while it is written",
    "combine-after-reuse": "^y: overwritten",
    "dispatch-first": "^deadlock$",
    "wgrad-not-awaited": "^(dOut|replayed x): overwritten",
    "dgrad-up-not-awaited": "^d_gate_up: overwritten",
    "straddling-minibatch": "^deadlock$",
    "carry-shared": "^carry: overwritten",
    "carry-not-awaited": "^carry: read|out of order",
    "no-barrier": "a route's row was not written|published rows overwritten",
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_seeded_mistake_is_caught(simulate, mistake):
    violation = simulate(INTERLEAVINGS, mistake)["violation"]
    assert violation is not None, f"{INTERLEAVINGS} interleavings did not notice {mistake}"
    assert re.search(MISTAKES[mistake], violation), violation


# Every (operation, counter) of csrc/common/waits.h.
WAITS = [
    ("Dispatch", "GateUp"),
    ("GateUp", "Arrived"),
    ("GateUp", "Down"),
    ("Down", "GateUp"),
    ("Down", "Combined"),
    ("Combine", "Down"),
    ("Pull", "Wgrad"),
    ("Pull", "DgradDown"),
    ("Replay", "Arrived"),
    ("DgradDown", "Arrived"),
    ("DgradDown", "GateUp"),
    ("DgradDown", "DgradUp"),
    ("DgradUp", "DgradDown"),
    ("DgradUp", "Pushed"),
    ("Push", "DgradUp"),
    ("Wgrad", "DgradDown"),
    ("Wgrad", "Wgrad"),
    ("SharedWgrad", "SharedDgrad"),
]


@pytest.mark.parametrize(("op", "counter"), WAITS, ids=["-".join(wait) for wait in WAITS])
@pytest.mark.parametrize("shortfall", [0, 1], ids=["left out", "one signal short"])
def test_every_wait_is_needed(simulate, op, counter, shortfall):
    report = simulate(INTERLEAVINGS, "mutated-wait", OPS[op], COUNTERS[counter], shortfall)
    assert report["violation"] is not None, f"{op}'s wait for {counter} can go: nothing noticed"
    assert report["violation"] != "deadlock", report
