"""Where steps run, in which folder and how many at a time, and how a user's mistake is shown."""

# pyright: reportPrivateImportUsage=false, reportAttributeAccessIssue=false
# (metaflow declares no exports)

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from metaflow import FlowMutator, StepMutator, current, user_step_decorator
from metaflow.exception import MetaflowException

from grpo_lib.errors import GrpoError


class StepFailed(MetaflowException):
    """A `GrpoError`: its message is for the user, a traceback would bury it."""

    def __init__(self, error: GrpoError) -> None:
        self.headline = f"{type(error).__name__}"
        super().__init__(str(error))


@user_step_decorator
def users_mistakes(step_name, flow, inputs):
    """Shows a `GrpoError` as its message alone; any other exception keeps its traceback."""
    try:
        yield
    except GrpoError as error:
        raise StepFailed(error) from error


@user_step_decorator
def in_own_folder(step_name, flow, inputs):
    """Gives a run that `resume` made, and that has the paths of its origin, a folder of its own with what it reads."""
    assert current.flow_name is not None, "a step runs in a flow"
    run_id = f"{current.flow_name}/{current.run_id}"
    if current.origin_run_id is not None and flow.paths.run_id != run_id:
        from grpo_lib.metaflow_runs import origins_of
        from grpo_lib.stages.adopt import adopt

        flow.paths = adopt(
            flow.paths,
            run_id=run_id,
            origins=origins_of(current.flow_name, current.origin_run_id),
            step=step_name,
            config=flow.config,
            config_hash=flow.config_hash,
            lineage=flow.lineage,
        )
    yield


def remote_pool(profile: Mapping[str, Any], name: str) -> dict[str, Any] | None:
    """Settings of a pool; None where the profile runs steps locally.

    Raises:
        ValueError: the profile has no such pool.
    """
    if not profile.get("remote"):
        return None
    pools = profile["pools"]
    if name not in pools:
        raise ValueError(f"profile {profile['name']!r} has no pool {name!r}; it has {', '.join(pools)}")
    return dict(pools[name])


def listed(text: str) -> list[str]:
    """The names in an option such as ``"olmo_core, hf_deepspeed"``."""
    return [name.strip() for name in text.split(",") if name.strip()]


class pool(StepMutator):  # noqa: N801  # used as a decorator
    """`@pool("gpu")`: run the step on that pool of the profile.

    A profile with `"remote": true` turns the pool's settings into `@kubernetes` and its `retry` into `@retry`; any
    other profile leaves the step local.
    """

    def init(self, name: str) -> None:
        self.name = name

    def pre_mutate(self, mutable_step) -> None:
        spec = remote_pool(dict(mutable_step.flow.configs)["profile"], self.name)
        if spec is None:
            return
        retry = spec.pop("retry", None)
        mutable_step.add_decorator("kubernetes", deco_kwargs=spec, duplicates=mutable_step.OVERRIDE)
        if retry:
            mutable_step.add_decorator("retry", deco_kwargs=dict(retry), duplicates=mutable_step.OVERRIDE)


class scheduled(FlowMutator):  # noqa: N801  # used as a decorator
    """Adds the profile's `schedule` (a cron line) to the deployed flow."""

    def pre_mutate(self, mutable_flow) -> None:
        profile = dict(mutable_flow.configs)["profile"]
        if profile.get("schedule"):
            mutable_flow.add_decorator("schedule", deco_kwargs={"cron": profile["schedule"]})


class limited(FlowMutator):  # noqa: N801  # used as a decorator
    """The profile's `max_workers`, where the user gave no `--max-workers`: how many tasks run at a time.

    Metaflow reads its options from variables of this form after flow mutators have run. Only `run` and `resume` are
    meant: on Argo the pools' machines decide.
    """

    def pre_mutate(self, mutable_flow) -> None:
        workers = dict(mutable_flow.configs)["profile"].get("max_workers")
        if workers is not None:
            for command in ("RUN", "RESUME"):
                os.environ.setdefault(f"METAFLOW_{command}_MAX_WORKERS", str(workers))
