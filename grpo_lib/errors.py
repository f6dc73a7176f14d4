"""Errors a user can act on: each message carries the rule, the offending values and the way out."""

from collections.abc import Sequence


class GrpoError(Exception):
    """Base of every error this project raises for a cause outside its own code."""


class ConfigError(GrpoError, ValueError):
    """The configuration breaks one or more rules; `problems` holds one message per rule."""

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(self.problems))

    def __reduce__(self) -> tuple[type["ConfigError"], tuple[tuple[str, ...]]]:
        return type(self), (self.problems,)


class PreflightError(GrpoError):
    """The machine cannot hold the run: devices, memory, disk or packages fall short, with the figures."""


class DataError(GrpoError, ValueError):
    """Rows, shards or a model folder are missing, malformed or empty."""


class StorageError(GrpoError):
    """A file or stored object cannot be written, found or trusted; the message names path, bytes and the way out."""


class ArtifactLost(StorageError):
    """What was stored is gone or has other bytes; to ask again is of no use, while every other failure may pass."""


class RunBusy(GrpoError):
    """Another process works on the run; the message says which, where, and when it was last heard of."""


class DeadlineExceeded(GrpoError, TimeoutError):
    """A wait ran past its deadline.

    Args:
        stage: What the program was doing, e.g. ``"weight sync"``.
        waited_for: What did not arrive, naming ranks or engines, e.g. ``"ranks [1] of 2"``.
        deadline_s: The deadline in seconds.
        setting: Config key that raises the deadline, e.g. ``"deadlines.barrier_s"``.
    """

    def __init__(self, *, stage: str, waited_for: str, deadline_s: float, setting: str) -> None:
        self.stage, self.waited_for, self.deadline_s, self.setting = stage, waited_for, deadline_s, setting
        super().__init__(
            f"{stage}: {waited_for} did not arrive within {deadline_s:g} s; "
            f"look at their logs, or raise {setting} if they were only slow"
        )

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild_deadline, (self.stage, self.waited_for, self.deadline_s, self.setting)


def _rebuild_deadline(stage: str, waited_for: str, deadline_s: float, setting: str) -> DeadlineExceeded:
    return DeadlineExceeded(stage=stage, waited_for=waited_for, deadline_s=deadline_s, setting=setting)


class NonFiniteLogprobs(GrpoError):
    """A trained token has a NaN or infinite log-probability; the message names the samples."""


class NonFiniteGradient(GrpoError):
    """The global gradient norm is NaN or infinite; the optimiser step was not applied."""


class WeightSyncError(GrpoError):
    """Sender and engine disagree after a weight transfer: names, checksums, version or decode canary."""


class StalenessError(GrpoError):
    """A rollout is older than `loop.max_staleness`, or engine and trainer versions differ after a push."""


class MismatchError(GrpoError):
    """Sampler and trainer disagree about more tokens than the configuration tolerates."""


class NoLearningSignal(GrpoError):
    """Too many draws or steps in a row had no group with any spread in its rewards."""


class VerifierOutage(GrpoError):
    """Too many verdicts are `failed`: the judge is broken, so the rewards mean nothing."""


class RankFailure(GrpoError):
    """A rank or engine actor raised or died; the message names it and carries the cause."""


class ParityFailure(GrpoError):
    """The parity report's verdict is FAIL; the report is stored before this is raised."""
