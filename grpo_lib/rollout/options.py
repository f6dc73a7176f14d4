"""How vLLM is started: what is the same everywhere, and, in one function, what the device decides."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from grpo_lib.config import RolloutConfig

WORKER_EXTENSION = "grpo_lib.rollout.vllm_worker.WeightTap"
_GREEDY_TEMPERATURE = "grpo_lib.rollout.greedy_temperature:GreedyTemperature"

# Smallest block the CPU attention kernel is optimised for. vLLM's default of 128 would let 64 MiB of KV cache hold
# fewer short sequences than `max_num_seqs`, and no prompt of usual length would ever be shared.
_CPU_BLOCK_TOKENS = 32
_CPU_BATCHED_TOKENS = 8192


def prepare_process(threads: int) -> None:
    """Set what vLLM and torch read once, at import; call it before either's first import in an engine process.

    torch's compiler is switched off on a CPU: vLLM compiles three small sampling functions there, which takes
    15 s and a C++ compiler at the first request and saves nothing at these batch sizes.
    """
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["OMP_NUM_THREADS"] = str(threads)
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    import torch

    if not torch.cuda.is_available():
        os.environ["TORCHDYNAMO_DISABLE"] = "1"


def engine_arguments(
    *, model_path: Path, config: RolloutConfig, dtype: str, transfer_backend: str, max_model_len: int
) -> dict[str, Any]:
    """Keyword arguments of vLLM's `EngineArgs`, equal for vLLM 0.26 and 0.32."""
    arguments: dict[str, Any] = {
        "model": str(model_path),
        "skip_tokenizer_init": True,  # token ids in, token ids out
        "generation_config": "vllm",  # ignore the folder's sampling defaults and EOS ids: requests carry their own
        "dtype": dtype,
        "seed": config.seed,
        "max_model_len": max_model_len,
        "max_num_seqs": config.max_num_seqs,
        "tensor_parallel_size": config.tensor_parallel_size,
        "enable_prefix_caching": config.prefix_caching,
        "logprobs_mode": "processed_logprobs",  # of the distribution sampled from, temperature included
        "async_scheduling": False,  # a token in flight across a pause would get the next policy's version
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
        "worker_extension_cls": WORKER_EXTENSION,
        "weight_transfer_config": {"backend": transfer_backend},
    }
    if config.temperature != 1.0:
        arguments["logits_processors"] = [_GREEDY_TEMPERATURE]
    return arguments | device_arguments(config)


def device_arguments(config: RolloutConfig) -> dict[str, Any]:
    """The arguments that differ between a CPU and a GPU."""
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        return {
            "enforce_eager": True,
            "block_size": _CPU_BLOCK_TOKENS,
            "kv_cache_memory_bytes": config.kv_cache_mib * 2**20,
            "max_num_batched_tokens": _CPU_BATCHED_TOKENS,
        }
    # Graphs for decode only: starts in a fraction of full compilation's time and decodes as fast.
    return {"compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}}


def import_architecture(model_path: Path) -> None:
    """Import the model's vLLM class in this process.

    vLLM otherwise inspects it in a child process that imports vLLM a second time (20 s on a busy machine), in order
    to keep CUDA uninitialised before it forks; an engine on a CPU does neither.
    """
    from transformers import AutoConfig
    from vllm import ModelRegistry
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    for name in AutoConfig.from_pretrained(model_path).architectures or ():
        if name in ModelRegistry.models:
            ModelRegistry.register_model(name, ModelRegistry.models[name].load_model_cls())
