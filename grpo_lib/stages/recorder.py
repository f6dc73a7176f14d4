"""What `fit` leaves behind on disk, written as it happens."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

from pydantic import TypeAdapter

from grpo_lib.algo.advantages import GroupAssessment
from grpo_lib.config import RunConfig
from grpo_lib.data.files import append_json_line
from grpo_lib.interfaces import Tracker, TrainerGroup
from grpo_lib.loop import StepRecord
from grpo_lib.stages.checkpoints import CheckpointState, CheckpointWriter
from grpo_lib.stages.published import publish_checkpoint
from grpo_lib.stages.run_paths import RunPaths
from grpo_lib.storage.rollouts import write_rollouts
from grpo_lib.tracking import MetricsFile
from grpo_lib.types import RolloutGroup, SyncCertificate

log = logging.getLogger(__name__)

_CERTIFICATE = TypeAdapter(SyncCertificate)
_SETTING = "storage.root"
_RECENT_STEPS = 20  # that the time left is estimated from


class DiskRecorder:
    """`RunRecorder`: metrics, certificates, rollouts and checkpoints of one run.

    Rollouts are written by a thread of their own while the trainer works on them; the step's metrics, which say that
    the step is done, wait for them. A checkpoint is written during the steps after it and becomes visible at the next
    call that finds it complete; what went wrong with it is raised there.

    Args:
        trainer: Whose state checkpoints hold.
        trackers: Where metrics go besides the metrics file; the caller closes them.
        tracker_run_id: The wandb run, which a checkpoint names so that a resumed run continues it.
        on_step: Told of every finished step.
    """

    def __init__(
        self,
        config: RunConfig,
        paths: RunPaths,
        *,
        trainer: TrainerGroup,
        trackers: Sequence[Tracker] = (),
        tracker_run_id: str | None = None,
        on_step: Callable[[StepRecord], None] | None = None,
    ) -> None:
        self._config, self._paths, self._trainer = config, paths, trainer
        self._trackers, self._tracker_run_id, self._on_step = tuple(trackers), tracker_run_id, on_step
        self._store = paths.open_store()
        self._metrics = MetricsFile(paths.metrics)
        self._checkpoints = CheckpointWriter(
            paths,
            trainer,
            loop=config.loop,
            on_visible=lambda path: publish_checkpoint(paths, path, loop=config.loop),
        )
        self._step_s: list[float] = []
        self._writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="rollouts")
        self._written: Future[None] | None = None

    def certificate(self, certificate: SyncCertificate) -> None:
        self._checkpoints.poll()
        append_json_line(self._paths.certificates, _CERTIFICATE.dump_python(certificate, mode="json"), setting=_SETTING)

    def rollouts(self, step: int, groups: tuple[RolloutGroup, ...], assessments: tuple[GroupAssessment, ...]) -> None:
        def write() -> None:
            ref = write_rollouts(self._store, step=step, groups=groups, assessments=assessments)
            append_json_line(self._paths.rollout_index, {"step": step, **ref.to_dict()}, setting=_SETTING)

        self._written = self._writer.submit(write)
        self._checkpoints.poll()

    def flush(self) -> None:
        """Wait until the step's rollouts are on disk; raises what went wrong there."""
        written, self._written = self._written, None
        if written is not None:
            written.result()

    def checkpoint(self, step: int, prompt_state: dict[str, int], empty_steps: int) -> None:
        """Begin one, behind the steps that follow; it becomes visible after this step's row. See `CheckpointWriter`."""
        self._checkpoints.begin(
            CheckpointState(
                run_id=self._paths.run_id,
                steps_done=step,
                empty_steps=empty_steps,
                policy_version=self._trainer.policy_version,
                prompts=prompt_state,
                tracker_run_id=self._tracker_run_id,
            )
        )

    def step(self, record: StepRecord) -> None:
        row = {"step": record.step, "policy_version": record.policy_version, **record.metrics}
        self._metrics.append(row)
        for tracker in self._trackers:
            tracker.log(record.step, record.metrics)
        log.info(self._line(record))
        if self._on_step is not None:
            self._on_step(record)
        self._checkpoints.recorded(record.step)

    def finish(self) -> None:
        """After the last step: wait for its checkpoint, and keep the metrics as Parquet too."""
        self.flush()
        self._checkpoints.finish()
        self._metrics.write_parquet()

    def close(self) -> None:
        """End the writers. Rollouts that nobody waited for belong to a step that failed: its error is on the way up, so
        a second one is logged and not raised over it."""
        self._checkpoints.close()
        self._writer.shutdown(wait=True)
        if self._written is not None and (error := self._written.exception()) is not None:
            log.error("the rollouts of the step that failed are not stored either: %s", error)

    def _line(self, record: StepRecord) -> str:
        metrics = record.metrics
        self._step_s.append(metrics["time/step_s"])
        recent = self._step_s[-_RECENT_STEPS:]
        left_s = (self._config.loop.steps - record.step) * sum(recent) / len(recent)
        trained = (
            f"loss {metrics['loss/policy']:+.4f}  grad {metrics['optim/grad_norm']:.3f}"
            if record.applied
            else "not applied: no group has any spread"
        )
        return (
            f"step {record.step}/{self._config.loop.steps}  reward {metrics['reward/mean']:.3f}  {trained}  "
            f"{metrics['time/step_s']:.2f} s  ETA {timedelta(seconds=round(left_s))}"
        )


def read_certificates(path: Path) -> list[SyncCertificate]:
    """Certificates of every push, in order."""
    return [_CERTIFICATE.validate_json(line) for line in path.read_text(encoding="utf-8").splitlines()]
