"""The profile decides where steps run: the same flow file on a laptop and on a cluster."""

from __future__ import annotations

from metaflow import FlowMutator, StepMutator


class pool(StepMutator):  # noqa: N801  # used as a decorator
    """`@pool("gpu")`: run the step on that pool of the profile.

    A profile with `"remote": true` turns the pool's settings into `@kubernetes` and its `retry` into `@retry`; any other
    profile leaves the step local.
    """

    def init(self, name: str) -> None:
        self.name = name

    def pre_mutate(self, mutable_step) -> None:
        profile = dict(mutable_step.flow.configs)["profile"]
        if not profile.get("remote"):
            return
        pools = profile["pools"]
        if self.name not in pools:
            raise ValueError(f"profile {profile['name']!r} has no pool {self.name!r}; it has {', '.join(pools)}")
        spec = dict(pools[self.name])
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
