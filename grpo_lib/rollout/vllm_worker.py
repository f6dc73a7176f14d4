"""What a vLLM worker really receives during a weight update, whichever way it travels.

Every transfer backend of vLLM ends in the model's `load_weights`, so that is where the tap sits: behind the wire and
before the model's own fusing and repacking.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from grpo_lib.algo.checksum import NamedChecksums
from grpo_lib.errors import WeightSyncError
from grpo_lib.types import WeightReceipt

if TYPE_CHECKING:
    import torch


@dataclass(slots=True, kw_only=True)
class _Tap:
    """What has passed since the update began."""

    parameters: frozenset[str]  # of this worker's model, fused as vLLM fuses them
    loaded: set[str] = field(default_factory=set)  # those that `load_weights` says it has filled
    checksums: NamedChecksums = field(default_factory=NamedChecksums)

    def through(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterable[tuple[str, torch.Tensor]]:
        """The same weights. Those that are all there already are summed together, others one by one as they come:
        a wire may use the memory of one for the next."""
        if isinstance(weights, Sequence):
            self._add(weights)
            return weights
        return self._one_by_one(weights)

    def _one_by_one(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        for pair in weights:
            self._add([pair])
            yield pair

    def _add(self, weights: Sequence[tuple[str, torch.Tensor]]) -> None:
        for name, _ in weights:
            if name in self.checksums:
                raise WeightSyncError(f"weight update: {name} arrived twice")
        self.checksums.add(weights)


class WeightTap:
    """Mixed into vLLM's worker class through `worker_extension_cls`; called by `collective_rpc`."""

    model_runner: Any  # the worker's own
    _weight_tap: _Tap | None = None

    def has_fp32_head(self) -> bool:
        """Whether logits leave the model with more than bfloat16's 8 bits; found by computing some, since vLLM versions
        differ in which options they honour."""
        import torch

        model = self.model_runner.get_model()
        weight = next(model.parameters())
        width = self.model_runner.model_config.get_hidden_size()
        generator = torch.Generator().manual_seed(0)
        hidden = torch.randn(1, width, generator=generator).to(weight.device, weight.dtype)
        with torch.inference_mode():
            logits = model.compute_logits(hidden)
        if logits is None:  # of several parts only the first gathers them
            return True
        return bool((logits.float() != logits.to(torch.bfloat16).float()).any())

    def open_weight_tap(self) -> None:
        """Watch what the model loads from now on."""
        model = self.model_runner.get_model()
        tap = _Tap(parameters=frozenset(name for name, _ in model.named_parameters()))
        load = model.load_weights

        def tapped(weights: Iterable[tuple[str, torch.Tensor]], *args: Any, **kwargs: Any) -> set[str]:
            loaded = load(tap.through(weights), *args, **kwargs)
            if loaded is None:
                raise WeightSyncError(
                    f"{type(model).__name__}.load_weights does not say which parameters it loaded, "
                    "so an incomplete update of this architecture could not be noticed"
                )
            tap.loaded |= loaded
            return loaded

        model.load_weights = tapped  # an instance attribute: hides the class's method until the tap is closed
        self._weight_tap = tap

    def close_weight_tap(self) -> WeightReceipt:
        """Stop watching and report."""
        tap = self._weight_tap
        assert tap is not None, "close_weight_tap without open_weight_tap"
        self._weight_tap = None
        model = self.model_runner.get_model()
        del model.load_weights
        repack_shared_layers(model)
        return WeightReceipt(
            checksums=tap.checksums.read(),
            num_bytes=tap.checksums.num_bytes,
            unloaded=tuple(sorted(tap.parameters - tap.loaded)),
        )


def repack_shared_layers(model: torch.nn.Module) -> None:
    """Refresh the packed copies that layers keep of a parameter which another layer owns.

    After a reload vLLM processes only the layer into which a tensor was loaded. On a CPU a head tied to the embeddings
    holds a packed copy of its own, and would go on decoding with the old weights. GPU kernels read the shared tensor.
    """
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    users: dict[int, list[torch.nn.Module]] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            users.setdefault(id(parameter), []).append(module)
    for module in {module for sharing in users.values() if len(sharing) > 1 for module in sharing}:
        if (method := getattr(module, "quant_method", None)) is not None:
            method.process_weights_after_loading(module)
