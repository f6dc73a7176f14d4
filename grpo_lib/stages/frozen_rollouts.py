"""Rollouts that two trainers are compared on: made fresh by a short run, or taken from a finished one."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from grpo_lib.config import RunConfig
from grpo_lib.data.chat import load_tokenizer, stop_token_ids, token_decoder
from grpo_lib.data.models import resolve_model_path
from grpo_lib.data.prompts import Split
from grpo_lib.data.store import read_prompts
from grpo_lib.errors import DataError
from grpo_lib.evaluate import evaluate_policy, summarize
from grpo_lib.interfaces import RolloutEngine, VerifierPool
from grpo_lib.loop import StepRecord
from grpo_lib.parity.probe import ENGINE_SCORE
from grpo_lib.stages import fit, parity_probe, prepare_data
from grpo_lib.stages.evaluate import store_samples
from grpo_lib.stages.live import LiveRun
from grpo_lib.stages.parity_probe import ScorerMeasurement, can_score
from grpo_lib.stages.run_paths import RunPaths
from grpo_lib.stages.scorers import ScoredBySequence
from grpo_lib.stages.stored_run import StoredRun, open_run, write_evaluation
from grpo_lib.storage.refs import StoreRef
from grpo_lib.storage.scores import write_scores


@dataclass(frozen=True, slots=True, kw_only=True)
class FrozenRollouts:
    """What every trainer is measured on, by reference; small and picklable."""

    run: str  # folder of the run that sampled them
    run_id: str
    steps: int  # that are replayed, from the first
    policy_version: int  # of the probe rollouts
    probe_tokens: int
    engine_score: ScorerMeasurement | None  # None where the engine cannot score as it samples
    digest: str  # of `rollouts_digest`
    seconds: float  # that they took

    def open(self, config: RunConfig) -> StoredRun:
        """The run under the tolerances of `config`."""
        return replace(open_run(self.run), config=config)


def run(
    config: RunConfig, paths: RunPaths, *, run_id: str, on_step: Callable[[StepRecord], None] | None = None
) -> FrozenRollouts:
    """Make them: `loop.steps` steps of the real loop, then samples of the last policy on the held-out prompts, scored
    by the engine that drew them. Trainer and engines start once; the result is a run folder like any other.
    """
    started = time.perf_counter()
    prepare_data.run(config, paths)

    def sample(live: LiveRun, verifiers: VerifierPool) -> None:
        _sample_probe(config, paths, live.engines, verifiers)

    fit.run(config, paths, run_id=run_id, on_step=on_step, from_shards=False, after=sample)
    return _frozen(open_run(str(paths.run)), paths, steps=config.parity.replay_steps, started=started)


def adopt(config: RunConfig, paths: RunPaths, *, source: str) -> FrozenRollouts:
    """Take those of a finished run. Where no engine has scored its probe rollouts, one with the exported weights does.

    Args:
        paths: Of the run that adopts; the other run's folder stays as it is.
        source: Run id or folder.
    """
    return _frozen(open_run(source), paths, steps=config.parity.replay_steps, started=time.perf_counter())


def rollouts_digest(run: StoredRun, *, steps: int) -> str:
    """sha256 over what the first `steps` steps and the probe rollouts hold, timings left out.

    The files are read and hashed again, so two processes with one digest have read the same rollouts.
    """
    contents = [run.rollouts(step).content_digest for step in range(1, steps + 1)]
    return hashlib.sha256("\n".join([*contents, run.probe_rollouts().content_digest]).encode()).hexdigest()


def check_digests(frozen: FrozenRollouts, seen: Mapping[str, str]) -> None:
    """Every trainer was measured on the frozen rollouts.

    Args:
        seen: Trainer → digest of what it read.

    Raises:
        DataError: one read something else.
    """
    other = {name: digest for name, digest in seen.items() if digest != frozen.digest}
    if other:
        found = ", ".join(f"{name} {digest}" for name, digest in other.items())
        raise DataError(
            f"the trainers were not measured on the same rollouts: {frozen.run_id} has {frozen.digest}, but read were "
            f"{found}. Someone wrote to {frozen.run} in between; run again"
        )


def _sample_probe(config: RunConfig, paths: RunPaths, engines: RolloutEngine, verifiers: VerifierPool) -> None:
    model_path = resolve_model_path(config.model.path)
    tokenizer = load_tokenizer(model_path)
    table = evaluate_policy(
        engines,
        read_prompts(paths.data, Split.HELDOUT),
        verifiers,
        token_decoder(tokenizer),
        config,
        stop_token_ids=stop_token_ids(model_path, tokenizer, config.rollout.stop_at),
        run_seed=config.seed,
    )
    scores = None
    if can_score(config):
        scorer = ScoredBySequence(name=ENGINE_SCORE, scorer=engines)
        scores = write_scores(paths.open_store(), scorer.score(table.groups)).to_dict()
    write_evaluation(
        paths,
        evaluation={"after": summarize(table, config.evaluation, seed=config.seed)},
        probe_rollouts=store_samples(config, paths, table).to_dict(),
        policy_version=table.policy_version,
        engine_scores=scores,
    )


def _frozen(run: StoredRun, paths: RunPaths, *, steps: int, started: float) -> FrozenRollouts:
    stored, engine = run.engine_scores_ref(), None
    if stored is not None:
        engine = ScorerMeasurement(scorer=ENGINE_SCORE, scores=stored.to_dict(), store=run.paths.store)
    elif can_score(run.config):
        engine = parity_probe.measure(run, scorer=ENGINE_SCORE, store=paths.store)
        paths.mirror().refer("scores-engine", StoreRef.from_dict(engine.scores))
    groups = run.probe_rollouts().groups
    return FrozenRollouts(
        run=str(run.paths.run),
        run_id=run.run_id,
        steps=steps,
        policy_version=run.policy_version,
        probe_tokens=sum(len(rollout.completion.token_ids) for group in groups for rollout in group.rollouts),
        engine_score=engine,
        digest=rollouts_digest(run, steps=steps),
        seconds=time.perf_counter() - started,
    )
