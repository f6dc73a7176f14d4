"""`sync_weights`: the initial weight sync on the real parts, before any rollout."""

from __future__ import annotations

from grpo_lib.config import RunConfig
from grpo_lib.data.chat import load_tokenizer, stop_token_ids
from grpo_lib.data.models import resolve_model_path
from grpo_lib.data.prompts import Split
from grpo_lib.data.store import read_prompts
from grpo_lib.errors import WeightSyncError
from grpo_lib.stages.live import live_run
from grpo_lib.stages.run_paths import RunPaths
from grpo_lib.types import SyncCertificate


def run(config: RunConfig, paths: RunPaths) -> SyncCertificate:
    """Start ranks and engines, push the sharded checkpoint's weights once, and return the certificate.

    Raises:
        WeightSyncError: the certificate is not `ok`.
    """
    paths.mirror().fetch(paths.data, paths.shards)
    model_path = resolve_model_path(config.model.path)
    with live_run(
        config,
        model_path=model_path,
        canary_prompts=read_prompts(paths.data, Split.TRAIN),
        stop_token_ids=stop_token_ids(model_path, load_tokenizer(model_path), config.rollout.stop_at),
        checkpoint=paths.shards,
    ) as live:
        certificate = live.sync.push(live.trainer.policy_version)
    if not certificate.ok:
        raise WeightSyncError(f"the initial weight sync is not certified: {certificate}")
    return certificate
