from collections import Counter

import pytest

from grpo_lib.data.order import PromptStream
from grpo_lib.errors import DataError
from grpo_lib.types import Prompt


def prompts(count: int) -> list[Prompt]:
    return [
        Prompt(prompt_id=f"p{i}", text="t", token_ids=(1,), answer="a", dataset="d", verifier="exact")
        for i in range(count)
    ]


def names(drawn: list[tuple[int, Prompt]]) -> list[tuple[int, str]]:
    return [(epoch, prompt.prompt_id) for epoch, prompt in drawn]


def test_every_epoch_visits_all_in_another_order() -> None:
    stream = PromptStream(prompts(20), run_seed=3)
    epochs = [stream.take(20) for _ in range(3)]
    for number, drawn in enumerate(epochs):
        assert {epoch for epoch, _ in drawn} == {number}
        assert Counter(prompt.prompt_id for _, prompt in drawn) == Counter(f"p{i}" for i in range(20))
    orders = {tuple(prompt.prompt_id for _, prompt in drawn) for drawn in epochs}
    assert len(orders) == 3
    assert tuple(f"p{i}" for i in range(20)) not in orders


def test_steps_may_cross_epochs_and_batch_size_does_not_matter() -> None:
    one, many = PromptStream(prompts(7), 1), PromptStream(prompts(7), 1)
    by_ones = [pair for _ in range(30) for pair in one.take(1)]
    by_fours = [pair for _ in range(8) for pair in many.take(4)][:30]
    assert names(by_ones) == names(by_fours)
    assert len(one) == 7


def test_seed_decides_the_order() -> None:
    assert names(PromptStream(prompts(20), 1).take(40)) == names(PromptStream(prompts(20), 1).take(40))
    assert names(PromptStream(prompts(20), 1).take(20)) != names(PromptStream(prompts(20), 2).take(20))


@pytest.mark.parametrize("done", [0, 3, 7, 8, 20])
def test_resumed_stream_goes_on_where_it_stopped(done: int) -> None:
    """Inside an epoch, at its boundary and in a later one; TRL 1.16 replays the first epoch's order there."""
    straight = names(PromptStream(prompts(7), 5).take(30))
    before = PromptStream(prompts(7), 5)
    before.take(done)
    resumed = PromptStream(prompts(7), 5)
    resumed.restore(before.state())
    assert names(resumed.take(30 - done)) == straight[done:]
    replayed = names(PromptStream(prompts(7), 5).take(30 - done))
    assert done == 0 or replayed != straight[done:]


def test_other_data_cannot_be_resumed() -> None:
    stream = PromptStream(prompts(7), 5)
    with pytest.raises(DataError, match="over 8 training prompts, but there are 7 now"):
        stream.restore(PromptStream(prompts(8), 5).state())
    with pytest.raises(DataError, match="damaged"):
        stream.restore({"position": -1, "num_prompts": 7})


def test_nothing_to_draw_from_and_shared_ids() -> None:
    with pytest.raises(DataError, match="no training prompt"):
        PromptStream([], 1)
    with pytest.raises(DataError, match="1 training prompts share an id"):
        PromptStream([*prompts(3), prompts(1)[0]], 1)
