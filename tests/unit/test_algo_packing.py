import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_lib.algo.packing import fit_rows, pack, packing_plan, plan_step, unpack_tokens
from grpo_lib.types import PackedBatch, TrainingSample
from tests.unit.algo_cases import make_sample

lengths_st = st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=40)


def samples_of(lengths: list[tuple[int, int]]) -> list[TrainingSample]:
    return [
        make_sample(f"e0.p{i}/0", prompt, response, advantage=i + 1) for i, (prompt, response) in enumerate(lengths)
    ]


def documents(batch: PackedBatch) -> dict[str, tuple[list[int], list[bool], list[float], list[float]]]:
    """Token-aligned content of every document, read back from the tensors position by position."""
    found = {}
    for row in range(batch.num_rows):
        for doc_id, sample_id in enumerate(batch.sample_ids[row], start=1):
            at = [t for t in range(batch.input_ids.shape[1]) if batch.doc_ids[row, t] == doc_id]
            assert at == list(range(at[0], at[0] + len(at))), "a document is one run"
            assert batch.position_ids[row, at].tolist() == list(range(len(at)))
            ids = batch.input_ids[row, at].tolist()
            assert batch.labels[row, at].tolist() == [*ids[1:], 0]
            assert not batch.response_mask[row, at[-1]], "the last token predicts nothing"

            def token_aligned(field: torch.Tensor, row: int = row, at: list[int] = at) -> list:
                return [0, *field[row, at[:-1]].tolist()]

            found[sample_id] = (
                ids,
                [bool(m) for m in token_aligned(batch.response_mask)],
                token_aligned(batch.advantages),
                token_aligned(batch.rollout_logprobs),
            )
    return found


def check_content(samples: list[TrainingSample], batches: list[PackedBatch]) -> None:
    found: dict = {}
    for batch in batches:
        found |= documents(batch)
        assert ((batch.doc_ids > 0) | (batch.input_ids == 0)).all(), "padding holds no tokens"
        assert ((batch.doc_ids > 0) | ~batch.response_mask).all(), "padding is never trained"
    assert sum(len(row) for batch in batches for row in batch.sample_ids) == len(samples)
    for sample in samples:
        ids, mask, advantages, logprobs = found[sample.sample_id]
        assert ids == sample.input_ids.tolist()
        assert mask == sample.response_mask.tolist()
        assert advantages == sample.advantages.tolist()
        assert logprobs == sample.rollout_logprobs.tolist()


def golden_samples() -> list[TrainingSample]:
    def sample(
        sample_id: str, ids: list[int], mask: list[bool], advantage: float, logprobs: list[float]
    ) -> TrainingSample:
        return TrainingSample(
            sample_id=sample_id,
            input_ids=np.array(ids),
            response_mask=np.array(mask),
            advantages=np.where(mask, np.float32(advantage), np.float32(0)),
            rollout_logprobs=np.array(logprobs, np.float32),
        )

    return [
        sample("a", [5, 6, 7, 1], [False, False, True, True], 2.0, [0, 0, -0.25, -0.5]),
        sample("b", [8, 9, 1], [False, True, True], -1.0, [0, -1.5, -0.75]),
    ]


def test_golden_row():
    """prime-rl 1525: a head shifted by one on both sides passes an invariance test; written-out tensors do not."""
    batch = pack(golden_samples(), 10)
    assert batch.sample_ids == (("a", "b"),)
    expected = {
        "input_ids":        [5, 6, 7, 1, 8, 9, 1, 0, 0, 0],
        "labels":           [6, 7, 1, 0, 9, 1, 0, 0, 0, 0],
        "position_ids":     [0, 1, 2, 3, 0, 1, 2, 0, 1, 2],
        "doc_ids":          [1, 1, 1, 1, 2, 2, 2, 0, 0, 0],
        "response_mask":    [0, 1, 1, 0, 1, 1, 0, 0, 0, 0],
        "advantages":       [0, 2, 2, 0, -1, -1, 0, 0, 0, 0],
        "rollout_logprobs": [0, -0.25, -0.5, 0, -1.5, -0.75, 0, 0, 0, 0],
    }  # fmt: skip
    assert {name: tensor.tolist() for name, tensor in batch.tensors().items()} == {
        name: [row] for name, row in expected.items()
    }
    assert (batch.num_trained_tokens, batch.num_real_tokens) == (4, 7)


def test_pack_equals_the_worked_example_of_the_type():
    batch = pack(golden_samples()[:1], 6)
    assert batch.input_ids.tolist() == [[5, 6, 7, 1, 0, 0]]
    assert batch.labels.tolist() == [[6, 7, 1, 0, 0, 0]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 3, 0, 1]]
    assert batch.doc_ids.tolist() == [[1, 1, 1, 1, 0, 0]]
    assert batch.advantages.tolist() == [[0, 2, 2, 0, 0, 0]]


@settings(max_examples=60, deadline=None, derandomize=True)
@given(lengths_st, st.integers(18, 40))
def test_nothing_is_lost_split_or_reordered(lengths: list[tuple[int, int]], pack_length: int):
    samples = samples_of(lengths)
    batch = pack(samples, pack_length)
    check_content(samples, [batch])
    order = {sample.sample_id: i for i, sample in enumerate(samples)}
    rows = [[order[sample_id] for sample_id in row] for row in batch.sample_ids]
    assert all(row == sorted(row) for row in rows)
    assert rows == sorted(rows)
    used = (batch.doc_ids > 0).sum(1)
    assert (used <= pack_length).all()
    assert (used * 2 <= pack_length).sum() <= 1, "at most one row is at most half full"


def test_the_content_check_notices_a_lost_a_shifted_and_a_split_document():
    samples = samples_of([(2, 3), (1, 4), (3, 2)])
    batch = pack(samples, 10)
    with pytest.raises(AssertionError):
        check_content([*samples, make_sample("e0.p9/0", 1, 1)], [batch])
    rolled = torch.roll(batch.labels, 1, dims=1)
    with pytest.raises(AssertionError):
        check_content(samples, [PackedBatch(**{**batch.tensors(), "labels": rolled}, sample_ids=batch.sample_ids)])
    cut = batch.doc_ids.clone()
    cut[0, 3] = 2
    with pytest.raises(AssertionError):
        check_content(samples, [PackedBatch(**{**batch.tensors(), "doc_ids": cut}, sample_ids=batch.sample_ids)])


@settings(max_examples=60, deadline=None, derandomize=True)
@given(lengths_st, st.integers(18, 40), st.integers(1, 5), st.integers(1, 3))
def test_every_rank_gets_the_same_number_of_equally_shaped_micro_batches(
    lengths: list[tuple[int, int]], pack_length: int, num_ranks: int, micro_batch_packs: int
):
    """verl 5228, AgileRL 660: unequal micro-batches hang the ranks that have more."""
    samples = samples_of(lengths)
    plan = plan_step(samples, num_ranks=num_ranks, pack_length=pack_length, micro_batch_packs=micro_batch_packs)
    batches = [batch for rank in plan.micro_batches for batch in rank]
    assert len(plan.micro_batches) == num_ranks
    assert len({len(rank) for rank in plan.micro_batches}) == 1
    assert len({tuple(batch.input_ids.shape) for batch in batches}) == 1
    assert batches[0].num_rows <= micro_batch_packs
    assert batches[0].input_ids.shape[1] == pack_length
    check_content(samples, batches)
    assert plan.num_samples == len(samples)
    assert (
        plan.num_trained_tokens
        == sum(response for _, response in lengths)
        == sum(b.num_trained_tokens for b in batches)
    )
    assert plan.num_real_tokens == sum(p + r for p, r in lengths) == sum(b.num_real_tokens for b in batches)
    assert plan.num_padded_tokens == sum(int((b.doc_ids == 0).sum()) for b in batches)
    loads = [sum(batch.num_real_tokens for batch in rank) for rank in plan.micro_batches]
    assert max(loads) - min(loads) <= pack_length
    num_rows = len(fit_rows([p + r for p, r in lengths], pack_length))
    needed = -(-num_rows // (num_ranks * micro_batch_packs))
    assert len(plan.micro_batches[0]) == needed, "no rank runs a micro-batch that the step could do without"
    spare = len(batches) * batches[0].num_rows - num_rows
    assert spare < num_ranks * needed, "no micro-batch is wider than the step needs"


def test_longest_documents_are_placed_first():
    """In input order 4 + 4 share a row and both 6s need their own; 6 + 4 twice fill two rows exactly."""
    assert fit_rows([4, 4, 6, 6], 10) == [[0, 2], [1, 3]]


def test_fewer_documents_than_ranks_leaves_all_padding_micro_batches():
    plan = plan_step(samples_of([(2, 2)]), num_ranks=3, pack_length=8, micro_batch_packs=2)
    empty = plan.micro_batches[1][0]
    assert [len(rank) for rank in plan.micro_batches] == [1, 1, 1]
    assert empty.sample_ids == ((),)
    assert not empty.doc_ids.any()
    assert empty.position_ids.tolist() == [list(range(8))]
    assert plan.padding_share == 20 / 24


def test_rows_are_spread_evenly_over_the_fewest_micro_batches():
    """7 full rows on one rank, at most 4 at once: two micro-batches of 4 and 3, the latter padded to 4."""
    plan = plan_step(samples_of([(4, 4)] * 7), num_ranks=1, pack_length=8, micro_batch_packs=4)
    assert [batch.num_rows for batch in plan.micro_batches[0]] == [4, 4]
    plan = plan_step(samples_of([(4, 4)] * 9), num_ranks=1, pack_length=8, micro_batch_packs=8)
    assert [batch.num_rows for batch in plan.micro_batches[0]] == [5, 5], "not 8 and 8"


def test_same_samples_give_the_same_plan():
    def ids() -> list:
        plan = plan_step(samples_of([(3, 4)] * 9), num_ranks=2, pack_length=16, micro_batch_packs=1)
        return [[batch.sample_ids for batch in rank] for rank in plan.micro_batches]

    assert ids() == ids()


def test_a_sample_longer_than_the_pack_is_named_with_its_length():
    with pytest.raises(ValueError, match=r"'e0\.p1/0', 12\).*trainer\.pack_length"):
        pack(samples_of([(2, 2), (4, 8)]), 10)
    with pytest.raises(ValueError, match=r"'e0\.p1/0', 12\)"):
        plan_step(samples_of([(2, 2), (4, 8)]), num_ranks=1, pack_length=10, micro_batch_packs=1)


def test_duplicate_ids_and_empty_steps_are_refused():
    sample = make_sample("e0.p0/0", 1, 2)
    with pytest.raises(ValueError, match=r"e0\.p0/0.*occur twice"):
        pack([sample, sample], 10)
    with pytest.raises(ValueError, match="no samples"):
        pack([], 10)
    with pytest.raises(ValueError, match="num_ranks"):
        plan_step([sample], num_ranks=0, pack_length=10, micro_batch_packs=1)


@settings(max_examples=30, deadline=None, derandomize=True)
@given(lengths_st, st.integers(18, 40))
def test_unpack_gives_back_each_samples_tokens_in_order(lengths: list[tuple[int, int]], pack_length: int):
    samples = samples_of(lengths)
    batch = pack(samples, pack_length)
    unpacked = unpack_tokens(batch, batch.rollout_logprobs)
    assert set(unpacked) == {sample.sample_id for sample in samples}
    for sample in samples:
        np.testing.assert_array_equal(unpacked[sample.sample_id], sample.rollout_logprobs[sample.response_mask])


def test_unpack_skips_tokens_inside_a_response_that_are_not_trained():
    sample = TrainingSample(
        sample_id="tool",
        input_ids=np.array([5, 6, 7, 8, 1]),
        response_mask=np.array([False, True, False, False, True]),
        advantages=np.array([0, 1, 0, 0, 1], np.float32),
        rollout_logprobs=np.array([0, -1, 0, 0, -2], np.float32),
    )
    batch = pack([sample], 8)
    assert unpack_tokens(batch, batch.rollout_logprobs)["tool"].tolist() == [-1, -2]
    assert unpack_tokens(batch, batch.labels)["tool"].tolist() == [6, 1]


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.data())
def test_packing_plan_bounds_hold_for_any_responses(data: st.DataObject):
    prompts = data.draw(st.lists(st.integers(1, 8), min_size=1, max_size=12))
    max_response = data.draw(st.integers(1, 8))
    shape = {"num_ranks": data.draw(st.integers(1, 3)), "micro_batch_packs": data.draw(st.integers(1, 2))}
    pack_length = max(prompts) + max_response + data.draw(st.integers(0, 20))
    group_size, prompts_per_step = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 6))
    plan = packing_plan(
        prompts, max_response=max_response, pack_length=pack_length, group_size=group_size,
        prompts_per_step=prompts_per_step, **shape,
    )  # fmt: skip
    lengths = [
        (data.draw(st.sampled_from(prompts)), data.draw(st.integers(1, max_response)))
        for _ in range(group_size * prompts_per_step)
    ]
    step = plan_step(samples_of(lengths), pack_length=pack_length, **shape)
    assert sum(batch.num_rows for batch in step.micro_batches[0]) <= plan.max_packs_per_rank
    assert step.padding_share <= plan.max_padding_share + 1e-12
    assert plan.num_samples == len(lengths)


def test_packing_plan_expectation_is_what_full_responses_give():
    plan = packing_plan(
        [3, 5], max_response=5, pack_length=20, num_ranks=2, group_size=4, prompts_per_step=2, micro_batch_packs=1
    )
    step = plan_step(samples_of([(3, 5)] * 4 + [(5, 5)] * 4), num_ranks=2, pack_length=20, micro_batch_packs=1)
    assert plan.longest_sample == 10
    assert plan.expected_packs_per_rank == len(step.micro_batches[0]) == 2
    assert plan.expected_padding_share == pytest.approx(step.padding_share) == pytest.approx(1 - 72 / 80)


def test_packing_plan_refuses_prompts_that_do_not_fit():
    with pytest.raises(ValueError, match=r"longest prompt \(9\).*= 15 exceeds trainer\.pack_length \(14\)"):
        packing_plan([3, 9], max_response=6, pack_length=14, num_ranks=1, group_size=2, prompts_per_step=1)
    with pytest.raises(ValueError, match="no prompts"):
        packing_plan([], max_response=6, pack_length=14, num_ranks=1, group_size=2, prompts_per_step=1)
