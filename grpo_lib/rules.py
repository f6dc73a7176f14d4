"""Rules over several settings: one function each, named for what it demands.

A rule returns None or one message that names every setting it judged as `key (value)`, says what is wrong with the
combination and how to mend it. `config.resolve` reports all of them together.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING

from grpo_lib.placement import engine_gpu_share, engines_per_card, shares_cards

if TYPE_CHECKING:
    from grpo_lib.config import RunConfig

Rule = Callable[["RunConfig"], str | None]

_S3_LOCATION = re.compile(r"s3://[a-z0-9][a-z0-9.-]{1,61}[a-z0-9](/[\w.-]+)*/?", re.ASCII)
# bfloat16 keeps 8 bits of mantissa: two correct implementations differ by this much in single log-probabilities.
_BFLOAT16_MIN_TOLERANCE = 1e-2


def pack_holds_prompt_and_response(config: RunConfig) -> str | None:
    prompt, response, pack = config.data.max_prompt_tokens, config.rollout.max_tokens, config.trainer.pack_length
    if prompt + response <= pack:
        return None
    return (
        f"data.max_prompt_tokens ({prompt}) + rollout.max_tokens ({response}) exceeds trainer.pack_length ({pack}): "
        f"a sample is never split; raise trainer.pack_length to {prompt + response} or lower one of the others"
    )


def group_has_peers(config: RunConfig) -> str | None:
    if config.rollout.group_size > 1:
        return None
    return (
        f"rollout.group_size (1) with algorithm.advantage ({config.algorithm.advantage}): a sample is compared with "
        "the others of its group, and alone it has advantage 0, so nothing would be learned; use at least 2"
    )


def sampling_is_not_truncated(config: RunConfig) -> str | None:
    rollout = config.rollout
    wrong = [
        f"{key} ({value:g})"
        for key, value, off in (("rollout.top_p", rollout.top_p, 1.0), ("rollout.top_k", rollout.top_k, 0))
        if value != off
    ]
    if not wrong:
        return None
    return (
        f"{' and '.join(wrong)} would sample from a truncated, renormalised distribution: with kept mass S the "
        "log-ratio of every token is off by log S against the trainer, which sees the whole vocabulary; "
        "set rollout.top_p=1 and rollout.top_k=0"
    )


def constant_denominator_is_given(config: RunConfig) -> str | None:
    algorithm = config.algorithm
    if algorithm.loss_denominator != "constant" or algorithm.constant_denominator is not None:
        return None
    return (
        "algorithm.loss_denominator (constant) needs algorithm.constant_denominator (null); the Dr. GRPO paper's "
        "choice is samples per step x response limit, here "
        f"{config.loop.prompts_per_step * config.rollout.group_size * config.rollout.max_tokens}"
    )


def constant_denominator_is_used(config: RunConfig) -> str | None:
    algorithm = config.algorithm
    if algorithm.loss_denominator == "constant" or algorithm.constant_denominator is None:
        return None
    return (
        f"algorithm.constant_denominator ({algorithm.constant_denominator:g}) has no effect with "
        f"algorithm.loss_denominator ({algorithm.loss_denominator}); set algorithm.loss_denominator=constant, "
        "or leave the number out"
    )


def dr_grpo_divides_by_a_constant(config: RunConfig) -> str | None:
    algorithm = config.algorithm
    if algorithm.loss != "dr_grpo" or algorithm.loss_denominator == "constant":
        return None
    return (
        f"algorithm.loss (dr_grpo) with algorithm.loss_denominator ({algorithm.loss_denominator}): dr_grpo is "
        "defined by its constant denominator, which removes the length bias; set algorithm.loss_denominator=constant "
        "and algorithm.constant_denominator, or choose algorithm.loss=grpo"
    )


def dr_grpo_keeps_the_spread(config: RunConfig) -> str | None:
    algorithm = config.algorithm
    if algorithm.loss != "dr_grpo" or algorithm.advantage != "standard":
        return None
    return (
        "algorithm.loss (dr_grpo) with algorithm.advantage (standard): Dr. GRPO does not divide by the group's "
        "standard deviation, which would weight easy and hard prompts up; set algorithm.advantage=centered"
    )


def rollouts_are_on_policy(config: RunConfig) -> str | None:
    if config.loop.max_staleness == 0:
        return None
    return (
        f"loop.max_staleness ({config.loop.max_staleness}): only the synchronous mode exists, in which every rollout "
        "is sampled by the policy that is trained on it; set loop.max_staleness=0"
    )


def warm_up_ends_within_the_run(config: RunConfig) -> str | None:
    warmup, steps = config.trainer.warmup_steps, config.loop.steps
    if warmup < steps or warmup == 0:
        return None
    return (
        f"trainer.warmup_steps ({warmup}) is not below loop.steps ({steps}): the learning rate would never reach its "
        "peak; lower the one or raise the other"
    )


def files_are_given(config: RunConfig) -> str | None:
    data = config.data
    missing = [f"data.{name} (null)" for name in ("train_path", "heldout_path") if getattr(data, name) is None]
    if data.source == "addition" or not missing:
        return None
    return f"data.source ({data.source}) reads files: {' and '.join(missing)} must name one"


def files_are_read(config: RunConfig) -> str | None:
    data = config.data
    given = [
        f"data.{name} ({path})"
        for name, path in (("train_path", data.train_path), ("heldout_path", data.heldout_path))
        if path is not None
    ]
    if data.source != "addition" or not given:
        return None
    return (
        f"{' and '.join(given)}: data.source (addition) generates its prompts and reads no file; "
        "set data.source=parquet or data.source=jsonl"
    )


def heldout_is_another_file(config: RunConfig) -> str | None:
    data = config.data
    if data.train_path is None or data.train_path != data.heldout_path:
        return None
    return (
        f"data.train_path ({data.train_path}) is also data.heldout_path ({data.heldout_path}): an evaluation on "
        "training prompts does not measure generalisation; give two files"
    )


def sums_are_enough(config: RunConfig) -> str | None:
    data = config.data
    wanted, available = data.num_train + data.num_heldout + data.num_shots, data.max_x * data.max_y
    if data.source != "addition" or wanted <= available:
        return None
    shots = f" + data.num_shots ({data.num_shots})" if data.num_shots else ""
    return (
        f"data.num_train ({data.num_train}) + data.num_heldout ({data.num_heldout}){shots} = {wanted} distinct sums, "
        f"but data.max_x ({data.max_x}) x data.max_y ({data.max_y}) has only {available}; raise the ranges or draw "
        "fewer"
    )


def shots_belong_to_raw_sums(config: RunConfig) -> str | None:
    data = config.data
    if data.num_shots == 0 or (data.source == "addition" and data.template == "raw"):
        return None
    return (
        f"data.num_shots ({data.num_shots}) with data.source ({data.source}) and data.template ({data.template}): only "
        "generated sums have shots, and they are a text to be continued, not a user's turn; set data.source=addition "
        "and data.template=raw, or data.num_shots=0"
    )


def shots_end_at_the_line(config: RunConfig) -> str | None:
    if config.data.num_shots == 0 or config.rollout.stop_at == "line":
        return None
    return (
        f"data.num_shots ({config.data.num_shots}) with rollout.stop_at ({config.rollout.stop_at}): after its answer "
        "the model goes on with the next question, as the shots do, and no completion would be an answer alone; set "
        "rollout.stop_at=line"
    )


def one_step_has_enough_prompts(config: RunConfig) -> str | None:
    wanted, available = config.loop.prompts_per_step, config.data.num_train
    if config.data.source != "addition" or wanted <= available:
        return None
    return (
        f"loop.prompts_per_step ({wanted}) exceeds data.num_train ({available}): one step would draw a prompt twice; "
        "raise data.num_train or lower loop.prompts_per_step"
    )


def pass_at_k_within_samples(config: RunConfig) -> str | None:
    evaluation = config.evaluation
    ks, samples = evaluation.pass_at, evaluation.samples_per_prompt
    shown = f"evaluation.pass_at ({', '.join(map(str, ks))})"
    if any(k < 1 or k > samples for k in ks):
        return (
            f"{shown} with evaluation.samples_per_prompt ({samples}): pass@k is estimated from at least k samples of a "
            f"prompt, and k is at least 1; keep every k in 1 ... {samples} or raise evaluation.samples_per_prompt"
        )
    if len(set(ks)) != len(ks):
        return f"{shown} names a k twice; name each once"
    return None


def engine_has_its_gpus(config: RunConfig) -> str | None:
    parallel, gpus = config.rollout.tensor_parallel_size, config.runtime.gpus_per_engine
    if gpus == parallel or (parallel == 1 and gpus < 1):
        return None
    return (
        f"rollout.tensor_parallel_size ({parallel}) with runtime.gpus_per_engine ({gpus:g}): an engine uses one "
        f"whole GPU per tensor-parallel part, or a share of one GPU, or none; set runtime.gpus_per_engine={parallel}"
    )


def rank_has_at_most_one_gpu(config: RunConfig) -> str | None:
    if config.runtime.gpus_per_rank <= 1:
        return None
    return (
        f"runtime.gpus_per_rank ({config.runtime.gpus_per_rank:g}): a data-parallel rank drives one GPU; set it to 1 "
        f"and raise trainer.num_ranks ({config.trainer.num_ranks})"
    )


def ranks_and_engines_share_a_device_kind(config: RunConfig) -> str | None:
    rank, engine = config.runtime.gpus_per_rank, config.runtime.gpus_per_engine
    if (rank > 0) == (engine > 0):
        return None
    return (
        f"runtime.gpus_per_rank ({rank:g}) with runtime.gpus_per_engine ({engine:g}): a weight transfer needs both "
        "on GPUs or both on CPU; set both above 0 or both to 0"
    )


def transfer_reaches_the_devices(config: RunConfig) -> str | None:
    backend, runtime = config.weight_sync.backend, config.runtime
    rank, engine = runtime.gpus_per_rank, runtime.gpus_per_engine
    shown = (
        f"weight_sync.backend ({backend}) with runtime.gpus_per_rank ({rank:g}) and "
        f"runtime.gpus_per_engine ({engine:g}): "
    )
    if backend == "cpu_gloo" and (rank > 0 or engine > 0):
        return shown + "cpu_gloo fills engines that live in host memory; set weight_sync.backend=nccl or ipc"
    if backend != "cpu_gloo" and (rank == 0 or engine == 0):
        return shown + f"{backend} moves weights between GPUs; set weight_sync.backend=cpu_gloo, or reserve GPUs"
    if backend == "nccl" and (rank < 1 or engine < 1):
        return shown + "NCCL refuses two processes on one GPU; reserve whole GPUs, or set weight_sync.backend=ipc"
    if backend == "ipc" and rank + engine > 1:
        return (
            shown
            + "CUDA IPC hands memory to a process on the same GPU; reserve shares that sum to at most 1, or set "
            + "weight_sync.backend=nccl"
        )
    return None


def iteration_holds_every_sequence(config: RunConfig) -> str | None:
    tokens, sequences = config.rollout.max_batched_tokens, config.rollout.max_num_seqs
    if tokens >= sequences:
        return None
    return (
        f"rollout.max_batched_tokens ({tokens}) is below rollout.max_num_seqs ({sequences}): each sequence takes one "
        "token of an iteration; raise the one or lower the other"
    )


def gpu_share_has_a_gpu(config: RunConfig) -> str | None:
    share, engine = config.rollout.gpu_memory_share, config.runtime.gpus_per_engine
    if share is None or engine > 0:
        return None
    return (
        f"rollout.gpu_memory_share ({share:g}) with runtime.gpus_per_engine ({engine:g}): an engine on a CPU takes "
        "rollout.kv_cache_mib; leave the share out, or reserve GPUs"
    )


def engine_shares_fit_a_card(config: RunConfig) -> str | None:
    engines, share = engines_per_card(config), engine_gpu_share(config)
    if config.runtime.gpus_per_engine == 0 or engines * share <= (0.95 if shares_cards(config) else 1):
        return None
    given = config.rollout.gpu_memory_share
    others = " and leave the ranks beside them nothing" if shares_cards(config) else ""
    return (
        f"rollout.gpu_memory_share ({'null' if given is None else f'{given:g}'}) with runtime.gpus_per_engine "
        f"({config.runtime.gpus_per_engine:g}) and runtime.gpus_per_rank ({config.runtime.gpus_per_rank:g}): "
        f"{engines} x {share:g} would take {engines * share:g} of a GPU's memory{others}; lower the share, or reserve "
        "a larger part of a GPU for an engine"
    )


def sleep_frees_a_shared_card(config: RunConfig) -> str | None:
    rank, engine = config.runtime.gpus_per_rank, config.runtime.gpus_per_engine
    if not config.rollout.sleep_while_training or shares_cards(config):
        return None
    where = "on a CPU there is nothing to free" if engine == 0 else "nobody else uses an engine's card"
    return (
        f"rollout.sleep_while_training (true) with runtime.gpus_per_rank ({rank:g}) and runtime.gpus_per_engine "
        f"({engine:g}): {where}; set it to false, or let ranks and engines share cards (both above 0, sum at most 1)"
    )


def tolerances_fit_the_dtype(config: RunConfig) -> str | None:
    if config.model.dtype != "bfloat16":
        return None
    tight = [
        f"{key} ({value:g})"
        for key, value in (
            ("weight_sync.canary_tolerance", config.weight_sync.canary_tolerance),
            ("parity.max_abs", config.parity.max_abs),
        )
        if value < _BFLOAT16_MIN_TOLERANCE
    ]
    if not tight:
        return None
    return (
        f"model.dtype (bfloat16) with {' and '.join(tight)}: engine and trainer differ by some 1e-2 nats in "
        f"bfloat16, so the run would fail its own check; set at least {_BFLOAT16_MIN_TOLERANCE:g} (5e-2 was the "
        "largest seen), or model.dtype=float32"
    )


def zero_stage_adds_gradients_in_fp32(config: RunConfig) -> str | None:
    trainer = config.trainer
    if trainer.backend != "hf_deepspeed" or config.model.dtype != "bfloat16" or trainer.zero_stage >= 2:
        return None
    return (
        f"trainer.zero_stage ({trainer.zero_stage}) with model.dtype ({config.model.dtype}): below stage 2 DeepSpeed "
        "keeps no fp32 gradients beside bfloat16 weights, and sums of micro-batches would be rounded; set "
        "trainer.zero_stage=2 or 3, or model.dtype=float32"
    )


def activations_are_spared_in_one_way(config: RunConfig) -> str | None:
    trainer = config.trainer
    if not trainer.activation_checkpointing or trainer.activation_memory_budget == 1:
        return None
    return (
        f"trainer.activation_checkpointing (true) with trainer.activation_memory_budget "
        f"({trainer.activation_memory_budget:g}): whole blocks are recomputed already; set "
        "trainer.activation_memory_budget=1, or trainer.activation_checkpointing=false"
    )


def activation_budget_has_a_compiler(config: RunConfig) -> str | None:
    trainer = config.trainer
    if trainer.activation_memory_budget == 1 or (trainer.compile and trainer.backend == "olmo_core"):
        return None
    return (
        f"trainer.activation_memory_budget ({trainer.activation_memory_budget:g}) with trainer.compile "
        f"({str(trainer.compile).lower()}) and trainer.backend ({trainer.backend}): the compiler of OLMo-core's blocks "
        "chooses what to recompute; set trainer.compile=true and trainer.backend=olmo_core, or "
        "trainer.activation_checkpointing=true instead"
    )


def compiled_blocks_have_a_kernel(config: RunConfig) -> str | None:
    gpus, dtype = config.runtime.gpus_per_rank, config.model.dtype
    if not config.trainer.compile or (gpus > 0 and dtype == "bfloat16"):
        return None
    return (
        f"trainer.compile (true) with runtime.gpus_per_rank ({gpus:g}) and model.dtype ({dtype}): attention kernels "
        "that take document boundaries, and so one graph for all packs, exist for bfloat16 on GPUs; set "
        "trainer.compile=false"
    )


def compiled_layers_are_whole(config: RunConfig) -> str | None:
    trainer = config.trainer
    if not trainer.compile or trainer.backend != "hf_deepspeed" or trainer.zero_stage < 3:
        return None
    return (
        f"trainer.compile (true) with trainer.zero_stage ({trainer.zero_stage}): ZeRO-3 gathers weights in hooks "
        "inside each layer, where a graph would end; set trainer.zero_stage=2, or trainer.compile=false"
    )


def parity_tolerances_are_ordered(config: RunConfig) -> str | None:
    mean, p999, largest = config.parity.mean_abs, config.parity.p999_abs, config.parity.max_abs
    if mean <= p999 <= largest:
        return None
    return (
        f"parity.mean_abs ({mean:g}), parity.p999_abs ({p999:g}) and parity.max_abs ({largest:g}) must not decrease "
        "in this order: a looser inner tolerance could never decide anything"
    )


def kept_steps_have_checkpoints(config: RunConfig) -> str | None:
    loop = config.loop
    if loop.keep_every % loop.checkpoint_every == 0:
        return None
    return (
        f"loop.keep_every ({loop.keep_every}) is no multiple of loop.checkpoint_every ({loop.checkpoint_every}), so "
        "most of the steps to keep have no checkpoint; choose a multiple, or 0 to keep the newest only"
    )


def store_is_a_folder_or_s3(config: RunConfig) -> str | None:
    location = config.storage.store
    if location is None or (location and ("://" not in location or _S3_LOCATION.fullmatch(location))):
        return None
    return (
        f"storage.store ({location}) is neither a folder nor s3://bucket/prefix with a bucket of 3 to 63 lower-case "
        "letters, digits, points and hyphens; other services that speak S3 are named by AWS_ENDPOINT_URL_S3"
    )


RULES: tuple[Rule, ...] = (
    pack_holds_prompt_and_response,
    group_has_peers,
    sampling_is_not_truncated,
    constant_denominator_is_given,
    constant_denominator_is_used,
    dr_grpo_divides_by_a_constant,
    dr_grpo_keeps_the_spread,
    rollouts_are_on_policy,
    warm_up_ends_within_the_run,
    files_are_given,
    files_are_read,
    heldout_is_another_file,
    sums_are_enough,
    shots_belong_to_raw_sums,
    shots_end_at_the_line,
    one_step_has_enough_prompts,
    pass_at_k_within_samples,
    engine_has_its_gpus,
    rank_has_at_most_one_gpu,
    ranks_and_engines_share_a_device_kind,
    transfer_reaches_the_devices,
    iteration_holds_every_sequence,
    gpu_share_has_a_gpu,
    engine_shares_fit_a_card,
    sleep_frees_a_shared_card,
    tolerances_fit_the_dtype,
    zero_stage_adds_gradients_in_fp32,
    activations_are_spared_in_one_way,
    activation_budget_has_a_compiler,
    compiled_blocks_have_a_kernel,
    compiled_layers_are_whole,
    parity_tolerances_are_ordered,
    kept_steps_have_checkpoints,
    store_is_a_folder_or_s3,
)
