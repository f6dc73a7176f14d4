"""What follows from a configuration and a model before anything runs: counts, bounds, memory and disk. No torch.

Counts are exact, bounds hold for every outcome, and bytes are estimates: good enough to refuse a run that cannot fit.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from grpo_lib.config import RunConfig
from grpo_lib.data.models import ModelFacts
from grpo_lib.placement import engine_gpu_share, engines_per_card, ranks_per_card, shares_cards

MIB = 1 << 20
_DTYPE_BYTES = {"float32": 4, "bfloat16": 2}
# Resident size of a process without its model. Imports alone take 440 MiB (trainer) and 680 MiB (engine) with a CPU
# build of torch; Ray's worker and run-time buffers come on top.
_DRIVER_PROCESS_BYTES = 600 * MIB
_RANK_PROCESS_BYTES = 600 * MIB
_ENGINE_PROCESS_BYTES = 900 * MIB
# CUDA context, library workspaces and compiled kernels of one process on a GPU; decode graphs of an engine.
_GPU_CONTEXT_BYTES = 1024 * MIB
_GPU_GRAPHS_BYTES = 1024 * MIB
_RAY_DAEMONS_BYTES = 700 * MIB  # head node: gcs server, raylet, agents


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """Smallest and largest value that any outcome of sampling can give, all groups kept."""

    low: int
    high: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Memory:
    """Bytes by cause; a subclass adds the causes that lie on the device."""

    process: int

    @property
    def device(self) -> int:
        """Everything that lies on the GPU where there is one."""
        return sum(asdict(self).values()) - self.process

    @property
    def total(self) -> int:
        return self.device + self.process


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMemory(_Memory):
    """Bytes of one trainer rank by cause."""

    parameters: int  # fp32 masters, and DeepSpeed's copies in the compute dtype
    gradients: int  # fp32
    optimizer: int  # two fp32 moments
    gathered: int  # full tensors that exist at a time: a layer in the forward pass, a bucket in a push
    activations: int
    logits: int  # fp32 [chunk, vocab]: logits, log-softmax and gradient
    context: int  # CUDA's own, on a GPU

    @property
    def idle(self) -> int:
        """What stays on the device between training steps."""
        return self.parameters + self.gradients + self.optimizer + self.context


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineMemory(_Memory):
    """Bytes of one engine by cause."""

    weights: int
    kv_cache: int  # `rollout.kv_cache_mib`; on a GPU what its share of the card leaves
    activations: int  # of the largest iteration, on a GPU
    logits: int
    graphs: int  # captured decode batches, on a GPU
    context: int  # CUDA's own, on a GPU

    @property
    def asleep(self) -> int:
        """What stays on the device while the engine sleeps."""
        return self.graphs + self.context


@dataclass(frozen=True, slots=True, kw_only=True)
class Derived:
    """Every quantity that follows from a configuration and a model."""

    steps: int
    optimizer_steps: int  # at most: a step without trainable tokens is not applied
    samples_per_step: int
    samples_total: int
    epochs: float | None  # None where the number of prompts is known only after `prepare_data`
    evaluation_samples: int  # both evaluations, greedy and sampled
    max_sample_tokens: int
    max_response_tokens_per_step: int
    max_tokens_per_step: int
    packs_per_step: Bounds
    packs_per_rank: Bounds
    micro_batches_per_rank: Bounds
    kv_bytes_per_token: int
    kv_cache_tokens: int | None  # None on a GPU
    rank_memory: RankMemory
    engine_memory: EngineMemory
    host_memory_bytes: int
    checkpoint_bytes: int
    num_checkpoints: int  # on disk at a time
    disk_bytes: int  # at the fullest moment of the run
    cpus: float
    gpus: float

    def to_dict(self) -> dict[str, Any]:
        """Plain values, totals included."""
        plain = asdict(self)
        plain["rank_memory"]["total"] = self.rank_memory.total
        plain["engine_memory"]["total"] = self.engine_memory.total
        return plain


def derive(config: RunConfig, facts: ModelFacts) -> Derived:
    """Counts, bounds, memory and disk of a run."""
    loop, rollout, trainer, runtime = config.loop, config.rollout, config.trainer, config.runtime
    samples = loop.prompts_per_step * rollout.group_size
    sample_tokens = config.data.max_prompt_tokens + rollout.max_tokens
    packs = _packs(samples, sample_tokens, trainer.pack_length)
    per_rank = _shared(packs, trainer.num_ranks)
    rank, engine = rank_memory(config, facts), engine_memory(config, facts)
    kv_bytes = kv_bytes_per_token(config, facts)
    on_gpu = runtime.gpus_per_engine > 0
    checkpoint = 12 * facts.num_parameters  # fp32 weights and two moments
    return Derived(
        steps=loop.steps,
        optimizer_steps=loop.steps,
        samples_per_step=samples,
        samples_total=samples * loop.steps,
        epochs=loop.steps * loop.prompts_per_step / config.data.num_train if config.data.source == "addition" else None,
        evaluation_samples=2 * config.data.num_heldout * (config.evaluation.samples_per_prompt + 1),
        max_sample_tokens=sample_tokens,
        max_response_tokens_per_step=samples * rollout.max_tokens,
        max_tokens_per_step=samples * sample_tokens,
        packs_per_step=packs,
        packs_per_rank=per_rank,
        micro_batches_per_rank=_shared(per_rank, trainer.micro_batch_packs),
        kv_bytes_per_token=kv_bytes,
        kv_cache_tokens=None if on_gpu else rollout.kv_cache_mib * MIB // kv_bytes,
        rank_memory=rank,
        engine_memory=engine,
        host_memory_bytes=_host_memory(config, rank, engine, checkpoint),
        checkpoint_bytes=checkpoint,
        num_checkpoints=_num_checkpoints(config),
        disk_bytes=_disk(config, checkpoint, facts.num_parameters),
        cpus=trainer.num_ranks * runtime.cpus_per_rank + rollout.num_engines * runtime.cpus_per_engine,
        gpus=trainer.num_ranks * runtime.gpus_per_rank + rollout.num_engines * runtime.gpus_per_engine,
    )


def model_problems(config: RunConfig, facts: ModelFacts) -> list[str]:
    """Rules between a configuration and its model, in the form of `rules.RULES`."""
    problems = []
    shown = f"model.path ({config.model.path})"
    tokens = config.data.max_prompt_tokens + config.rollout.max_tokens
    if tokens > facts.max_position:
        problems.append(
            f"data.max_prompt_tokens ({config.data.max_prompt_tokens}) + rollout.max_tokens "
            f"({config.rollout.max_tokens}) = {tokens} exceeds the {facts.max_position} positions of {shown}; lower "
            "one of them"
        )
    parallel = config.rollout.tensor_parallel_size
    if facts.num_heads % parallel:
        problems.append(
            f"rollout.tensor_parallel_size ({parallel}) does not divide the {facts.num_heads} attention heads of "
            f"{shown}"
        )
    available, needed = config.rollout.kv_cache_mib * MIB, tokens * kv_bytes_per_token(config, facts)
    if config.runtime.gpus_per_engine == 0 and needed > available:
        problems.append(
            f"rollout.kv_cache_mib ({config.rollout.kv_cache_mib}) cannot hold one sample of {tokens} tokens; "
            f"raise it to at least {math.ceil(needed / MIB)}"
        )
    return problems


def kv_bytes_per_token(config: RunConfig, facts: ModelFacts) -> int:
    """Keys and values of one token on one tensor-parallel part."""
    heads = math.ceil(facts.num_kv_heads / config.rollout.tensor_parallel_size)
    return 2 * facts.num_layers * heads * facts.head_dim * _DTYPE_BYTES[config.model.dtype]


def rank_memory(config: RunConfig, facts: ModelFacts) -> RankMemory:
    """fp32 training under FSDP2 or a ZeRO stage; activations by Korthikanti et al. 2022 (arXiv 2205.05198), equation 1.

    The paper's s·b·h·(34 + 5·a·s/h) bytes per layer are for 2-byte activations and a materialised [T, T] attention
    matrix, which is what torch's masked attention on CPU does and GPU kernels do not. Recomputed layers keep their
    s·b·h inputs only.
    """
    trainer, on_gpu = config.trainer, config.runtime.gpus_per_rank > 0
    tokens = trainer.pack_length * trainer.micro_batch_packs
    attention = 0 if on_gpu else 5 * facts.num_heads * trainer.pack_length
    per_layer = tokens * (34 * facts.hidden_size + attention)
    if trainer.activation_checkpointing:
        activations = per_layer + facts.num_layers * 2 * tokens * facts.hidden_size
    else:
        activations = math.ceil(trainer.activation_memory_budget * facts.num_layers * per_layer)
    kept_logits = 0 if trainer.logprob_recompute else _DTYPE_BYTES[config.model.dtype] * tokens
    embedding = facts.vocab_size * facts.hidden_size
    layer = math.ceil((facts.num_parameters - embedding) / facts.num_layers)
    in_forward = 4 * (embedding + layer) if _gathers_in_forward(config) else 0
    parameters, gradients = _weights_and_gradients(config, facts)
    return RankMemory(
        process=_RANK_PROCESS_BYTES,
        parameters=parameters,
        gradients=gradients,
        optimizer=8 * (facts.num_parameters if _is_replicated(config) else _shard(config, facts)),
        gathered=max(in_forward, min(trainer.bucket_mib * MIB, 4 * facts.num_parameters)),
        activations=activations * _DTYPE_BYTES[config.model.dtype] // 2,
        logits=(3 * 4 * min(trainer.logprob_chunk_tokens, tokens) + kept_logits) * facts.vocab_size,
        context=_GPU_CONTEXT_BYTES if on_gpu else 0,
    )


def engine_memory(config: RunConfig, facts: ModelFacts) -> EngineMemory:
    """Weights of one tensor-parallel part, the configured KV cache on CPU, and one iteration's tensors.

    On a GPU the cache is 0 here: `engine_kv_cache_bytes` says what the engine's share of a card leaves for it. Scoring
    holds a row of logits, of their fp32 copy and of log-probabilities for every token of a sequence in the iteration.
    """
    rollout, on_gpu = config.rollout, config.runtime.gpus_per_engine > 0
    weights = facts.num_parameters * _DTYPE_BYTES[config.model.dtype]
    row = (_DTYPE_BYTES[config.model.dtype] + 8) * facts.vocab_size
    scored = min(rollout.max_batched_tokens, config.data.max_prompt_tokens + rollout.max_tokens)
    heads = (facts.num_heads + 2 * facts.num_kv_heads) * facts.head_dim
    per_token = 3 * facts.intermediate_size + 4 * facts.hidden_size + 2 * heads
    return EngineMemory(
        process=_ENGINE_PROCESS_BYTES,
        weights=math.ceil(weights / rollout.tensor_parallel_size),
        kv_cache=0 if on_gpu else rollout.kv_cache_mib * MIB,
        activations=rollout.max_batched_tokens * per_token * _DTYPE_BYTES[config.model.dtype] if on_gpu else 0,
        logits=row * max(rollout.max_num_seqs, scored) if on_gpu else 2 * 4 * rollout.max_num_seqs * facts.vocab_size,
        graphs=_GPU_GRAPHS_BYTES if on_gpu else 0,
        context=_GPU_CONTEXT_BYTES if on_gpu else 0,
    )


def engine_kv_cache_bytes(config: RunConfig, facts: ModelFacts, gpu_bytes: int) -> int:
    """What one engine's share of a GPU leaves for its cache; negative where the rest does not fit."""
    return int(engine_gpu_share(config) * gpu_bytes) - engine_memory(config, facts).device


@dataclass(frozen=True, slots=True, kw_only=True)
class CardMemory:
    """Most bytes of one GPU at the two moments that take most; an engine's share counts in full while it is awake."""

    training: int
    rollouts: int


def card_memory(config: RunConfig, facts: ModelFacts, gpu_bytes: int) -> CardMemory:
    """Ranks and engines of the fullest card. Where they do not share cards, the larger of the two."""
    rank, engine = rank_memory(config, facts), engine_memory(config, facts)
    ranks, engines = ranks_per_card(config), engines_per_card(config)
    awake = int(engines * engine_gpu_share(config) * gpu_bytes)
    if not shares_cards(config):
        return CardMemory(training=ranks * rank.device, rollouts=awake)
    beside = engines * engine.asleep if config.rollout.sleep_while_training else awake
    return CardMemory(training=ranks * rank.device + beside, rollouts=ranks * rank.idle + awake)


def gib(num_bytes: float) -> str:
    """Bytes for people, e.g. ``"3.2 GiB"`` or ``"12.5 MiB"``."""
    return f"{num_bytes / 2**30:.1f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.1f} MiB"


def _shard(config: RunConfig, facts: ModelFacts) -> int:
    """Parameters of one rank where they are spread."""
    return math.ceil(facts.num_parameters / config.trainer.num_ranks)


def _is_replicated(config: RunConfig) -> bool:
    return config.trainer.backend == "hf_deepspeed" and config.trainer.zero_stage == 0


def _gathers_in_forward(config: RunConfig) -> bool:
    return config.trainer.backend == "olmo_core" or config.trainer.zero_stage == 3


def _weights_and_gradients(config: RunConfig, facts: ModelFacts) -> tuple[int, int]:
    """Bytes of one rank's weights and gradients.

    FSDP2 computes with fp32 shards that it gathers. DeepSpeed has masters beside what it computes with: whole below
    stage 3, a shard at stage 3. Its gradients are whole below stage 2 and exist twice in a step from stage 1 on, as
    they were accumulated and flattened for the optimiser.
    """
    whole, shard = facts.num_parameters, _shard(config, facts)
    if config.trainer.backend == "olmo_core":
        return 4 * shard, 4 * shard
    compute = _DTYPE_BYTES[config.model.dtype]
    return {
        0: (4 * whole, 4 * whole),
        1: (compute * whole + 4 * shard, 4 * whole + 4 * shard),
        2: (compute * whole + 4 * shard, 8 * shard),
        3: (compute * shard + 4 * shard, 8 * shard),
    }[config.trainer.zero_stage]


def _packs(samples: int, sample_tokens: int, pack_length: int) -> Bounds:
    """Packs of one step.

    Packing is greedy and never splits a sample, so a pack that was closed holds at least as many samples as the longest
    ones would fill it with. A sample has at least one prompt and one response token.
    """
    return Bounds(
        low=math.ceil(2 * samples / pack_length), high=math.ceil(samples / max(1, pack_length // sample_tokens))
    )


def _shared(bounds: Bounds, parts: int) -> Bounds:
    return Bounds(low=math.ceil(bounds.low / parts), high=math.ceil(bounds.high / parts))


def _host_memory(config: RunConfig, rank: RankMemory, engine: EngineMemory, checkpoint: int) -> int:
    """All processes, and the copy of the trainer's state that checkpoints are written from."""
    ranks = config.trainer.num_ranks * (rank.process if config.runtime.gpus_per_rank > 0 else rank.total)
    asleep = engine.weights if config.rollout.sleep_while_training else 0
    on_host = engine.process + asleep if config.runtime.gpus_per_engine > 0 else engine.total
    engines = config.rollout.num_engines * on_host
    fixed = _DRIVER_PROCESS_BYTES + _RAY_DAEMONS_BYTES + config.runtime.object_store_mib * MIB
    return fixed + ranks + engines + checkpoint


def _num_checkpoints(config: RunConfig) -> int:
    """On disk at a time: a new one is complete before the oldest goes."""
    loop = config.loop
    return loop.keep_checkpoints + 1 + (loop.steps // loop.keep_every if loop.keep_every else 0)


def _disk(config: RunConfig, checkpoint: int, num_parameters: int) -> int:
    """Checkpoints, the sharded base model, the export, rollouts."""
    per_sample = 12 * config.rollout.max_tokens + 8 * config.data.max_prompt_tokens + 512
    evaluation = 2 * config.data.num_heldout * (config.evaluation.samples_per_prompt + 1)
    samples = config.loop.steps * config.loop.prompts_per_step * config.rollout.group_size + evaluation
    return (_num_checkpoints(config) + 1) * checkpoint + 4 * num_parameters + samples * per_sample
