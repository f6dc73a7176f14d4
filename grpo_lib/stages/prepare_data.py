"""`prepare_data`: rows → templates → token ids → filter → prompt shards, and the packing that follows from them."""

from __future__ import annotations

from dataclasses import dataclass

from grpo_lib.algo.packing import PackingPlan, packing_plan
from grpo_lib.config import RunConfig
from grpo_lib.data.chat import load_tokenizer
from grpo_lib.data.models import resolve_model_path
from grpo_lib.data.prepare import prepare_prompts
from grpo_lib.data.store import DatasetManifest, write_dataset
from grpo_lib.errors import DataError
from grpo_lib.stages.run_paths import RunPaths
from grpo_lib.verifiers.registry import get_verifier


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedData:
    """Shards with their hashes and drop counts, and the packs that a step is expected to need."""

    manifest: DatasetManifest
    packing: PackingPlan


def run(config: RunConfig, paths: RunPaths) -> PreparedData:
    """Write the train and held-out shards of a run.

    Raises:
        DataError: nothing is left of a split, or fewer training prompts than one step needs.
    """
    model = resolve_model_path(config.model.path)
    tokenizer = load_tokenizer(model)
    prepared = prepare_prompts(
        config.data, config.verifier, tokenizer, accepts_answer=get_verifier(config.verifier.name).accepts_answer
    )
    if len(prepared.train) < config.loop.prompts_per_step:
        raise DataError(
            f"{len(prepared.train)} training prompts are left after filtering ({prepared.drops}), but one step needs "
            f"loop.prompts_per_step ({config.loop.prompts_per_step}); bring more prompts or lower it"
        )
    manifest = write_dataset(paths.data, prepared)
    paths.mirror().publish(paths.data)
    packing = packing_plan(
        [len(prompt.token_ids) for prompt in prepared.train],
        max_response=config.rollout.max_tokens,
        pack_length=config.trainer.pack_length,
        num_ranks=config.trainer.num_ranks,
        group_size=config.rollout.group_size,
        prompts_per_step=config.loop.prompts_per_step,
        micro_batch_packs=config.trainer.micro_batch_packs,
    )
    return PreparedData(manifest=manifest, packing=packing)
