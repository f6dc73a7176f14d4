"""Every random number of a run derives from its seed here, so that a rerun, a resume and another machine repeat it."""

from __future__ import annotations

import hashlib
import json

import numpy as np


def sample_seed(run_seed: int, epoch: int, prompt_id: str, sample_index: int) -> int:
    """Sampling seed of one group member, in [0, 2^63): distinct across members, prompts and epochs.

    It depends on nothing that varies between runs: not on the step, the engine, or the order of requests.
    """
    return int.from_bytes(_digest("sample", run_seed, epoch, prompt_id, sample_index)[:8], "big") >> 1


def epoch_order(run_seed: int, epoch: int, num_prompts: int) -> np.ndarray:
    """[num_prompts] int64: the permutation of prompt rows that an epoch visits.

    The raw Philox stream is sorted instead of calling `Generator.permutation`: NumPy promises stable streams for bit
    generators only, and a resumed run must see the same order under another NumPy version.
    """
    if num_prompts < 1:
        raise ValueError(f"an epoch over {num_prompts} prompts has no order; the training set is empty")
    key = int.from_bytes(_digest("epoch", run_seed, epoch)[:16], "big")
    keys = np.random.Philox(key=key).random_raw(num_prompts)
    return np.argsort(keys, kind="stable").astype(np.int64)


def _digest(*parts: str | int) -> bytes:
    """sha256 over an unambiguous encoding: ("a", 12) and ("a1", 2) differ."""
    return hashlib.sha256(json.dumps(parts).encode()).digest()
