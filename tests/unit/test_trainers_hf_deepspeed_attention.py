"""Documents of a packed row, hand-worked, and their attention against a plain loop over documents."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from grpo_lib.errors import GrpoError
from grpo_lib.trainers.hf_deepspeed_attention import DocumentGroups, document_attention

HEADS, KV_HEADS, WIDTH = 4, 2, 8
POSITIONS = torch.tensor([[0, 1, 0, 1, 2, 0, 1, 0], [0, 1, 2, 3, 4, 5, 6, 7]])


def test_documents_of_one_length_stand_together() -> None:
    found = DocumentGroups.of(torch.tensor([[0, 1, 0, 1, 2, 0, 1]]))
    assert [group.tolist() for group in found.groups] == [[[0, 1], [5, 6]], [[2, 3, 4]]]
    assert found.restore.tolist() == [0, 1, 4, 5, 6, 2, 3]


def test_a_row_ends_a_document() -> None:
    found = DocumentGroups.of(torch.tensor([[0, 1], [0, 1]]))
    assert [group.tolist() for group in found.groups] == [[[0, 1], [2, 3]]]


def test_attention_is_that_of_each_document_alone() -> None:
    generator = torch.Generator().manual_seed(0)

    def draw(heads: int) -> torch.Tensor:
        return torch.randn(2, heads, 8, WIDTH, generator=generator, dtype=torch.float64)

    query, key, value = draw(HEADS), draw(KV_HEADS), draw(KV_HEADS)
    found, _ = document_attention(
        nn.Identity(), query, key, value, None, scaling=0.3, documents=DocumentGroups.of(POSITIONS)
    )
    assert found.shape == (2, 8, HEADS, WIDTH)
    for row in range(2):
        for place in range(8):
            first = place - int(POSITIONS[row, place])
            for head in range(HEADS):
                kv = head * KV_HEADS // HEADS
                scores = [0.3 * float(query[row, head, place] @ key[row, kv, i]) for i in range(first, place + 1)]
                weights = [math.exp(score) for score in scores]
                pairs = zip(weights, range(first, place + 1), strict=True)
                expected = torch.stack([w / sum(weights) * value[row, kv, i] for w, i in pairs]).sum(0)
                torch.testing.assert_close(found[row, place, head], expected)


@pytest.mark.parametrize("options", [{}, {"attention_mask": torch.ones(1, 2)}])
def test_attention_without_boundaries_is_an_error(options: dict[str, torch.Tensor]) -> None:
    tensor = torch.zeros(1, 1, 2, 4)
    documents = DocumentGroups.of(torch.tensor([[0, 1]])) if options else None
    with pytest.raises(GrpoError, match="without document boundaries"):
        document_attention(nn.Identity(), tensor, tensor, tensor, options.get("attention_mask"), documents=documents)
