"""The independent reference of parity bisect: a plain Hugging Face model that can make a named mistake on purpose.

Attention is eager under an explicit mask, position ids are given, and every row runs by itself: nothing is shared with
a trainer or an engine, and nothing depends on how transformers guesses at packed rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from grpo_lib.algo.faults import Fault, faulty_batch, visible_tokens
from grpo_lib.interfaces import PolicyLoss
from grpo_lib.types import PackedBatch

WeightReader = Callable[[str], torch.Tensor]  # Hugging Face name → full tensor


class HfReference:
    """Scores, hidden states and gradients of packed batches, as configured or under a `Fault`.

    Args:
        model_path: Hugging Face folder; its weights are used where no version is asked for.
        dtype: Compute dtype, ``"float32"`` or ``"bfloat16"``.
        temperature: Sampling temperature that log-probabilities are taken at.
        version: Policy version that the scorers under suspicion should hold.
        weights: Version → reader of its tensors. `version` is among them, other versions are suspects.
    """

    def __init__(
        self, model_path: Path, *, dtype: str, temperature: float, version: int, weights: Mapping[int, WeightReader]
    ) -> None:
        if version not in weights:
            raise ValueError(f"reference weights are of versions {sorted(weights)}; version {version} is missing")
        self.temperature, self.version, self.versions = temperature, version, tuple(sorted(weights))
        self._weights = dict(weights)
        self._model: Any = AutoModelForCausalLM.from_pretrained(
            model_path, dtype=getattr(torch, dtype), attn_implementation="eager"
        ).eval()
        self._parameters = dict(self._model.named_parameters())  # a tied head is not listed twice
        self._held: tuple[object, ...] = ()

    @property
    def tensor_names(self) -> tuple[str, ...]:
        """Hugging Face names, each stored tensor once."""
        return tuple(self._parameters)

    @torch.no_grad()
    def logprobs(self, batch: PackedBatch, fault: Fault) -> torch.Tensor:
        """[B, T] float32: log-probability of each label; rows joined to one where the fault joins them."""
        self._hold(fault)
        batch = faulty_batch(batch, fault)
        return torch.cat([self._row_logprobs(batch, row, fault) for row in range(batch.num_rows)])

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
            for row in range(batch.num_rows):
                self._row_logits(batch, row, Fault())
        finally:
            for hook in hooks:
                hook.remove()
        is_real = (batch.doc_ids > 0)[..., None]
        return {name: torch.where(is_real, torch.cat(rows), 0) for name, rows in seen.items()}

    def gradient(
        self, batches: Sequence[PackedBatch], loss: PolicyLoss, *, loss_denominator: float
    ) -> dict[str, torch.Tensor]:
        """Tensor name → gradient of the summed token loss / `loss_denominator` over all batches, not clipped."""
        self._hold(Fault())
        self._model.zero_grad(set_to_none=True)
        for batch in batches:
            logprobs = torch.cat([self._row_logprobs(batch, row, Fault()) for row in range(batch.num_rows)])
            value, _ = loss(logprobs, batch, loss_denominator)
            value.backward()
        gradients = {
            name: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            for name, parameter in self._parameters.items()
        }
        self._model.zero_grad(set_to_none=True)
        return gradients

    def _row_logprobs(self, batch: PackedBatch, row: int, fault: Fault) -> torch.Tensor:
        temperature = self.temperature if fault.temperature is None else fault.temperature
        log_softmax = (self._row_logits(batch, row, fault).float() / temperature).log_softmax(-1)
        return log_softmax.gather(-1, batch.labels[row : row + 1, :, None])[..., 0]

    def _row_logits(self, batch: PackedBatch, row: int, fault: Fault) -> torch.Tensor:
        """[1, T, V]. The mask is additive: eager attention takes a boolean one for numbers."""
        one = slice(row, row + 1)
        visible = visible_tokens(batch, fault.sight)[one, None] if batch.num_rows == 1 else None
        if visible is None:
            single = _row_of(batch, row)
            visible = visible_tokens(single, fault.sight)[:, None]
        dtype = self._model.dtype
        mask = torch.zeros(visible.shape, dtype=dtype).masked_fill_(~visible, torch.finfo(dtype).min)
        return self._model(
            input_ids=batch.input_ids[one],
            attention_mask=mask,
            position_ids=batch.position_ids[one],
            use_cache=False,
        ).logits

    @torch.no_grad()
    def _hold(self, fault: Fault) -> None:
        """Fill the model with the fault's weights, unless it holds them already."""
        wanted = (fault.version, fault.tensors, fault.bf16_weights)
        if wanted == self._held:
            return
        if fault.version is not None and fault.version not in self._weights:
            raise ValueError(f"weights of version {fault.version} are not stored; stored are {list(self.versions)}")
        for name, parameter in self._parameters.items():
            is_other = fault.version is not None and (not fault.tensors or name in fault.tensors)
            tensor = self._weights[fault.version if is_other else self.version](name)  # pyright: ignore
            parameter.copy_(tensor.bfloat16() if fault.bf16_weights else tensor)
        self._held = wanted
