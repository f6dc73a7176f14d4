"""Learning curves on one GPU: a recipe, one run per seed, from prompts to held-out accuracy.

    grpo get-model smollm2_135m
    python benchmarks/gpu_learning.py --out learning --seeds 1 2 3

Each run is `fit` as the flow calls it, with the evaluations on its live engine: of the trained policy, then of the base
model on the same prompts with the same seeds. Runs follow one another. With `--together` they share the card, which
changes the seconds and nothing else: the first one starts ahead, and the others start up once it trains, so that its
step time, printed for the steps before the others' first one, is that of a run alone on the card. `--set` is the
flow's. A run leaves its usual folder, with every metric, certificate and rollout of every step.
"""

from __future__ import annotations

import argparse
import json
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from grpo_lib.config import RunConfig
    from grpo_lib.interfaces import VerifierPool
    from grpo_lib.stages.live import LiveRun

SHOWN_EVERY = 10  # steps of one point of the printed curve
WARM_STEPS = 5  # compile and fill caches
POLL_S = 0.2


def run_seed(config: RunConfig, out: Path) -> dict[str, Any]:
    """One run in this process."""
    from grpo_lib.evaluate import EvaluationResult, EvaluationTable
    from grpo_lib.stages import fit, prepare_data
    from grpo_lib.stages.run_paths import RunPaths
    from grpo_lib.tracking import read_metrics

    paths = RunPaths.of(config, f"seed-{config.seed}")
    prepare_data.run(config, paths)
    tables: dict[str, EvaluationTable] = {}

    def evaluate(live: LiveRun, verifiers: VerifierPool) -> None:
        tables.update(evaluations(config, paths, live, verifiers))

    started = time.monotonic()
    result = fit.run(config, paths, run_id=paths.run.name, from_shards=False, after=evaluate)
    wall_s = time.monotonic() - started
    rows = list(read_metrics(paths.metrics))
    evaluation = EvaluationResult(
        before=tables["before"], after=tables["after"], config=config.evaluation, seed=config.seed
    )
    summary = {
        "seed": config.seed,
        "start_s": result.start_s,
        "fit_and_evaluations_s": wall_s,
        "evaluation_s": {name: table.seconds for name, table in tables.items()},
        "spans_median_s": result.spans_median_s,
        "reward": [row["reward/mean"] for row in rows],
        "step_s": [row["time/step_s"] for row in rows],
        "mismatch_abs_mean": [row.get("mismatch/abs_mean") for row in rows],
        "tis_clip_count": sum(int(row.get("mismatch/tis_clip_count") or 0) for row in rows),
        "trained_tokens": sum(int(row.get("batch/trained_tokens") or 0) for row in rows),
        "grad_norm": [row.get("optim/grad_norm") for row in rows],
        "kept_groups": [row.get("group/kept") for row in rows],
        "evaluation": evaluation.to_dict(),
    }
    out.write_text(json.dumps(summary, indent=1))
    return summary


def evaluations(config: RunConfig, paths: Any, live: LiveRun, verifiers: VerifierPool) -> dict[str, Any]:
    """The policy that the engines hold, then the base model in the same engines."""
    from grpo_lib.data.chat import load_tokenizer, stop_token_ids, token_decoder
    from grpo_lib.data.models import resolve_model_path
    from grpo_lib.data.prompts import Split
    from grpo_lib.data.store import read_prompts
    from grpo_lib.evaluate import evaluate_policy

    model = resolve_model_path(config.model.path)
    tokenizer = load_tokenizer(model)
    stops, decode = stop_token_ids(model, tokenizer, config.rollout.stop_at), token_decoder(tokenizer)
    prompts = read_prompts(paths.data, Split.HELDOUT)

    def evaluated() -> Any:
        return evaluate_policy(
            live.engines, prompts, verifiers, decode, config, stop_token_ids=stops, run_seed=config.seed
        )

    after = evaluated()
    live.engines.pause()
    live.engines.load_weights(model, 0)
    live.engines.resume()
    return {"before": evaluated(), "after": after}


def run_all(options: argparse.Namespace) -> list[dict[str, Any]]:
    """A process per seed: each has a Ray cluster of its own."""
    results: list[dict[str, Any]] = []
    running: list[tuple[int, subprocess.Popen[bytes]]] = []
    alone, deadline = 0, time.monotonic() + options.seconds
    try:
        for seed in options.seeds:
            running.append((seed, start(seed, options)))
            if not options.together:
                results.append(finished(*running.pop(), options, time.monotonic() + options.seconds))
            elif len(running) == 1:
                wait_for_step(*running[0], options, deadline)
        if options.together and len(running) > 1:
            wait_for_step(*running[1], options, deadline)
            alone = num_steps(options.seeds[0], options)
        results += [finished(seed, process, options, deadline) for seed, process in running]
        if alone > WARM_STEPS and "failed" not in results[0]:
            results[0]["alone_step_s"] = statistics.median(results[0]["step_s"][WARM_STEPS:alone])
            results[0]["alone_steps"] = alone - WARM_STEPS
    finally:
        for _, process in running:
            stop(process)
    return results


def wait_for_step(seed: int, process: subprocess.Popen[bytes], options: argparse.Namespace, deadline: float) -> None:
    """Until a run has done its first step, or has ended."""
    while not num_steps(seed, options) and process.poll() is None and time.monotonic() < deadline:
        time.sleep(POLL_S)


def num_steps(seed: int, options: argparse.Namespace) -> int:
    metrics = options.out / "runs" / f"seed-{seed}" / "metrics.jsonl"
    return len(metrics.read_bytes().splitlines()) if metrics.is_file() else 0


def stop(process: subprocess.Popen[bytes]) -> None:
    """As from a keyboard, so that a run ends the cluster it started."""
    process.send_signal(signal.SIGINT)
    try:
        process.wait(timeout=30)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def start(seed: int, options: argparse.Namespace) -> subprocess.Popen[bytes]:
    command = [sys.executable, __file__, "--worker", "--seeds", str(seed), "--out", str(options.out)]
    command += ["--recipe", options.recipe]
    command += [part for override in options.overrides for part in ("--set", override)]
    with log_of(options.out, seed).open("wb") as log:
        return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)


def finished(
    seed: int, process: subprocess.Popen[bytes], options: argparse.Namespace, deadline: float
) -> dict[str, Any]:
    """What a run left, or how it failed."""
    try:
        process.wait(timeout=max(deadline - time.monotonic(), 0.0))
    except subprocess.TimeoutExpired:
        stop(process)
    if (path := result_of(options.out, seed)).is_file():
        return json.loads(path.read_text())
    log = log_of(options.out, seed).read_text(errors="replace")
    return {"seed": seed, "failed": f"exit status {process.poll()}", "log": log[-3000:]}


def log_of(out: Path, seed: int) -> Path:
    return out / f"seed-{seed}.log"


def result_of(out: Path, seed: int) -> Path:
    return out / f"seed-{seed}.json"


def table(results: Sequence[Mapping[str, Any]]) -> str:
    """Accuracy with its interval, seconds, and the curve."""
    lines = [f"{'seed':>4}  {'held-out, sampled':>36}  {'greedy':>12}  {'s/step':>6}  {'start s':>7}  clipped"]
    for one in results:
        if "failed" in one:
            lines.append(f"{one['seed']:4}  FAILED: {one['failed']}\n{one['log']}")
            continue
        sides = [one["evaluation"][side] for side in ("before", "after")]
        sampled = " → ".join(interval(side["sampled_pass_at_1"]) for side in sides)
        greedy = " → ".join(f"{side['greedy_pass_at_1']['value']:.3f}" for side in sides)
        lines.append(
            f"{one['seed']:4}  {sampled:>36}  {greedy:>12}  {one['spans_median_s']['step']:6.3f}  "
            f"{one['start_s']:7.1f}  {one['tis_clip_count']} of {one['trained_tokens']:,}"
        )
    done = [one for one in results if "failed" not in one]
    lines += [
        f"seed {one['seed']}, {one['alone_steps']} steps alone on the card: median {one['alone_step_s']:.3f} s"
        for one in done
        if "alone_step_s" in one
    ]
    lines += [
        f"seed {one['seed']}, median s: " + ", ".join(f"{name} {s:.3f}" for name, s in one["spans_median_s"].items())
        for one in done
    ]
    lines += [f"seed {one['seed']}, mean reward up to step " + curve(one["reward"]) for one in done]
    return "\n".join(lines)


def interval(estimate: Mapping[str, Any]) -> str:
    return f"{estimate['value']:.3f} [{estimate['low']:.3f}, {estimate['high']:.3f}]"


def curve(rewards: Sequence[float]) -> str:
    """E.g. ``10: .213  20: .310``: means over the steps since the number before."""
    starts = range(0, len(rewards), SHOWN_EVERY)
    parts = [rewards[start : start + SHOWN_EVERY] for start in starts]
    return "  ".join(
        f"{start + len(part)}: {sum(part) / len(part):.3f}" for start, part in zip(starts, parts, strict=True)
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("gpu_learning"), help="folder of results, logs and runs")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--together", action="store_true", help="all seeds at once on the card")
    parser.add_argument("--recipe", default="smollm2_addition")
    parser.add_argument("--seconds", type=float, default=420, help="limit of a run, or of all together")
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.out = options.out.resolve()
    options.out.mkdir(parents=True, exist_ok=True)
    if options.worker:
        from grpo_lib.config import resolve

        (seed,) = options.seeds
        config = resolve(options.recipe, [f"storage.root={options.out / 'runs'}", *options.overrides], seed=seed)
        run_seed(config, result_of(options.out, seed))
        return
    results = run_all(options)
    (options.out / "learning.json").write_text(json.dumps(results, indent=1))
    print(table(results))
    sys.exit(any("failed" in one for one in results))


if __name__ == "__main__":
    main()
