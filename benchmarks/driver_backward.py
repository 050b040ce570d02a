"""Drives the CUDA backward from Python through ctypes, after a forward of the same `driver.Group`."""

import ctypes
from dataclasses import dataclass

import torch
from driver import MAX_RANKS, ForwardArgs, Group, check, ptr


class BackwardArgs(ctypes.Structure):
    _fields_ = (
        [("forward", ForwardArgs)]
        + [
            (n, ctypes.c_int32)
            for n in (
                "window_tiles",
                "chunk_units",
                "wants_dx",
                "d_gate_up_into",
                "d_down_into",
                "comm_sms",
                "reuses_ring",
            )
        ]
        + [(n, ctypes.c_void_p) for n in ("x", "dout", "shared_scale")]
        + [(n, ctypes.c_void_p * MAX_RANKS) for n in ("peer_dout", "peer_weight", "peer_dweight")]
        + [
            (n, ctypes.c_void_p)
            for n in (
                "workspace shared_dx d_gate_up_proj d_down_proj d_shared_gate d_shared_up d_shared_down d_shared_scale"
            ).split()
        ]
    )


@dataclass
class Wants:
    """Which gradients a backward computes; those of the route weights always."""

    dx: bool = True
    experts: bool = True
    shared: bool = True


class Backward:
    """The backward's buffers of every rank of `group`, poisoned with NaN; gradients lie in `ranks[r]`.

    reuses_ring: what the forward left is written over, so there is one backward.

    sums: of each rank, in bf16 or fp32, the d_gate_up_proj and d_down_proj that gradients are added to.
    """

    def __init__(
        self,
        group: Group,
        window_tiles: int = 0,
        chunk_units: int = 0,
        wants: Wants | None = None,
        sums=None,
        comm_sms: int = 0,
        reuses_ring: bool = False,
    ):
        self.reuses_ring = reuses_ring
        self.group, self.window_tiles, self.chunk_units, self.comm_sms = group, window_tiles, chunk_units, comm_sms
        self.wants, self.sums = wants or Wants(), sums
        self.lib = group.lib
        self.lib.mok_backward_workspace_bytes.restype = ctypes.c_int64
        g = group
        n, k = max(g.max_tokens, 1), g.topk
        dev = g.weights[0].gate_up.device
        new = lambda *s, dtype=torch.bfloat16: torch.full(s, float("nan"), dtype=dtype, device=dev)
        self.ranks = []
        for w in g.weights:
            b = dict(
                dout=new(n, g.D),
                weight=new(n, k, dtype=torch.float32),
                dweight=new(n * k, dtype=torch.float32),
                shared_dx=new(n, g.D),
                dx=new(n, g.D),
                d_weight=new(n, k, dtype=torch.float32),
            )
            if self.wants.experts:
                b |= dict(d_gate_up_proj=torch.full_like(w.gate_up, float("nan")))
                b |= dict(d_down_proj=torch.full_like(w.down, float("nan")))
            if self.wants.shared and w.shared:
                names = ("d_shared_gate", "d_shared_up", "d_shared_down")
                b |= {m: torch.full_like(t, float("nan")) for m, t in zip(names, w.shared, strict=True)}
                b["d_shared_scale"] = new(n, dtype=torch.float32)
            self.ranks.append(b | (sums[len(self.ranks)] if sums else {}))
        for r, b in enumerate(self.ranks):
            size = self.lib.mok_backward_workspace_bytes(ctypes.byref(self.args(r, g.max_tokens)))
            b["workspace"] = torch.full((size,), 0xFF, dtype=torch.uint8, device=dev)  # NaN, as bf16 and as fp32

    def args(self, rank, tokens, x=None, dout=None, scale=None):
        g, b = self.group, self.ranks[rank]
        a = BackwardArgs(
            forward=g.args(rank, tokens, x),
            window_tiles=self.window_tiles,
            chunk_units=self.chunk_units,
            wants_dx=int(self.wants.dx),
            comm_sms=self.comm_sms,
            reuses_ring=int(self.reuses_ring),
            x=x.data_ptr() if x is not None else g.ranks[rank]["x"].data_ptr(),
            dout=dout.data_ptr() if dout is not None else b["dout"].data_ptr(),
            shared_scale=scale.data_ptr() if scale is not None else None,
        )
        for r, o in enumerate(self.ranks):
            a.peer_dout[r], a.peer_weight[r] = o["dout"].data_ptr(), o["weight"].data_ptr()
            a.peer_dweight[r] = o["dweight"].data_ptr()
        if dout is not None and g.R == 1:
            a.peer_dout[rank] = dout.data_ptr()
        if self.sums:
            kinds = {torch.bfloat16: 1, torch.float32: 2}
            a.d_gate_up_into, a.d_down_into = kinds[b["d_gate_up_proj"].dtype], kinds[b["d_down_proj"].dtype]
        if "workspace" in b:
            a.workspace = b["workspace"].data_ptr()
        if g.S and self.wants.dx:
            a.shared_dx = b["shared_dx"].data_ptr()
        for name in (
            "d_gate_up_proj",
            "d_down_proj",
            "d_shared_gate",
            "d_shared_up",
            "d_shared_down",
            "d_shared_scale",
        ):
            if name in b:
                setattr(a, name, b[name].data_ptr())
        return a

    def prologue(self, rank, x, dout, weight):
        """One rank: dOut and x stay where they are."""
        g, b, f = self.group, self.ranks[rank], self.group.ranks[rank]
        alone = g.R == 1
        wants = ctypes.c_void_p(f["tokens"].data_ptr() + 4)
        check(
            self.lib.mok_backward_prologue(
                ptr(dout if alone else b["dout"]),
                ptr(dout),
                ptr(x if alone else f["x"]),
                ptr(x),
                ptr(b["weight"]),
                ptr(weight),
                wants,
                int(self.wants.dx),
                x.shape[0],
                g.topk,
                g.D,
                g.stream(),
            )
        )

    def launch(self, *args):
        array = (BackwardArgs * len(args))(*args)
        check(self.lib.mok_backward(array, len(args), self.group.stream()))

    def epilogue(self, rank, tokens):
        g, b = self.group, self.ranks[rank]
        check(
            self.lib.mok_backward_epilogue(
                ptr(b["dx"]) if self.wants.dx else None,
                ptr(g.ranks[rank]["routed"]),
                ptr(b["shared_dx"]) if g.S else None,
                ptr(b["d_weight"]),
                ptr(b["dweight"]),
                ptr(g.ranks[rank]["ids"]),
                g.R * g.L,
                tokens,
                g.topk,
                g.D,
                ptr(g.ranks[rank]["abort_word"]),
                g.stream(),
            )
        )

    def backward(self, xs, douts, weights, scales=None, one_launch=True):
        """All ranks, phase by phase. weights: fp32 [N, K], as in the forward. Returns each rank's gradients by name."""
        g = self.group
        for r in range(g.R):
            self.prologue(r, xs[r], douts[r], weights[r])
        g.barrier_all(3)
        args = [self.args(r, xs[r].shape[0], xs[r], douts[r], scales[r] if scales else None) for r in range(g.R)]
        if one_launch:
            self.launch(*args)
        else:
            for a in args:
                self.launch(a)
        g.barrier_all(4)
        for r in range(g.R):
            self.epilogue(r, xs[r].shape[0])
        return [self.gradients(r, xs[r].shape[0]) for r in range(g.R)]

    def gradients(self, rank, tokens):
        b = self.ranks[rank]
        out = {"d_weight": b["d_weight"][:tokens]}
        if self.wants.dx:
            out["dx"] = b["dx"][:tokens]
        for name in ("d_gate_up_proj", "d_down_proj", "d_shared_gate", "d_shared_up", "d_shared_down"):
            if name in b:
                out[name] = b[name]
        if "d_shared_scale" in b:
            out["d_shared_scale"] = b["d_shared_scale"][:tokens]
        return out
