"""Attention that stays inside documents, for OLMo-core models on any device.

OLMo-core's PyTorch backend refuses document boundaries and its flash backends need packages that have no CPU build.
`VarlenAttention` calls the kernel of `varlen_attention.document_kernel`, which knows boundaries. `DocumentAttention` is
for a CPU and for fp32: it gathers the documents of a micro-batch into a few rectangles [documents, length], where plain
causal attention cannot cross a boundary, and scatters the results back. Work and memory grow with the sum of squared
document lengths, not with the squared pack length, and no mask is ever built.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from olmo_core.nn.attention import Attention
from olmo_core.nn.attention.backend import TorchAttentionBackend
from olmo_core.nn.attention.kv_cache import KVCacheManager
from olmo_core.nn.transformer import Transformer
from torch.nn.functional import scaled_dot_product_attention

from grpo_lib.errors import GrpoError
from grpo_lib.trainers.varlen_attention import DocumentKernel


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DocumentBuckets:
    """Documents grouped by length to within a factor of two, so that padding at most doubles a document.

    Three documents of 2, 5 and 2 tokens: buckets ``[[0, 1], [7, 8]]`` and ``[[2, 3, 4, 5, 6]]``, and
    ``restore = [0, 1, 4, 5, 6, 7, 8, 2, 3]``, the place of each token in the flattened buckets.
    """

    buckets: tuple[torch.Tensor, ...]  # each [documents, length] int64 token positions; short rows repeat their last
    restore: torch.Tensor  # [tokens] int64

    @staticmethod
    def of(cu_doc_lens: torch.Tensor) -> DocumentBuckets:
        """From cumulative document lengths [documents + 1], which count all tokens of all rows."""
        bounds = cu_doc_lens.to(device="cpu", dtype=torch.int64)
        starts, lengths = bounds[:-1], bounds.diff()
        size_class = torch.ceil(torch.log2(lengths.double()))
        restore = torch.empty(int(bounds[-1]), dtype=torch.int64)
        buckets, num_placed = [], 0
        for members in (torch.nonzero(size_class == size)[:, 0] for size in size_class.unique()):
            offsets = torch.arange(int(lengths[members].max()))
            is_real = offsets < lengths[members, None]
            bucket = starts[members, None] + torch.minimum(offsets, lengths[members, None] - 1)
            places = num_placed + torch.arange(bucket.numel()).view(bucket.shape)
            restore[bucket[is_real]] = places[is_real]
            num_placed += bucket.numel()
            buckets.append(bucket.to(cu_doc_lens.device))
        return DocumentBuckets(buckets=tuple(buckets), restore=restore.to(cu_doc_lens.device))


class BucketCache:
    """The buckets of the micro-batch in flight, shared by all blocks: they get the same `cu_doc_lens` object."""

    def __init__(self) -> None:
        self._key: torch.Tensor | None = None
        self._buckets: DocumentBuckets | None = None

    def get(self, cu_doc_lens: torch.Tensor) -> DocumentBuckets:
        # Holding the key keeps it alive, so identity cannot be that of a later tensor at the same address.
        if self._buckets is None or self._key is not cu_doc_lens:
            self._key, self._buckets = cu_doc_lens, DocumentBuckets.of(cu_doc_lens)
        return self._buckets


class _WithinDocuments(TorchAttentionBackend):
    """Takes its sizes from the backend that it replaces; a call without document boundaries is an error."""

    def __init__(self, replaced: TorchAttentionBackend) -> None:
        super().__init__(
            head_dim=replaced.head_dim,
            n_heads=replaced.n_heads,
            n_kv_heads=replaced.n_kv_heads,
            scale=replaced.scale,
            dropout_p=replaced.dropout_p,
            window_size=replaced.window_size,
        )

    @classmethod
    def assert_supports_swa(cls) -> None:
        raise GrpoError(f"{cls.__name__} has no sliding window; use a model with full attention in every layer")

    def warmup_cache(self, max_seq_len: int, device: torch.device) -> None:
        """Nothing to build: there is no mask."""

    def forward(
        self,
        qkv: torch.Tensor | tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        cu_doc_lens: torch.Tensor | None = None,
        cu_doc_lens_q: torch.Tensor | None = None,
        cu_doc_lens_k: torch.Tensor | None = None,
        max_doc_len: int | None = None,
        max_doc_len_q: int | None = None,
        max_doc_len_k: int | None = None,
        local_k_slice: slice | None = None,
        kv_cache_manager: KVCacheManager | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """q [B, T, heads, head_dim], k and v [B, T, kv heads, head_dim] → [B, T, heads, head_dim]."""
        unused = (cu_doc_lens_q, cu_doc_lens_k, max_doc_len_q, max_doc_len_k, local_k_slice, kv_cache_manager, sinks)
        assert all(option is None for option in unused), unused
        if cu_doc_lens is None or max_doc_len is None:
            # OLMo-core drops `doc_lens` without a word when `max_doc_lens` is not given with it.
            raise GrpoError("attention was called without document boundaries: packed documents would see each other")
        q, k, v = qkv
        return self._attend(q, k, v, cu_doc_lens, max_doc_len)

    def _attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_doc_lens: torch.Tensor, max_doc_len: int
    ) -> torch.Tensor:
        raise NotImplementedError


class DocumentAttention(_WithinDocuments):
    """PyTorch's dense causal attention on rectangles of documents."""

    def __init__(self, replaced: TorchAttentionBackend, cache: BucketCache) -> None:
        super().__init__(replaced)
        self._buckets = cache

    def _attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_doc_lens: torch.Tensor, max_doc_len: int
    ) -> torch.Tensor:
        documents = self._buckets.get(cu_doc_lens)
        outputs = []
        for bucket in documents.buckets:
            # Short rows are padded at their end, where causal attention hides the padding from every real token.
            attended = scaled_dot_product_attention(
                _gather(q, bucket),
                _gather(k, bucket),
                _gather(v, bucket),
                dropout_p=self.dropout_p,
                is_causal=True,
                scale=self.scale,
                enable_gqa=self.n_heads != self.n_kv_heads,
            )
            outputs.append(attended.transpose(1, 2).flatten(0, 1))
        return torch.cat(outputs).index_select(0, documents.restore).view(q.shape)


class VarlenAttention(_WithinDocuments):
    """A kernel that takes the boundaries themselves."""

    def __init__(self, replaced: TorchAttentionBackend, kernel: DocumentKernel) -> None:
        super().__init__(replaced)
        assert self.dropout_p == 0, "the kernel has no dropout"
        self._kernel = kernel

    def _attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_doc_lens: torch.Tensor, max_doc_len: int
    ) -> torch.Tensor:
        attended = self._kernel(q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), cu_doc_lens, max_doc_len, self.scale)
        return attended.view(q.shape)


def use_document_attention(model: Transformer, kernel: DocumentKernel | None = None) -> None:
    """Give every block the same kind of attention, and fail where a block has none to replace.

    Args:
        kernel: What `VarlenAttention` is to call; None is `DocumentAttention`.

    Raises:
        GrpoError: names the block whose sequence mixer cannot honour document boundaries.
    """
    cache = BucketCache()
    for name, block in model.blocks.items():
        mixer = block.attention
        if not isinstance(mixer, Attention) or not isinstance(mixer.backend, TorchAttentionBackend):
            kind = type(getattr(mixer, "backend", mixer)).__name__
            raise GrpoError(f"block {name}: {kind} cannot keep attention inside documents")
        if kernel is None:
            mixer.backend = DocumentAttention(mixer.backend, cache)
        else:
            mixer.backend = VarlenAttention(mixer.backend, kernel)


def bound_single_documents(model: Transformer) -> None:
    """Give blocks of a compiled model the boundaries of two documents at least, of which the second may be empty.

    A compiler takes a size of one for a constant, and the rotary embedding has a tensor with as many elements as there
    are documents: a row of one document would be compiled as a case of its own.
    """
    prepare = model._prepare_inputs

    def prepared(*inputs: Any, **options: Any) -> tuple[Any, ...]:
        prepared_inputs = prepare(*inputs, **options)
        block_options = prepared_inputs[2]
        bounds = block_options["cu_doc_lens"]
        if len(bounds) == 2:
            block_options["cu_doc_lens"] = torch.cat([bounds, bounds[-1:]])
            torch._dynamo.maybe_mark_dynamic(block_options["cu_doc_lens"], 0)  # as OLMo-core marks its own
        return prepared_inputs

    model._prepare_inputs = prepared  # pyright: ignore[reportAttributeAccessIssue] the same five results


def _gather(x: torch.Tensor, bucket: torch.Tensor) -> torch.Tensor:
    """[B, T, heads, head_dim] → [documents, heads, length, head_dim]."""
    return x.flatten(0, 1).index_select(0, bucket.flatten()).unflatten(0, bucket.shape).transpose(1, 2)
