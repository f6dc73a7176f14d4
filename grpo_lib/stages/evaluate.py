"""`evaluate`: the base model and the trained one on the held-out prompts, by one engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from grpo_lib.algo.advantages import assess_group
from grpo_lib.config import RunConfig
from grpo_lib.data.chat import load_tokenizer, stop_token_ids, token_decoder
from grpo_lib.data.models import resolve_model_path
from grpo_lib.data.prompts import Split
from grpo_lib.data.store import read_prompts
from grpo_lib.evaluate import EvaluationResult, EvaluationTable, evaluate_policy
from grpo_lib.stages.attempts import attempt
from grpo_lib.stages.live import live_engines
from grpo_lib.stages.run_paths import RunPaths
from grpo_lib.stages.stored_run import write_evaluation
from grpo_lib.storage.refs import StoreRef
from grpo_lib.storage.rollouts import write_rollouts
from grpo_lib.verifiers.pool import ProcessVerifierPool


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """The table as plain data, and where the trained policy's samples are stored."""

    evaluation: dict[str, Any]
    rollouts: dict[str, Any]  # store reference


def run(config: RunConfig, paths: RunPaths, *, policy_version: int) -> Evaluation:
    """Evaluate before and after training with the same prompts and seeds.

    Args:
        policy_version: Of the exported model.

    Raises:
        RunBusy: another process is at work on the run.
    """
    with attempt(paths, stage="evaluate"):
        return _evaluate(config, paths, policy_version)


def _evaluate(config: RunConfig, paths: RunPaths, policy_version: int) -> Evaluation:
    mirror = paths.mirror()
    mirror.fetch(paths.data, paths.export)
    model_path = resolve_model_path(config.model.path)
    prompts = read_prompts(paths.data, Split.HELDOUT)
    tokenizer = load_tokenizer(model_path)
    stops, decode = stop_token_ids(model_path, tokenizer, config.rollout.stop_at), token_decoder(tokenizer)
    with (
        ProcessVerifierPool(config.verifier) as verifiers,
        live_engines(config, model_path=model_path, policy_version=0) as engines,
    ):
        before = evaluate_policy(
            engines, prompts, verifiers, decode, config, stop_token_ids=stops, run_seed=config.seed
        )
        engines.pause()
        engines.load_weights(paths.export, policy_version)
        engines.resume()
        after = evaluate_policy(engines, prompts, verifiers, decode, config, stop_token_ids=stops, run_seed=config.seed)
    result = EvaluationResult(before=before, after=after, config=config.evaluation, seed=config.seed)
    ref = store_samples(config, paths, after)
    evaluation = result.to_dict()
    write_evaluation(paths, evaluation=evaluation, probe_rollouts=ref.to_dict(), policy_version=policy_version)
    mirror.publish(paths.evaluation)
    return Evaluation(evaluation=evaluation, rollouts=ref.to_dict())


def store_samples(config: RunConfig, paths: RunPaths, table: EvaluationTable) -> StoreRef:
    """Keep the sampled completions of an evaluation, judged as a step's rollouts are."""
    assessments = [
        assess_group(group, kind=config.algorithm.advantage, correct_reward=config.verifier.correct_reward)
        for group in table.groups
    ]
    return write_rollouts(paths.open_store(), step=config.loop.steps, groups=table.groups, assessments=assessments)
