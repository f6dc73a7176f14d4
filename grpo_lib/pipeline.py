"""Prompts in, judged rollout groups out: what stands between the engines and the training step.

Only the synchronous mode exists: a batch is requested when the step needs it, by the policy that the step will train.
Completions are judged while others are still being generated.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from grpo_lib.algo.advantages import GroupAssessment, assess_group
from grpo_lib.config import RunConfig
from grpo_lib.errors import DeadlineExceeded, NoLearningSignal, StalenessError, VerifierOutage
from grpo_lib.interfaces import RolloutEngine, TokenDecoder, VerifierPool
from grpo_lib.seeds import sample_seed
from grpo_lib.timing import StepTimer
from grpo_lib.types import (
    Completion,
    GenerationRequest,
    GroupStatus,
    Prompt,
    Rollout,
    RolloutGroup,
    SamplingParams,
    Verdict,
    VerdictState,
)

_POLL_S = 1.0  # upper bound of one wait; completions and verdicts end it earlier
_VERDICT_GRACE_S = 60.0  # for restarting workers, on top of every outstanding verdict's own limit


class PromptSource(Protocol):
    """An endless, resumable order of training prompts."""

    def take(self, count: int) -> list[tuple[int, Prompt]]:
        """The next `count` prompts with their epoch."""
        ...

    def state(self) -> dict[str, int]: ...


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepRollouts:
    """The groups of one step with their assessments, in the order the prompts were drawn."""

    groups: tuple[RolloutGroup, ...]
    assessments: tuple[GroupAssessment, ...]
    num_draws: int  # batches drawn; more than one only with active sampling


def sampling_params(config: RunConfig, stop_token_ids: Sequence[int]) -> SamplingParams:
    """Training's sampling parameters."""
    return SamplingParams(
        temperature=config.rollout.temperature,
        max_tokens=config.rollout.max_tokens,
        stop_token_ids=tuple(stop_token_ids),
        top_p=config.rollout.top_p,
        top_k=config.rollout.top_k,
    )


class RolloutPipeline:
    """Draws a step's groups from the engine and has them judged.

    Args:
        engine: All engines behind one front.
        prompts: Training order.
        verifiers: Worker processes that judge texts.
        decode: Token ids to text, for the verifiers.
        stop_token_ids: Every id that ends a completion.
    """

    def __init__(
        self,
        *,
        config: RunConfig,
        engine: RolloutEngine,
        prompts: PromptSource,
        verifiers: VerifierPool,
        decode: TokenDecoder,
        stop_token_ids: Sequence[int],
    ) -> None:
        self._config = config
        self._engine = engine
        self.prompts = prompts
        self._verifiers = verifiers
        self._decode = decode
        self._sampling = sampling_params(config, stop_token_ids)

    def next_batch(self, policy_version: int, timer: StepTimer) -> StepRollouts:
        """The groups of one step, sampled by `policy_version`.

        With active sampling, draws go on until `loop.prompts_per_step` groups have spread.

        Raises:
            NoLearningSignal: `loop.max_draws_per_step` draws did not yield enough groups with spread.
            VerifierOutage: more than `verifier.max_failed_share` of a draw's verdicts are `failed`.
            StalenessError: a token is older than `loop.max_staleness` allows.
        """
        loop = self._config.loop
        groups: list[RolloutGroup] = []
        assessments: list[GroupAssessment] = []
        draws = 0
        wanted = loop.prompts_per_step
        while wanted > 0:
            if draws == (loop.max_draws_per_step if loop.active_sampling else 1):
                raise NoLearningSignal(
                    f"{loop.prompts_per_step - wanted} of {loop.prompts_per_step} groups have any spread in their "
                    f"rewards after {draws} draws of {len(groups)} prompts; make the task neither hopeless nor solved, "
                    "raise rollout.group_size or loop.max_draws_per_step, or set loop.active_sampling=false"
                )
            drawn = self._draw(wanted, policy_version, timer)
            draws += 1
            groups += drawn
            assessments += [self._assess(group) for group in drawn]
            if not loop.active_sampling:
                break
            kept = sum(a.status is GroupStatus.KEPT for a in assessments)
            wanted = loop.prompts_per_step - kept
        return StepRollouts(groups=tuple(groups), assessments=tuple(assessments), num_draws=draws)

    def _assess(self, group: RolloutGroup) -> GroupAssessment:
        return assess_group(
            group, kind=self._config.algorithm.advantage, correct_reward=self._config.verifier.correct_reward
        )

    def _draw(self, count: int, policy_version: int, timer: StepTimer) -> list[RolloutGroup]:
        drawn = self.prompts.take(count)
        requests, owners = self._requests(drawn)
        completions: dict[str, Completion] = {}
        texts: dict[str, str] = {}
        verdicts: dict[str, Verdict] = {}
        with timer.span("wait_for_rollouts"):
            for completion in completions_of(self._engine, requests, self._config, stage="rollouts"):
                self._check_age(completion, policy_version)
                key = completion.request_id
                completions[key] = completion
                texts[key] = self._decode(completion.token_ids.tolist())
                self._verifiers.submit(key, owners[key], texts[key])
                verdicts.update(self._verifiers.collect(0.0))
        with timer.span("verify"):
            collect_verdicts(self._verifiers, verdicts, len(requests), self._config, stage="rollouts")
        return [self._group(epoch, prompt, completions, texts, verdicts) for epoch, prompt in drawn]

    def _requests(self, drawn: list[tuple[int, Prompt]]) -> tuple[list[GenerationRequest], dict[str, Prompt]]:
        requests: list[GenerationRequest] = []
        owners: dict[str, Prompt] = {}
        for epoch, prompt in drawn:
            for index in range(self._config.rollout.group_size):
                request_id = f"{group_id(epoch, prompt)}/{index}"
                owners[request_id] = prompt
                requests.append(
                    GenerationRequest(
                        request_id=request_id,
                        prompt_token_ids=prompt.token_ids,
                        sampling=self._sampling,
                        seed=sample_seed(self._config.seed, epoch, prompt.prompt_id, index),
                    )
                )
        return requests, owners

    def _group(
        self,
        epoch: int,
        prompt: Prompt,
        completions: dict[str, Completion],
        texts: dict[str, str],
        verdicts: dict[str, Verdict],
    ) -> RolloutGroup:
        name = group_id(epoch, prompt)
        rollouts = tuple(
            Rollout(
                sample_index=index,
                completion=completions[f"{name}/{index}"],
                text=texts[f"{name}/{index}"],
                verdict=verdicts[f"{name}/{index}"],
            )
            for index in range(self._config.rollout.group_size)
        )
        return RolloutGroup(group_id=name, prompt=prompt, rollouts=rollouts)

    def _check_age(self, completion: Completion, policy_version: int) -> None:
        oldest = min((span.version for span in completion.version_spans), default=policy_version)
        newest = max((span.version for span in completion.version_spans), default=policy_version)
        age = policy_version - oldest
        if newest > policy_version or age > self._config.loop.max_staleness:
            raise StalenessError(
                f"rollout {completion.request_id} was sampled by policy versions {oldest} … {newest} while the trainer "
                f"is at version {policy_version}: age {age} exceeds loop.max_staleness "
                f"({self._config.loop.max_staleness}); the engine missed a weight update"
            )


def completions_of(
    engine: RolloutEngine, requests: Sequence[GenerationRequest], config: RunConfig, *, stage: str
) -> Iterator[Completion]:
    """Submit, and yield completions as they finish.

    Raises:
        DeadlineExceeded: `deadlines.generate_s` passed with completions outstanding.
    """
    deadline_s = config.deadlines.generate_s
    deadline = time.monotonic() + deadline_s
    engine.submit(requests)
    outstanding = len(requests)
    while outstanding:
        for completion in engine.poll(_POLL_S):
            outstanding -= 1
            yield completion
        if outstanding and time.monotonic() > deadline:
            raise DeadlineExceeded(
                stage=stage,
                waited_for=f"{outstanding} of {len(requests)} completions",
                deadline_s=deadline_s,
                setting="deadlines.generate_s",
            )


def collect_verdicts(
    verifiers: VerifierPool, verdicts: dict[str, Verdict], expected: int, config: RunConfig, *, stage: str
) -> None:
    """Wait until `verdicts` holds all that were submitted.

    Raises:
        VerifierOutage: more than `verifier.max_failed_share` of them failed.
        DeadlineExceeded: the pool, which answers every submission within its limit, has stopped answering.
    """
    rounds = math.ceil((expected - len(verdicts)) / config.verifier.num_workers)
    deadline_s = rounds * config.verifier.timeout_s + _VERDICT_GRACE_S
    deadline = time.monotonic() + deadline_s
    while len(verdicts) < expected:
        verdicts.update(verifiers.collect(_POLL_S))
        if len(verdicts) < expected and time.monotonic() > deadline:
            raise DeadlineExceeded(
                stage=stage,
                waited_for=f"{expected - len(verdicts)} of {expected} verdicts",
                deadline_s=deadline_s,
                setting="verifier.timeout_s or verifier.num_workers",
            )
    failed = {key: verdict for key, verdict in verdicts.items() if verdict.state is VerdictState.FAILED}
    limit = config.verifier.max_failed_share
    if len(failed) > limit * len(verdicts):
        key, verdict = next(iter(failed.items()))
        raise VerifierOutage(
            f"{stage}: {len(failed)} of {len(verdicts)} verdicts failed, more than verifier.max_failed_share "
            f"({limit:g}); first: {' '.join(filter(None, (f'{key}: {verdict.reason}', verdict.extracted)))}; "
            "the rewards would mean nothing. Mend the verifier or raise verifier.timeout_s"
        )


def group_id(epoch: int, prompt: Prompt) -> str:
    """A prompt's group at one visit, e.g. ``"e0.addition-train-000017"``."""
    return f"e{epoch}.{prompt.prompt_id}"
