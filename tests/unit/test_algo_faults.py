"""Faults on a golden batch of two rows: documents of 3 and 2 tokens with one of padding, and one of 4."""

import torch

from grpo_lib.algo.faults import Fault, Sight, faulty_batch, visible_tokens
from grpo_lib.types import PackedBatch


def batch() -> PackedBatch:
    return PackedBatch(
        input_ids=torch.tensor([[5, 6, 7, 8, 9, 0], [1, 2, 3, 4, 0, 0]]),
        labels=torch.tensor([[6, 7, 0, 9, 0, 0], [2, 3, 4, 0, 0, 0]]),
        position_ids=torch.tensor([[0, 1, 2, 0, 1, 0], [0, 1, 2, 3, 0, 1]]),
        doc_ids=torch.tensor([[1, 1, 1, 2, 2, 0], [1, 1, 1, 1, 0, 0]]),
        response_mask=torch.tensor([[0, 1, 0, 1, 0, 0], [0, 1, 1, 0, 0, 0]]).bool(),
        advantages=torch.zeros(2, 6),
        rollout_logprobs=torch.zeros(2, 6),
        sample_ids=(("a/0", "a/1"), ("b/0",)),
    )


def seen(sight: Sight, row: int, position: int) -> list[int]:
    return torch.nonzero(visible_tokens(batch().doc_ids, sight)[row, position])[:, 0].tolist()


def test_the_default_is_no_mistake() -> None:
    right = batch()
    assert faulty_batch(right, Fault()) is right
    assert seen(Sight.DOCUMENT, 0, 2) == [0, 1, 2]
    assert seen(Sight.DOCUMENT, 0, 4) == [3, 4]
    assert seen(Sight.DOCUMENT, 1, 5) == [4, 5], "padding sees padding, so that its softmax has a row"


def test_without_boundaries_a_token_sees_the_row_before_it_and_no_padding() -> None:
    assert seen(Sight.ROW, 0, 4) == [0, 1, 2, 3, 4]
    assert seen(Sight.ROW, 0, 5) == [5]


def test_rows_join_to_one_without_padding() -> None:
    joined = faulty_batch(batch(), Fault(sight=Sight.MICRO_BATCH))
    assert joined.input_ids.tolist() == [[5, 6, 7, 8, 9, 1, 2, 3, 4]]
    assert joined.doc_ids.tolist() == [[1, 1, 1, 2, 2, 3, 3, 3, 3]]
    assert joined.position_ids.tolist() == [[0, 1, 2, 0, 1, 0, 1, 2, 3]]
    assert joined.sample_ids == (("a/0", "a/1", "b/0"),)
    run_on = faulty_batch(batch(), Fault(sight=Sight.MICRO_BATCH, positions_restart=False))
    assert run_on.position_ids.tolist() == [list(range(9))]


def test_labels_move_along_the_row() -> None:
    later = faulty_batch(batch(), Fault(label_shift=1))
    assert later.labels[0].tolist() == [7, 0, 9, 0, 0, 6]
    assert later.response_mask.equal(batch().response_mask)
    assert faulty_batch(batch(), Fault(label_shift=-1)).labels[1].tolist() == [0, 2, 3, 4, 0, 0]
