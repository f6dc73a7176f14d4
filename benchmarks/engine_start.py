"""Where an engine's start goes: `python benchmarks/engine_start.py --recipe NAME [--set …]` prints seconds by phase.

The engine starts in this process, as it does in its Ray actor. A second start on the same machine finds vLLM's and
Triton's caches filled: run it twice to see what they are worth.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from grpo_lib.config import resolve
from grpo_lib.data.models import resolve_model_path
from grpo_lib.recipes import default_recipe

# vLLM's worker in the order in which the engine calls it, and what each call does.
_WORKER_PHASES = {
    "init_device": "device and process groups",
    "load_model": "model built, weights loaded",
    "determine_available_memory": "forward pass of the largest iteration",
    "initialize_from_config": "KV cache allocated",
    "compile_or_warm_up_model": "kernels warmed up, decode graphs captured",
}


class Phases:
    """Seconds by phase, in the order in which phases began."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        self.seconds.setdefault(name, 0.0)
        try:
            yield
        finally:
            self.seconds[name] += time.perf_counter() - started

    def watch(self, owner: Any, method: str, name: str) -> None:
        """Charge every call of a method; a subclass that calls its parent's is charged once."""
        plain: Callable[..., Any] = getattr(owner, method)

        @functools.wraps(plain)
        def timed(*args: Any, **kwargs: Any) -> Any:
            with self.span(name):
                return plain(*args, **kwargs)

        setattr(owner, method, timed)


def measure(recipe: str, overrides: list[str]) -> dict[str, float]:
    """Start one engine, and close it again."""
    config, phases = resolve(recipe, overrides), Phases()
    model = resolve_model_path(config.model.path)
    started = time.perf_counter()
    with phases.span("import torch"):
        import torch  # noqa: F401
    with phases.span("import the stages"):
        from grpo_lib.rollout import options, vllm_engine
        from grpo_lib.stages.live import engine_factory

        options.prepare_process(config.runtime.threads_per_process)
    with phases.span("import vllm"):
        from vllm.platforms import current_platform
        from vllm.v1.engine.llm_engine import LLMEngine  # noqa: F401

    with phases.span("import the worker"):
        if current_platform.is_cpu():
            from vllm.v1.worker.cpu_worker import CPUWorker as Worker
        else:
            from vllm.v1.worker.gpu_worker import Worker
    for method, name in _WORKER_PHASES.items():
        phases.watch(Worker, method, name)
    phases.watch(vllm_engine, "import_architecture", "import the architecture")
    phases.watch(vllm_engine, "open_model_folder", "check the model folder")
    phases.watch(vllm_engine, "_warm_up", "first sampled and first scored request")
    engine = engine_factory(config, model, policy_version=0, index=0)()
    total = time.perf_counter() - started
    engine.close()
    return {**phases.seconds, "the rest": total - sum(phases.seconds.values()), "total": total}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default=default_recipe.__name__)
    parser.add_argument("--set", action="append", default=[], dest="overrides", metavar="KEY.PATH=VALUE")
    options = parser.parse_args()
    seconds = measure(options.recipe, options.overrides)
    width = max(map(len, seconds))
    for name, value in seconds.items():
        print(f"{name:<{width}}  {value:7.2f} s")
    print(json.dumps({name: round(value, 3) for name, value in seconds.items()}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
