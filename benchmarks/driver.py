"""Drives the CUDA forward from Python through ctypes: one process, one GPU, one or more ranks on it.

A `Group` of R ranks holds every rank's symmetric buffers on the one GPU, so a peer pointer is an ordinary pointer. That
is evidence of arithmetic and protocol order, not of link behaviour.
"""

import ctypes
import os
from dataclasses import dataclass, field

import torch

MAX_RANKS, MAX_TOPK, TILE = 72, 16, 128
WHOLE, GATE_UP_ONLY, DOWN_ONLY, NO_DISPATCH = range(4)


class TimeoutRecord(ctypes.Structure):
    _fields_ = [(n, ctypes.c_uint32) for n in ("set", "rank", "phase", "waiting_for", "expected", "seen")]


class ForwardArgs(ctypes.Structure):
    _fields_ = (
        [
            (n, ctypes.c_int32)
            for n in (
                "rank ranks tokens max_tokens topk hidden inter shared_inter local_experts first_expert ring_tiles "
                "minibatch_tiles lead_tiles ladder store_gate_up"
            ).split()
        ]
        + [("swiglu_limit", ctypes.c_float), ("sm_limit", ctypes.c_int32), ("comm_sms", ctypes.c_int32)]
        + [("timeout_ns", ctypes.c_uint64)]
        + [(n, ctypes.c_void_p * MAX_RANKS) for n in "peer_x peer_ids peer_tokens peer_routed".split()]
        + [
            (n, ctypes.c_void_p)
            for n in (
                "gate_up_proj down_proj shared_gate shared_up shared_down ring_x ring_gate_up ring_h shared_gate_up "
                "shared_h shared_y schedule scratch abort_word record"
            ).split()
        ]
    )


def load(path=None):
    root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    lib = ctypes.CDLL(path or os.environ.get("MOK_CUDA_LIB") or os.path.join(root, "build-cuda", "libmok_cuda.so"))
    for name in ("mok_schedule_bytes", "mok_scratch_bytes"):
        getattr(lib, name).restype = ctypes.c_int64
    return lib


def check(status):
    if status != 0:
        raise RuntimeError(f"CUDA error {status}")


def ptr(t):
    return ctypes.c_void_p(t.data_ptr() if t is not None and t.numel() else None)


@dataclass
class Settings:
    ring_tiles: int = 0  # 0: everything fits, just
    minibatch_tiles: int = 0
    lead_tiles: int = 0
    store_gate_up: bool = True
    swiglu_limit: float = 0.0
    sm_limit: int = 0
    comm_sms: int = 0  # of the forward
    timeout_s: float = 5.0
    ladder: int = WHOLE


@dataclass
class Weights:
    """One rank's experts, Hugging Face layout, and the shared expert (same on all ranks)."""

    gate_up: torch.Tensor  # [L, 2I, D]
    down: torch.Tensor  # [L, D, I]
    shared: tuple = None  # gate [S, D], up [S, D], down [D, S]


@dataclass
class Group:
    """R ranks on one GPU. tokens[r] may differ; weights[r] holds experts r*L .. (r+1)*L-1."""

    weights: list
    topk: int
    max_tokens: int
    settings: Settings = field(default_factory=Settings)
    lib: object = None

    def __post_init__(self):
        self.lib = self.lib or load()
        self.R = len(self.weights)
        w = self.weights[0]
        self.L, self.I2, self.D = w.gate_up.shape
        self.I = self.I2 // 2
        self.S = w.shared[0].shape[0] if w.shared else 0
        dev, bf = w.gate_up.device, torch.bfloat16
        n, k = max(self.max_tokens, 1), self.topk
        routes = self.R * self.max_tokens * k
        halves = 2 * routes // TILE + min(routes, self.L)  # an expert's last tile may have half the rows
        self.ring_tiles = max(2, self.settings.ring_tiles or -(-halves // 2))
        rows = self.ring_tiles * TILE
        new = lambda *s, dtype=bf: torch.full(
            s, float("nan") if dtype.is_floating_point else 0, dtype=dtype, device=dev
        )
        self.ranks = []
        for _ in range(self.R):
            b = dict(
                x=new(n, self.D),
                ids=new(n, k, dtype=torch.int32),
                weight=new(n, k, dtype=torch.float32),
                tokens=new(2, dtype=torch.int32),
                routed=new(n * k, self.D),
                ring_x=new(rows, self.D),
                ring_gate_up=new(rows, self.I2),
                ring_h=new(rows, self.I),
                shared_gate_up=new(n, 2 * max(self.S, 1)),
                shared_h=new(n, max(self.S, 1)),
                shared_y=new(n, self.D),
                abort_word=new(1, dtype=torch.int32),
                pad=new(MAX_RANKS, dtype=torch.int32),
                epoch=new(1, dtype=torch.int32),
                out=new(n, self.D),
            )
            self.ranks.append(b)
        a = self.args(0, self.max_tokens)
        for b in self.ranks:
            b["schedule"] = torch.zeros(self.lib.mok_schedule_bytes(ctypes.byref(a)), dtype=torch.uint8, device=dev)
            b["scratch"] = torch.zeros(self.lib.mok_scratch_bytes(ctypes.byref(a)), dtype=torch.uint8, device=dev)
        self.record = torch.zeros(8, dtype=torch.int32).pin_memory()
        self.pads = (ctypes.c_void_p * self.R)(*[b["pad"].data_ptr() for b in self.ranks])
        self.aborts = (ctypes.c_void_p * self.R)(*[b["abort_word"].data_ptr() for b in self.ranks])
        self.timeout_ns = ctypes.c_uint64(int(self.settings.timeout_s * 1e9))

    def args(self, rank, tokens, x=None):
        s, w, b = self.settings, self.weights[rank], self.ranks[rank]
        a = ForwardArgs(
            rank=rank,
            ranks=self.R,
            tokens=tokens,
            max_tokens=self.max_tokens,
            topk=self.topk,
            hidden=self.D,
            inter=self.I,
            shared_inter=self.S,
            local_experts=self.L,
            first_expert=rank * self.L,
            ring_tiles=self.ring_tiles,
            minibatch_tiles=s.minibatch_tiles,
            lead_tiles=s.lead_tiles,
            ladder=s.ladder,
            store_gate_up=int(s.store_gate_up),
            swiglu_limit=s.swiglu_limit,
            sm_limit=s.sm_limit,
            comm_sms=s.comm_sms,
            timeout_ns=int(s.timeout_s * 1e9),
        )
        for r, o in enumerate(self.ranks):
            a.peer_x[r], a.peer_ids[r] = o["x"].data_ptr(), o["ids"].data_ptr()
            a.peer_tokens[r], a.peer_routed[r] = o["tokens"].data_ptr(), o["routed"].data_ptr()
        if x is not None:
            a.peer_x[rank] = x.data_ptr()
        a.gate_up_proj, a.down_proj = w.gate_up.data_ptr(), w.down.data_ptr()
        if self.S:
            a.shared_gate, a.shared_up, a.shared_down = (t.data_ptr() for t in w.shared)
        for name in "ring_x ring_gate_up ring_h shared_gate_up shared_h shared_y schedule scratch abort_word".split():
            if name in b:
                setattr(a, name, b[name].data_ptr())
        if hasattr(self, "record"):
            a.record = self.record.data_ptr()
        return a

    def stream(self):
        return ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)

    def prologue(self, rank, x, ids, weight, alias=False):
        """alias: leave x where it is (one rank only)."""
        b = self.ranks[rank]
        dst = x if alias else b["x"]
        check(
            self.lib.mok_prologue(
                ptr(dst),
                ptr(x),
                ptr(b["ids"]),
                ptr(ids),
                int(ids.dtype == torch.int64),
                ptr(b["weight"]),
                ptr(weight),
                int(weight.dtype == torch.bfloat16),
                ptr(b["tokens"]),
                x.shape[0],
                self.topk,
                self.D,
                self.stream(),
            )
        )

    def barrier(self, rank, phase):
        b = self.ranks[rank]
        check(
            self.lib.mok_barrier(
                self.pads,
                self.aborts,
                rank,
                self.R,
                ptr(b["epoch"]),
                self.timeout_ns,
                ctypes.c_void_p(self.record.data_ptr()),
                phase,
                self.stream(),
            )
        )

    def schedule(self, args):
        check(self.lib.mok_schedule(ctypes.byref(args), self.stream()))

    def megakernel(self, *args):
        array = (ForwardArgs * len(args))(*args)
        check(self.lib.mok_forward(array, len(args), self.stream()))

    def epilogue(self, rank, tokens, scale=None, out=None):
        b = self.ranks[rank]
        out = b["out"] if out is None else out
        check(
            self.lib.mok_epilogue(
                ptr(out),
                ptr(b["routed"]),
                ptr(b["weight"]),
                ptr(b["ids"]),
                self.R * self.L,
                ptr(b["shared_y"]) if self.S else None,
                ptr(scale),
                tokens,
                self.topk,
                self.D,
                ptr(b["abort_word"]),
                self.stream(),
            )
        )
        return out[:tokens]

    def forward_single(self, x, ids, weight, scale=None, out=None, args=None):
        """One rank: no barriers, x is read where it lies."""
        self.prologue(0, x, ids, weight, alias=True)
        a = args or self.args(0, x.shape[0], x)
        self.schedule(a)
        self.megakernel(a)
        return self.epilogue(0, x.shape[0], scale, out)

    def forward(self, xs, ids, weights, scales=None, one_launch=True):
        """All ranks, phase by phase; one_launch: a single megakernel launch whose block ranges are the ranks."""
        n = [x.shape[0] for x in xs]
        for r in range(self.R):
            self.prologue(r, xs[r], ids[r], weights[r])
        self.barrier_all(1)
        args = [self.args(r, n[r]) for r in range(self.R)]
        for a in args:
            self.schedule(a)
        if one_launch:
            self.megakernel(*args)
        else:
            for a in args:
                self.megakernel(a)
        self.barrier_all(2)
        return [self.epilogue(r, n[r], scales[r] if scales else None) for r in range(self.R)]

    def barrier_all(self, phase):
        """Every rank's barrier kernel, each on its own stream, since each waits for the others."""
        if self.R == 1:
            return
        if not hasattr(self, "streams"):
            self.streams = [torch.cuda.Stream() for _ in range(self.R)]
        main = torch.cuda.current_stream()
        for r, s in enumerate(self.streams):
            s.wait_stream(main)
            with torch.cuda.stream(s):
                self.barrier(r, phase)
        for s in self.streams:
            main.wait_stream(s)

    def header(self, rank=0):
        names = "tiles units minibatches tasks minibatch_tiles lag rows routed_pairs".split()
        return dict(zip(names, self.ranks[rank]["schedule"][:32].view(torch.int32).tolist(), strict=True))


def reference(x, ids, weight, experts, shared=None, scale=None, limit=0.0, dtype=torch.float64):
    """The layer in `dtype`, nothing rounded on the way.

    experts: list of (gate_up [2I, D], down [D, I]); id -1 or too large: masked.
    """

    def mlp(v, gate, up, down):
        g, u = v @ gate.T, v @ up.T
        if limit > 0:
            g, u = g.clamp(max=limit), u.clamp(-limit, limit)
        return (torch.nn.functional.silu(g) * u) @ down.T

    xd = x.to(dtype)
    out = torch.zeros(x.shape, dtype=dtype, device=x.device)
    if shared is not None:
        y = mlp(xd, *[t.to(dtype) for t in shared])
        out += y * scale.to(dtype)[:, None] if scale is not None else y
    for e, (gate_up, down) in enumerate(experts):
        token, slot = (ids == e).nonzero(as_tuple=True)
        if token.numel():
            gate, up = gate_up.to(dtype).chunk(2)
            out.index_add_(0, token, mlp(xd[token], gate, up, down.to(dtype)) * weight[token, slot].to(dtype)[:, None])
    return out


def relative_error(a, b):
    """||a - b|| / ||b||; NaN never passes a comparison."""
    if b.numel() == 0:
        return 0.0
    return ((a.double() - b.double()).norm() / b.double().norm().clamp_min(1e-300)).item()


def make_weights(ranks, experts, hidden, inter, shared=0, device="cuda", seed=0):
    g = torch.Generator(device=device).manual_seed(seed)
    new = lambda *s: torch.randn(*s, generator=g, device=device, dtype=torch.bfloat16).mul_(0.02)
    common = (new(shared, hidden), new(shared, hidden), new(hidden, shared)) if shared else None
    return [Weights(new(experts, 2 * inter, hidden), new(experts, hidden, inter), common) for _ in range(ranks)]


def make_routes(tokens, topk, experts, device="cuda", seed=0):
    """Top-k of random logits: ids int64 [N, K] (distinct while there are enough experts), weights fp32 [N, K]."""
    g = torch.Generator(device=device).manual_seed(seed)
    if topk <= experts:
        w, ids = torch.randn(tokens, experts, generator=g, device=device).topk(topk)
        return ids, w.softmax(-1)
    ids = torch.randint(0, experts, (tokens, topk), generator=g, device=device)
    return ids, torch.rand(tokens, topk, generator=g, device=device).softmax(-1)
