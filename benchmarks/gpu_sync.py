"""Weight sync on one GPU: the certified push from a trainer rank to a vLLM engine, and a device copy of as many bytes.

    python benchmarks/gpu_sync.py --model DIR --out sync.json

Both are Ray actors on the same card, as in a run, and the push is a run's own: the trainer's weights in the compute
dtype, CUDA IPC, vLLM's loading, checksums of every tensor on both sides, the certificate. `transfer` ends when the
engine has acknowledged and reported what it received; `push` begins before the engine is paused and ends when it may
serve again. The decode canary is timed apart. Pushes and copies alternate; figures are medians of the counted rounds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from card import product_tflops, the_card
from grpo_work import Work, prompts_of
from progress import actors_watched, say

from grpo_lib.config import RunConfig, resolve
from grpo_lib.data.chat import load_tokenizer
from grpo_lib.errors import WeightSyncError
from grpo_lib.stages.live import live_run
from grpo_lib.types import SyncCertificate
from grpo_lib.weight_sync.sync import CertifiedWeightSync

_WARM = 1  # rounds that are not counted, beside the first push, which opens handles and compiles kernels


def sync_config(model: Path, root: Path, overrides: Sequence[str]) -> RunConfig:
    """A trainer and an engine that share the card; a canary after every push, and `overrides` last."""
    mine = {
        "model.path": str(model),
        "data.num_shots": 0,
        "rollout.max_tokens": 24,
        "rollout.stop_at": "end_of_text",
        "rollout.gpu_memory_share": 0.2,
        "rollout.max_num_seqs": 16,  # fewer graphs to record than a run has; only the canary decodes
        "weight_sync.canary_every": 1,
        "weight_sync.canary_tolerance": 5.0,  # random weights are as sharp as trained ones, and less smooth
        "storage.root": str(root),
        "runtime.object_store_mib": 1024,
    }
    given = {override.partition("=")[0] for override in overrides}
    own = [f"{key}={json.dumps(value)}" for key, value in mine.items() if key not in given]
    return resolve("smollm2_addition", [*own, *overrides])


class DeviceCopy:
    """Seconds of one plain copy on the card, of as many bytes as a push moves."""

    def __init__(self, num_bytes: int) -> None:
        self._source = torch.empty(num_bytes, dtype=torch.uint8, device="cuda").random_()
        self._target = torch.empty_like(self._source)

    def __call__(self) -> float:
        begun, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        begun.record()
        self._target.copy_(self._source)
        ended.record()
        torch.cuda.synchronize()
        return begun.elapsed_time(ended) / 1e3


def measure(config: RunConfig, model: Path, rounds: int, keep: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
    """All rounds, with every number of each; `keep` gets what is known after each of them."""
    prompts = prompts_of(load_tokenizer(model), Work(), config.weight_sync.canary_prompts)
    started = time.perf_counter()
    seen: list[dict[str, float]] = []
    with (
        actors_watched(),
        live_run(config, model_path=model, canary_prompts=prompts, stop_token_ids=(), checkpoint=None) as live,
    ):
        start_s = time.perf_counter() - started
        say("trainer and engine are connected")
        first, timed = pushed(live.sync)
        say(f"first push: {timed}")
        result = {
            "start_s": start_s,
            "num_tensors": first.num_tensors,
            "num_bytes": first.num_bytes,
            "canary": None if first.canary is None else asdict(first.canary),
            "first_transfer_s": first.transfer_s,
            "rounds": seen,
            "rows": [],
        }
        copy = DeviceCopy(first.num_bytes)
        for _ in range(_WARM + rounds):
            seen.append({**pushed(live.sync)[1], "copy_s": copy()})
            say(f"round {len(seen)}: {seen[-1]}")
            if counted := seen[_WARM:]:
                result["rows"] = rows_of(counted, first.num_bytes)
                keep(result)
    return result


def pushed(sync: CertifiedWeightSync) -> tuple[SyncCertificate, dict[str, float]]:
    """One push, and where its seconds went.

    Raises:
        WeightSyncError: it is not certified, so that its time means nothing.
    """
    begun = time.perf_counter()
    certificate = sync.push(0)
    seconds = time.perf_counter() - begun
    if not certificate.ok or certificate.canary is None:
        raise WeightSyncError(f"a push is not certified: {certificate}")
    canary_s = certificate.canary.seconds
    return certificate, {"transfer_s": certificate.transfer_s, "push_s": seconds - canary_s, "canary_s": canary_s}


def rows_of(counted: Sequence[dict[str, float]], num_bytes: int) -> list[dict[str, Any]]:
    """One row for each thing that was timed."""
    rows: list[dict[str, Any]] = []
    for case in ("transfer", "push", "copy", "canary"):
        seconds = [row[f"{case}_s"] for row in counted]
        row = {"case": case, "rounds": len(seconds), "seconds": statistics.median(seconds)}
        row |= {"min_s": min(seconds), "max_s": max(seconds)}
        if case != "canary":
            row["gb_per_s"] = num_bytes / row["seconds"] / 1e9
        rows.append(row)
    return rows


def summary_of(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Flat numbers by name, for the targets."""
    seconds = {row["case"]: row["seconds"] for row in rows}
    return {f"{case}_s": value for case, value in seconds.items()} | {
        "transfer_gb_per_s": next(row["gb_per_s"] for row in rows if row["case"] == "transfer"),
        "transfer_over_copy": seconds["transfer"] / seconds["copy"],
    }


def table(found: dict[str, Any]) -> str:
    lines = [
        f"{found['num_tensors']} tensors, {found['num_bytes'] / 1e9:.2f} GB; trainer and engine start in "
        f"{found['start_s']:.0f} s; first push {found['first_transfer_s']:.3f} s; {found['rows'][0]['rounds']} rounds",
        f"{'':9} {'median s':>9} {'min':>8} {'max':>8} {'GB/s':>7}",
    ]
    for row in found["rows"]:
        rate = f"{row['gb_per_s']:7.0f}" if "gb_per_s" in row else ""
        lines.append(f"{row['case']:9} {row['seconds']:9.4f} {row['min_s']:8.4f} {row['max_s']:8.4f} {rate}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="Hugging Face folder")
    parser.add_argument("--out", type=Path, default=Path("gpu_sync.json"), help="JSON with every number")
    parser.add_argument("--lock", type=Path, help="file lock of the card; the script waits for it")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="setting of the run")
    parser.add_argument("--rounds", type=int, default=7, help="counted rounds")
    arguments = parser.parse_args()
    result: dict[str, Any] = {"summary": {}, "rows": []}
    with tempfile.TemporaryDirectory(prefix="gpu_sync_") as root, the_card(arguments.lock):
        try:
            config = sync_config(arguments.model, Path(root), arguments.set)
            result["config"] = config.model_dump(mode="json")
            result["product_tflops_before"] = product_tflops()

            def keep(found: dict[str, Any]) -> None:
                result.update(found, summary=summary_of(found["rows"]), table=table(found))
                arguments.out.write_text(json.dumps(result))

            measure(config, arguments.model, arguments.rounds, keep)
            print(result["table"])
        except Exception as error:  # noqa: BLE001 process boundary: the failure is the row
            text = "".join(traceback.format_exception(error, limit=-8))
            result["rows"] += [
                {"case": "sync", "failed": f"{type(error).__name__}: {error}"[:300], "log": text[-3000:]}
            ]
            print(text, file=sys.stderr)
    arguments.out.write_text(json.dumps(result))


if __name__ == "__main__":
    main()
