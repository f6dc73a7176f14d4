"""The independent reference of parity bisect: a plain Hugging Face model that can make a named mistake on purpose.

Attention is eager under an explicit mask and position ids are given: nothing is shared with a trainer or an engine, and
nothing depends on how transformers recognises packed rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from grpo_lib.algo.faults import Fault, faulty_batch, visible_tokens
from grpo_lib.interfaces import PolicyLoss
from grpo_lib.types import PackedBatch

_MASK_ELEMENTS = 1 << 24  # of one forward; bounds mask and attention scores per head
_EMBEDDING = "model.embed_tokens.weight"

WeightReader = Callable[[str], torch.Tensor]  # Hugging Face name → full tensor


class HfReference:
    """Scores, hidden states and gradients of packed batches, as configured or under a `Fault`.

    Args:
        model_path: Hugging Face folder, of which only the config is read.
        dtype: Compute dtype, ``"float32"`` or ``"bfloat16"``.
        temperature: Sampling temperature that log-probabilities are taken at.
        version: Policy version that the scorers under suspicion should hold.
        weights: Version → reader of its tensors. `version` is among them, other versions are suspects.
        fp32_head: fp32 logits from bfloat16 hidden states.
    """

    def __init__(
        self,
        model_path: Path,
        *,
        dtype: str,
        temperature: float,
        version: int,
        weights: Mapping[int, WeightReader],
        fp32_head: bool = False,
    ) -> None:
        if version not in weights:
            raise ValueError(f"reference weights are of versions {sorted(weights)}; version {version} is missing")
        self.temperature, self.version, self.versions = temperature, version, tuple(sorted(weights))
        self._weights, self._fp32_head = dict(weights), fp32_head
        self._model: Any = AutoModelForCausalLM.from_config(
            AutoConfig.from_pretrained(model_path), dtype=getattr(torch, dtype), attn_implementation="eager"
        ).eval()
        # PyTorch drops the gradient of an embedding's padding token; a policy may sample that token and train on it.
        self._model.get_input_embeddings().padding_idx = None
        self._parameters = dict(self._model.named_parameters())  # a tied head is not listed twice
        self._held: tuple[object, ...] = ()

    @property
    def tensor_names(self) -> tuple[str, ...]:
        """Hugging Face names, each stored tensor once."""
        return tuple(self._parameters)

    @property
    def tied_embedding(self) -> str | None:
        """Name of the embedding that is the output head too; None where the head is a tensor of its own."""
        return _EMBEDDING if self._model.config.tie_word_embeddings else None

    @torch.no_grad()
    def logprobs(self, batch: PackedBatch, fault: Fault) -> torch.Tensor:
        """[B, T] float32: log-probability of each label; rows joined to one where the fault joins them."""
        self._hold(fault)
        batch = faulty_batch(batch, fault)
        return self._logprobs(batch, fault)

    @torch.no_grad()
    def hidden_states(self, batch: PackedBatch) -> dict[str, torch.Tensor]:
        """``"embedding"``, ``"layer 0"`` … → [B, T, D] float32, 0 at padding: the residual stream after each block.

        Read by hooks and not from `output_hidden_states`, whose last entry has passed the final norm.
        """
        self._hold(Fault())
        modules = {"embedding": self._model.get_input_embeddings()}
        modules |= {f"layer {index}": layer for index, layer in enumerate(self._model.model.layers)}
        seen: dict[str, list[torch.Tensor]] = {name: [] for name in modules}

        def keep(name: str) -> Callable[..., None]:
            return lambda _module, _inputs, output: seen[name].append(
                (output if isinstance(output, torch.Tensor) else output[0]).float()
            )

        hooks = [module.register_forward_hook(keep(name)) for name, module in modules.items()]
        try:
            for _ in self._forward(batch, Fault()):
                pass
        finally:
            for hook in hooks:
                hook.remove()
        is_real = (batch.doc_ids > 0)[..., None]
        return {name: torch.where(is_real, torch.cat(rows), 0) for name, rows in seen.items()}

    def gradient(
        self, batches: Sequence[PackedBatch], loss: PolicyLoss, *, loss_denominator: float, fault: Fault
    ) -> dict[str, torch.Tensor]:
        """Tensor name → gradient of the summed token loss / `loss_denominator` over all batches, not clipped."""
        self._hold(fault)
        self._model.zero_grad(set_to_none=True)
        for batch in batches:
            value, _ = loss(self._logprobs(batch, fault), batch, loss_denominator)
            value.backward()
        gradients = {
            name: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            for name, parameter in self._parameters.items()
        }
        self._model.zero_grad(set_to_none=True)
        return gradients

    def _logprobs(self, batch: PackedBatch, fault: Fault) -> torch.Tensor:
        """[B, T] float32 of a batch that the fault has rewritten already."""
        temperature = self.temperature if fault.temperature is None else fault.temperature
        rows = []
        for chunk, logits in self._forward(batch, fault):
            log_softmax = (logits.float() / temperature).log_softmax(-1)
            rows.append(log_softmax.gather(-1, batch.labels[chunk, :, None])[..., 0])
        return torch.cat(rows)

    def _forward(self, batch: PackedBatch, fault: Fault) -> Iterator[tuple[slice, torch.Tensor]]:
        """(rows, their logits [b, T, V]). The mask is additive: eager attention takes a boolean one for numbers."""
        rows_at_once = max(1, _MASK_ELEMENTS // batch.input_ids.shape[1] ** 2)
        for start in range(0, batch.num_rows, rows_at_once):
            chunk = slice(start, start + rows_at_once)
            visible = visible_tokens(batch.doc_ids[chunk], fault.sight)[:, None]
            dtype = self._model.dtype
            mask = torch.zeros(visible.shape, dtype=dtype).masked_fill_(~visible, torch.finfo(dtype).min)
            output = self._model.model(
                input_ids=batch.input_ids[chunk],
                attention_mask=mask,
                position_ids=batch.position_ids[chunk],
                use_cache=False,
            )
            hidden, head = output.last_hidden_state, self._head(fault)
            if self._fp32_head:
                hidden, head = hidden.float(), head.float()
            yield chunk, torch.nn.functional.linear(hidden, head)

    def _head(self, fault: Fault) -> torch.Tensor:
        """[V, D]. The families here have no bias and no scale in their head."""
        if fault.head_version is not None:
            return self._weights[fault.head_version](_EMBEDDING).to(self._model.dtype)
        weight = self._model.get_output_embeddings().weight
        return weight.detach() if fault.head_detached else weight

    @torch.no_grad()
    def _hold(self, fault: Fault) -> None:
        """Fill the model with the fault's weights, unless it holds them already."""
        wanted = (fault.version, fault.tensors, fault.bf16_weights)
        if wanted == self._held:
            return
        other = self.version if fault.version is None else fault.version
        if other not in self._weights:
            raise ValueError(f"weights of version {other} are not stored; stored are {list(self.versions)}")
        for name, parameter in self._parameters.items():
            is_other = not fault.tensors or name in fault.tensors
            tensor = self._weights[other if is_other else self.version](name)
            parameter.copy_(tensor.bfloat16() if fault.bf16_weights else tensor)
        self._held = wanted
