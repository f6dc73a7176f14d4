"""Every rule over several settings: refused with the values and a way out, and accepted once the way out is taken."""

import pytest

from grpo_lib.config import resolve
from grpo_lib.errors import ConfigError
from grpo_lib.rules import RULES

RECIPE = "embedded_addition"
GPU = ["runtime.gpus_per_rank=1", "runtime.gpus_per_engine=1", "weight_sync.backend=nccl"]
SHARED = ["weight_sync.backend=ipc", "runtime.gpus_per_rank=0.5", "runtime.gpus_per_engine=0.5"]
BF16_GPU = [*GPU, "model.dtype=bfloat16", "weight_sync.canary_tolerance=0.1", "parity.max_abs=0.1"]
SHOTS = ["data.num_shots=3", "data.template=raw", "rollout.stop_at=line"]
FILES = ["data.source=parquet", "data.train_path=a.parquet", "data.heldout_path=b.parquet"]

# rule, overrides that break it and only it, what the message must contain, overrides that mend it
CASES = [
    (
        "pack_holds_prompt_and_response",
        ["data.max_prompt_tokens=100", "rollout.max_tokens=29"],
        ["data.max_prompt_tokens (100)", "rollout.max_tokens (29)", "trainer.pack_length (128)", "129"],
        ["trainer.pack_length=129"],
    ),
    ("group_has_peers", ["rollout.group_size=1"], ["rollout.group_size (1)", "at least 2"], ["rollout.group_size=2"]),
    (
        "sampling_is_not_truncated",
        ["rollout.top_p=0.95"],
        ["rollout.top_p (0.95)", "log S", "rollout.top_p=1"],
        ["rollout.top_p=1"],
    ),
    (
        "sampling_is_not_truncated",
        ["rollout.top_k=50"],
        ["rollout.top_k (50)", "log S", "rollout.top_k=0"],
        ["rollout.top_k=0"],
    ),
    (
        "constant_denominator_is_given",
        ["algorithm.loss_denominator=constant"],
        ["algorithm.loss_denominator (constant)", "algorithm.constant_denominator (null)", "1536"],
        ["algorithm.constant_denominator=1536"],
    ),
    (
        "constant_denominator_is_used",
        ["algorithm.constant_denominator=1536"],
        ["algorithm.constant_denominator (1536)", "algorithm.loss_denominator (tokens)"],
        ["algorithm.loss_denominator=constant"],
    ),
    (
        "dr_grpo_divides_by_a_constant",
        ["algorithm.loss=dr_grpo", "algorithm.advantage=centered"],
        ["algorithm.loss (dr_grpo)", "algorithm.loss_denominator (tokens)"],
        ["algorithm.loss_denominator=constant", "algorithm.constant_denominator=1536"],
    ),
    *(
        (
            "zero_stage_adds_gradients_in_fp32",
            [
                "trainer.backend=hf_deepspeed",
                f"trainer.zero_stage={stage}",
                "model.dtype=bfloat16",
                "weight_sync.canary_tolerance=0.1",
                "parity.max_abs=0.1",
            ],
            [f"trainer.zero_stage ({stage})", "model.dtype (bfloat16)", "fp32 gradients"],
            ["trainer.zero_stage=2"],
        )
        for stage in (0, 1)
    ),
    (
        "activations_are_spared_in_one_way",
        [
            *BF16_GPU,
            "trainer.compile=true",
            "trainer.activation_checkpointing=true",
            "trainer.activation_memory_budget=0.5",
        ],
        ["trainer.activation_checkpointing (true)", "trainer.activation_memory_budget (0.5)"],
        ["trainer.activation_checkpointing=false"],
    ),
    *(
        (
            "activation_budget_has_a_compiler",
            [*BF16_GPU, "trainer.activation_memory_budget=0.5", *breaking],
            ["trainer.activation_memory_budget (0.5)", *parts],
            mending,
        )
        for breaking, parts, mending in (
            ([], ["trainer.compile (false)"], ["trainer.compile=true"]),
            (
                ["trainer.compile=true", "trainer.backend=hf_deepspeed"],
                ["trainer.backend (hf_deepspeed)"],
                ["trainer.backend=olmo_core"],
            ),
        )
    ),
    ("compiled_blocks_have_a_kernel", ["trainer.compile=true"], ["runtime.gpus_per_rank (0)"], None),
    (
        "compiled_blocks_have_a_kernel",
        [*GPU, "trainer.compile=true"],
        ["model.dtype (float32)", "trainer.compile (true)"],
        ["trainer.compile=false"],
    ),
    (
        "compiled_layers_are_whole",
        [*BF16_GPU, "trainer.compile=true", "trainer.backend=hf_deepspeed", "trainer.zero_stage=3"],
        ["trainer.zero_stage (3)", "trainer.compile (true)"],
        ["trainer.zero_stage=2"],
    ),
    (
        "dr_grpo_keeps_the_spread",
        ["algorithm.loss=dr_grpo", "algorithm.loss_denominator=constant", "algorithm.constant_denominator=1536"],
        ["algorithm.loss (dr_grpo)", "algorithm.advantage (standard)"],
        ["algorithm.advantage=centered"],
    ),
    ("rollouts_are_on_policy", ["loop.max_staleness=4"], ["loop.max_staleness (4)", "synchronous"], None),
    (
        "warm_up_ends_within_the_run",
        ["trainer.warmup_steps=150"],
        ["trainer.warmup_steps (150)", "loop.steps (150)"],
        ["loop.steps=151"],
    ),
    (
        "files_are_given",
        ["data.source=jsonl", "data.train_path=a.jsonl"],
        ["data.source (jsonl)", "data.heldout_path (null)"],
        ["data.heldout_path=b.jsonl"],
    ),
    (
        "files_are_read",
        ["data.train_path=a.parquet"],
        ["data.train_path (a.parquet)", "data.source (addition)"],
        ["data.source=parquet", "data.heldout_path=b.parquet"],
    ),
    (
        "heldout_is_another_file",
        ["data.source=jsonl", "data.train_path=a.jsonl", "data.heldout_path=a.jsonl"],
        ["data.train_path (a.jsonl)", "data.heldout_path"],
        None,
    ),
    (
        "sums_are_enough",
        ["data.num_train=900"],
        ["data.num_train (900)", "data.num_heldout (150)", "1050", "1000"],
        ["data.max_y=11"],
    ),
    (
        "one_step_has_enough_prompts",
        ["data.num_train=15"],
        ["loop.prompts_per_step (16)", "data.num_train (15)"],
        ["loop.prompts_per_step=15"],
    ),
    (
        "pass_at_k_within_samples",
        ["evaluation.pass_at=[1, 64]"],
        ["evaluation.pass_at (1, 64)", "evaluation.samples_per_prompt (48)"],
        ["evaluation.samples_per_prompt=64"],
    ),
    ("pass_at_k_within_samples", ["evaluation.pass_at=[0]"], ["evaluation.pass_at (0)", "at least 1"], None),
    ("pass_at_k_within_samples", ["evaluation.pass_at=[4, 4]"], ["evaluation.pass_at (4, 4)", "twice"], None),
    (
        "sums_are_enough",
        [*SHOTS[1:], "data.num_shots=51"],
        ["data.num_train (800)", "data.num_heldout (150)", "data.num_shots (51)", "1001 distinct sums"],
        ["data.num_shots=50"],
    ),
    (
        "shots_belong_to_raw_sums",
        ["data.num_shots=3", "rollout.stop_at=line"],
        ["data.num_shots (3)", "data.template (tokenizer)", "data.template=raw"],
        ["data.template=raw"],
    ),
    (
        "shots_belong_to_raw_sums",
        [*FILES, *SHOTS],
        ["data.num_shots (3)", "data.source (parquet)"],
        ["data.num_shots=0"],
    ),
    (
        "shots_end_at_the_line",
        SHOTS[:2],
        ["data.num_shots (3)", "rollout.stop_at (end_of_text)", "rollout.stop_at=line"],
        ["rollout.stop_at=line"],
    ),
    (
        "iteration_holds_every_sequence",
        ["rollout.max_batched_tokens=255"],
        ["rollout.max_batched_tokens (255)", "rollout.max_num_seqs (256)"],
        ["rollout.max_num_seqs=255"],
    ),
    (
        "gpu_share_has_a_gpu",
        ["rollout.gpu_memory_share=0.5"],
        ["rollout.gpu_memory_share (0.5)", "runtime.gpus_per_engine (0)"],
        [*GPU, "rollout.gpu_memory_share=0.5"],
    ),
    (
        "engine_shares_fit_a_card",
        [*SHARED, "rollout.gpu_memory_share=0.96"],
        ["rollout.gpu_memory_share (0.96)", "runtime.gpus_per_rank (0.5)", "leave the ranks beside them nothing"],
        ["rollout.gpu_memory_share=0.95"],
    ),
    (
        "engine_shares_fit_a_card",  # Ray puts two engines of half a card on one
        [
            "weight_sync.backend=ipc",
            "runtime.gpus_per_rank=0.2",
            "runtime.gpus_per_engine=0.4",
            "rollout.num_engines=2",
            "rollout.gpu_memory_share=0.5",
        ],
        ["2 x 0.5 would take 1", "runtime.gpus_per_engine (0.4)"],
        ["rollout.num_engines=1"],
    ),
    (
        "sleep_frees_a_shared_card",
        ["rollout.sleep_while_training=true"],
        ["rollout.sleep_while_training (true)", "on a CPU there is nothing to free"],
        [*SHARED, "rollout.sleep_while_training=true"],
    ),
    (
        "sleep_frees_a_shared_card",
        [*GPU, "rollout.sleep_while_training=true"],
        ["rollout.sleep_while_training (true)", "nobody else uses"],
        [*SHARED, "rollout.sleep_while_training=true"],
    ),
    (
        "engine_has_its_gpus",
        ["rollout.tensor_parallel_size=2"],
        ["rollout.tensor_parallel_size (2)", "runtime.gpus_per_engine (0)", "runtime.gpus_per_engine=2"],
        ["runtime.gpus_per_engine=2", "runtime.gpus_per_rank=1", "weight_sync.backend=nccl"],
    ),
    (
        "engine_has_its_gpus",
        [*GPU[::2], "runtime.gpus_per_engine=2"],
        ["rollout.tensor_parallel_size (1)", "runtime.gpus_per_engine (2)"],
        ["rollout.tensor_parallel_size=2"],
    ),
    (
        "rank_has_at_most_one_gpu",
        [*GPU[1:], "runtime.gpus_per_rank=2"],
        ["runtime.gpus_per_rank (2)", "trainer.num_ranks (2)"],
        None,
    ),
    (
        "ranks_and_engines_share_a_device_kind",
        ["runtime.gpus_per_rank=1"],
        ["runtime.gpus_per_rank (1)", "runtime.gpus_per_engine (0)"],
        ["runtime.gpus_per_engine=1", "weight_sync.backend=nccl"],
    ),
    (
        "transfer_reaches_the_devices",
        GPU[:2],
        ["weight_sync.backend (cpu_gloo)", "runtime.gpus_per_rank (1)", "nccl or ipc"],
        GPU[2:],
    ),
    (
        "transfer_reaches_the_devices",
        ["weight_sync.backend=nccl"],
        ["weight_sync.backend (nccl)", "runtime.gpus_per_rank (0)", "cpu_gloo"],
        GPU[:2],
    ),
    (
        "transfer_reaches_the_devices",
        ["weight_sync.backend=ipc"],
        ["weight_sync.backend (ipc)", "cpu_gloo"],
        ["runtime.gpus_per_rank=0.4", "runtime.gpus_per_engine=0.6"],
    ),
    (
        "transfer_reaches_the_devices",
        ["weight_sync.backend=nccl", "runtime.gpus_per_rank=0.5", "runtime.gpus_per_engine=0.5"],
        ["weight_sync.backend (nccl)", "one GPU", "ipc"],
        None,
    ),
    (
        "transfer_reaches_the_devices",
        [*GPU[:2], "weight_sync.backend=ipc"],
        ["weight_sync.backend (ipc)", "same GPU", "nccl"],
        None,
    ),
    (
        "tolerances_fit_the_dtype",
        ["model.dtype=bfloat16"],
        ["model.dtype (bfloat16)", "weight_sync.canary_tolerance (5e-05)", "parity.max_abs (5e-05)", "0.01"],
        ["weight_sync.canary_tolerance=0.1", "parity.max_abs=0.1"],
    ),
    (
        "parity_tolerances_are_ordered",
        ["parity.mean_abs=1e-3"],
        ["parity.mean_abs (0.001)", "parity.p999_abs (1e-05)"],
        ["parity.p999_abs=1e-3", "parity.max_abs=1e-3"],
    ),
    (
        "kept_steps_have_checkpoints",
        ["loop.keep_every=75"],
        ["loop.keep_every (75)", "loop.checkpoint_every (50)"],
        ["loop.keep_every=100"],
    ),
    (
        "store_is_a_folder_or_s3",
        ["storage.store=gs://bucket/runs"],
        ["storage.store (gs://bucket/runs)", "s3://bucket/prefix", "AWS_ENDPOINT_URL_S3"],
        ["storage.store=s3://bucket/runs"],
    ),
    (
        "store_is_a_folder_or_s3",
        ["storage.store=s3://Bucket_1"],
        ["storage.store (s3://Bucket_1)", "3 to 63 lower-case"],
        ["storage.store=s3://bucket-1/"],
    ),
    ("store_is_a_folder_or_s3", ["storage.store="], ["storage.store ()"], ["storage.store=folder"]),
]
# Breaking these breaks a second rule about the same settings, whose message is as true.
COMPANIONS = {
    "engine_has_its_gpus": "ranks_and_engines_share_a_device_kind",
    "ranks_and_engines_share_a_device_kind": "transfer_reaches_the_devices",
}


@pytest.mark.parametrize(("name", "breaking", "parts", "mending"), CASES)
def test_rule(name: str, breaking: list[str], parts: list[str], mending: list[str] | None) -> None:
    rule = next(rule for rule in RULES if rule.__name__ == name)
    with pytest.raises(ConfigError) as caught:
        resolve(RECIPE, breaking)
    message = next(problem for problem in caught.value.problems if all(part in problem for part in parts))
    assert len(caught.value.problems) == 1 or name in COMPANIONS
    if mending is not None:
        keys = {override.partition("=")[0] for override in mending}
        kept = [override for override in breaking if override.partition("=")[0] not in keys]
        config = resolve(RECIPE, [*kept, *mending])
        assert rule(config) is None
    assert not message.endswith(".")


def test_every_rule_has_a_case() -> None:
    assert {case[0] for case in CASES} == {rule.__name__ for rule in RULES}


def test_gpu_configurations_that_are_meant_to_work() -> None:
    split = resolve(RECIPE, [*GPU, "trainer.num_ranks=4", "rollout.num_engines=4"])
    assert (split.trainer.num_ranks, split.rollout.num_engines) == (4, 4)
    parallel = resolve(RECIPE, [*GPU[::2], "rollout.tensor_parallel_size=2", "runtime.gpus_per_engine=2"])
    assert parallel.runtime.gpus_per_engine == parallel.rollout.tensor_parallel_size == 2
    shared = resolve(RECIPE, ["weight_sync.backend=ipc", "runtime.gpus_per_rank=0.5", "runtime.gpus_per_engine=0.5"])
    assert shared.runtime.gpus_per_rank + shared.runtime.gpus_per_engine == 1


def test_file_sources_are_not_judged_by_the_generator_settings() -> None:
    assert resolve(RECIPE, [*FILES, "data.num_train=5", "data.max_x=2"]).data.num_train == 5
