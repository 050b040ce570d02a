"""What the fused layer is measured against at several ranks.

`TransformersEP`  transformers' own AllToAllEP around its grouped_mm experts, eager, as its users run it; the shared
                  expert as a plain MLP.
`NcclComposite`   torch._grouped_mm with fused glue between NCCL all-to-alls. How many rows go where is given in
                  advance, so there is no host sync; which expert each is for travels as it must. The shared expert runs
                  beside the dispatch, weight gradients beside the last exchange. Route weights travel in the forward,
                  beside its products, and are kept.
`DeepEPComposite` the same between DeepEP's dispatch and combine, which move a token once to each rank.

The composites have a backward of their own and can be captured in CUDA graphs.
"""

import functools
from types import SimpleNamespace

import torch
import torch.distributed as dist
import torch.nn.functional as F
from baselines import Products
from torch.distributed.device_mesh import init_device_mesh


@functools.cache  # each mesh has communicators of its own
def _mesh(device_type, ranks):
    return init_device_mesh(device_type, (ranks, 1), mesh_dim_names=("ep", "tp"))


class TransformersEP:
    def __init__(self, weights, problem):
        from transformers.distributed.expert_parallel import AllToAllEP
        from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

        config = SimpleNamespace(
            num_experts=problem.experts,
            num_local_experts=problem.experts,
            hidden_size=problem.hidden,
            moe_intermediate_size=problem.inter,
            hidden_act="silu",
            _experts_implementation="grouped_mm",
        )
        with torch.device("meta"):
            experts = Qwen3MoeExperts(config)
        experts._is_expert_parallel = True
        experts.gate_up_proj, experts.down_proj = weights.gate_up, weights.down
        mesh = _mesh(torch.device(problem.device).type, problem.ranks)
        self.layer, self.shared = AllToAllEP(experts, mesh["ep"], mesh["tp"]), weights.shared

    def __call__(self, s):
        out = self.layer(s.x, s.ids, s.weight.to(s.x.dtype))
        if self.shared:
            gate, up, down = self.shared
            out = out + F.linear(F.silu(F.linear(s.x, gate)) * F.linear(s.x, up), down)
        return out


class NcclComposite(Products):
    def __init__(self, weights, problem, group=None):
        super().__init__(weights)
        self.problem, self.group = problem, group

    def __call__(self, s):
        ranks, local, k = self.problem.ranks, self.problem.experts, self.problem.topk
        routes, arriving, device = s.ids.numel(), sum(s.recv), s.x.device
        expert, perm = torch.sort(s.ids.flatten().to(torch.int16), stable=True)
        inverse = torch.empty_like(perm).scatter_(0, perm, torch.arange(routes, device=device))
        every = torch.arange(ranks * local, device=device, dtype=torch.int16)
        ends = torch.searchsorted(expert, every, right=True)
        counts = torch.diff(ends, prepend=ends.new_zeros(1))
        received = torch.empty_like(counts)  # rows from each rank for each of this rank's experts
        counting = dist.all_to_all_single(received, counts, group=self.group, async_op=True)
        arrived, moving = self._exchange(self.glue.permute(s.x, perm, k), s.recv, s.send)
        weight, weighing = self._exchange(s.weight.flatten()[perm], s.recv, s.send)  # the backward reads it
        shared_gate_up, shared = self.shared_forward(s.x)

        # Rows came sorted by rank, then expert. `source`: where the rows in the order of expert, then rank, lie.
        counting.wait()
        lengths = received.view(ranks, local).T.flatten()
        last = lengths.cumsum(0)
        came_at = (received.cumsum(0) - received).view(ranks, local).T.flatten()
        position = torch.arange(arriving, device=device)
        block = torch.searchsorted(last, position, right=True)
        source = (came_at - last + lengths)[block] + position
        back = torch.empty_like(source).scatter_(0, source, position)
        offsets = last.view(local, ranks)[:, -1].to(torch.int32)

        moving.wait()
        rows = self.glue.permute(arrived, source, 1)
        gate_up, y = self.experts(rows, offsets)
        returned, moving = self._exchange(self.glue.permute(y, back, 1), s.send, s.recv)
        weighing.wait()
        moving.wait()
        self.saved = perm, inverse.view_as(s.ids), source, back, weight, offsets, rows, gate_up, shared_gate_up
        return self.glue.weighted_sum(returned, inverse.view_as(s.ids), s.weight, shared)

    def backward(self, s):
        """Gradients of x, route weights, gate_up, down and the shared gate, up and down."""
        perm, inverse, source, back, weight, offsets, rows, gate_up, shared_gate_up = self.saved
        arrived, moving = self._exchange(self.glue.permute(s.dout, perm, self.problem.topk), s.recv, s.send)
        shared_dx, shared = self.shared_backward(s.x, s.dout, shared_gate_up)
        moving.wait()
        drows = self.glue.permute(arrived, source, 1)
        dx_rows, d_gate_up, weighted_h, dots = self.experts_dgrad(drows, gate_up, offsets, weight, source)
        returned, moving = self._exchange(self.glue.permute(dx_rows, back, 1), s.send, s.recv)
        d_weight, weighing = self._exchange(dots, s.send, s.recv)
        grads = self.experts_wgrad(drows, rows, d_gate_up, weighted_h, offsets)
        moving.wait()
        weighing.wait()
        return self.glue.weighted_sum(returned, inverse, None, shared_dx), d_weight[inverse], *grads, *shared

    def _exchange(self, rows, recv, send):
        into = rows.new_empty(sum(recv), *rows.shape[1:])
        return into, dist.all_to_all_single(into, rows, recv, send, group=self.group, async_op=True)


class DeepEPComposite(Products):
    """Rows are tokens as DeepEP moves them: each once to each rank that has an expert of it. bf16, one machine."""

    def __init__(self, weights, problem, group=None):
        import deep_ep

        super().__init__(weights)
        self.problem, group = problem, group or dist.group.WORLD
        row_bytes = problem.hidden * 2
        configs = (deep_ep.Buffer.get_dispatch_config, deep_ep.Buffer.get_combine_config)
        hint = max(of(problem.ranks).get_nvl_buffer_size_hint(row_bytes, problem.ranks) for of in configs)
        self.buffer = deep_ep.Buffer(group, hint, 0)

    def __call__(self, s):
        local, k = self.problem.experts, self.problem.topk
        per_rank, _, per_expert, in_rank, _ = self.buffer.get_dispatch_layout(s.ids, self.problem.ranks * local)
        # As many rows as there are, known in advance: that spares the host sync.
        tokens, ids, weight, _, handle, _ = self.buffer.dispatch(
            s.x,
            topk_idx=s.ids,
            topk_weights=s.weight,
            num_tokens_per_rank=per_rank,
            is_token_in_rank=in_rank,
            num_tokens_per_expert=per_expert,
            num_worst_tokens=s.tokens_here,
        )
        shared_gate_up, shared = self.shared_forward(s.x)
        here = sum(s.recv)
        flat = ids.flatten()
        expert, perm = torch.sort(torch.where(flat < 0, local, flat).to(torch.int16), stable=True)
        every = torch.arange(local, device=s.x.device, dtype=torch.int16)
        offsets = torch.searchsorted(expert, every, right=True).to(torch.int32)
        perm = perm[:here]  # the others are routes to other ranks
        row = torch.full_like(flat, -1).scatter_(0, perm, torch.arange(here, device=s.x.device)).view_as(ids)
        rows = self.glue.permute(tokens, perm, k)
        gate_up, y = self.experts(rows, offsets)
        part = self.glue.weighted_sum(y, row, weight, None)
        out, _, _ = self.buffer.combine(part, handle)
        self.saved = handle, perm, row, weight, offsets, rows, gate_up, shared_gate_up
        return out if shared is None else out + shared

    def backward(self, s):
        """As NcclComposite.backward."""
        handle, perm, row, weight, offsets, rows, gate_up, shared_gate_up = self.saved
        dtokens, *_ = self.buffer.dispatch(s.dout, handle=handle)
        shared_dx, shared = self.shared_backward(s.x, s.dout, shared_gate_up)
        drows = self.glue.permute(dtokens, perm, self.problem.topk)
        dx_rows, d_gate_up, weighted_h, dots = self.experts_dgrad(drows, gate_up, offsets, weight, perm)
        part = self.glue.weighted_sum(dx_rows, row, None, None)
        dx, d_weight, _ = self.buffer.combine(part, handle, topk_weights=dots)
        grads = self.experts_wgrad(drows, rows, d_gate_up, weighted_h, offsets)
        return dx if shared_dx is None else dx + shared_dx, d_weight, *grads, *shared
