"""A kernel that is told document boundaries gets the right ones, through OLMo-core and through transformers."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from olmo_core.nn.transformer import Transformer
from transformers import AutoModelForCausalLM

from grpo_lib.config import TrainerConfig
from grpo_lib.errors import GrpoError
from grpo_lib.trainers.hf_checkpoint import HfFolder
from grpo_lib.trainers.hf_deepspeed_model import TokenLogprobModel, build_model
from grpo_lib.trainers.joined_documents import JoinedDocuments, WantedLabels
from grpo_lib.trainers.olmo_core_attention import VarlenAttention, use_document_attention
from grpo_lib.trainers.olmo_core_model import transformer_config
from grpo_lib.trainers.output_head import HeadOptions
from grpo_lib.trainers.varlen_attention import DocumentKernel, document_kernel
from tests.document_kernels import masked_attention
from tests.tiny_models import FAMILIES, VOCAB, make_tiny_model

CPU = torch.device("cpu")
DOC_IDS = torch.tensor([[1, 1, 1, 1, 1, 2, 2, 0], [1, 1, 2, 2, 2, 2, 2, 2]])
POSITIONS = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 0], [0, 1, 0, 1, 2, 3, 4, 5]])


def tokens() -> torch.Tensor:
    return torch.randint(3, VOCAB, DOC_IDS.shape, generator=torch.Generator().manual_seed(0))


def test_a_cpu_and_fp32_have_no_kernel() -> None:
    assert document_kernel(CPU, torch.bfloat16) is None
    assert document_kernel(torch.device("cuda"), torch.float32) is None


# --- transformers ---------------------------------------------------------------------------------------------------


def hf_model(path: Path, kernel: DocumentKernel | None) -> TokenLogprobModel:
    model = build_model(
        HfFolder(path),
        dtype=torch.float32,
        init_context=nullcontext(),
        kernel=kernel,
        config=TrainerConfig(),
        trainable=True,
        head=HeadOptions(temperature=1.0, chunk_tokens=64),
    )
    model.lm.load_state_dict(AutoModelForCausalLM.from_pretrained(path).state_dict())
    return model


def joined_scores(model: TokenLogprobModel, documents: JoinedDocuments, **changes: Any) -> torch.Tensor:
    wanted = WantedLabels.of(tokens(), documents, CPU)
    bounds = torch.nn.functional.pad(documents.lens[0].cumsum(0), (1, 0)).int()
    inputs = {
        "input_ids": documents.joined(tokens()),
        "position_ids": documents.positions(),
        "labels": wanted.labels,
        "positions": wanted.positions,
        "cu_lens": bounds,
        "max_len": documents.max_len,
    }
    return wanted.in_rows(model(**{**inputs, **changes})[0])


@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_scores_a_joined_row_as_it_scores_packed_rows(tmp_path: Path, family: str) -> None:
    path = make_tiny_model(tmp_path / family, family)
    wanted = WantedLabels.of(tokens(), None, CPU)
    rows, _ = hf_model(path, None)(tokens(), POSITIONS, wanted.labels, wanted.positions)
    expected = wanted.in_rows(rows).masked_fill(DOC_IDS == 0, 0)
    model = hf_model(path, masked_attention)
    documents = JoinedDocuments.of(DOC_IDS, POSITIONS).padded_to(16)
    torch.testing.assert_close(joined_scores(model, documents), expected, rtol=0, atol=1e-5)
    one_document = {"cu_lens": torch.tensor([0, 16], dtype=torch.int32), "max_len": 16}
    assert (joined_scores(model, documents, **one_document) - expected).abs().max() > 1e-2, "nothing would be noticed"


def test_transformers_without_boundaries_is_an_error(tmp_path: Path) -> None:
    model = hf_model(make_tiny_model(tmp_path, "qwen3"), masked_attention)
    with pytest.raises(GrpoError, match="document bounds"):
        joined_scores(model, JoinedDocuments.of(DOC_IDS, POSITIONS), cu_lens=None)


# --- OLMo-core ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model_type", ["llama", "olmo2", "qwen3"])
def test_olmo_core_with_a_kernel_equals_its_dense_attention(model_type: str) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformer_config(
        {"model_type": model_type, **sizes, "num_key_value_heads": 2, "vocab_size": VOCAB, "head_dim": 8}
    )
    documents = JoinedDocuments.of(DOC_IDS, POSITIONS).padded_to(16)

    def filled() -> Transformer:
        model = config.build(init_device="cpu")
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator) + (parameter.ndim == 1))
        return model

    def logits(model: Transformer, lens: torch.Tensor) -> torch.Tensor:
        result = model(documents.joined(tokens()), doc_lens=lens, max_doc_lens=[int(lens.max())])
        assert isinstance(result, torch.Tensor)
        return result[0, : int(documents.is_kept.sum())]

    dense, model = filled(), filled()
    use_document_attention(dense)
    expected = logits(dense, documents.lens)
    use_document_attention(model, masked_attention)
    assert {type(block.attention.backend) for block in model.blocks.values()} == {VarlenAttention}  # pyright: ignore[reportAttributeAccessIssue]
    torch.testing.assert_close(logits(model, documents.lens), expected, rtol=0, atol=1e-5)
    assert (logits(model, documents.lens.sum()[None, None]) - expected).abs().max() > 1e-2, "nothing would be noticed"
