"""The work that two systems are compared on: lengths, prompts and rewards, and what a step's records become."""

import statistics

import gpu_step
import grpo_work
import pytest
from grpo_work import Work

from grpo_lib.config import VerifierConfig
from grpo_lib.data.chat import load_tokenizer
from grpo_lib.data.models import resolve_model_path
from grpo_lib.timing import SPANS
from grpo_lib.verifiers.pool import ProcessVerifierPool


def test_mixed_lengths_are_as_wide_as_those_of_a_chat_model_and_never_above_the_limit():
    lengths = sorted(Work(mixed=True, max_tokens=1000, num_prompts=64).lengths)
    assert lengths[-1] == 1000
    assert sum(length == 1000 for length in lengths) == pytest.approx(len(lengths) / 10, abs=2)  # cut at p90
    median = statistics.median(lengths)
    assert median / lengths[len(lengths) // 20] == pytest.approx(3.7, abs=0.3)
    assert Work(mixed=True).lengths != tuple(sorted(Work(mixed=True).lengths))


def test_a_step_of_equal_lengths_fills_whole_packs():
    assert set(Work().lengths) == {128}
    assert Work().num_tokens == 2 * 10_240


def test_prompts_have_the_asked_number_of_tokens_and_keep_them_as_text():
    tokenizer = load_tokenizer(resolve_model_path("builtin:tiny_qwen3"))
    work = Work(prompt_tokens=12)
    prompts = grpo_work.prompts_of(tokenizer, work, 20)
    assert len({prompt.text for prompt in prompts}) == 20
    for prompt in prompts:
        assert len(prompt.token_ids) == 12
        assert tuple(tokenizer(prompt.text)["input_ids"]) == prompt.token_ids  # pyright: ignore[reportArgumentType]


def test_the_reward_is_the_same_in_a_worker_process_and_has_spread_even_among_equal_completions():
    texts = [grpo_work.spelled([7, 8, index if index < 20 else 0]) for index in range(40)]
    tokenizer = load_tokenizer(resolve_model_path("builtin:tiny_qwen3"))
    prompt = grpo_work.prompts_of(tokenizer, Work(prompt_tokens=12), 1)[0]
    verdicts = {}
    with ProcessVerifierPool(VerifierConfig(), verifiers={grpo_work.VERIFIER: grpo_work.build}) as pool:
        for index, text in enumerate(texts):
            pool.submit(str(index), prompt, text)
        while len(verdicts) < len(texts):
            verdicts.update(pool.collect(30.0))
    rewards = [verdicts[str(index)].reward for index in range(len(texts))]
    assert rewards == [grpo_work.drawn_reward(text, place) for place, text in enumerate(texts)]
    assert len(set(rewards)) == len(rewards)
    assert 0.2 < statistics.mean(rewards) < 0.8


def test_only_counted_steps_of_a_phase_enter_its_medians():
    work = Work(num_prompts=1, group_size=2, prompt_tokens=3, max_tokens=5)
    phases = gpu_step.phases_of(steps=3, mixed_steps=0, work=work)

    def metrics(step_s: float, *, applied: bool = True) -> dict[str, float]:
        spans = {f"time/{name}_s": 0.1 for name in (*SPANS, "other")}
        return {
            **spans,
            "time/step_s": step_s,
            "optim/applied": float(applied),
            "response/tokens": 10,
            "batch/samples": 2,
            "batch/real_tokens": 16,
            "throughput/padding_share": 0.0,
            "throughput/train_tokens_per_s": 1.0,
        }

    (row,) = gpu_step.phase_rows(phases, [metrics(s) for s in (90.0, 80.0, 1.0, 4.0, 2.0)])
    assert (row["step_s"], row["steps"], row["samples_per_s"], row["tokens_per_s"]) == (2.0, 3, 1.0, 8.0)
    assert gpu_step.summary_of([row])["equal_other_share"] == pytest.approx(0.05)
    (row,) = gpu_step.phase_rows(phases, [metrics(1.0, applied=step != 3) for step in range(5)])
    assert row["failed"].startswith("1 of 3 steps not applied")
    assert gpu_step.summary_of([row]) == {}
    assert len(gpu_step.table([row]).splitlines()) == 1
