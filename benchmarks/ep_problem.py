"""One MoE layer over R ranks: routes, tensors and the exact result, the same on every rank without a word between them.

Whatever rank asks, `weights(r)` and `inputs(r, seed)` are what rank r has, so each rank computes its part of the
reference alone: the output and the gradients of its tokens, and the gradients of its experts over all ranks' tokens.
"""

import statistics
from dataclasses import dataclass

import torch

ROUTINGS = ("uniform", "zipf", "skewed")
HOT = 4.0  # skewed: how much likelier rank 0's experts are


@dataclass
class Inputs:
    """What one rank feeds one layer."""

    x: torch.Tensor  # [N, D]
    ids: torch.Tensor  # [N, K] int64, global
    weight: torch.Tensor  # [N, K] fp32
    dout: torch.Tensor  # [N, D]
    routes: torch.Tensor  # [R, R] int64 on the host: routes from each rank to each
    rank: int
    tokens_here: int  # of all ranks, those that have a route to this one

    @property
    def send(self):
        return self.routes[self.rank].tolist()

    @property
    def recv(self):
        return self.routes[:, self.rank].tolist()


@dataclass
class Weights:
    gate_up: torch.Tensor  # [L, 2I, D]
    down: torch.Tensor  # [L, D, I]
    shared: tuple | None  # gate [S, D], up [S, D], down [D, S]


@dataclass
class Problem:
    ranks: int
    rank: int
    tokens: int  # a rank
    hidden: int
    inter: int
    topk: int
    experts: int  # a rank
    shared: int = 0
    routing: str = "uniform"
    remote: bool = False  # every route to another rank than the token's
    device: str = "cuda"
    dtype: torch.dtype = torch.bfloat16

    def weights(self, rank=None):
        rank = self.rank if rank is None else rank
        own, common = self._normal(1_000_000 + rank), self._normal(2_000_000)
        d, i, s = self.hidden, self.inter, self.shared
        shared = (common(s, d, scale=0.02), common(s, d, scale=0.02), common(d, s, scale=0.02)) if s else None
        return Weights(own(self.experts, 2 * i, d, scale=0.02), own(self.experts, d, i, scale=0.02), shared)

    def ids(self, rank, seed, local=False):
        """int64 [N, K] on the host. `local`: the same experts within a rank, but all of them on the token's own."""
        generator = torch.Generator().manual_seed(1000 * seed + rank)
        total = self.ranks * self.experts
        logits = torch.zeros(total)
        if self.routing == "zipf":
            order = torch.randperm(total, generator=torch.Generator().manual_seed(0))
            logits = -torch.log(1.0 + order)
        elif self.routing == "skewed":
            logits[: self.experts] = torch.tensor(HOT).log()
        if self.remote:
            logits[rank * self.experts : (rank + 1) * self.experts] = -torch.inf
        if int(torch.isfinite(logits).sum()) >= self.topk:  # distinct experts
            noise = -torch.log(-torch.log(torch.rand(self.tokens, total, generator=generator).clamp(1e-20, 1 - 1e-7)))
            ids = (logits + noise).topk(self.topk).indices
        else:
            chance = logits.softmax(0).expand(self.tokens, total)
            ids = torch.multinomial(chance, self.topk, replacement=True, generator=generator)
        return ids % self.experts + rank * self.experts if local else ids

    def inputs(self, rank=None, seed=0, local=False):
        rank = self.rank if rank is None else rank
        normal = self._normal(1000 * seed + rank)
        n, d, k = self.tokens, self.hidden, self.topk
        x, dout = normal(n, d), normal(n, d)
        weight = normal(n, k, dtype=torch.float32).softmax(-1)
        owners = self._owners(seed, local)
        ids = self.ids(rank, seed, local).to(self.device)
        here = int(self._tokens(owners)[:, rank].sum())
        return Inputs(x, ids, weight, dout, self._routes(owners), rank, here)

    def routes(self, seed=0, local=False):
        """int64 [R, R]: how many routes lead from each rank to each."""
        return self._routes(self._owners(seed, local))

    def _owners(self, seed, local):
        return [self.ids(r, seed, local) // self.experts for r in range(self.ranks)]

    def _routes(self, owners):
        return torch.stack([torch.bincount(owner.flatten(), minlength=self.ranks) for owner in owners])

    def _tokens(self, owners):
        """int64 [R, R]: how many tokens of each rank have a route to each."""
        return torch.stack([torch.stack([(o == r).any(1).sum() for r in range(self.ranks)]) for o in owners])

    def link_bytes(self, seeds, once=False):
        """Bytes over a rank's link in each direction in a forward, and as many in a backward, of the busiest rank.

        The mean over the inputs of `seeds`. A remote route's row goes there and its result back, each 2D bytes: in one
        direction go the rows of the rank's own remote routes and the results of the others' routes to it, in the other
        what answers them. `once`: a token goes once to each rank that has routes of it, and one sum comes back.
        """
        crossing = []
        for owners in (self._owners(seed, local=False) for seed in seeds):
            rows = (self._tokens if once else self._routes)(owners)
            remote = rows - torch.diag(rows.diag())
            crossing.append(int((remote.sum(0) + remote.sum(1)).max()))
        return statistics.mean(crossing) * self.hidden * self.dtype.itemsize

    @torch.no_grad()
    def exact(self, seed=0, local=False):
        """In fp64: output, and gradients of x, route weights, gate_up, down and the shared gate, up and down."""
        mine, own = self.inputs(seed=seed, local=local), self.weights()
        x, dout, weight = mine.x.double(), mine.dout.double(), mine.weight.double()
        out, dx, d_weight = torch.zeros_like(x), torch.zeros_like(x), torch.zeros_like(weight)
        d_shared = ()
        if own.shared:
            y, (dxs, *d_shared) = _mlp(x, [t.double() for t in own.shared], dout)
            out, dx = out + y, dx + dxs
        for owner in range(self.ranks):
            w = self.weights(owner)
            for e in range(self.experts):
                token, slot = (mine.ids == owner * self.experts + e).nonzero(as_tuple=True)
                if not token.numel():
                    continue
                factor = weight[token, slot].unsqueeze(1)
                matrices = [*w.gate_up[e].double().chunk(2), w.down[e].double()]
                y, (dxe, *_) = _mlp(x[token], matrices, dout[token] * factor, weights=False)
                out.index_add_(0, token, y * factor)
                dx.index_add_(0, token, dxe)
                d_weight[token, slot] = (y * dout[token]).sum(1)
        grads = [torch.zeros(t.shape, dtype=torch.float64, device=self.device) for t in (own.gate_up, own.down)]
        for source in range(self.ranks):
            theirs = self.inputs(source, seed, local)
            for e in range(self.experts):
                token, slot = (theirs.ids == self.rank * self.experts + e).nonzero(as_tuple=True)
                if not token.numel():
                    continue
                d = theirs.dout[token].double() * theirs.weight[token, slot].double().unsqueeze(1)
                matrices = [*own.gate_up[e].double().chunk(2), own.down[e].double()]
                _, (_, d_gate, d_up, d_down) = _mlp(theirs.x[token].double(), matrices, d)
                grads[0][e] += torch.cat([d_gate, d_up])
                grads[1][e] += d_down
        return out, dx, d_weight, *grads, *d_shared

    def _normal(self, seed):
        generator = torch.Generator(self.device).manual_seed(seed)

        def new(*sizes, scale=1.0, dtype=None):
            t = torch.randn(*sizes, generator=generator, device=self.device, dtype=dtype or self.dtype)
            return t.mul_(scale)

        return new


def _mlp(x, matrices, dy, weights=True):
    """down(silu(gate x) * up x), and the gradients of x and, with `weights`, of gate, up and down."""
    gate, up, down = matrices
    g, u = x @ gate.T, x @ up.T
    s = g.sigmoid()
    h = g * s * u
    y = h @ down.T
    dh = dy @ down
    dg, du = dh * u * (s + g * s * (1 - s)), dh * g * s
    dx = dg @ gate + du @ up
    return y, (dx, dg.T @ x, du.T @ x, dy.T @ h) if weights else (dx,)
