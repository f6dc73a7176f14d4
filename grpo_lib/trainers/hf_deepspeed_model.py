"""A Hugging Face causal language model that returns log-probabilities of the labels that are asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import cast

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.initialization import no_init_weights

from grpo_lib.algo.logprobs import token_logprobs
from grpo_lib.data.models import SUPPORTED_FAMILIES
from grpo_lib.errors import DataError
from grpo_lib.trainers.hf_checkpoint import HfFolder
from grpo_lib.trainers.hf_deepspeed_attention import DOCUMENT_ATTENTION, DocumentGroups
from grpo_lib.trainers.labels import IGNORED_LABEL

TIED_HEAD = "lm_head.weight"
_EMBEDDING = "model.embed_tokens.weight"


class TokenLogprobHead(nn.Module):
    """Projection, temperature-scaled log-softmax and entropy, for the labels that are asked for.

    ZeRO-3 gathers a module's weights around its forward and its backward pass. The projection is therefore not called
    as a module: ranks have different numbers of chunks, and would gather the matrix different numbers of times. It is
    whole while this module runs, see `DeepSpeedRuntime.engine`.
    """

    def __init__(self, projection: nn.Linear, *, temperature: float, chunk_tokens: int) -> None:
        super().__init__()
        self._projection = (projection,)  # in a tuple, so that it stays a module of the language model alone
        self._temperature, self._chunk_tokens = temperature, chunk_tokens

    @property
    def weight(self) -> nn.Parameter:
        """[V, D], the embedding matrix if they are tied."""
        return cast("nn.Parameter", self._projection[0].weight)

    def forward(self, hidden: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probability and entropy of each label.

        Args:
            hidden: [B, T, D] after the final norm.
            labels: [B, T] int64; positions with `IGNORED_LABEL` are not projected.

        Returns:
            logprobs [B, T] float32 with gradient and entropy [B, T] float32 without; 0 at ignored positions. Without
            any label they still have a graph to the weights, so that this rank joins the backward's collectives.
        """
        wanted = labels != IGNORED_LABEL
        logprobs, entropy = token_logprobs(
            hidden[wanted],
            lambda rows: nn.functional.linear(rows, self.weight),
            labels[wanted],
            temperature=self._temperature,
            chunk_tokens=self._chunk_tokens,
        )
        zeros = logprobs.new_zeros(labels.shape)
        return zeros.masked_scatter(wanted, logprobs), zeros.masked_scatter(wanted, entropy)


class TokenLogprobModel(nn.Module):
    """A causal language model that ends in a `TokenLogprobHead` instead of logits."""

    def __init__(self, lm: PreTrainedModel, *, temperature: float, chunk_tokens: int) -> None:
        super().__init__()
        self.lm = lm
        projection = lm.get_output_embeddings()
        assert isinstance(projection, nn.Linear), type(projection)
        assert projection.bias is None, "no family here has a bias in its head"
        self.head = TokenLogprobHead(projection, temperature=temperature, chunk_tokens=chunk_tokens)

    @property
    def body(self) -> nn.Module:
        return cast("nn.Module", self.lm.model)

    def forward(
        self, input_ids: torch.Tensor, position_ids: torch.Tensor, labels: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probability and entropy of each label, as `TokenLogprobHead`.

        Args:
            input_ids: [B, T] int64.
            position_ids: [B, T] int64, restarting at 0 with each document.
            labels: [B, T] int64.
        """
        output = self.body(
            input_ids=input_ids,
            position_ids=position_ids,
            attention_mask=None,
            use_cache=False,
            documents=DocumentGroups.of(position_ids),  # handed down to the attention of every layer
        )
        return self.head(output.last_hidden_state, labels)

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
    activation_checkpointing: bool,
    temperature: float,
    chunk_tokens: int,
) -> TokenLogprobModel:
    """The folder's model with unset weights, made inside `init_context`, which decides on the device.

    Raises:
        DataError: the family is not supported, or the model draws random numbers while training.
    """
    model_type = folder.config.get("model_type")
    if model_type not in SUPPORTED_FAMILIES:
        raise DataError(
            f"config.json: model_type {model_type!r} is not supported by the hf_deepspeed trainer; it knows "
            f"{', '.join(sorted(SUPPORTED_FAMILIES))}"
        )
    config = AutoConfig.from_pretrained(folder.path)
    if config.attention_dropout:
        raise DataError(
            f"config.json: attention_dropout ({config.attention_dropout}) must be 0 for the hf_deepspeed trainer"
        )
    with no_init_weights(), init_context:
        lm = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=DOCUMENT_ATTENTION)
    lm.tie_weights()
    # PyTorch drops the gradient of an embedding's padding token, but a policy may sample that token and train on it.
    cast("nn.Embedding", lm.get_input_embeddings()).padding_idx = None
    lm.train(activation_checkpointing)  # the families here differ in training mode by nothing else
    if activation_checkpointing:
        lm.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return TokenLogprobModel(lm, temperature=temperature, chunk_tokens=chunk_tokens)


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
