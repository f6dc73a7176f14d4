"""What only the OLMo-core trainer can get wrong: document boundaries, and the meaning of a Hugging Face config.

Functions whose name does not start with `test_` run in the ranks.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from grpo_lib.errors import GrpoError
from tests.distributed.gloo_ranks import RankPool
from tests.distributed.trainer_cases import OLMO_CORE, hf_scores, largest_difference, score

# --- Documents stay apart -----------------------------------------------------------------------------------------


def build_with_broken_boundaries(rank: int, num_ranks: int, model: Path, how: str) -> str:
    from olmo_core.nn.attention.backend import TorchAttentionBackend

    from grpo_lib.trainers.joined_documents import JoinedDocuments
    from grpo_lib.trainers.olmo_core_attention import DocumentAttention

    original_of, original_forward = JoinedDocuments.of, DocumentAttention.forward

    def as_one_document(doc_ids: torch.Tensor, position_ids: torch.Tensor) -> JoinedDocuments:
        documents = original_of(doc_ids, position_ids)
        return JoinedDocuments(is_kept=documents.is_kept, lens=documents.lens.sum()[None, None])

    def without_the_first(doc_ids: torch.Tensor, position_ids: torch.Tensor) -> JoinedDocuments:
        documents = original_of(doc_ids, position_ids)
        return JoinedDocuments(is_kept=documents.is_kept, lens=documents.lens[:, -1:])

    def leaking(self: Any, qkv: Any, cu_doc_lens: Any = None, max_doc_len: Any = None, **options: Any) -> Any:
        return TorchAttentionBackend.forward(self, qkv, **options)

    if how == "one document per row":
        setattr(JoinedDocuments, "of", staticmethod(as_one_document))  # noqa: B010 sabotage
    elif how == "a length left out":
        setattr(JoinedDocuments, "of", staticmethod(without_the_first))  # noqa: B010 sabotage
    else:
        setattr(DocumentAttention, "forward", leaking)  # noqa: B010 sabotage
    try:
        OLMO_CORE.build(rank, num_ranks, model)
    except (GrpoError, RuntimeError, IndexError) as error:
        return f"{type(error).__name__}: {error}"
    finally:
        setattr(JoinedDocuments, "of", staticmethod(original_of))  # noqa: B010
        setattr(DocumentAttention, "forward", original_forward)  # noqa: B010
    return "built"


@pytest.mark.parametrize("how", ["one document per row", "a length left out", "attention ignores the boundaries"])
def test_lost_boundaries_fail_at_construction(one_rank: RankPool, tiny_models: dict[str, Path], how: str) -> None:
    (message,) = one_rank.run(build_with_broken_boundaries, tiny_models["qwen3"], how)
    assert message != "built"
    if how != "a length left out":
        assert "cross document boundaries" in message


# --- Families and their rounding ----------------------------------------------------------------------------------


@pytest.mark.parametrize("model_type", ["llama", "olmo2", "qwen3"])
def test_left_out_config_keys_mean_what_they_mean_to_transformers(model_type: str) -> None:
    from transformers import AutoConfig

    from grpo_lib.trainers.olmo_core_model import transformer_config

    sizes = {"hidden_size": 256, "vocab_size": 64, "num_hidden_layers": 1, "intermediate_size": 32}
    full = AutoConfig.for_model(model_type, **sizes, num_attention_heads=4, num_key_value_heads=4).to_dict()
    short = {"model_type": model_type, **sizes, "num_attention_heads": 4}
    assert transformer_config(short) == transformer_config(full)


def score_with_another_rounding(rank: int, num_ranks: int, model: Path, part: str) -> dict[str, np.ndarray]:
    from olmo_core.nn.layer_norm import LayerNormType

    from grpo_lib.trainers import olmo_core_model

    original = olmo_core_model._FAMILIES
    other: dict[str, Any] = {"layer_norm": LayerNormType.rms} if part == "norm" else {"rope_full_precision": True}
    olmo_core_model._FAMILIES = {name: replace(family, **other) for name, family in original.items()}
    try:
        return score(OLMO_CORE.build(rank, num_ranks, model, dtype="bfloat16"))
    finally:
        olmo_core_model._FAMILIES = original


@pytest.mark.parametrize("part", ["norm", "rotary embedding"])
def test_the_comparison_notices_another_rounding_order(
    one_rank: RankPool, tiny_models: dict[str, Path], part: str
) -> None:
    (scores,) = one_rank.run(score_with_another_rounding, tiny_models["llama"], part)
    assert largest_difference(scores, hf_scores(tiny_models["llama"], torch.bfloat16)) > 1e-2
