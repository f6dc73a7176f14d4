"""Hugging Face config → OLMo-core model, sharded or whole and filled from the folder, with an exact name map.

OLMo-core has no builder from a Hugging Face config, so each family is spelled out here, down to the order in which its
norm rounds and the precision of its rotary embedding: in bf16 either one alone moves logits visibly.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from olmo_core.nn.attention.backend import AttentionBackendName
from olmo_core.nn.feed_forward import FeedForward, FeedForwardConfig
from olmo_core.nn.layer_norm import LayerNormType
from olmo_core.nn.rope import RoPEScalingConfig, StepwiseRoPEScalingConfig
from olmo_core.nn.transformer import (
    Transformer,
    TransformerActivationCheckpointingMode,
    TransformerBlockType,
    TransformerConfig,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard
from torch.utils.checkpoint import checkpoint

from grpo_lib.config import TrainerConfig
from grpo_lib.errors import DataError
from grpo_lib.trainers.compiled_blocks import compile_blocks
from grpo_lib.trainers.hf_checkpoint import HfFolder
from grpo_lib.trainers.joined_documents import ROW_MULTIPLE
from grpo_lib.trainers.olmo_core_attention import bound_single_documents, use_document_attention
from grpo_lib.trainers.olmo_core_head import TokenLogprobHeadConfig
from grpo_lib.trainers.olmo_core_weights import ShardedWeights, Weights, WholeWeights, fsdp_modules
from grpo_lib.trainers.output_head import HeadOptions
from grpo_lib.trainers.varlen_attention import document_kernel

TIED_HEAD = "lm_head.weight"

_ROOT_NAMES = {"embeddings.weight": "model.embed_tokens.weight", "lm_head.norm.weight": "model.norm.weight"}
_UNTIED_HEAD_NAMES = {"lm_head.w_out.weight": TIED_HEAD}
_BLOCK_NAMES = {
    "attention.w_q.weight": "self_attn.q_proj.weight",
    "attention.w_k.weight": "self_attn.k_proj.weight",
    "attention.w_v.weight": "self_attn.v_proj.weight",
    "attention.w_out.weight": "self_attn.o_proj.weight",
    "feed_forward.w1.weight": "mlp.gate_proj.weight",
    "feed_forward.w2.weight": "mlp.down_proj.weight",
    "feed_forward.w3.weight": "mlp.up_proj.weight",
}
_QK_NORM_NAMES = {
    "attention.q_norm.weight": "self_attn.q_norm.weight",
    "attention.k_norm.weight": "self_attn.k_norm.weight",
}
_PRE_NORM_NAMES = {
    "attention_norm.weight": "input_layernorm.weight",
    "feed_forward_norm.weight": "post_attention_layernorm.weight",
}
_POST_NORM_NAMES = {
    "attention_norm.weight": "post_attention_layernorm.weight",
    "feed_forward_norm.weight": "post_feedforward_layernorm.weight",
}

# Modules that wrap another one and insert their attribute into the parameter names below it.
_WRAPPERS = ("_checkpoint_wrapped_module.", "_orig_mod.")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Family:
    """What a `model_type` means beyond its config.json."""

    layer_norm: LayerNormType
    rope_full_precision: bool
    block: TransformerBlockType
    block_names: Mapping[str, str]
    qk_norm: bool
    head_qk_norm: bool
    head_dim: int | None  # value of a config.json that does not give one; None = hidden_size / heads
    rms_norm_eps: float  # likewise


_FAMILIES: Mapping[str, _Family] = {
    "llama": _Family(
        layer_norm=LayerNormType.qwen_rms,
        rope_full_precision=False,
        block=TransformerBlockType.default,
        block_names={**_BLOCK_NAMES, **_PRE_NORM_NAMES},
        qk_norm=False,
        head_qk_norm=False,
        head_dim=None,
        rms_norm_eps=1e-6,
    ),
    "olmo2": _Family(
        layer_norm=LayerNormType.rms,
        rope_full_precision=True,
        block=TransformerBlockType.reordered_norm,
        block_names={**_BLOCK_NAMES, **_POST_NORM_NAMES, **_QK_NORM_NAMES},
        qk_norm=True,
        head_qk_norm=False,
        head_dim=None,
        rms_norm_eps=1e-5,
    ),
    "qwen3": _Family(
        layer_norm=LayerNormType.qwen_rms,
        rope_full_precision=False,
        block=TransformerBlockType.default,
        block_names={**_BLOCK_NAMES, **_PRE_NORM_NAMES, **_QK_NORM_NAMES},
        qk_norm=True,
        head_qk_norm=True,
        head_dim=128,
        rms_norm_eps=1e-6,
    ),
}

# Features of these families that the OLMo-core model built here does not have: key → the value that means "off".
_OFF: Mapping[str, tuple[object, ...]] = {
    "attention_bias": (False, None),
    "attention_dropout": (0, None),
    "hidden_act": ("silu", None),
    "mlp_bias": (False, None),
    "pretraining_tp": (1, None),
    "use_sliding_window": (False, None),
}


class NameMap:
    """Trainer parameter names ↔ Hugging Face tensor names, one to one and complete; unknown names raise."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        family = _family(config)
        self.tied = is_tied(config)
        self._model_type = config["model_type"]
        self._to_hf = dict(_ROOT_NAMES) if self.tied else {**_ROOT_NAMES, **_UNTIED_HEAD_NAMES}
        for layer in range(_required(config, "num_hidden_layers")):
            for trainer, hf in family.block_names.items():
                self._to_hf[f"blocks.{layer}.{trainer}"] = f"model.layers.{layer}.{hf}"
        self._to_trainer = {hf: trainer for trainer, hf in self._to_hf.items()}
        assert len(self._to_trainer) == len(self._to_hf), "two parameters share a Hugging Face name"

    @property
    def trainer_names(self) -> tuple[str, ...]:
        return tuple(self._to_hf)

    def hf(self, trainer_name: str) -> str:
        """Hugging Face name of a parameter, wrappers in its name removed."""
        for wrapper in _WRAPPERS:
            trainer_name = trainer_name.replace(wrapper, "")
        if trainer_name not in self._to_hf:
            raise DataError(f"parameter {trainer_name!r} has no Hugging Face name in model_type {self._model_type!r}")
        return self._to_hf[trainer_name]

    def trainer(self, hf_name: str) -> str:
        """Parameter name of a Hugging Face tensor."""
        if hf_name not in self._to_trainer:
            raise DataError(f"tensor {hf_name!r} is no tensor of model_type {self._model_type!r}")
        return self._to_trainer[hf_name]


def is_tied(config: Mapping[str, Any]) -> bool:
    """Whether the output head is the embedding matrix."""
    return bool(config.get("tie_word_embeddings", False))


def transformer_config(config: Mapping[str, Any]) -> TransformerConfig:
    """The OLMo-core config with the same function as a Hugging Face config.json of a known family.

    Raises:
        DataError: the family or one of its features is not supported, or a key is missing.
    """
    family = _family(config)
    for key, off in _OFF.items():
        if config.get(key) not in off:
            raise DataError(f"config.json: {key} ({config[key]!r}) is not supported by the olmo_core trainer")
    if any(kind != "full_attention" for kind in config.get("layer_types") or ()):
        raise DataError("config.json: layer_types must all be 'full_attention' for the olmo_core trainer")
    d_model, n_heads = _required(config, "hidden_size"), _required(config, "num_attention_heads")
    theta, scaling = _rope(config)
    return TransformerConfig.llama_like(
        d_model=d_model,
        vocab_size=_required(config, "vocab_size"),
        n_layers=_required(config, "num_hidden_layers"),
        n_heads=n_heads,
        n_kv_heads=config.get("num_key_value_heads") or n_heads,
        head_dim=config.get("head_dim") or family.head_dim or d_model // n_heads,
        qk_norm=family.qk_norm,
        use_head_qk_norm=family.head_qk_norm,
        layer_norm_eps=config.get("rms_norm_eps", family.rms_norm_eps),
        layer_norm_name=family.layer_norm,
        rope_theta=theta,
        rope_full_precision=family.rope_full_precision,
        rope_scaling=scaling,
        attn_backend=AttentionBackendName.torch,
        block_name=family.block,
        feed_forward=FeedForwardConfig(hidden_size=_required(config, "intermediate_size"), bias=False),
        tie_word_embeddings=is_tied(config),
    )


def build_weights(
    folder: HfFolder,
    *,
    config: TrainerConfig,
    mesh: DeviceMesh,
    device: torch.device,
    compute_dtype: torch.dtype,
    head: HeadOptions,
    trainable: bool,
) -> Weights:
    """The folder's model on this rank: fp32 masters, computing in `compute_dtype`, attention inside documents.

    Raises:
        DataError: names the tensor or setting that does not fit.
    """
    plan = transformer_config(folder.config)
    plan = dataclasses.replace(plan, lm_head=TokenLogprobHeadConfig.extending(plan.lm_head, head))
    model = _computing_model(plan, config, device=device, compute_dtype=compute_dtype, trainable=trainable)
    if mesh.size() > 1:
        _shard(model, mesh, compute_dtype)
        weights: Weights = ShardedWeights(_with_memory(model, plan, device), mesh)
    else:
        model = _with_memory(model.to(compute_dtype), plan, device)
        has_masters = trainable and compute_dtype is not torch.float32
        masters = _with_memory(plan.build(init_device="meta"), plan, device) if has_masters else model
        weights = WholeWeights(model, masters)
    if config.compile:
        # A compiled block is made for the rotary table it saw first, and would be made again for a longer one.
        model.get_rope_buffers(longest_row(config), device)
    _load(weights, folder)
    return weights


def _computing_model(
    plan: TransformerConfig, config: TrainerConfig, *, device: torch.device, compute_dtype: torch.dtype, trainable: bool
) -> Transformer:
    """The model without memory for its weights. Checkpointing, compilation and sharding apply in this order only."""
    model = plan.build(init_device="meta")
    model.requires_grad_(trainable)
    kernel = document_kernel(device, compute_dtype)
    use_document_attention(model, kernel)
    if trainable:
        _limit_activations(model, config)
    if config.compile:
        # The buckets of the dense attention are data to a compiler, and each of them would be a graph of its own.
        assert kernel is not None, f"compiled blocks need a kernel that takes boundaries, {compute_dtype} has none"
        model.apply_compile()  # which also tells the compiler what varies
        compile_blocks(model.blocks.values())
        bound_single_documents(model)
    return model


def _shard(model: Transformer, mesh: DeviceMesh, compute_dtype: torch.dtype) -> None:
    model.apply_fsdp(dp_mesh=mesh, param_dtype=compute_dtype, reduce_dtype=torch.float32)
    for module in fsdp_modules(model):
        # FSDP2 divides summed gradients by the number of ranks. Losses here are divided by a denominator that already
        # counts all ranks, so the sum itself is the gradient. A divide factor of 1 with plain sums is exact for any
        # number of ranks, where scaling the loss by it would round; gloo has no pre-multiplied sum either.
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)


def _with_memory(model: Transformer, plan: TransformerConfig, device: torch.device) -> Transformer:
    """The same model with its tensors on the device, unset."""
    model.to_empty(device=device)
    if plan.tie_word_embeddings:
        # `to_empty` gives every module a tensor of its own and so unties the head, which would then drift.
        model.lm_head.w_out.weight = model.embeddings.weight
    return model


def longest_row(config: TrainerConfig) -> int:
    """Tokens of the longest joined row of a planned micro-batch, padding included."""
    tokens = config.micro_batch_packs * config.pack_length
    return -(-tokens // ROW_MULTIPLE) * ROW_MULTIPLE


def _limit_activations(model: Transformer, config: TrainerConfig) -> None:
    """Recompute whole blocks, or what a compiled block can spare within its memory budget."""
    modes = TransformerActivationCheckpointingMode
    if config.activation_checkpointing:
        model.apply_activation_checkpointing(modes.full)
    elif config.compile:
        # Set even to 1: the budget belongs to the process and would outlive another trainer's.
        model.apply_activation_checkpointing(modes.budget, activation_memory_budget=config.activation_memory_budget)
        if config.activation_memory_budget == 1:  # below it the compiler chooses
            for block in model.blocks.values():
                _recompute_gate(cast("FeedForward", block.feed_forward))


def _recompute_gate(feed_forward: FeedForward) -> None:
    """Keep what goes into a feed-forward's elementwise product, and not the product itself.

    The compiler fuses the product into its own gradient, where both inputs are read anyway: for one write to memory a
    layer's largest activations are two instead of three.
    """

    def gate(gated: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        return feed_forward.activation_fn(gated) * values

    def forward(x: torch.Tensor) -> torch.Tensor:
        return feed_forward.w2(checkpoint(gate, feed_forward.w1(x), feed_forward.w3(x), use_reentrant=False))

    feed_forward.forward = forward


def _load(weights: Weights, folder: HfFolder) -> None:
    """Fill every master with its rows of the folder's tensors."""
    names = NameMap(folder.config)
    parameters = {names.hf(name): parameter for name, parameter in weights.masters.named_parameters()}
    unfilled = {names.hf(name) for name in names.trainer_names} - parameters.keys()
    assert not unfilled, f"the name map lists tensors that the model lacks: {sorted(unfilled)}"
    expected = {name: tuple(parameter.shape) for name, parameter in parameters.items()}
    if names.tied and TIED_HEAD in folder.names:
        folder.check_tied_copy(TIED_HEAD, _ROOT_NAMES["embeddings.weight"])
        expected[TIED_HEAD] = expected[names.hf("embeddings.weight")]
    folder.check_tensors(expected)
    for name, parameter in parameters.items():
        assert getattr(parameter, "placements", (Shard(0),)) == (Shard(0),), name
        weights.fill(parameter, lambda start, stop, name=name: folder.rows(name, start, stop))
    weights.publish()


def _family(config: Mapping[str, Any]) -> _Family:
    model_type = str(config.get("model_type"))
    if model_type not in _FAMILIES:
        raise DataError(
            f"config.json: model_type {model_type!r} is not supported by the olmo_core trainer; "
            f"it knows {', '.join(sorted(_FAMILIES))}"
        )
    return _FAMILIES[model_type]


def _required(config: Mapping[str, Any], key: str) -> int:
    if not isinstance(config.get(key), int):
        raise DataError(f"config.json: {key} ({config.get(key)!r}) must be an integer")
    return config[key]


def _rope(config: Mapping[str, Any]) -> tuple[int, RoPEScalingConfig | None]:
    """Base and scaling of the rotary embedding, from the keys before and since transformers 5."""
    rope = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
    theta = rope.get("rope_theta", config.get("rope_theta", 10_000.0))
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "llama3":
        return theta, StepwiseRoPEScalingConfig(
            factor=rope["factor"],
            low_freq_proportion=1 - 1 / rope["low_freq_factor"],
            high_freq_proportion=1 / rope["high_freq_factor"],
            old_context_len=rope["original_max_position_embeddings"],
        )
    if kind != "default" or rope.get("partial_rotary_factor", 1) != 1:
        raise DataError(f"config.json: rotary embedding {rope!r} is not supported; known are 'default' and 'llama3'")
    return theta, None
