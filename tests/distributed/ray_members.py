"""Light objects that Ray actors host in tests: a member that misbehaves on request, a rank and an engine."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch

from grpo_lib.trainers.checkpoint_folder import Snapshot, WriteBehind
from grpo_lib.types import (
    Completion,
    FinishReason,
    GenerationRequest,
    PackedBatch,
    SenderReport,
    Stat,
    StepMetrics,
    VersionSpan,
    WeightReceipt,
    WrittenFile,
)


class Member:
    def __init__(self, index: int) -> None:
        self.index = index

    def where(self) -> tuple[int, int, str | None]:
        return self.index, os.getpid(), os.environ.get("OMP_NUM_THREADS")

    def add(self, a: int, *, b: int) -> int:
        return self.index + a + b

    def sleep_if(self, index: int, seconds: float) -> int:
        if self.index == index:
            time.sleep(seconds)
        return self.index

    def fail_if(self, index: int) -> int:
        if self.index == index:
            raise KeyError(f"tensor of member {self.index}")
        return self.index

    def fail_after_death_of(self, pid: int) -> None:
        """As a collective does when its peer's process ends."""
        while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
            time.sleep(0.01)
        raise ConnectionError("connection closed by peer")


def broken_factory() -> None:
    raise FileNotFoundError("no such model folder")


class Rank:
    """Answers as a trainer rank: sums what it is given, and reports global figures from every rank alike."""

    def __init__(self, index: int, version: int = 3) -> None:
        self.index, self.policy_version = index, version
        self.drifts = False
        self.journal: list[str] = []
        self._numel = 16
        self._writer = WriteBehind()

    def grow(self, numel: int) -> None:
        """Have that many numbers to save from now on."""
        self._numel = numel

    def begin_save(self, path: Path) -> None:
        tensors = {"weight/w": torch.full((self._numel,), float(self.policy_version))}
        header = {"policy_version": str(self.policy_version)}
        self._writer.begin(path, partial(Snapshot, rank=self.index, tensors=tensors, header=header))

    def written(self, *, wait: bool) -> WrittenFile | None:
        return self._writer.written(wait=wait)

    def forward_backward(self, micro_batches: Sequence[PackedBatch], *, loss_denominator: float) -> StepMetrics:
        tokens = float(sum(batch.num_trained_tokens for batch in micro_batches))
        total = float(sum(batch.advantages.sum() for batch in micro_batches))
        assert all(batch.advantages.is_contiguous() for batch in micro_batches)
        micro_batches[0].advantages.add_(1.0)  # a rank may write into what it was given
        return StepMetrics(
            stats={
                "loss/policy": Stat.mean(total / loss_denominator, tokens),
                "tokens": Stat.sum(tokens),
                "mismatch/abs_max": Stat.max(float(self.index)),
            }
        )

    def optim_step(self) -> StepMetrics:
        self.policy_version += 1 if not (self.drifts and self.index == 1) else 2
        return StepMetrics(stats={"optim/grad_norm": Stat.sum(2.5), "optim/weights_moved": Stat.sum(1.0)})

    def drift(self, drifts: bool) -> None:
        self.drifts = drifts

    def logprobs(self, micro_batches: Sequence[PackedBatch], *, reference: bool) -> list[torch.Tensor]:
        return [batch.rollout_logprobs * (2.0 if reference else 1.0) for batch in micro_batches]

    def load(self, path: Path) -> None:
        self.policy_version = int(path.name)

    def connect_sender(self, client: Any, *, port: int, timeout_s: float) -> None:
        self.journal.append(f"connect {client} {port} {timeout_s:g}")

    def push_weights(self, policy_version: int) -> SenderReport:
        return SenderReport(
            policy_version=policy_version, checksums={f"w{self.index}": 1}, num_bytes=self.index, seconds=0.0
        )


class Engine:
    """Completes a request after a while with one token per prompt token; journals what a weight transfer calls."""

    def __init__(self, index: int, delay_s: float = 0.0) -> None:
        self.index, self.delay_s = index, delay_s
        self.policy_version = 0
        self.journal: list[Any] = []
        self._waiting: list[tuple[float, GenerationRequest]] = []
        self._lock = threading.Lock()

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        if any(request.seed < 0 for request in requests):
            raise ValueError("negative seed")
        with self._lock:
            self._waiting += [(time.monotonic() + self.delay_s, request) for request in requests]

    def poll(self, timeout_s: float) -> list[Completion]:
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            with self._lock:
                done = [request for due, request in self._waiting if due <= time.monotonic()]
                self._waiting = [(due, request) for due, request in self._waiting if request not in done]
            if done:
                return [self._complete(request) for request in done]
            time.sleep(0.002)
        return []

    def _complete(self, request: GenerationRequest) -> Completion:
        count = len(request.prompt_token_ids)
        return Completion(
            request_id=request.request_id,
            token_ids=np.full(count, self.index, np.int64),
            logprobs=np.full(count, -0.5, np.float32),
            version_spans=(VersionSpan(version=self.policy_version, start=0, stop=count),),
            finish_reason=FinishReason.LENGTH,
            seed=request.seed,
            latency_s=self.delay_s,
        )

    def score(self, sequences: Sequence[tuple[Sequence[int], int]]) -> list[np.ndarray]:
        return [np.asarray(tokens[count:], np.float32) for tokens, count in sequences]

    def pause(self) -> None:
        self.journal.append("pause")

    def resume(self) -> None:
        self.journal.append("resume")

    def checkpoint_names(self) -> frozenset[str]:
        return frozenset({"w"})

    def init_weight_transfer_engine(self, request: dict[str, Any]) -> None:
        self.journal.append(request)

    def start_weight_update(self) -> None:
        self.journal.append("start")

    def update_weights(self, request: dict[str, Any]) -> None:
        self.journal.append(request)

    def finish_weight_update(self) -> None:
        self.journal.append("finish")

    def commit_weights(self, policy_version: int) -> tuple[WeightReceipt, ...]:
        self.policy_version = policy_version
        return (WeightReceipt(checksums={"w": self.index}, num_bytes=4, unloaded=()),)

    def set_version(self, version: int) -> None:
        self.policy_version = version
