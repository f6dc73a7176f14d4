"""Rollouts into the local store and back, against the plain disk: `python benchmarks/storage.py --out DIR`.

Each of some writers writes a step's rollouts and verifies them. Next to that, in the same second and on the same disk,
one file of as many bytes is written in 8 MiB pieces, flushed and read. Both are read from the disk, not from the page
cache. The ratio compares the sums of both, so that a disk that is slow for a while slows both. A rollout's bytes are
its token ids (int64), log-probabilities (float32) and text as the program holds them; `stored_gb` is what of it reaches
the disk. Writing is computing: on a machine that is busy with something else the ratio says little. Ends with one line
of JSON.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import psutil

from grpo_lib.algo.advantages import GroupAssessment, assess_group
from grpo_lib.data.files import fsync
from grpo_lib.storage.local import LocalStore
from grpo_lib.storage.rollouts import write_rollouts
from grpo_lib.types import (
    Completion,
    FinishReason,
    Prompt,
    Rollout,
    RolloutGroup,
    Verdict,
    VerdictReason,
    VerdictState,
    VersionSpan,
)

_PROMPTS, _SAMPLES = 64, 16  # of a step
_PIECE_BYTES = 8 << 20
_VOCABULARY = 150_000
_BYTES_PER_TOKEN = 8 + 4 + 3  # id, log-probability, text
_TEXT = (
    "we have the sum of all terms and so it is equal to x squared plus two times b which gives us therefore answer "
    "first second consider equation both sides let n be an integer then follows that because 12 7 144 3.5 = + - \\frac"
)
_WORDS = _TEXT.split()


class PeakMemory:
    """Largest resident memory of this process while the block runs, over what it was when it began."""

    def __enter__(self) -> PeakMemory:
        self._process, self._stop = psutil.Process(), threading.Event()
        self._before = self._peak = self._process.memory_info().rss
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    @property
    def over_baseline_mb(self) -> float:
        return (self._peak - self._before) / 1e6

    def _run(self) -> None:
        while not self._stop.wait(0.01):
            self._peak = max(self._peak, self._process.memory_info().rss)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder on the disk to measure")
    parser.add_argument("--gb", type=float, default=1.0, help="rollouts to write, 10^9 bytes")
    parser.add_argument("--tokens", type=int, default=2000, help="mean length of a completion")
    parser.add_argument("--writers", type=int, default=len(os.sched_getaffinity(0)), help="steps at the same time")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    store = LocalStore(options.out / "store")
    per_step = _PROMPTS * _SAMPLES * options.tokens * _BYTES_PER_TOKEN
    rounds = max(1, round(options.gb * 1e9 / per_step / options.writers))
    steps = _steps((1 + rounds) * options.writers, options.tokens)
    ours_s = plain_s = peak_mb = 0.0
    payload = stored = 0
    with ThreadPoolExecutor(max_workers=options.writers) as pool:
        for number in range(1 + rounds):
            batch = list(itertools.islice(steps, options.writers))
            num_bytes = sum(_size(rollout) for _, groups, _ in batch for group in groups for rollout in group.rollouts)
            plain = _plain(options.out / "plain", num_bytes)
            with PeakMemory() as memory:
                started = time.perf_counter()
                sizes = list(pool.map(lambda step: _written_and_verified(store, *step), batch))
                ours = time.perf_counter() - started
            peak_mb = max(peak_mb, memory.over_baseline_mb)
            if number > 0:  # the first one touches memory that the process did not have before
                plain_s, ours_s = plain_s + plain, ours_s + ours
                payload, stored = payload + num_bytes, stored + sum(sizes)
    print(
        json.dumps(
            {
                "steps": rounds * options.writers,
                "writers": options.writers,
                "rollouts_gb": round(payload / 1e9, 3),
                "stored_gb": round(stored / 1e9, 3),
                "rollouts_mb_per_s": round(payload / 1e6 / ours_s, 1),
                "disk_mb_per_s": round(payload / 1e6 / plain_s, 1),
                "ratio": round(plain_s / ours_s, 3),
                "peak_mb_over_baseline": round(peak_mb, 1),
                "load": os.getloadavg()[0],
            }
        )
    )


def _written_and_verified(
    store: LocalStore, step: int, groups: Sequence[RolloutGroup], assessments: Sequence[GroupAssessment]
) -> int:
    """Bytes on the disk."""
    ref = write_rollouts(store, step=step, groups=groups, assessments=assessments)
    _forget(store.get(ref))
    store.verify(ref)
    return ref.size_bytes


def _forget(path: Path) -> None:
    """Drop a flushed file from the page cache: what is read after that comes from the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


def _plain(path: Path, num_bytes: int) -> float:
    """Seconds for as many bytes, written and flushed, then read."""
    piece = os.urandom(_PIECE_BYTES)
    started = time.perf_counter()
    with path.open("wb", buffering=0) as file:
        for left in range(num_bytes, 0, -_PIECE_BYTES):
            file.write(piece[: min(left, _PIECE_BYTES)])
    fsync(path)
    _forget(path)
    buffer = bytearray(_PIECE_BYTES)
    with path.open("rb", buffering=0) as file:
        while file.readinto(buffer):
            pass
    seconds = time.perf_counter() - started
    path.unlink()
    return seconds


def _size(rollout: Rollout) -> int:
    return rollout.completion.token_ids.nbytes + rollout.completion.logprobs.nbytes + len(rollout.text)


def _steps(num_steps: int, mean_tokens: int) -> Iterator[tuple[int, list[RolloutGroup], list[GroupAssessment]]]:
    """Rollouts as a real run has them: lengths differ, ids come by their frequency, log-probabilities are all over."""
    random = np.random.default_rng(0)
    for step in range(num_steps):
        groups = [_group(random, index, mean_tokens) for index in range(_PROMPTS)]
        yield step, groups, [assess_group(group, kind="standard", correct_reward=1.0) for group in groups]


def _group(random: np.random.Generator, index: int, mean_tokens: int) -> RolloutGroup:
    prompt = Prompt(
        prompt_id=f"prompt-{index}",
        text="x" * 800,
        token_ids=tuple(random.integers(0, _VOCABULARY, 200).tolist()),
        answer="42",
        dataset="benchmark",
        verifier="exact",
    )
    return RolloutGroup(
        group_id=f"group-{index}",
        prompt=prompt,
        rollouts=tuple(_rollout(random, index, number, mean_tokens) for number in range(_SAMPLES)),
    )


def _rollout(random: np.random.Generator, group: int, number: int, mean_tokens: int) -> Rollout:
    length = int(random.integers(mean_tokens // 2, mean_tokens * 3 // 2))
    correct = bool(random.integers(2))
    return Rollout(
        sample_index=number,
        completion=Completion(
            request_id=f"{group}/{number}",
            token_ids=np.minimum(random.zipf(1.2, length), _VOCABULARY - 1).astype(np.int64),
            logprobs=-random.exponential(0.5, length).astype(np.float32),
            version_spans=(VersionSpan(version=0, start=0, stop=length),),
            finish_reason=FinishReason.STOP,
            seed=number,
            latency_s=1.0,
        ),
        text=" ".join(_WORDS[word] for word in random.integers(0, len(_WORDS), int(0.7 * length))),
        verdict=Verdict(
            state=VerdictState.VALID if correct else VerdictState.ZERO,
            reward=float(correct),
            reason=VerdictReason.CORRECT if correct else VerdictReason.WRONG,
            extracted="42",
            elapsed_ms=1.0,
        ),
    )


if __name__ == "__main__":
    main()
