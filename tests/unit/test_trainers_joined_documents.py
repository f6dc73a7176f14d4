"""One row out of packs, and the indices into it and back."""

from __future__ import annotations

import pytest
import torch

from grpo_lib.trainers.joined_documents import JoinedDocuments, WantedLabels
from grpo_lib.trainers.labels import IGNORED_LABEL

CPU = torch.device("cpu")
DOC_IDS = torch.tensor([[1, 1, 2, 0], [1, 1, 1, 0]])
POSITIONS = torch.tensor([[0, 1, 0, 0], [0, 1, 2, 0]])
TOKENS = torch.tensor([[5, 6, 7, 90], [8, 9, 10, 91]])


def test_the_row_of_the_docstring() -> None:
    documents = JoinedDocuments.of(DOC_IDS, POSITIONS)
    assert documents.lens.tolist() == [[2, 1, 3]]
    assert documents.joined(TOKENS).tolist() == [[5, 6, 7, 8, 9, 10]]
    assert documents.positions().tolist() == [[0, 1, 0, 0, 1, 2]]
    assert documents.max_len == 3


@pytest.mark.parametrize(
    ("multiple", "lens"), [(1, [2, 1, 3]), (3, [2, 1, 3]), (4, [2, 1, 3, 2]), (256, [2, 1, 3, 250])]
)
def test_padding_is_bounded_and_a_document_of_its_own(multiple: int, lens: list[int]) -> None:
    documents = JoinedDocuments.of(DOC_IDS, POSITIONS).padded_to(multiple)
    assert documents.lens.tolist() == [lens]
    row = documents.joined(TOKENS)
    assert row.shape[1] % multiple == 0
    assert row.shape[1] - 6 < multiple
    assert row[0, :6].tolist() == [5, 6, 7, 8, 9, 10]
    assert not row[0, 6:].any()
    assert documents.positions()[0, 6:].tolist() == list(range(row.shape[1] - 6))


def test_values_of_the_row_return_to_their_places() -> None:
    documents = JoinedDocuments.of(DOC_IDS, POSITIONS).padded_to(4)
    row = torch.arange(1.0, 9.0)[None, :, None].expand(-1, -1, 2)  # 7 and 8 are at padding
    rows = documents.in_rows(row)
    assert rows[..., 0].tolist() == [[1, 2, 3, 0], [4, 5, 6, 0]]
    assert torch.equal(rows[..., 0], rows[..., 1])


def test_wanted_labels_of_the_docstring() -> None:
    labels = torch.full_like(TOKENS, IGNORED_LABEL)
    labels[0, 1], labels[1, 0] = 60, 61
    labels[0, 3] = 62  # at padding, which no document holds
    wanted = WantedLabels.of(labels, JoinedDocuments.of(DOC_IDS, POSITIONS).padded_to(4), CPU)
    assert (wanted.labels.tolist(), wanted.positions.tolist(), wanted.places.tolist()) == ([60, 61], [1, 3], [1, 4])
    on_rows = WantedLabels.of(labels, None, CPU)
    assert on_rows.positions.tolist() == on_rows.places.tolist() == [1, 3, 4]


def test_results_and_gradients_find_their_places() -> None:
    labels = torch.where(DOC_IDS > 0, TOKENS, IGNORED_LABEL)
    wanted = WantedLabels.of(labels, JoinedDocuments.of(DOC_IDS, POSITIONS), CPU)
    values = wanted.labels.double().requires_grad_()
    rows = wanted.in_rows(values)
    assert rows.tolist() == [[5, 6, 7, 0], [8, 9, 10, 0]]
    upstream = torch.arange(8.0, dtype=torch.float64).view(2, 4)
    (gradient,) = torch.autograd.grad(rows, values, upstream)
    assert gradient.tolist() == [0, 1, 2, 4, 5, 6]


def test_nothing_wanted_still_has_a_graph() -> None:
    wanted = WantedLabels.of(torch.full_like(TOKENS, IGNORED_LABEL), None, CPU)
    rows = wanted.in_rows(torch.zeros(0, requires_grad=True))
    assert rows.requires_grad
    assert not rows.any()
