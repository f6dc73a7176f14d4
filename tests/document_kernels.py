"""A plain document kernel for a CPU, in place of those that need a GPU."""

from __future__ import annotations

import torch
from torch.nn.functional import scaled_dot_product_attention


def masked_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_lens: torch.Tensor, max_len: int, scale: float | None
) -> torch.Tensor:
    """`DocumentKernel` by a block-diagonal mask."""
    lens = cu_lens.diff()
    assert max_len == int(lens.max()), "the longest document is not the one that was announced"
    assert len(q) == int(cu_lens[-1]), "the boundaries do not add up to the row"
    documents = torch.repeat_interleave(torch.arange(len(lens)), lens)
    mask = (documents[:, None] == documents).tril()
    heads = (x.transpose(0, 1)[None] for x in (q, k, v))
    return scaled_dot_product_attention(*heads, attn_mask=mask, scale=scale, enable_gqa=True)[0].transpose(0, 1)
