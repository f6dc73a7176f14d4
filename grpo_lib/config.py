"""The configuration of a run: a frozen pydantic tree. No I/O, no environment, no runtime values.

Field constraints hold what one value must satisfy. A rule over several values is one function in `rules.RULES`, and
`resolve` reports every problem at once. `docs/configuration.md` is generated from the descriptions.
"""

from __future__ import annotations

import ast
import difflib
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic.fields import FieldInfo

from grpo_lib.errors import ConfigError
from grpo_lib.placement import OWN_GPU_SHARE, SHARED_GPU_SHARE
from grpo_lib.rules import RULES


class _Section(BaseModel):
    model_config = ConfigDict(
        extra="forbid", frozen=True, validate_default=True, protected_namespaces=(), allow_inf_nan=False
    )


class ModelConfig(_Section):
    """The base model."""

    path: str = Field(
        default="builtin:tiny_qwen3",
        description="Hugging Face folder, hub name, `builtin:<name>`, or `cached:<name>` of `grpo get-model`.",
    )
    dtype: Literal["float32", "bfloat16"] = Field(default="float32", description="Compute dtype of trainer and engine.")
    fp32_head: bool = Field(
        default=True,
        description="fp32 logits from bfloat16 hidden states, in trainer and engine alike; no effect in float32.",
    )


class DataConfig(_Section):
    """Where prompts come from and how they become token ids."""

    source: Literal["addition", "parquet", "jsonl"] = Field(
        default="addition", description="Generated sums, or local files."
    )
    train_path: str | None = Field(default=None, description="Training file for `parquet` and `jsonl`.")
    heldout_path: str | None = Field(default=None, description="Held-out file for `parquet` and `jsonl`.")
    prompt_field: str = Field(default="prompt", description="Column with the user's text.")
    answer_field: str = Field(default="answer", description="Column with the reference answer.")
    num_train: int = Field(default=800, ge=1, description="Training prompts that the `addition` source draws.")
    num_heldout: int = Field(default=150, ge=1, description="Held-out prompts, disjoint from training.")
    max_x: int = Field(default=100, ge=2, description="`addition`: x is in [0, max_x).")
    max_y: int = Field(default=10, ge=1, description="`addition`: y is in [0, max_y).")
    num_shots: int = Field(
        default=0,
        ge=0,
        description="`addition`: solved sums in words before each question, for base models; 0 is the bare `x+y=`.",
    )
    template: Literal["tokenizer", "raw"] = Field(
        default="tokenizer",
        description="`tokenizer`: the model's chat template with a generation prompt; `raw`: text as is.",
    )
    max_prompt_tokens: int = Field(default=16, ge=1, description="Longer prompts are dropped and counted.")


class VerifierConfig(_Section):
    """How completions are judged."""

    name: Literal["integer", "exact"] = Field(default="integer", description="Default verifier of the rows.")
    num_workers: int = Field(default=1, ge=1, description="Killable worker processes.")
    timeout_s: float = Field(default=5.0, gt=0, description="Wall limit of one verdict; past it the state is `failed`.")
    max_text_chars: int = Field(default=65536, ge=1, description="Text beyond this length is cut before it is judged.")
    max_failed_share: float = Field(
        default=0.1, ge=0, le=1, description="A step with more `failed` verdicts stops the run."
    )
    correct_reward: float = Field(default=1.0, gt=0, description="Reward of a correct answer; a wrong one has 0.")


class RolloutConfig(_Section):
    """Sampling and the engines."""

    group_size: int = Field(default=16, ge=1, description="Completions per prompt.")
    max_tokens: int = Field(default=6, ge=1, description="Response limit; a completion that reaches it is `length`.")
    temperature: float = Field(default=1.0, gt=0, le=10, description="Sampling temperature; logprobs are taken at it.")
    top_p: float = Field(
        default=1.0, gt=0, le=1, description="Must be 1: nucleus sampling biases the ratio by the kept mass."
    )
    top_k: int = Field(default=0, ge=0, description="Must be 0 (off), for the same reason.")
    stop_at: Literal["end_of_text", "line"] = Field(
        default="end_of_text",
        description="What ends a completion, and is trained as its last token: the model's stop tokens; `line` adds "
        "every token with a newline in it.",
    )
    num_engines: int = Field(default=1, ge=1, description="vLLM engines, one Ray actor each.")
    tensor_parallel_size: int = Field(default=1, ge=1, description="GPUs per engine.")
    max_num_seqs: int = Field(default=256, ge=1, description="Sequences decoded together by one engine.")
    max_batched_tokens: int = Field(
        default=8192, ge=1, description="Tokens of one engine iteration; scoring holds as many rows of logits."
    )
    gpu_memory_share: float | None = Field(
        default=None,
        gt=0,
        le=1,
        description="Part of a GPU's memory that one engine takes, its cache included; by default "
        f"{SHARED_GPU_SHARE:g} of a card that it shares with a rank, and {OWN_GPU_SHARE:g} of its own.",
    )
    sleep_while_training: bool = Field(
        default=False,
        description="Free an engine's GPU memory between rollouts and the next push; weights go to host memory.",
    )
    kv_cache_mib: int = Field(default=64, ge=1, description="KV cache of one engine on CPU, MiB.")
    prefix_caching: bool = Field(
        default=True, description="Reuse prompt KV within a policy version; reset at every push."
    )
    seed: int = Field(
        default=0, ge=0, lt=2**32, description="Engine seed; samples have their own, derived from the run's seed."
    )


class AlgorithmConfig(_Section):
    """Advantages and loss; the formulas are in `grpo_lib/algo/`."""

    advantage: Literal["centered", "standard", "leave_one_out"] = Field(
        default="standard", description="Group baseline: mean, mean and population std, or the mean of the others."
    )
    loss: Literal["grpo", "dapo", "cispo", "dr_grpo", "gspo"] = Field(default="dapo", description="Surrogate.")
    clip_lower: float = Field(
        default=0.2, gt=0, le=1, description="Ratios below 1 - clip_lower are clipped; not used by `cispo`."
    )
    clip_higher: float = Field(
        default=0.272,
        gt=0,
        description="Ratios above 1 + clip_higher are clipped; `grpo` and `dr_grpo` are symmetric and use clip_lower.",
    )
    correction: Literal["tis", "two_sided", "mask", "sequence", "off"] = Field(
        default="tis", description="Importance weight of the sampler's distribution on each token's policy loss."
    )
    correction_cap: float = Field(
        default=2.0, gt=1, description="Largest weight; `two_sided` and `mask` also use 1 / cap."
    )
    max_masked_share: float = Field(
        default=0.5, ge=0, le=1, description="A step whose correction leaves out more of its tokens stops the run."
    )
    kl_beta: float = Field(
        default=0.0, ge=0, description="Weight of the KL to the frozen reference policy; 0 loads none."
    )
    kl_estimator: Literal["k1", "k2", "k3", "k3_weighted"] = Field(
        default="k3", description="Estimator of the KL; `k3_weighted` multiplies d by the ratio instead."
    )
    loss_denominator: Literal["tokens", "constant"] = Field(
        default="tokens", description="Trained tokens of the whole step, or `constant_denominator` (Dr. GRPO)."
    )
    constant_denominator: float | None = Field(default=None, gt=0, description="For `loss_denominator=constant`.")
    mask_truncated: bool = Field(
        default=False, description="Exclude `length` completions from the loss; group statistics keep them."
    )


class TrainerConfig(_Section):
    """The trainer, its optimiser and its sharding."""

    backend: Literal["olmo_core", "hf_deepspeed"] = Field(default="olmo_core", description="Trainer backend.")
    num_ranks: int = Field(default=2, ge=1, description="Data-parallel ranks, one Ray actor each.")
    pack_length: int = Field(default=128, ge=2, description="Tokens per pack; holds at least one prompt and response.")
    micro_batch_packs: int = Field(default=16, ge=1, description="Most packs of a rank's forward pass.")
    learning_rate: float = Field(default=1e-3, gt=0, description="Peak learning rate.")
    lr_scheduler: Literal["constant", "linear", "cosine"] = Field(default="constant", description="After the warm-up.")
    warmup_steps: int = Field(default=0, ge=0, description="Steps of linear warm-up.")
    adam_beta1: float = Field(default=0.9, ge=0, lt=1, description="AdamW beta 1.")
    adam_beta2: float = Field(default=0.95, ge=0, lt=1, description="AdamW beta 2.")
    adam_eps: float = Field(default=1e-8, gt=0, description="AdamW epsilon.")
    weight_decay: float = Field(default=0.0, ge=0, description="Decoupled weight decay.")
    max_grad_norm: float = Field(default=1.0, gt=0, description="Global gradient norm limit.")
    logprob_chunk_tokens: int = Field(
        default=1024, ge=1, description="Tokens whose fp32 [chunk, vocab] logits exist at a time."
    )
    logprob_recompute: bool = Field(
        default=True,
        description="Project hidden states again in the backward pass; off keeps [tokens, vocab] in the compute dtype.",
    )
    bucket_mib: int = Field(default=256, ge=1, description="Size of a gathered weight bucket, MiB.")
    zero_stage: int = Field(default=2, ge=0, le=3, description="DeepSpeed's ZeRO stage; hf_deepspeed only.")
    activation_checkpointing: bool = Field(
        default=False, description="Recompute each block in the backward pass instead of keeping its activations."
    )
    activation_memory_budget: float = Field(
        default=1.0,
        gt=0,
        le=1,
        description="Share of a compiled block's activations that are kept, the rest is recomputed; olmo_core only.",
    )
    compile: bool = Field(default=False, description="Compile transformer blocks; for bfloat16 on GPUs.")


TRAINERS: tuple[str, ...] = get_args(TrainerConfig.model_fields["backend"].annotation)  # all backends, by name


class LoopConfig(_Section):
    """The GRPO loop."""

    steps: int = Field(default=150, ge=1, description="GRPO steps.")
    prompts_per_step: int = Field(default=16, ge=1, description="Groups per step.")
    max_staleness: int = Field(default=0, ge=0, description="Policy versions a rollout may be old; 0 = synchronous.")
    active_sampling: bool = Field(
        default=False, description="Draw more prompts until `prompts_per_step` groups have spread."
    )
    max_draws_per_step: int = Field(
        default=8, ge=1, description="Active sampling: draws of what is still missing before it stops."
    )
    max_empty_steps: int = Field(
        default=10, ge=1, description="Steps in a row without a trainable token before it stops."
    )
    checkpoint_every: int = Field(
        default=50, ge=1, description="Steps between checkpoints; the last step always has one."
    )
    keep_checkpoints: int = Field(default=2, ge=1, description="Newest checkpoints kept.")
    keep_every: int = Field(default=0, ge=0, description="Also kept: checkpoints of steps divisible by this; 0 = none.")


class WeightSyncConfig(_Section):
    """Trainer → engine."""

    backend: Literal["cpu_gloo", "nccl", "ipc"] = Field(default="cpu_gloo", description="vLLM weight-transfer backend.")
    canary_every: int = Field(default=25, ge=1, description="Decode canary on the first push and every n-th.")
    canary_prompts: int = Field(default=8, ge=1, description="Prompts the canary decodes.")
    canary_tolerance: float = Field(default=5e-5, gt=0, description="Largest |engine - trainer| log-probability, nats.")
    port: int = Field(default=0, ge=0, le=65535, description="Rendezvous port; 0 picks a free one.")


class EvaluationConfig(_Section):
    """Held-out evaluation, before and after training."""

    samples_per_prompt: int = Field(
        default=48,
        ge=1,
        description="Sampled completions per held-out prompt; the trained policy's are the tokens of the parity probe.",
    )
    pass_at: tuple[int, ...] = Field(default=(1, 4, 8), description="k of the unbiased pass@k.")
    bootstrap_resamples: int = Field(default=2000, ge=100, description="Resamples, clustered by prompt.")
    confidence: float = Field(default=0.95, gt=0.5, lt=1, description="Level of the intervals.")


class ParityConfig(_Section):
    """Tolerances of the parity report, in nats unless said otherwise."""

    min_tokens: int = Field(default=20_000, ge=1, description="Fewer scored tokens make the probe INCONCLUSIVE.")
    max_abs: float = Field(default=5e-5, gt=0, description="Largest |logprob difference| of any pair of scorers.")
    p999_abs: float = Field(default=1e-5, gt=0, description="99.9th percentile.")
    mean_abs: float = Field(default=1e-6, gt=0, description="Mean.")
    decode_score_max_abs: float = Field(default=0.0, ge=0, description="Engine's decode against its own score.")
    replay_steps: int = Field(default=20, ge=1, description="Stored steps that are replayed.")
    replay_max_abs: float = Field(default=1e-5, gt=0, description="Lockstep: largest |logprob difference| of a step.")
    replay_relative: float = Field(
        default=1e-5, gt=0, description="Lockstep: relative L2 distance of gradients and of weights after a step."
    )
    noise_factor: float = Field(
        default=3.0, ge=1, description="Free-running: largest multiple of the noise floor of one backend with itself."
    )
    free_weight_relative: float = Field(
        default=1e-5, gt=0, description="Free-running: relative L2 distance of the weights after the last step."
    )
    min_seeds: int = Field(default=3, ge=2, description="Runs per side; fewer make learning curves INCONCLUSIVE.")
    accuracy_margin: float = Field(
        default=0.05, gt=0, lt=1, description="Difference of accuracy or reward share that still counts as equal."
    )
    history_nights: int = Field(default=14, ge=5, description="Past nights whose band a nightly value is held against.")


class TrackingConfig(_Section):
    """Metrics besides the run's own files."""

    wandb: bool = Field(
        default=False, description="Log to Weights & Biases; WANDB_MODE=offline works without a network."
    )
    project: str = Field(default="grpo", description="wandb project.")


class DeadlinesConfig(_Section):
    """Seconds after which a wait ends with an error that names who is missing."""

    ranks_start_s: float = Field(default=300.0, gt=0, description="Trainer ranks load and shard the model.")
    engine_start_s: float = Field(default=300.0, gt=0, description="An engine loads its model and warms up.")
    barrier_s: float = Field(default=120.0, gt=0, description="All ranks reach a barrier.")
    generate_s: float = Field(default=300.0, gt=0, description="The rollouts of one step.")
    train_s: float = Field(default=300.0, gt=0, description="One trainer call.")
    weight_sync_s: float = Field(default=120.0, gt=0, description="One weight transfer.")
    placement_s: float = Field(default=60.0, gt=0, description="Ray places all actors.")


class RuntimeConfig(_Section):
    """Ray and the machine's share."""

    cpus_per_rank: float = Field(default=0.5, gt=0, description="Ray CPUs reserved for a trainer rank.")
    cpus_per_engine: float = Field(default=1.0, gt=0, description="Ray CPUs reserved for an engine.")
    gpus_per_rank: float = Field(default=0.0, ge=0, description="GPUs reserved for a trainer rank.")
    gpus_per_engine: float = Field(default=0.0, ge=0, description="GPUs reserved for an engine.")
    threads_per_process: int = Field(default=1, ge=1, description="Math threads of a rank or engine.")
    object_store_mib: int = Field(default=128, ge=80, description="Ray object store, MiB.")


class StorageConfig(_Section):
    """Where big artifacts go."""

    root: str = Field(default="runs", description="Folder of run directories.")
    store: str | None = Field(
        default=None,
        description="Content-addressed store of rollouts: a folder, or `s3://bucket/prefix`, through which steps on "
        "machines without a shared disk also hand on data and checkpoints; the folder `store` of the root when null.",
    )


class RunConfig(_Section):
    """Everything that decides a run; its hash names it."""

    recipe: str = Field(description="Name of the recipe this configuration started from.")
    seed: int = Field(
        default=1, ge=0, lt=2**32, description="Run seed: prompt order and every sample's seed derive from it."
    )
    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    verifier: VerifierConfig = VerifierConfig()
    rollout: RolloutConfig = RolloutConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    trainer: TrainerConfig = TrainerConfig()
    loop: LoopConfig = LoopConfig()
    weight_sync: WeightSyncConfig = WeightSyncConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    parity: ParityConfig = ParityConfig()
    tracking: TrackingConfig = TrackingConfig()
    deadlines: DeadlinesConfig = DeadlinesConfig()
    runtime: RuntimeConfig = RuntimeConfig()
    storage: StorageConfig = StorageConfig()


def settings() -> dict[str, FieldInfo]:
    """Every setting by dotted key, in the order of the tree; sections themselves are not settings."""
    fields: dict[str, FieldInfo] = {}
    for name, field in RunConfig.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            fields.update({f"{name}.{leaf}": inner for leaf, inner in field.annotation.model_fields.items()})
        else:
            fields[name] = field
    return fields


def flat(config: RunConfig) -> dict[str, Any]:
    """Plain values by dotted key."""
    values: dict[str, Any] = {}
    for name, value in config.model_dump(mode="json").items():
        if isinstance(value, dict):
            values.update({f"{name}.{leaf}": inner for leaf, inner in value.items()})
        else:
            values[name] = value
    return values


def config_hash(config: RunConfig) -> str:
    """sha256 of the canonical JSON (sorted keys, no spaces): equal for equal configurations, on any machine."""
    canonical = json.dumps(config.model_dump(mode="json"), sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(canonical.encode()).hexdigest()


def resolve(
    recipe: str,
    overrides: Sequence[str] = (),
    *,
    trainer: str | None = None,
    seed: int | None = None,
    more_rules: Callable[[RunConfig], Sequence[str]] = lambda config: (),
) -> RunConfig:
    """The frozen configuration of a run: defaults, then the recipe, then the overrides.

    Args:
        overrides: `key.path=value`; the value is JSON, else a Python literal, else a string.
        trainer: `trainer.backend`, as the flow's `--trainer` gives it.
        seed: `seed`, as `--seed` gives it.
        more_rules: Rules that need to know more than the configuration, such as its model; messages as in `rules`.

    Raises:
        ConfigError: every problem at once. Rules over several values are checked on what is valid.
    """
    from grpo_lib.recipes import RECIPES, default_recipe  # recipes are written in terms of the classes above

    problems: list[str] = []
    if recipe not in RECIPES:
        problems.append(f"recipe {recipe!r} does not exist{_suggestion(recipe, RECIPES)}")
    base = flat(RECIPES.get(recipe, default_recipe)())
    flags = {"trainer.backend": ("--trainer", trainer), "seed": ("--seed", seed)}
    given = _read_overrides(overrides, {key: flag for key, flag in flags.items() if flag[1] is not None}, problems)
    return _settled(base, given, problems, more_rules)


def with_overrides(config: RunConfig, overrides: Sequence[str]) -> RunConfig:
    """A configuration with single settings changed, written and judged as in `resolve`.

    Raises:
        ConfigError: every problem at once.
    """
    problems: list[str] = []
    return _settled(flat(config), _read_overrides(overrides, {}, problems), problems, lambda _: ())


def _settled(
    base: Mapping[str, Any],
    given: Mapping[str, Any],
    problems: Sequence[str],
    more_rules: Callable[[RunConfig], Sequence[str]],
) -> RunConfig:
    config, invalid = _build(base, given)
    problems = [*problems, *invalid.values()]
    messages = [message for rule in RULES if (message := rule(config)) is not None]
    # A rule that involves an invalid value would be judging the recipe's value that stands in for it.
    problems += [m for m in (*messages, *more_rules(config)) if not any(f"{key} (" in m for key in invalid)]
    if problems:
        raise ConfigError(problems)
    return config


def _read_overrides(
    overrides: Sequence[str], flags: Mapping[str, tuple[str, object]], problems: list[str]
) -> dict[str, Any]:
    """Values by dotted key; malformed, unknown and contradicting ones become problems."""
    known = settings()
    sections = {key.partition(".")[0] for key in known if "." in key}
    values: dict[str, Any] = {key: value for key, (_, value) in flags.items()}
    for text in overrides:
        key, equals, raw = text.partition("=")
        key = key.strip()
        if not text.isascii() and any("\ud800" <= char <= "\udfff" for char in text):
            problems.append(f"override {text!a} is not valid UTF-8")
        elif not equals or not key:
            problems.append(f"override {text!r} is not of the form key.path=value, e.g. loop.steps=10")
        elif key == "recipe":
            problems.append("recipe is chosen with --recipe, not with --set")
        elif key in sections:
            keys = ", ".join(name for name in known if name.startswith(f"{key}."))
            problems.append(f"{key} is a section; set one of its keys: {keys}")
        elif key not in known:
            problems.append(f"{key} is not a setting{_suggestion(key, known)}")
        else:
            value = _read_value(raw.strip(), known[key])
            if key in values and values[key] != value:
                source = flags[key][0] if key in flags else "an earlier --set"
                problems.append(
                    f"{key} is {_show(values[key])} by {source} and {_show(value)} by --set; keep one of them"
                )
            values[key] = value
    return values


def _read_value(raw: str, field: FieldInfo) -> Any:
    try:
        value = json.loads(raw)
    except (ValueError, RecursionError):
        try:
            value = ast.literal_eval(raw)  # .5, 1_000, True, (1, 4)
            json.dumps(value)
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
            value = raw
    is_text = field.annotation is str or str in get_args(field.annotation)
    return raw if is_text and value is not None and not isinstance(value, str) else value


def _build(base: Mapping[str, Any], given: Mapping[str, Any]) -> tuple[RunConfig, dict[str, str]]:
    """The configuration, with the base's value in place of each invalid one, and a problem per invalid key."""
    known = settings()
    invalid: dict[str, str] = {}
    while True:
        tree: dict[str, Any] = {}
        for key, value in {**base, **{k: v for k, v in given.items() if k not in invalid}}.items():
            section, _, leaf = key.rpartition(".")
            (tree.setdefault(section, {}) if section else tree)[leaf] = value
        try:
            # JSON and strict: `true` is not the number 1, "5" is not 5, while a list is still a tuple.
            return RunConfig.model_validate_json(json.dumps(tree), strict=True), invalid
        except ValidationError as error:
            for detail in error.errors(include_url=False):
                key = next(name for n in (2, 1) if (name := ".".join(map(str, detail["loc"][:n]))) in known)
                reason = detail["msg"][0].lower() + detail["msg"][1:]
                invalid.setdefault(key, f"{key} ({_show(given[key])}): {reason}. Meaning: {known[key].description}")


def _show(value: object) -> str:
    text = value if isinstance(value, str) and value else json.dumps(value)
    return text if len(text) <= 80 else f"{text[:76]} ..."


def _suggestion(name: str, choices: Mapping[str, object]) -> str:
    """The nearest choice, by the whole name or by what follows its last dot."""
    near = difflib.get_close_matches(name, choices, n=1, cutoff=0.7)
    if not near:
        by_leaf = {key.rpartition(".")[2]: key for key in choices}
        near = [by_leaf[leaf] for leaf in difflib.get_close_matches(name.rpartition(".")[2], by_leaf, n=1, cutoff=0.7)]
    if near:
        return f"; did you mean {near[0]}?"
    return f"; there are {', '.join(choices)}" if len(choices) < 10 else "; docs/configuration.md lists all of them"
