"""Log-probabilities of trained weights: the engine and both trainers on the same sampled tokens, on one GPU.

    grpo get-model smollm2_135m
    python benchmarks/gpu_parity.py --model ~/.cache/grpo/models/smollm2_135m --out parity.json

The engine samples chat answers and three-shot sums at temperature 1 until there are `--tokens` of them; both trainers
score them in packs of 10 240 tokens. All three are processes of their own that import side by side. Each trainer also
scores some of the documents again: among other documents, and alone. That changes nothing in exact arithmetic and
should change no bit either. The engine scores a part of its own tokens by prefill, which is the noise between two right
ways through one engine.

The distances are those of `grpo_lib.parity.probe`. Without a GPU everything runs in float32 on the CPU; with few tokens
(`--tokens 200 --longest 16 --repacked 4`) that is enough to try the script.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from card import the_card
from parity_requests import RESPONSE_LIMITS, as_group, requests

if TYPE_CHECKING:
    from grpo_lib.config import RunConfig
    from grpo_lib.parity.probe import PairStatistics
    from grpo_lib.types import Completion, GenerationRequest, RolloutGroup, StepPlan

PACK = 10_240
TRAINERS = ("olmo_core", "hf_deepspeed")
ENGINE = "engine"
NO_WORSE = 1.01  # times the other's mean: five standard errors of a mean over so many tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """An upper limit of the default recipe, for each trainer against the engine."""

    name: str
    value: Callable[[PairStatistics], float]
    limit: float


TARGETS = (
    Target(name="mean |d|", value=lambda pair: pair.mean_abs, limit=0.032),
    Target(name="outside [0.9, 1.1]", value=lambda pair: pair.below_band + pair.above_band, limit=0.05),
    Target(name="k3", value=lambda pair: pair.k3, limit=1.2e-3),
    Target(name="non-finite", value=lambda pair: pair.nan_count, limit=0),
)


def run_config(model: Path) -> RunConfig:
    """The recipe with room for long answers, compiled on a GPU and in float32 on a CPU."""
    import torch

    from grpo_lib.config import resolve

    overrides = [f"model.path={model}", "data.max_prompt_tokens=128", f"rollout.max_tokens={RESPONSE_LIMITS[-1]}",
                 f"trainer.pack_length={PACK}", "rollout.max_num_seqs=512"]  # fmt: skip
    if torch.cuda.is_available():
        overrides += ["trainer.compile=true", "trainer.logprob_recompute=false"]
    else:
        overrides += ["model.dtype=float32", "runtime.gpus_per_rank=0", "runtime.gpus_per_engine=0",
                      "weight_sync.backend=cpu_gloo", "rollout.kv_cache_mib=512", "trainer.compile=false",
                      "runtime.threads_per_process=1"]  # fmt: skip
    return resolve("smollm2_addition", overrides)


# --- The engine's process ---------------------------------------------------------------------------------------------


def run_engine(work: Path, options: argparse.Namespace) -> None:
    """Sample, store, and score a part by prefill."""
    from grpo_lib.algo.advantages import assess_group
    from grpo_lib.parity.probe import ENGINE_SCORE
    from grpo_lib.rollout.options import prepare_process
    from grpo_lib.stages.live import engine_factory
    from grpo_lib.stages.scorers import ScoredBySequence
    from grpo_lib.storage.local import LocalStore
    from grpo_lib.storage.rollouts import write_rollouts

    config = run_config(options.model)
    prepare_process(config.runtime.threads_per_process)
    import_module("vllm.v1.engine.llm_engine")
    announce(work, ENGINE)
    clock = Clock()
    engine = engine_factory(config, options.model, policy_version=0, index=0)()
    clock.lap("start")
    groups = sampled(engine, requests(config, options.model, options.longest), options.tokens)
    clock.lap("sample")
    assessed = [assess_group(group, kind="centered", correct_reward=1.0) for group in groups]
    ref = write_rollouts(LocalStore(work / "store"), step=0, groups=groups, assessments=assessed)
    hand_over(work / "rollouts.json", ref.to_dict())
    part = first_tokens(groups, options.prefill_tokens)
    clock.lap("store")
    scores = ScoredBySequence(name=ENGINE_SCORE, scorer=engine).score(part)
    clock.lap("prefill")
    hand_over(work / f"{ENGINE}.json", {"scores": {"prefill": stored(work, scores)}, "seconds": clock.laps})
    engine.close()


def sampled(engine: Any, wanted: Iterator[tuple[GenerationRequest, str]], num_tokens: int) -> tuple[RolloutGroup, ...]:
    """Completions in the order of their requests, in waves until there are enough tokens."""
    groups: list[RolloutGroup] = []
    tokens, wave = 0, max(4, num_tokens // 220)  # about what an answer has
    while tokens < num_tokens:
        asked = {request.request_id: (request, text) for request, text in islice(wanted, wave)}
        engine.submit([request for request, _ in asked.values()])
        done: dict[str, Completion] = {}
        while len(done) < len(asked):
            done.update((completion.request_id, completion) for completion in engine.poll(1.0))
        groups += [as_group(*asked[name], done[name]) for name in asked]
        tokens = num_response_tokens(groups)
        wave = max(4, int(1.1 * (num_tokens - tokens) / (tokens / len(groups))))
    return tuple(groups)


def num_response_tokens(groups: Sequence[RolloutGroup]) -> int:
    return sum(len(group.rollouts[0].completion.token_ids) for group in groups)


def first_tokens(groups: Sequence[RolloutGroup], num_tokens: int) -> Sequence[RolloutGroup]:
    """The first groups that hold about so many tokens."""
    ends = np.cumsum([len(group.rollouts[0].completion.token_ids) for group in groups])
    return groups[: int(np.searchsorted(ends, num_tokens)) + 1]


# --- A trainer's process ----------------------------------------------------------------------------------------------


class OneRank:
    """As much of a `TrainerGroup` as scoring takes, around the one rank of this process."""

    num_ranks = 1

    def __init__(self, backend: Any) -> None:
        self._backend = backend

    def logprobs(self, plan: StepPlan) -> tuple[tuple[Any, ...], ...]:
        return (tuple(self._backend.logprobs(batch) for batch in plan.micro_batches[0]),)


def run_trainer(name: str, work: Path, options: argparse.Namespace) -> None:
    """Score all documents packed, and some of them packed otherwise."""
    if name == "hf_deepspeed":
        import torch

        os.environ["DS_ACCELERATOR"] = "cuda" if torch.cuda.is_available() else "cpu"
        import_module("deepspeed")
    from grpo_lib.stages.scorers import stored_documents
    from grpo_lib.stages.trainer_rank import backend_class, build_trainer

    config = run_config(options.model)
    config = config.model_copy(update={"trainer": config.trainer.model_copy(update={"backend": name})})
    backend_class(name)
    announce(work, name)
    clock = Clock()
    trainer = OneRank(build_trainer(config, options.model, 0, trainable=True))
    clock.lap("start")
    documents = stored_documents(read_groups(work, awaited(work / "rollouts.json", options.seconds)))
    clock.lap("wait")
    scores = packings(trainer, documents, config, options.repacked, clock)
    kept = {kind: stored(work, values) for kind, values in scores.items()}
    hand_over(work / f"{name}.json", {"scores": kept, "seconds": clock.laps})


def packings(
    trainer: Any, documents: Mapping[str, Any], config: RunConfig, num_alone: int, clock: Clock
) -> dict[str, dict[str, np.ndarray]]:
    """Scores of the same documents by how they were packed. Only `packed` holds all of them."""
    from grpo_lib.stages.scorers import score_packed

    def score(some: Mapping[str, Any], pack_length: int = PACK) -> dict[str, np.ndarray]:
        found = score_packed(trainer, some, config.trainer.model_copy(update={"pack_length": pack_length}))
        clock.lap("score", add=True)
        return found

    names = list(documents)
    found = {"packed": score(documents), "packed again": score(documents), "among others": {}}
    for half in (names[::2], names[1::2]):  # every document gets other neighbours and another place
        found["among others"] |= score({name: documents[name] for name in half})
    lengths = {name: len(prompt) + len(response) for name, (prompt, response) in documents.items()}
    by_length = sorted(names, key=lengths.__getitem__)
    alone = by_length[:: max(1, len(names) // num_alone)][:num_alone]
    found["alone in its row"] = {
        key: value for name in alone for key, value in score({name: documents[name]}, lengths[name]).items()
    }
    return found


# --- Between the processes --------------------------------------------------------------------------------------------


class Clock:
    """Seconds between laps."""

    def __init__(self) -> None:
        self.laps: dict[str, float] = {}
        self._last = time.monotonic()

    def lap(self, name: str, *, add: bool = False) -> None:
        now = time.monotonic()
        self.laps[name] = round(now - self._last + (self.laps.get(name, 0.0) if add else 0.0), 2)
        self._last = now


def announce(work: Path, name: str) -> None:
    """Say that everything is imported, and wait for the card."""
    hand_over(work / f"{name}.ready", {})
    awaited(work / "go", 600.0)


def hand_over(path: Path, content: Mapping[str, Any]) -> None:
    """Whole or not at all."""
    partial = path.with_name(f".{path.name}")
    partial.write_text(json.dumps(content))
    partial.rename(path)


def awaited(path: Path, deadline_s: float) -> Any:
    end = time.monotonic() + deadline_s
    while not path.is_file():
        if time.monotonic() > end:
            raise TimeoutError(f"{path.name} did not come within {deadline_s:g} s; raise --seconds")
        time.sleep(0.05)
    return json.loads(path.read_text())


def stored(work: Path, scores: Mapping[str, np.ndarray]) -> dict[str, Any]:
    from grpo_lib.storage.local import LocalStore
    from grpo_lib.storage.scores import write_scores

    return write_scores(LocalStore(work / "store"), scores).to_dict()


def read_back(work: Path, ref: Mapping[str, Any]) -> dict[str, np.ndarray]:
    from grpo_lib.storage.local import LocalStore
    from grpo_lib.storage.refs import StoreRef
    from grpo_lib.storage.scores import read_scores

    return read_scores(LocalStore(work / "store"), StoreRef.from_dict(dict(ref)))


def read_groups(work: Path, ref: Mapping[str, Any]) -> tuple[RolloutGroup, ...]:
    from grpo_lib.storage.local import LocalStore
    from grpo_lib.storage.refs import StoreRef
    from grpo_lib.storage.rollouts import read_rollouts

    return read_rollouts(LocalStore(work / "store"), StoreRef.from_dict(dict(ref))).groups


def run_worker(name: str, work: Path, options: argparse.Namespace) -> None:
    try:
        if name == ENGINE:
            run_engine(work, options)
        else:
            run_trainer(name, work, options)
    except BaseException as error:  # noqa: BLE001 process boundary: the failure is the result
        text = "".join(traceback.format_exception(error, limit=-8))
        hand_over(work / f"{name}.json", {"failed": f"{type(error).__name__}: {error}"[:500], "log": text[-3000:]})
        hand_over(work / f"{name}.ready", {})
    os._exit(0)  # process groups and compilers leave threads behind that wait for nothing


# --- The comparison ---------------------------------------------------------------------------------------------------


def run_all(work: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Start the processes, give them the card, compare what they found."""
    names = (ENGINE, *TRAINERS)
    processes = {name: start(name, work, options) for name in names}
    try:
        for name in names:
            awaited(work / f"{name}.ready", options.seconds)
        with the_card(options.lock):
            began = time.monotonic()
            hand_over(work / "go", {})
            results = {ENGINE: result_of(ENGINE, processes[ENGINE], work, options.seconds)}
            if "failed" not in results[ENGINE]:  # else the trainers wait in vain
                results |= {name: result_of(name, processes[name], work, options.seconds) for name in TRAINERS}
            card_s = time.monotonic() - began
    finally:
        for process in processes.values():
            process.kill()
            process.wait()
    failed = {name: result for name, result in results.items() if "failed" in result}
    rows = {} if failed else compared(work, results)
    return {
        "versions": versions(),
        "options": {key: str(value) for key, value in vars(options).items()},
        "card_s": card_s,
        "seconds": {name: result.get("seconds") for name, result in results.items()},
        "failed": failed,
        **rows,
    }


def start(name: str, work: Path, options: argparse.Namespace) -> subprocess.Popen[bytes]:
    command = [sys.executable, __file__, "--worker", name, "--work", str(work), "--model", str(options.model)]
    for key in ("tokens", "longest", "prefill_tokens", "repacked", "seconds"):
        command += [f"--{key.replace('_', '-')}", str(getattr(options, key))]
    environment = {
        **os.environ,
        "TOKENIZERS_PARALLELISM": "false",
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
    }
    if name == ENGINE:
        del environment["PYTORCH_CUDA_ALLOC_CONF"]  # vLLM's graphs and pools bring their own settings
    with (work / f"{name}.log").open("wb") as log:
        return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment)


def result_of(name: str, process: subprocess.Popen[bytes], work: Path, deadline_s: float) -> dict[str, Any]:
    try:
        process.wait(timeout=deadline_s)
    except subprocess.TimeoutExpired:
        return {"failed": f"no result within {deadline_s:g} s", "log": tail(work, name)}
    path = work / f"{name}.json"
    if path.is_file():
        return json.loads(path.read_text())
    return {"failed": f"exit status {process.returncode}", "log": tail(work, name)}


def tail(work: Path, name: str) -> str:
    return (work / f"{name}.log").read_text(errors="replace")[-3000:]


def compared(work: Path, results: Mapping[str, Any]) -> dict[str, Any]:
    """Every pair, each trainer against itself, and what is asked of them."""
    from grpo_lib.parity.probe import ENGINE_DECODE, ENGINE_SCORE, StoredLogprobs, compare, probe
    from grpo_lib.stages.scorers import ScoredBefore

    groups = read_groups(work, json.loads((work / "rollouts.json").read_text()))
    found = {name: {kind: read_back(work, ref) for kind, ref in results[name]["scores"].items()} for name in results}
    scorers = [StoredLogprobs(), *(ScoredBefore(name=name, scores=found[name]["packed"]) for name in TRAINERS)]
    pairs = list(probe(groups, scorers, policy_version=0, cap=2.0))
    decoded = StoredLogprobs().score(groups)
    prefill = found[ENGINE]["prefill"]
    own = {name: decoded[name] for name in prefill}
    noise = compare(ENGINE_SCORE, prefill, ENGINE_DECODE, own, cap=2.0)
    repacked = [
        compare(
            f"{name}, {kind}", scores, f"{name}, packed", {key: found[name]["packed"][key] for key in scores}, cap=2.0
        )
        for name in TRAINERS
        for kind, scores in found[name].items()
        if kind != "packed"
    ]
    lengths = [len(g.prompt.token_ids) + len(g.rollouts[0].completion.token_ids) for g in groups]
    return {
        "documents": len(groups),
        "lengths": {f"p{q}": float(np.percentile(lengths, q)) for q in (5, 50, 95, 100)},
        "pairs": [row(pair) for pair in [*pairs, noise]],
        "repacked": [row(pair) for pair in repacked],
        "targets": targets(pairs, repacked),
    }


def row(pair: PairStatistics) -> dict[str, Any]:
    return {**pair.to_dict(), "outside_band": pair.below_band + pair.above_band, "histogram": pair.histogram}


def targets(pairs: Sequence[PairStatistics], repacked: Sequence[PairStatistics]) -> list[dict[str, Any]]:
    """Of each trainer against the engine, of one against the other, and of each against itself."""
    from grpo_lib.parity.probe import ENGINE_DECODE

    by_name = {pair.name_a: pair for pair in pairs if pair.name_b == ENGINE_DECODE}
    asked = [
        (f"{name}: {target.name}", target.value(by_name[name]), target.limit) for name in TRAINERS for target in TARGETS
    ]
    ours, other = (by_name[name].mean_abs for name in TRAINERS)
    asked.append((f"{TRAINERS[0]} no worse than {TRAINERS[1]}: mean |d|", ours, NO_WORSE * other))
    asked += [(f"{pair.name_a}: max |d|", pair.max_abs, 0.0) for pair in repacked]
    return [{"target": name, "value": value, "limit": limit, "met": value <= limit} for name, value, limit in asked]


def versions() -> dict[str, str]:
    import torch

    names = ("transformers", "ai2-olmo-core", "deepspeed", "triton", "vllm")
    known = {dist.metadata["Name"].lower(): dist.version for dist in importlib.metadata.distributions()}
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    return {**{name: known[name] for name in names if name in known}, "torch": torch.__version__, "gpu": gpu}


def table(result: Mapping[str, Any]) -> str:
    """Every pair of scorers."""
    if result["failed"]:
        return "\n".join(f"{name} FAILED: {one['failed']}\n{one['log']}" for name, one in result["failed"].items())
    lines = [
        f"{result['documents']} documents of {result['lengths']} tokens, {result['card_s']:.0f} s of the card",
        f"{'pair':50} {'tokens':>8} {'mean':>8} {'p99':>7} {'max':>6} {'outside':>8} {'k3':>8} {'r > 2':>5} "
        f"{'95 % interval of its rate':>26} {'NaN':>4}",
    ]
    lines += [pair_line(pair) for pair in (*result["pairs"], *result["repacked"])]
    return "\n".join(lines)


def target_lines(result: Mapping[str, Any]) -> str:
    return "\n".join(
        f"{'met' if one['met'] else 'MISSED':8} {one['target']:60} {one['value']:.4g} (limit {one['limit']:.4g})"
        for one in result.get("targets", ())
    )


def pair_line(pair: Mapping[str, Any]) -> str:
    return (
        f"{pair['name_a'] + ' vs ' + pair['name_b']:50} {pair['num_tokens']:8,} {pair['mean_abs']:8.5f} "
        f"{pair['p99_abs']:7.4f} {pair['max_abs']:6.3f} {pair['outside_band']:8.3%} {pair['k3']:8.1e} "
        f"{pair['tis_clip_count']:5} {pair['tis_clip_low']:12.1e} … {pair['tis_clip_high']:.1e}   {pair['nan_count']:4}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="trained weights, a Hugging Face folder")
    parser.add_argument("--out", type=Path, default=Path("gpu_parity.json"), help="JSON with every number")
    parser.add_argument("--tokens", type=int, default=320_000, help="sampled tokens, at least")
    parser.add_argument("--longest", type=int, default=RESPONSE_LIMITS[-1], help="longest answer")
    parser.add_argument("--prefill-tokens", type=int, default=60_000, help="tokens the engine scores again")
    parser.add_argument("--repacked", type=int, default=100, help="documents that are scored alone")
    parser.add_argument("--seconds", type=float, default=150, help="limit of each process, waiting included")
    parser.add_argument("--lock", type=Path, help="file lock of the card; the script waits for it")
    parser.add_argument("--work", type=Path, help="keep rollouts, scores and logs in this folder")
    parser.add_argument("--worker", choices=(ENGINE, *TRAINERS), help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.model = options.model.resolve()
    if options.worker:
        run_worker(options.worker, options.work, options)
    with tempfile.TemporaryDirectory(prefix="gpu_parity_") as scratch:
        work = (options.work or Path(scratch)).resolve()
        work.mkdir(parents=True, exist_ok=True)
        result = run_all(work, options)
    result["table"] = table(result)
    options.out.write_text(json.dumps(result, indent=1))
    print(result["table"], target_lines(result), sep="\n")
    sys.exit(bool(result["failed"]))


if __name__ == "__main__":
    main()
