"""Held-out evaluation: greedy and sampled pass@1, unbiased pass@k, and intervals that respect the prompts.

Samples of one prompt are not independent, so every interval resamples prompts, never samples. A gain is paired: the
same prompts before and after.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from grpo_lib.config import EvaluationConfig, RunConfig
from grpo_lib.errors import GrpoError, StalenessError
from grpo_lib.interfaces import RolloutEngine, TokenDecoder, VerifierPool
from grpo_lib.pipeline import collect_verdicts, completions_of, sampling_params
from grpo_lib.seeds import sample_seed
from grpo_lib.types import (
    Completion,
    FinishReason,
    GenerationRequest,
    Prompt,
    Rollout,
    RolloutGroup,
    Verdict,
    VerdictReason,
    VerdictState,
)

# Training epochs count from 0, so an evaluation never draws the samples of a training step.
EVALUATION_EPOCH = -1
_GREEDY = "greedy"

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A mean over prompts with its bootstrap interval; NaN bounds where one prompt gives no interval."""

    value: float
    low: float
    high: float
    num_prompts: int

    def to_dict(self) -> dict[str, float | int | None]:
        """Plain numbers; NaN, which JSON has not, becomes None."""
        bounds = {"value": self.value, "low": self.low, "high": self.high}
        plain = {name: None if math.isnan(number) else number for name, number in bounds.items()}
        return {**plain, "num_prompts": self.num_prompts}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EvaluationTable:
    """One policy on the held-out prompts. Failed verdicts are in neither `correct` nor `judged`."""

    policy_version: int
    prompt_ids: tuple[str, ...]  # [P]
    correct: np.ndarray  # [P] int64, of the sampled completions
    judged: np.ndarray  # [P] int64
    greedy: np.ndarray  # [P] float64: 1 correct, 0 wrong, NaN failed verdict
    num_failed: int
    num_truncated: int  # sampled completions that reached the limit
    response_tokens: int  # of the sampled completions
    seconds: float
    groups: tuple[RolloutGroup, ...]  # the sampled completions, group_id "eval.v<version>.<prompt_id>"

    def pass_rates(self) -> np.ndarray:
        """[P] share of correct samples; NaN where no verdict was given."""
        return np.divide(self.correct, self.judged, out=np.full(len(self.judged), np.nan), where=self.judged > 0)

    def pass_at(self, k: int) -> np.ndarray:
        """[P] unbiased pass@k; NaN where fewer than k samples were judged."""
        pairs = zip(self.judged.tolist(), self.correct.tolist(), strict=True)
        return np.array([pass_at_k(n, c, k) if n >= k else math.nan for n, c in pairs], dtype=np.float64)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EvaluationResult:
    """The base model and the trained one on the same prompts."""

    before: EvaluationTable
    after: EvaluationTable
    config: EvaluationConfig
    seed: int  # of the bootstrap

    def to_dict(self) -> dict[str, Any]:
        """Plain dict ``{"before": …, "after": …, "gain": …}``; every estimate is {value, low, high, num_prompts}."""
        if self.before.prompt_ids != self.after.prompt_ids:
            raise ValueError("before and after were not evaluated on the same prompts in the same order")
        return {
            "before": summarize(self.before, self.config, seed=self.seed),
            "after": summarize(self.after, self.config, seed=self.seed),
            "gain": {
                "sampled_pass_at_1": self._gain(self.before.pass_rates(), self.after.pass_rates()),
                "greedy_pass_at_1": self._gain(self.before.greedy, self.after.greedy),
                "confidence": self.config.confidence,
            },
        }

    def _gain(self, before: np.ndarray, after: np.ndarray) -> dict[str, float | int | None]:
        return estimate(after - before, self.config, seed=self.seed).to_dict()


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """Probability that at least one of k samples drawn without replacement is correct: 1 - C(n-c, k) / C(n, k).

    Chen et al. 2021 (arXiv 2107.03374), equation 1, as the product that does not overflow.
    """
    if not (1 <= k <= num_samples and 0 <= num_correct <= num_samples):
        raise ValueError(f"pass@{k} of {num_correct} correct among {num_samples} samples is undefined")
    if num_samples - num_correct < k:
        return 1.0
    return 1.0 - math.prod(1.0 - k / n for n in range(num_samples - num_correct + 1, num_samples + 1))


def estimate(values_P: np.ndarray, config: EvaluationConfig, *, seed: int) -> Estimate:
    """Mean over prompts with its BCa bootstrap interval; NaN entries are prompts without a value and left out.

    Where all prompts agree the resamples do too, and the interval is the value itself.
    """
    from scipy.stats import bootstrap  # seconds of import that only an evaluation pays

    values = values_P[~np.isnan(values_P)]
    if len(values) == 0:
        return Estimate(value=math.nan, low=math.nan, high=math.nan, num_prompts=0)
    mean = float(values.mean())
    if len(values) == 1:
        return Estimate(value=mean, low=math.nan, high=math.nan, num_prompts=1)
    if np.ptp(values) == 0:
        return Estimate(value=mean, low=mean, high=mean, num_prompts=len(values))
    interval = bootstrap(
        (values,),
        np.mean,
        n_resamples=config.bootstrap_resamples,
        confidence_level=config.confidence,
        method="BCa",
        rng=np.random.default_rng(seed),
    ).confidence_interval
    return Estimate(value=mean, low=float(interval.low), high=float(interval.high), num_prompts=len(values))


def summarize(table: EvaluationTable, config: EvaluationConfig, *, seed: int) -> dict[str, Any]:
    """Plain dict of one policy's evaluation."""
    num_samples = sum(len(group.rollouts) for group in table.groups)
    return {
        "policy_version": table.policy_version,
        "sampled_pass_at_1": estimate(table.pass_rates(), config, seed=seed).to_dict(),
        "greedy_pass_at_1": estimate(table.greedy, config, seed=seed).to_dict(),
        "pass_at_k": {str(k): estimate(table.pass_at(k), config, seed=seed).to_dict() for k in config.pass_at},
        "num_prompts": len(table.prompt_ids),
        "num_samples": num_samples,
        "failed_verdicts": table.num_failed,
        "truncated_share": table.num_truncated / num_samples if num_samples else 0.0,
        "response_tokens": table.response_tokens,
        "seconds": table.seconds,
        "warnings": warnings_of(table),
    }


def warnings_of(table: EvaluationTable) -> list[str]:
    """What makes an evaluation doubtful; exactly zero is far more often a broken verifier or template than a policy."""
    shown = f"evaluation of policy version {table.policy_version}"
    warnings = []
    if table.judged.sum() > 0 and table.correct.sum() == 0:
        warnings.append(
            f"{shown}: none of {int(table.judged.sum())} samples is correct. Exactly 0 usually means a broken "
            "verifier, template or stop token; read some rollouts before believing it"
        )
    if table.num_failed:
        warnings.append(f"{shown}: {table.num_failed} verdicts failed and are left out")
    return warnings


def evaluate_policy(
    engine: RolloutEngine,
    prompts: Sequence[Prompt],
    verifiers: VerifierPool,
    decode: TokenDecoder,
    config: RunConfig,
    *,
    stop_token_ids: Sequence[int],
    run_seed: int,
) -> EvaluationTable:
    """Sample and judge every held-out prompt with the weights the engine holds now.

    Requests go out in portions of about one training step, each with that step's deadline.

    Raises:
        VerifierOutage: more than `verifier.max_failed_share` of the verdicts failed.
        StalenessError: the engine's weights changed on the way.
        DeadlineExceeded: a portion or the verdicts did not arrive.
    """
    started = time.monotonic()
    version = engine.policy_version
    requests = list(_requests(prompts, config, version, stop_token_ids, run_seed))
    completions: dict[str, Completion] = {}
    texts: dict[str, str] = {}
    verdicts: dict[str, Verdict] = {}
    portion = config.loop.prompts_per_step * config.rollout.group_size
    for start in range(0, len(requests), portion):
        batch = requests[start : start + portion]
        for completion in completions_of(engine, [request for request, _ in batch], config, stage="evaluation"):
            _check(completion, version)
            completions[completion.request_id] = completion
        for request, prompt in batch:
            key = request.request_id
            texts[key] = decode(completions[key].token_ids.tolist())
            verifiers.submit(key, prompt, texts[key])
        verdicts.update(verifiers.collect(0.0))
    collect_verdicts(verifiers, verdicts, len(requests), config, stage="evaluation")
    rollouts = {
        key: Rollout(sample_index=0, completion=completions[key], text=texts[key], verdict=verdicts[key])
        for key in completions
    }
    table = _table(prompts, rollouts, version, config.evaluation.samples_per_prompt, time.monotonic() - started)
    for warning in warnings_of(table):
        log.warning(warning)
    return table


def _group_id(version: int, prompt: Prompt) -> str:
    return f"eval.v{version}.{prompt.prompt_id}"


def _requests(
    prompts: Sequence[Prompt], config: RunConfig, version: int, stop_token_ids: Sequence[int], run_seed: int
) -> Iterator[tuple[GenerationRequest, Prompt]]:
    """Each prompt's samples, then its greedy completion, whose seed argmax does not use."""
    sampling = sampling_params(config, stop_token_ids)
    for prompt in prompts:
        for index in range(config.evaluation.samples_per_prompt + 1):
            greedy = index == config.evaluation.samples_per_prompt
            request = GenerationRequest(
                request_id=f"{_group_id(version, prompt)}/{_GREEDY if greedy else index}",
                prompt_token_ids=prompt.token_ids,
                sampling=replace(sampling, greedy=greedy),
                seed=sample_seed(run_seed, EVALUATION_EPOCH, prompt.prompt_id, index),
            )
            yield request, prompt


def _check(completion: Completion, version: int) -> None:
    if completion.finish_reason is FinishReason.ABORT:
        raise GrpoError(
            f"evaluation: the engine aborted {completion.request_id} after {len(completion.token_ids)} tokens; "
            "a fragment cannot be judged, so the accuracy would be wrong. Look at the engine's log"
        )
    versions = {span.version for span in completion.version_spans}
    if versions - {version}:
        raise StalenessError(
            f"evaluation of policy version {version}: {completion.request_id} was sampled by {sorted(versions)}; "
            "the engine's weights changed while it was evaluated"
        )


def _table(
    prompts: Sequence[Prompt], rollouts: Mapping[str, Rollout], version: int, num_samples: int, seconds: float
) -> EvaluationTable:
    groups = tuple(
        RolloutGroup(
            group_id=_group_id(version, prompt),
            prompt=prompt,
            rollouts=tuple(
                replace(rollouts[f"{_group_id(version, prompt)}/{index}"], sample_index=index)
                for index in range(num_samples)
            ),
        )
        for prompt in prompts
    )
    greedy = [rollouts[f"{_group_id(version, prompt)}/{_GREEDY}"].verdict for prompt in prompts]
    sampled = [rollout for group in groups for rollout in group.rollouts]
    return EvaluationTable(
        policy_version=version,
        prompt_ids=tuple(prompt.prompt_id for prompt in prompts),
        correct=np.array([_count(group, correct=True) for group in groups], dtype=np.int64),
        judged=np.array([_count(group, correct=False) for group in groups], dtype=np.int64),
        greedy=np.array([math.nan if _failed(v) else float(_correct(v)) for v in greedy], dtype=np.float64),
        num_failed=sum(_failed(rollout.verdict) for rollout in rollouts.values()),
        num_truncated=sum(rollout.completion.finish_reason is FinishReason.LENGTH for rollout in sampled),
        response_tokens=sum(len(rollout.completion.token_ids) for rollout in sampled),
        seconds=seconds,
        groups=groups,
    )


def _count(group: RolloutGroup, *, correct: bool) -> int:
    judged: Iterable[Verdict] = (r.verdict for r in group.rollouts if not _failed(r.verdict))
    return sum(_correct(verdict) if correct else True for verdict in judged)


def _failed(verdict: Verdict) -> bool:
    return verdict.state is VerdictState.FAILED


def _correct(verdict: Verdict) -> bool:
    return verdict.reason is VerdictReason.CORRECT
