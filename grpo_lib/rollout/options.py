"""How vLLM is started: what is the same everywhere, and, in one function, what the device decides."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_lib.config import RolloutConfig

WORKER_EXTENSION = "grpo_lib.rollout.vllm_worker.WeightTap"
# How vLLM knows our backends, where it differs: it has an `ipc` of its own. The receivers are vLLM plugins.
_BACKEND_OF_VLLM = {"ipc": "cuda_ipc"}
_GREEDY_TEMPERATURE = "grpo_lib.rollout.greedy_temperature:GreedyTemperature"

# Smallest block the CPU attention kernel is optimised for. vLLM's default of 128 would let 64 MiB of KV cache hold
# fewer short sequences than `max_num_seqs`, and no prompt of usual length would ever be shared.
_CPU_BLOCK_TOKENS = 32

# Batch sizes whose decode is captured as a graph; a batch is padded to the next one. Decoding reads all weights
# whatever the batch, so padding costs little, and each size costs start-up time: vLLM's own list has 35 up to 256.
_GRAPH_SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256, 320, 384, 448, 512)


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuBudget:
    """How much of a GPU one engine may take.

    The cache is what is left of the share. vLLM would measure instead, over the whole card: the memory that a rank
    takes on the same card in the meantime would be charged to the engine, or fail its start.
    """

    share: float  # of the card's memory, everything included
    fixed_bytes: int  # everything but the KV cache

    def kv_cache_bytes(self, total_bytes: int) -> int:
        """Raises `ValueError` where nothing is left."""
        left = int(self.share * total_bytes) - self.fixed_bytes
        if left <= 0:
            raise ValueError(
                f"an engine may take {self.share:g} of {total_bytes / 2**30:.1f} GiB, but needs "
                f"{self.fixed_bytes / 2**30:.1f} GiB besides its KV cache; raise rollout.gpu_memory_share, or lower "
                "rollout.max_num_seqs or rollout.max_batched_tokens"
            )
        return left


def prepare_process(threads: int) -> None:
    """Set what vLLM and torch read once, at import; call it before either's first import in an engine process.

    torch's compiler is switched off on a CPU: vLLM compiles three small sampling functions there, which takes
    15 s and a C++ compiler at the first request and saves nothing at these batch sizes.
    """
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["OMP_NUM_THREADS"] = str(threads)
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    # It samples from truncated distributions only, which no run of ours asks for, and compiles its kernels at start.
    os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
    # In an fp32 model vLLM's attention is a Triton kernel, whose products would be TF32: 3e-2 nats off, measured.
    os.environ.setdefault("TRITON_F32_DEFAULT", "ieee")
    import torch

    if not torch.cuda.is_available():
        os.environ["TORCHDYNAMO_DISABLE"] = "1"


def engine_arguments(
    *,
    model_path: Path,
    config: RolloutConfig,
    dtype: str,
    transfer_backend: str,
    max_model_len: int,
    fp32_head: bool = False,
    gpu: GpuBudget | None = None,
) -> dict[str, Any]:
    """Keyword arguments of vLLM's `EngineArgs`, equal for vLLM 0.26 and 0.32.

    `weight_transfer_config` needs no VLLM_ALLOW_INSECURE_SERIALIZATION: vLLM asks for it where it unpickles handles
    that came over HTTP, and ours come as objects through Ray.
    """
    arguments: dict[str, Any] = {
        "model": str(model_path),
        "skip_tokenizer_init": True,  # token ids in, token ids out
        "generation_config": "vllm",  # ignore the folder's sampling defaults and EOS ids: requests carry their own
        "dtype": dtype,
        "seed": config.seed,
        "max_model_len": max_model_len,
        "max_num_seqs": config.max_num_seqs,
        "max_num_batched_tokens": config.max_batched_tokens,
        "tensor_parallel_size": config.tensor_parallel_size,
        "enable_prefix_caching": config.prefix_caching,
        "logprobs_mode": "processed_logprobs",  # of the distribution sampled from, temperature included
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
        "worker_extension_cls": WORKER_EXTENSION,
        "weight_transfer_config": {"backend": _BACKEND_OF_VLLM.get(transfer_backend, transfer_backend)},
    }
    if fp32_head and dtype != "float32":
        arguments["hf_overrides"] = {"head_dtype": "float32"}  # logits in fp32, as the trainer's
    if config.temperature != 1.0:
        # On a GPU this costs speed: vLLM's newer model runner, which samples all rows in one kernel, takes no processor
        # and gives way to the older one, which draws for each seeded request on its own.
        arguments["logits_processors"] = [_GREEDY_TEMPERATURE]
    return arguments | device_arguments(config, gpu)


def device_arguments(config: RolloutConfig, gpu: GpuBudget | None) -> dict[str, Any]:
    """The arguments that differ between a CPU and a GPU."""
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        return {
            "enforce_eager": True,
            "async_scheduling": False,  # a CPU has no device to keep busy meanwhile
            "block_size": _CPU_BLOCK_TOKENS,
            "kv_cache_memory_bytes": config.kv_cache_mib * 2**20,
        }
    if gpu is None:
        raise ValueError("an engine on a GPU needs a GpuBudget; stages.live makes one from the configuration")
    return gpu_arguments(config, gpu, total_bytes=current_platform.get_device_total_memory())


def gpu_arguments(config: RolloutConfig, gpu: GpuBudget, *, total_bytes: int) -> dict[str, Any]:
    """Graphs for decode only: they start in a fraction of full compilation's time and decode as fast."""
    return {
        "async_scheduling": True,  # the host prepares a step while the GPU computes the one before; see VllmCore
        "kv_cache_memory_bytes": gpu.kv_cache_bytes(total_bytes),
        # Not used beside the cache's own size, but vLLM still refuses to start unless this much is free.
        "gpu_memory_utilization": 0.01,
        "enable_sleep_mode": config.sleep_while_training,
        "enable_flashinfer_autotune": False,  # tunes quantised kernels, with a forward pass of the largest batch
        "compilation_config": {
            "mode": 0,
            "cudagraph_mode": "FULL_DECODE_ONLY",
            "cudagraph_capture_sizes": graph_sizes(config.max_num_seqs),
        },
    }


def graph_sizes(max_num_seqs: int) -> list[int]:
    """Batch sizes to capture; the last is the largest batch there can be, as far as graphs go."""
    largest = min(max_num_seqs, _GRAPH_SIZES[-1])
    return [*(size for size in _GRAPH_SIZES if size < largest), largest]


def import_architecture(model_path: Path, config: RolloutConfig) -> None:
    """Import the model's vLLM class in this process.

    vLLM otherwise inspects it in a child process that imports vLLM a second time (20 s on a busy machine), in order
    to keep CUDA uninitialised before it forks workers. An engine of one part runs in this process and forks none.
    """
    from transformers import AutoConfig
    from vllm import ModelRegistry

    if config.tensor_parallel_size > 1:
        return
    for name in AutoConfig.from_pretrained(model_path).architectures or ():
        if name in ModelRegistry.models:
            ModelRegistry.register_model(name, ModelRegistry.models[name].load_model_cls())
