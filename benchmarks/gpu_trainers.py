"""Trainer compute on one GPU: one pack of 10 240 tokens at the shape of Qwen3-4B, by every trainer.

    python benchmarks/gpu_trainers.py --out trainers.json

Each case is a process of its own with random weights made on the card, the same for all by name. All of them import
side by side, and the first takes the card when the last is done with that, which would disturb it. They follow each
other in the order of `CASES`, which alternates between the trainers: two of them do not fit on the card together. A
compiled case takes about 20 seconds until its first step is over. A fixed matrix product is timed before and after each
case, so that a card that slows down is seen as such. A case that fails is a row that says how. `--all` adds cases and
packs, and takes about six minutes.

Nothing of Ray or vLLM is needed. FLOP of a step: 6 for each weight of the blocks and token, 6 for each weight of the
head and label, and 12 · layers · heads · head_dim · sum(length²) / 2 for causal attention. Recomputing does not count.
`value` is the mean log-probability of the labels after the same number of steps, and so about equal for all cases.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from card import product_tflops, the_card
from gpu_trainer_cases import DOCUMENTS, Case, chosen_cases, every_case

TOKENS = 10_240
PEAK_FLOPS = 989e12  # H200, dense bfloat16
QWEN3_4B: Mapping[str, Any] = {
    "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "vocab_size": 151_936, "hidden_size": 2560,
    "intermediate_size": 9728, "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8,
    "head_dim": 128, "max_position_embeddings": 40_960, "rope_theta": 1_000_000.0, "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True, "hidden_act": "silu", "attention_bias": False, "attention_dropout": 0.0,
    "bos_token_id": 151_643, "eos_token_id": 151_645,
}  # fmt: skip
_TINY: Mapping[str, Any] = {**QWEN3_4B, "vocab_size": 512, "hidden_size": 128, "intermediate_size": 256,
                            "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}  # fmt: skip


# --- One case, in its own process -----------------------------------------------------------------------------------


def run_case(case: Case, config: Mapping[str, Any], *, turn: Turn, repeats: int, deadline_s: float) -> dict[str, Any]:
    """Import, wait for the turn, measure."""
    import_trainer(case.trainer)
    turn.wait()
    started = time.monotonic()
    row: dict[str, Any] = {"case": case.name, "settings": dict(case.settings), "packs": []}
    row["product_tflops_before"] = product_tflops()
    row["card_ready_s"] = time.monotonic() - started
    steps = steps_of(case, config)
    row["start_s"] = time.monotonic() - started
    for num_documents in case.documents:
        if row["packs"] and time.monotonic() - started > deadline_s:
            row["stopped"] = f"{deadline_s:g} s were over before the pack of {num_documents} documents"
            break
        row["packs"].append(measured(steps, config, num_documents, repeats))
    row["product_tflops_after"] = product_tflops()
    row.update(explained(steps, config))
    row["card_s"] = time.monotonic() - started
    return row


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """Two files by which a process says that it is ready, and is told to go."""

    ready: Path
    go: Path

    @staticmethod
    def of(output: Path) -> Turn:
        """Beside a case's output."""
        return Turn(ready=output.with_suffix(".ready"), go=output.with_suffix(".go"))

    def wait(self) -> None:
        self.ready.touch()
        while not self.go.exists():
            time.sleep(0.05)


def import_trainer(trainer: str) -> None:
    """What takes long and needs no card."""
    if trainer != "plain_hf":
        import_module("torch._inductor.compile_fx")  # else with the first graph
    if trainer == "plain_hf":
        import_module("transformers")
        return
    if trainer == "hf_deepspeed":
        os.environ["DS_ACCELERATOR"] = "cuda"
        import_module("deepspeed")
    import_module(f"grpo_lib.trainers.{trainer}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    """The two halves of an optimiser step on a pack, each over when it returns, and the mean log-probability."""

    forward_backward: Callable[[Any], float]
    optim_step: Callable[[], None]


def steps_of(case: Case, config: Mapping[str, Any]) -> Steps:
    return plain_hf_steps(config) if case.trainer == "plain_hf" else trainer_steps(case, config)


def trainer_steps(case: Case, config: Mapping[str, Any]) -> Steps:
    from grpo_lib.algo.losses import build_loss
    from grpo_lib.config import AlgorithmConfig, TrainerConfig
    from grpo_lib.stages.trainer_rank import backend_class

    trainer_class = backend_class(case.trainer)
    # The trainers open a folder by its path; here its tensors come out of a generator on the card.
    setattr(sys.modules[trainer_class.__module__], "HfFolder", RandomFolder)  # noqa: B010 of that module alone
    settings = {"logprob_recompute": False, "learning_rate": 1e-6, "num_ranks": 1, "micro_batch_packs": 1}
    trainer = trainer_class(
        config=TrainerConfig(pack_length=TOKENS, **{**settings, **case.settings}),
        model_path=written_config(config),
        dtype="bfloat16",
        temperature=1.0,
        correction_cap=2.0,
        total_steps=1000,
        rank=0,
        world_size=1,
        device="cuda",
        fp32_head=True,
    )
    loss = build_loss(AlgorithmConfig())

    def forward_backward(batch: Any) -> float:
        metrics = trainer.forward_backward([batch], loss, loss_denominator=float(batch.num_trained_tokens)).values()
        return -math.log(config["vocab_size"]) - metrics["mismatch/k1"]  # the pack's sampler was uniform

    return Steps(forward_backward=forward_backward, optim_step=lambda: check_moved(trainer.optim_step().values()))


def check_moved(metrics: Mapping[str, float]) -> None:
    if not (metrics["optim/weights_moved"] and math.isfinite(metrics["optim/grad_norm"])):
        raise RuntimeError(f"a step that trains nothing is not worth timing: {metrics}")


def plain_hf_steps(config: Mapping[str, Any]) -> Steps:
    """What one writes without a library for it: bfloat16 weights and moments, all logits, no fp32 master."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.initialization import no_init_weights

    from grpo_lib.trainers.hf_deepspeed_model import use_kernel
    from grpo_lib.trainers.joined_documents import JoinedDocuments
    from grpo_lib.trainers.varlen_attention import document_kernel

    device = torch.device("cuda")
    kernel = document_kernel(device, torch.bfloat16)
    assert kernel is not None
    with no_init_weights(), device:
        model: Any = AutoModelForCausalLM.from_config(
            AutoConfig.from_pretrained(written_config(config)),
            dtype=torch.bfloat16,
            attn_implementation=use_kernel(kernel),
        )
    model.tie_weights()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(random_tensor(name, tuple(parameter.shape)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, weight_decay=0.0, fused=True)

    def forward_backward(batch: Any) -> float:
        documents = JoinedDocuments.of(batch.doc_ids, batch.position_ids)
        bounds = torch.nn.functional.pad(documents.lens[0].cumsum(0), (1, 0)).int().to(device)
        logits = model(
            input_ids=documents.joined(batch.input_ids).to(device),
            position_ids=documents.positions().to(device),
            use_cache=False,
            document_bounds=bounds,
            longest_document=documents.max_len,
        ).logits[0]
        mask, labels = batch.response_mask.flatten().to(device), batch.labels.flatten().to(device)
        losses = torch.nn.functional.cross_entropy(logits.float(), labels, reduction="none")
        value = (losses * mask).sum() / mask.sum()
        value.backward()
        return -float(value)

    def optim_step() -> None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        torch.cuda.synchronize()

    return Steps(forward_backward=forward_backward, optim_step=optim_step)


class RandomFolder:
    """A model folder without files: what `HfFolder` gives, from names and shapes alone."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config: Mapping[str, Any] = json.loads((path / "config.json").read_text())
        self.names: frozenset[str] = frozenset()
        self._shapes: dict[str, tuple[int, ...]] = {}

    def check_tensors(self, expected: Mapping[str, Sequence[int]]) -> None:
        self._shapes = {name: tuple(shape) for name, shape in expected.items()}

    def rows(self, name: str, start: int, stop: int) -> Any:
        return random_tensor(name, self._shapes[name])[start:stop]

    def flat(self, name: str, start: int, stop: int) -> Any:
        return random_tensor(name, self._shapes[name]).flatten()[start:stop]


def random_tensor(name: str, shape: tuple[int, ...]) -> Any:
    """The same for a name in every process: fp32 values of bfloat16 precision on the card."""
    import torch

    generator = torch.Generator("cuda").manual_seed(zlib.crc32(name.encode()))
    if len(shape) == 1:
        return torch.ones(shape, device="cuda")
    return torch.randn(shape, generator=generator, device="cuda").mul_(0.02).bfloat16().float()


def written_config(config: Mapping[str, Any]) -> Path:
    folder = Path(tempfile.mkdtemp(prefix="gpu_trainers_"))
    (folder / "config.json").write_text(json.dumps(dict(config)))
    return folder


def pack_of(num_documents: int, vocab_size: int) -> Any:
    """A full pack of equal documents; every token but a document's first is trained."""
    import numpy as np

    from grpo_lib.algo.packing import pack
    from grpo_lib.types import TrainingSample

    rng = np.random.default_rng(num_documents)
    samples = []
    for index in range(num_documents):
        length = TOKENS // num_documents
        mask = np.arange(length) > 0
        samples.append(
            TrainingSample(
                sample_id=f"e0.p{index}/0",
                input_ids=rng.integers(0, vocab_size, length),
                response_mask=mask,
                advantages=np.where(mask, rng.normal(), 0).astype(np.float32),
                rollout_logprobs=np.where(mask, -math.log(vocab_size), 0).astype(np.float32),
            )
        )
    return pack(samples, TOKENS)


def measured(steps: Steps, config: Mapping[str, Any], num_documents: int, repeats: int) -> dict[str, Any]:
    """Medians over `repeats` steps after two that compile, tune and fill caches."""
    import torch

    batch = pack_of(num_documents, config["vocab_size"])
    first = time.perf_counter()
    steps.forward_backward(batch)
    steps.optim_step()
    torch.cuda.synchronize()
    first_s = time.perf_counter() - first
    steps.forward_backward(batch)
    steps.optim_step()
    torch.cuda.reset_peak_memory_stats()
    forward_backward_s, optim_s, value = [], [], 0.0
    for _ in range(repeats):
        torch.cuda.synchronize()
        start = time.perf_counter()
        value = steps.forward_backward(batch)
        torch.cuda.synchronize()
        middle = time.perf_counter()
        steps.optim_step()
        torch.cuda.synchronize()
        forward_backward_s.append(middle - start)
        optim_s.append(time.perf_counter() - middle)
    step_s = [a + b for a, b in zip(forward_backward_s, optim_s, strict=True)]
    flop = step_flop(config, num_documents)
    return {
        "documents": num_documents,
        "real_tokens": batch.num_real_tokens,
        "first_s": first_s,
        "forward_backward_s": statistics.median(forward_backward_s),
        "optim_s": statistics.median(optim_s),
        "step_s": statistics.median(step_s),
        "step_min_s": min(step_s),
        "step_max_s": max(step_s),
        "ms_per_token": 1e3 * statistics.median(step_s) / batch.num_real_tokens,
        "tflop": flop / 1e12,
        "mfu_forward_backward": flop / statistics.median(forward_backward_s) / PEAK_FLOPS,
        "mfu_step": flop / statistics.median(step_s) / PEAK_FLOPS,
        "peak_gb": torch.cuda.max_memory_allocated() / 1e9,
        "reserved_gb": torch.cuda.max_memory_reserved() / 1e9,
        "value": value,
    }


def step_flop(config: Mapping[str, Any], num_documents: int) -> float:
    """See the module's text."""
    hidden, layers = config["hidden_size"], config["num_hidden_layers"]
    heads, kv_heads, head_dim = config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]
    block = hidden * head_dim * (2 * heads + 2 * kv_heads) + 3 * hidden * config["intermediate_size"]
    length = TOKENS // num_documents
    labels = TOKENS - num_documents
    attention = 12 * layers * heads * head_dim * num_documents * length**2 / 2
    return 6 * layers * block * TOKENS + 6 * config["vocab_size"] * hidden * labels + attention


def explained(steps: Steps, config: Mapping[str, Any]) -> dict[str, Any]:
    """Where the host waited in a step, and the kernels that took most of one."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    batch = pack_of(DOCUMENTS[0], config["vocab_size"])
    found: dict[str, Any] = {}
    try:
        torch.cuda.set_sync_debug_mode("warn")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            steps.forward_backward(batch)
            steps.optim_step()
        places = [f"{Path(w.filename).name}:{w.lineno}" for w in caught if "synchroniz" in str(w.message)]
        found["host_waits"] = {place: places.count(place) for place in dict.fromkeys(places)}
    finally:
        torch.cuda.set_sync_debug_mode("default")
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        steps.forward_backward(batch)
        steps.optim_step()
    kernels = sorted(profiler.key_averages(), key=lambda event: -event.self_device_time_total)
    found["kernels_ms"] = {e.key[:90]: round(e.self_device_time_total / 1e3, 2) for e in kernels[:14]}
    found["kernels_total_ms"] = round(sum(e.self_device_time_total for e in kernels) / 1e3, 1)
    return found


# --- All cases ------------------------------------------------------------------------------------------------------


def run_all(cases: Sequence[Case], arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Start all cases; they take the card one after the other when all of them have imported."""
    folder = Path(tempfile.mkdtemp(prefix="gpu_trainers_"))
    started = time.monotonic()
    waiting = [(case, *start_case(case, folder, index, arguments)) for index, case in enumerate(cases)]
    try:
        for _, process, output in waiting:
            while process.poll() is None and not Turn.of(output).ready.exists():
                time.sleep(0.05)
        print(f"[{time.monotonic() - started:5.0f} s] imported", flush=True)
        with the_card(arguments.lock):
            rows = []
            for case, process, output in waiting:
                if time.monotonic() - started > arguments.seconds:
                    rows.append(
                        {"case": case.name, "failed": f"not run: {arguments.seconds:g} s are over", "skipped": True}
                    )
                else:
                    Turn.of(output).go.touch()
                    rows.append(finished_case(case, process, output, arguments.case_seconds))
                print(f"[{time.monotonic() - started:5.0f} s] {summary(rows[-1])}", flush=True)
            return rows
    finally:
        for _, process, _ in waiting:
            process.kill()
            process.wait()


def start_case(
    case: Case, folder: Path, index: int, arguments: argparse.Namespace
) -> tuple[subprocess.Popen[bytes], Path]:
    output = folder / f"{index}.json"
    command = [sys.executable, __file__, "--worker", case.name, "--out", str(output),
               "--repeats", str(arguments.repeats), "--pack-seconds", str(arguments.pack_seconds)]  # fmt: skip
    command += ["--tiny"] * arguments.tiny + ["--all"] * arguments.all
    environment = {
        **os.environ,
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
        "TOKENIZERS_PARALLELISM": "false",
    }
    with (folder / f"{index}.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment)
    return process, output


def finished_case(case: Case, process: subprocess.Popen[bytes], output: Path, timeout_s: float) -> dict[str, Any]:
    """The row of a case, or the end of what it printed."""
    try:
        process.wait(timeout=timeout_s)
        if output.is_file():
            return json.loads(output.read_text())
        failure = f"exit status {process.returncode}"
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        failure = f"no result within {timeout_s:g} s"
    log = output.with_suffix(".log").read_text(errors="replace")
    return {"case": case.name, "failed": failure, "log": log[-3000:]}


def summary(row: Mapping[str, Any]) -> str:
    if "failed" in row:
        return f"{row['case']}: FAILED ({row['failed']})\n{row.get('log', '')}"
    packs = ", ".join(f"{p['documents']} docs {p['step_s']:.3f} s" for p in row["packs"])
    return f"{row['case']}: {packs}; {row['card_s']:.0f} s of the card"


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """One line for each case and pack."""
    lines = [
        f"{'case':44} {'docs':>4} {'fwd+bwd s':>9} {'optim s':>8} {'step s':>7} {'min-max':>13} {'us/token':>8} "
        f"{'MFU f+b':>7} {'MFU':>5} {'peak GB':>7} {'value':>9}"
    ]
    for row in rows:
        if "failed" in row:
            lines.append(f"{row['case']:44} {'' if row.get('skipped') else 'FAILED: '}{row['failed']}")
            continue
        lines += [pack_line(row["case"], pack) for pack in row["packs"]]
        lines.append(
            f"    product {row['product_tflops_before']:.0f} → {row['product_tflops_after']:.0f} TFLOP/s, start "
            f"{row['start_s']:.0f} s, first step {row['packs'][0]['first_s']:.0f} s, host waits {row['host_waits']}"
        )
        if "stopped" in row:
            lines.append(f"    stopped: {row['stopped']}")
    return "\n".join(lines)


def pack_line(case: str, pack: Mapping[str, Any]) -> str:
    return (
        f"{case:44} {pack['documents']:4d} {pack['forward_backward_s']:9.3f} {pack['optim_s']:8.3f} "
        f"{pack['step_s']:7.3f} {pack['step_min_s']:6.3f}-{pack['step_max_s']:.3f} {1e3 * pack['ms_per_token']:8.1f} "
        f"{pack['mfu_forward_backward']:7.1%} {pack['mfu_step']:5.1%} {pack['peak_gb']:7.1f} {pack['value']:9.4f}"
    )


def versions() -> dict[str, str]:
    import importlib.metadata as metadata

    import torch

    found = {name: metadata.version(name) for name in ("transformers", "deepspeed", "ai2-olmo-core", "triton")}
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    return {**found, "torch": torch.__version__, "gpu": gpu}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("gpu_trainers.json"), help="JSON with every number")
    parser.add_argument("--only", help="the case of this name, or all whose name contains this")
    parser.add_argument("--all", action="store_true", help="further cases, and all packs for each of them")
    parser.add_argument("--repeats", type=int, default=5, help="timed steps of a case and pack")
    parser.add_argument("--seconds", type=float, help="after which no further case begins (100; any with --all)")
    parser.add_argument("--case-seconds", type=float, default=110, help="limit of one case")
    parser.add_argument("--pack-seconds", type=float, default=50, help="of a case, after which no further pack starts")
    parser.add_argument("--kernels", action="store_true", help="print the kernels of each case")
    parser.add_argument("--tiny", action="store_true", help="a model of two small layers, to try the script itself")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--lock", type=Path, help="file lock of the card; the script waits for it")
    arguments = parser.parse_args()
    if arguments.seconds is None:
        arguments.seconds = math.inf if arguments.all else 100.0
    config = _TINY if arguments.tiny else QWEN3_4B
    if arguments.worker:
        case = next(case for case in every_case(every_pack=arguments.all) if case.name == arguments.worker)
        try:
            turn = Turn.of(arguments.out)
            row = run_case(case, config, turn=turn, repeats=arguments.repeats, deadline_s=arguments.pack_seconds)
        except Exception as error:  # noqa: BLE001 process boundary: the failure is the row
            text = "".join(traceback.format_exception(error, limit=-8))
            row = {"case": case.name, "failed": f"{type(error).__name__}: {error}"[:300], "log": text[-3000:]}
        arguments.out.write_text(json.dumps(row))
        os._exit(0)  # process groups and compilers leave threads behind that wait for nothing
    cases = chosen_cases(arguments.only, further=arguments.all)
    rows = run_all(cases, arguments)
    arguments.out.write_text(json.dumps({"versions": versions(), "cases": [asdict(c) for c in cases], "rows": rows}))
    print(table(rows))
    if arguments.kernels:
        for row in rows:
            print(json.dumps({row["case"]: row.get("kernels_ms", row.get("failed"))}, indent=1))
    sys.exit(any("failed" in row and "skipped" not in row for row in rows))


if __name__ == "__main__":
    main()
