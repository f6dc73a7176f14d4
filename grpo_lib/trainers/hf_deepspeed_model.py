"""A Hugging Face causal language model that returns log-probabilities of the labels that are asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import cast

import torch
from torch import nn
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.initialization import no_init_weights

from grpo_lib.config import TrainerConfig
from grpo_lib.data.models import SUPPORTED_FAMILIES
from grpo_lib.errors import DataError, GrpoError
from grpo_lib.trainers.compiled_blocks import compile_blocks, explained_recompile_limit
from grpo_lib.trainers.hf_checkpoint import HfFolder
from grpo_lib.trainers.hf_deepspeed_attention import DOCUMENT_ATTENTION, DocumentGroups
from grpo_lib.trainers.output_head import HeadOptions, projected_logprobs
from grpo_lib.trainers.varlen_attention import DocumentKernel

TIED_HEAD = "lm_head.weight"
KERNEL_ATTENTION = "grpo_varlen"  # name that transformers knows the attention of `use_kernel` by
_EMBEDDING = "model.embed_tokens.weight"


class TokenLogprobHead(nn.Module):
    """Projection, temperature-scaled log-softmax and entropy, for the labels that are asked for.

    ZeRO-3 gathers a module's weights around its forward and its backward pass. The projection is therefore not called
    as a module: ranks have different numbers of chunks, and would gather the matrix different numbers of times. It is
    whole while this module runs, see `DeepSpeedRuntime.engine`.
    """

    def __init__(self, projection: nn.Linear, options: HeadOptions) -> None:
        super().__init__()
        self._projection = (projection,)  # in a tuple, so that it stays a module of the language model alone
        self._options = options

    @property
    def weight(self) -> nn.Parameter:
        """[V, D], the embedding matrix if they are tied."""
        return cast("nn.Parameter", self._projection[0].weight)

    def forward(
        self, hidden: torch.Tensor, labels: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probability and entropy of each label.

        Args:
            hidden: [B, T, D] after the final norm.
            labels: [n] int64.
            positions: [n] int64: where in the flattened [B, T] they are wanted.

        Returns:
            logprobs [n] float32 with gradient and entropy [n] float32 without. Without any label they still have a
            graph to the weights, so that this rank joins the backward's collectives.
        """
        rows = hidden.flatten(0, 1).index_select(0, positions)
        return projected_logprobs(rows, self.weight, labels, self._options)


class TokenLogprobModel(nn.Module):
    """A causal language model that ends in a `TokenLogprobHead` instead of logits."""

    def __init__(self, lm: PreTrainedModel, options: HeadOptions) -> None:
        super().__init__()
        self.lm = lm
        projection = lm.get_output_embeddings()
        assert isinstance(projection, nn.Linear), type(projection)
        assert projection.bias is None, "no family here has a bias in its head"
        self.head = TokenLogprobHead(projection, options)

    @property
    def body(self) -> nn.Module:
        return cast("nn.Module", self.lm.model)

    def forward(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        labels: torch.Tensor,
        positions: torch.Tensor,
        cu_lens: torch.Tensor | None = None,
        max_len: int | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probability and entropy of each label, as `TokenLogprobHead`.

        Args:
            input_ids: [B, T] int64; one row with boundaries.
            position_ids: [B, T] int64, restarting at 0 with each document.
            labels: [n] int64.
            positions: [n] int64, in the flattened [B, T].
            cu_lens: [documents + 1] int32, for `KERNEL_ATTENTION`; else documents start where positions are 0.
            max_len: Longest document.
        """
        # Boundaries are handed down to the attention of every layer; transformers itself gets no mask and no cache.
        boundaries = (
            {"documents": DocumentGroups.of(position_ids)}
            if cu_lens is None
            else {"document_bounds": cu_lens, "longest_document": max_len}
        )
        with explained_recompile_limit():
            output = self.body(
                input_ids=input_ids, position_ids=position_ids, attention_mask=None, use_cache=False, **boundaries
            )
        return self.head(output.last_hidden_state, labels, positions)

    @contextmanager
    def recorded(self) -> Iterator[dict[str, torch.Tensor]]:
        """Outputs of the embedding and of each block of the forward passes inside, by the names of `hidden_states`."""
        outputs: dict[str, torch.Tensor] = {}

        def keep(name: str) -> Callable[..., None]:
            def hook(module: nn.Module, args: object, output: torch.Tensor | tuple[torch.Tensor, ...]) -> None:
                outputs[name] = output if isinstance(output, torch.Tensor) else output[0]

            return hook

        layers = {f"layer {i}": layer for i, layer in enumerate(cast("nn.ModuleList", self.body.layers))}
        modules = {"embedding": cast("nn.Module", self.body.embed_tokens), **layers}
        handles = [module.register_forward_hook(keep(name)) for name, module in modules.items()]
        try:
            yield outputs
        finally:
            for handle in handles:
                handle.remove()


def build_model(
    folder: HfFolder,
    *,
    dtype: torch.dtype,
    init_context: AbstractContextManager[object],
    kernel: DocumentKernel | None,
    config: TrainerConfig,
    trainable: bool,
    head: HeadOptions,
) -> TokenLogprobModel:
    """The folder's model with unset weights, made inside `init_context`, which decides on the device.

    Args:
        kernel: Attention for documents in one row; None is `DOCUMENT_ATTENTION`.

    Raises:
        DataError: the family is not supported, or the model draws random numbers while training.
    """
    model_type = folder.config.get("model_type")
    if model_type not in SUPPORTED_FAMILIES:
        raise DataError(
            f"config.json: model_type {model_type!r} is not supported by the hf_deepspeed trainer; it knows "
            f"{', '.join(sorted(SUPPORTED_FAMILIES))}"
        )
    hf_config = AutoConfig.from_pretrained(folder.path)
    if hf_config.attention_dropout:
        raise DataError(
            f"config.json: attention_dropout ({hf_config.attention_dropout}) must be 0 for the hf_deepspeed trainer"
        )
    attention = DOCUMENT_ATTENTION if kernel is None else use_kernel(kernel)
    with no_init_weights(), init_context:
        lm = AutoModelForCausalLM.from_config(hf_config, dtype=dtype, attn_implementation=attention)
    lm.tie_weights()
    # PyTorch drops the gradient of an embedding's padding token, but a policy may sample that token and train on it.
    cast("nn.Embedding", lm.get_input_embeddings()).padding_idx = None
    is_checkpointed = config.activation_checkpointing and trainable
    lm.train(is_checkpointed)  # the families here differ in training mode by nothing else
    if is_checkpointed:
        lm.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if config.compile:
        compile_blocks(cast("nn.ModuleList", cast("nn.Module", lm.model).layers), dynamic=True)
    return TokenLogprobModel(lm, head)


def use_kernel(kernel: DocumentKernel) -> str:
    """Register a kernel with transformers; returns the name of the attention, which has no mask at all."""

    def attend(
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        scaling: float | None = None,
        document_bounds: torch.Tensor | None = None,
        longest_document: int | None = None,
        sliding_window: int | None = None,
        **_: object,
    ) -> tuple[torch.Tensor, None]:
        """[1, heads, N, head_dim] each → [1, N, heads, head_dim]."""
        if document_bounds is None or longest_document is None or attention_mask is not None or sliding_window:
            raise GrpoError(f"{KERNEL_ATTENTION}: one row, its document bounds, no mask and no window are needed")
        q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
        return kernel(q, k, v, document_bounds, longest_document, scaling)[None], None

    AttentionInterface.register(KERNEL_ATTENTION, attend)
    return KERNEL_ATTENTION


def check_folder(folder: HfFolder, shapes: dict[str, tuple[int, ...]]) -> None:
    """Raise unless the folder holds exactly the model's tensors.

    Raises:
        DataError: names the tensor and its file.
    """
    expected = dict(shapes)
    if TIED_HEAD not in expected and TIED_HEAD in folder.names:
        folder.check_tied_copy(TIED_HEAD, _EMBEDDING)
        expected[TIED_HEAD] = expected[_EMBEDDING]
    folder.check_tensors(expected)
