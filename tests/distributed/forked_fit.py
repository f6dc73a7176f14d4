"""`stages.fit` with its real trainer in processes that start in a second, so that it can be killed often.

Processes fork from one that has imported everything. The trainer's rank lives in the driver's process, and Hugging
Face's model samples; loop, recorder, checkpoints, prompts and verifiers are the run's own.
"""

from __future__ import annotations

import hashlib
import multiprocessing as mp
import os
import pickle
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import deepspeed  # noqa: F401  # imported here, once, and not by every process
import olmo_core.nn.transformer  # noqa: F401
import torch
from transformers import AutoModelForCausalLM

from grpo_lib.config import RunConfig
from grpo_lib.ray_runtime.trainer_group import RayTrainerGroup
from grpo_lib.stages import fit
from grpo_lib.stages.doomed_attempt import Death, Doom
from grpo_lib.stages.run_paths import RunPaths
from grpo_lib.stages.trainer_rank import TrainerRankFactory
from grpo_lib.types import StateKind, SyncCertificate
from tests.parity.embedded_run import HfEngine


class OneRank:
    """`ActorGroup` of one member in this process; arguments are pickled, as they would be on the way to another."""

    size = 1
    processes: dict[str, int] = {}  # noqa: RUF012  # there are none

    def __init__(self, member: Any) -> None:
        self._member = member

    def call(self, method: str, *args: Any, deadline_s: float, setting: str, **kwargs: Any) -> list[Any]:
        attribute = getattr(self._member, method)
        return [attribute(*pickle.loads(pickle.dumps(args)), **kwargs) if callable(attribute) else attribute]

    def call_each(self, method: str, args_list: list[tuple[Any, ...]], **options: Any) -> list[Any]:
        return self.call(method, *args_list[0], **options)

    def call_and_read(self, method: str, attribute: str, **options: Any) -> list[tuple[Any, Any]]:
        return [(self.call(method, **options)[0], getattr(self._member, attribute))]


class FileSync:
    """`WeightSync` through a file that both sides see."""

    def __init__(self, trainer: RayTrainerGroup, engine: HfEngine) -> None:
        self._trainer, self._engine = trainer, engine

    def push(self, policy_version: int) -> SyncCertificate:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name) / "weights"
            self._trainer.dump_state(folder, [StateKind.WEIGHT])
            content = (folder / f"{StateKind.WEIGHT}.safetensors").read_bytes()
            self._engine.load(folder, policy_version)
        return SyncCertificate(
            policy_version=policy_version,
            engine_versions=(self._engine.policy_version,),
            num_tensors=1,
            num_bytes=len(content),
            transfer_s=0.0,
            missing=(),
            unexpected=(),
            unloaded=(),
            mismatched=(),
            checksum=hashlib.sha256(content).hexdigest(),
        )


@dataclass(kw_only=True)
class LocalRun:
    """`LiveRun` in this process."""

    trainer: RayTrainerGroup
    engines: HfEngine
    sync: FileSync
    processes: dict[str, int]


@contextmanager
def local_run(config: RunConfig, *, model_path: Path, checkpoint: Path | None, **_: Any) -> Iterator[LocalRun]:
    rank = TrainerRankFactory(config=config, model_path=model_path, rank=0, checkpoint=checkpoint)()
    rank.setup(*rank.listen_address())
    trainer = RayTrainerGroup(
        OneRank(rank),  # type: ignore[arg-type]  # as far as one rank needs a group
        name=config.trainer.backend,
        deadlines=config.deadlines,
        has_reference=False,
    )
    engine = HfEngine(model=AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32).eval())
    yield LocalRun(trainer=trainer, engines=engine, sync=FileSync(trainer, engine), processes={})
    rank.close()


def attempt(config: RunConfig, paths: RunPaths, death: Death | None = None) -> None:
    """Body of the process."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    fit.live_run = local_run  # type: ignore[assignment]
    on_span = None if death is None else Doom(death)
    fit.run(config, paths, run_id=paths.run.name, on_span=on_span, from_shards=False)


class ForkedFits:
    """Starts attempts."""

    def __init__(self) -> None:
        self._context = mp.get_context("forkserver")
        self._context.set_forkserver_preload([__name__])

    def run(self, config: RunConfig, paths: RunPaths, death: Death | None = None) -> int | None:
        """One attempt; the exit code of its process."""
        process = self._context.Process(target=attempt, args=(config, paths, death))
        process.start()
        process.join(timeout=120)
        if process.is_alive():
            process.kill()
            process.join()
            return None
        return process.exitcode
