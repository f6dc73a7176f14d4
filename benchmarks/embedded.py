"""The loop without Metaflow, measured: `python benchmarks/embedded.py --out DIR` ends with one JSON line.

Seconds are wall seconds of this machine; `cpu_s_per_step` counts every process of the run, driver, ranks, engine and
Ray's own. `rss_mb` is the largest sum of resident memory over all processes, sampled four times a second.
"""

from __future__ import annotations

import argparse
import json
import statistics
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from grpo_lib.config import RunConfig
from grpo_lib.loop import StepRecord
from grpo_lib.stages import begin, evaluate, fit, prepare_data
from grpo_lib.stages.run_paths import RunPaths

_REWARD_GOAL = 0.8
_COLD_STEPS = 5  # fill caches
_REWARD_WINDOW = 10  # steps averaged, so that one lucky batch is not the goal


class ProcessTree:
    """Samples memory and CPU time of this process and all its descendants."""

    def __init__(self, period_s: float = 0.25) -> None:
        self._period_s = period_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._lock = threading.Lock()  # `cpu_s` samples too
        self._cpu: dict[int, float] = {}
        self.peak_rss_bytes = 0

    def __enter__(self) -> ProcessTree:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def cpu_s(self) -> float:
        """CPU seconds so far; a process that ended counts with its last sample."""
        self._sample()
        with self._lock:
            return sum(self._cpu.values())

    def _run(self) -> None:
        while not self._stop.wait(self._period_s):
            self._sample()

    def _sample(self) -> None:
        me = psutil.Process()
        rss = 0
        for process in [me, *me.children(recursive=True)]:
            try:
                with self._lock, process.oneshot():
                    times = process.cpu_times()
                    self._cpu[process.pid] = times.user + times.system
                    rss += process.memory_info().rss
            except psutil.NoSuchProcess:
                continue
        self.peak_rss_bytes = max(self.peak_rss_bytes, rss)


@dataclass
class Observed:
    """What the run showed while it ran."""

    tree: ProcessTree
    started: float
    rewards: list[float]
    step_s: list[float]
    last_step: int
    warm_cpu_s: float = 0.0  # CPU seconds of the warm steps; sampling each of them would cost milliseconds of it
    to_goal_s: float | None = None

    def on_step(self, record: StepRecord) -> None:
        self.rewards.append(record.metrics["reward/mean"])
        self.step_s.append(record.metrics["time/step_s"])
        if record.step == _COLD_STEPS:
            self.warm_cpu_s = -self.tree.cpu_s()
        elif record.step == self.last_step:
            self.warm_cpu_s += self.tree.cpu_s()
        recent = self.rewards[-_REWARD_WINDOW:]
        if self.to_goal_s is None and len(recent) == _REWARD_WINDOW and statistics.mean(recent) >= _REWARD_GOAL:
            self.to_goal_s = time.perf_counter() - self.started


def measure(config: RunConfig) -> dict[str, Any]:
    """One run: prepare, fit, evaluate."""
    paths = RunPaths.of(config, f"embedded-seed{config.seed}")
    prepare_data.run(config, paths)
    with ProcessTree() as tree:
        observed = Observed(tree=tree, started=time.perf_counter(), rewards=[], step_s=[], last_step=config.loop.steps)
        training = fit.run(config, paths, run_id=paths.run.name, on_step=observed.on_step, from_shards=False)
        evaluation = evaluate.run(config, paths, policy_version=training.policy_version).evaluation
    at_100 = observed.rewards[99 - _REWARD_WINDOW + 1 : 100]
    warm = observed.step_s[_COLD_STEPS:]
    return {
        "system": f"grpo_lib/{config.trainer.backend}",
        "seed": config.seed,
        "threads": config.runtime.threads_per_process,
        "s_per_step_median": statistics.median(warm),
        "cpu_s_per_step": observed.warm_cpu_s / len(warm),
        "start_s": training.start_s,
        "wall_to_0_8": observed.to_goal_s,
        "reward_at_100": statistics.mean(at_100) if len(observed.rewards) >= 100 else None,
        "heldout_before": evaluation["before"]["sampled_pass_at_1"]["value"],
        "heldout_acc": evaluation["after"]["sampled_pass_at_1"]["value"],
        "greedy_before": evaluation["before"]["greedy_pass_at_1"]["value"],
        "greedy_acc": evaluation["after"]["greedy_pass_at_1"]["value"],
        "rss_mb": tree.peak_rss_bytes / 2**20,
        "spans_median_s": training.spans_median_s,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="embedded_addition")
    parser.add_argument("--trainer", default="olmo_core")
    parser.add_argument("--model", help="Hugging Face folder; the recipe's model when absent")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--steps", type=int, help="GRPO steps; the recipe's when absent")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    arguments = parser.parse_args()
    if arguments.steps is not None and arguments.steps <= _COLD_STEPS:
        parser.error(f"--steps must be above {_COLD_STEPS}, which are not measured")
    overrides = [
        *arguments.set,
        f"storage.root={json.dumps(str(arguments.out))}",
        f"runtime.threads_per_process={arguments.threads}",
        *([f"model.path={json.dumps(arguments.model)}"] if arguments.model else []),
        *([f"loop.steps={arguments.steps}"] if arguments.steps else []),
    ]
    setup = begin.run(recipe=arguments.recipe, overrides=overrides, trainer=arguments.trainer, seed=arguments.seed)
    print(json.dumps(measure(setup.config)))


if __name__ == "__main__":
    main()
