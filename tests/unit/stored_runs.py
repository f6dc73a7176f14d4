"""A finished run on disk, written by the code that writes real ones; the parts that compute are fakes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from grpo_lib.algo.advantages import assess_group
from grpo_lib.algo.metrics import rollout_metrics
from grpo_lib.config import config_hash, resolve
from grpo_lib.data.models import resolve_model_path
from grpo_lib.loop import StepRecord
from grpo_lib.stages import prepare_data
from grpo_lib.stages.lineage import lineage
from grpo_lib.stages.recorder import DiskRecorder
from grpo_lib.stages.run_paths import RunPaths
from grpo_lib.stages.stored_run import StoredRun, open_run, write_evaluation, write_run
from grpo_lib.storage.local import LocalStore
from grpo_lib.storage.rollouts import write_rollouts
from tests.unit.algo_cases import make_group, make_rollout
from tests.unit.fakes import FakeEngine, FakeSync, FakeTrainer


def finished_run(
    root: Path,
    run_id: str,
    *,
    rewards: Sequence[Sequence[float]] = ((1.0, 0.0), (0.0, 1.0)),
    overrides: Sequence[str] = (),
) -> StoredRun:
    """A run with one step for each row of rewards; each step has one group, sampled by the version before the step."""
    config = resolve("embedded_addition", [f"loop.steps={len(rewards)}", f"storage.root={root}", *overrides])
    paths = RunPaths.of(config, run_id)
    model = resolve_model_path(config.model.path)
    write_run(paths, run_id=run_id, config=config, config_hash=config_hash(config), lineage=lineage(config, model))
    prepare_data.run(config, paths)
    sync = FakeSync([], FakeEngine([]))
    recorder = DiskRecorder(config, paths, trainer=FakeTrainer([]))
    recorder.certificate(sync.push(0))
    groups = []
    for step, row in enumerate(rewards, start=1):
        group = make_group([make_rollout(index, reward) for index, reward in enumerate(row)])
        assessment = assess_group(group, kind="centered", correct_reward=1.0)
        groups.append((group, assessment))
        recorder.rollouts(step, (group,), (assessment,))
        recorder.flush()
        metrics = rollout_metrics([group], [assessment], policy_version=step - 1).values()
        metrics |= {"loss/policy": 0.25 * step, "optim/grad_norm": 1.0, "optim/applied": 1.0, "time/step_s": 1.0}
        recorder.step(StepRecord(step=step, policy_version=step, applied=True, metrics=metrics))
        recorder.certificate(sync.push(step))
    recorder.close()
    group, assessment = groups[-1]
    probe = write_rollouts(LocalStore(Path(paths.store)), step=len(rewards), groups=[group], assessments=[assessment])
    write_evaluation(
        paths, evaluation={"after": {"accuracy": 0.5, "seconds": 3.0}}, probe_rollouts=probe.to_dict(), policy_version=2
    )
    return open_run(str(paths.run))
