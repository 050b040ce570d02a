"""As much of DeepEP's interface (version 1.2, ranks of one machine) as benchmarks/ep_baselines.py uses, over gloo."""

import torch
import torch.distributed as dist


class Config:
    def get_nvl_buffer_size_hint(self, hidden_bytes, ranks):
        return hidden_bytes * ranks


class Buffer:
    get_dispatch_config = staticmethod(lambda ranks: Config())
    get_combine_config = staticmethod(lambda ranks: Config())

    def __init__(self, group, num_nvl_bytes, num_rdma_bytes):
        assert num_nvl_bytes > 0 and num_rdma_bytes == 0
        self.group, self.rank, self.size = group, dist.get_rank(group), dist.get_world_size(group)

    def get_dispatch_layout(self, topk_idx, num_experts):
        owner = topk_idx // (num_experts // self.size)
        in_rank = torch.stack([(owner == r).any(1) for r in range(self.size)], dim=1)
        per_expert = torch.bincount(topk_idx.flatten(), minlength=num_experts).int()
        return in_rank.sum(0).int(), None, per_expert, in_rank, None

    def dispatch(
        self,
        x,
        handle=None,
        topk_idx=None,
        topk_weights=None,
        num_tokens_per_rank=None,
        is_token_in_rank=None,
        num_tokens_per_expert=None,
        num_worst_tokens=0,
    ):
        if handle is not None:
            assert topk_idx is None and topk_weights is None
            return self._rows(x, handle), None, None, None, None, None
        handle = self._everyone(is_token_in_rank)
        ids, weights = self._rows(topk_idx, handle), self._rows(topk_weights, handle)
        local = num_tokens_per_expert.numel() // self.size
        ids = ids - self.rank * local
        absent = (ids < 0) | (ids >= local)
        assert len(ids) == num_worst_tokens, "exactly as many as announced"
        rows = self._rows(x, handle)
        return rows, ids.masked_fill(absent, -1), weights.masked_fill(absent, 0), [], handle, None

    def combine(self, x, handle, topk_weights=None):
        """Sums over ranks of what each has of this rank's tokens."""
        results = []
        for rows in (x, topk_weights):
            if rows is None:
                results.append(None)
                continue
            total = torch.zeros(len(handle[self.rank]), *rows.shape[1:], dtype=rows.dtype)
            for r, theirs in enumerate(self._everyone(rows)):
                first = sum(int(handle[source][:, r].sum()) for source in range(self.rank))
                here = handle[self.rank][:, r]
                total[here] += theirs[first : first + int(here.sum())]
            results.append(total)
        return *results, None

    def _rows(self, mine, handle):
        return torch.cat([t[handle[r][:, self.rank]] for r, t in enumerate(self._everyone(mine))])

    def _everyone(self, value):
        values = [None] * self.size
        dist.all_gather_object(values, value.detach(), group=self.group)
        return values
