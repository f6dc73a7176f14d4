"""The main job: `python flows/grpo_flow.py run --trainer olmo_core`."""

# pyright: reportPrivateImportUsage=false, reportAttributeAccessIssue=false
# pyright: reportArgumentType=false, reportCallIssue=false
# (metaflow declares no exports, and its decorators and artifacts are made at run time)

from __future__ import annotations

import getpass
import logging
import os
from pathlib import Path

# Metaflow refuses to run as an unknown user, which root in a container is; its own variable settles that.
os.environ.setdefault("METAFLOW_USER", user if (user := getpass.getuser()) != "root" else "grpo")

from cards import LiveCard, report_card
from metaflow import Config, FlowSpec, Parameter, card, current, project, step
from mutators import in_own_folder, pool, remote_pool, scheduled, users_mistakes

logging.basicConfig(format="%(message)s")
logging.getLogger("grpo_lib").setLevel(logging.INFO)

_PROFILES = Path(__file__).resolve().parent / "profiles"


@scheduled
@project(name="grpo")
class GRPOFlow(FlowSpec):
    """Prompts and a base model in; a GRPO-trained model, its evaluation and a parity verdict out."""

    trainer = Parameter("trainer", default="olmo_core", help="Trainer backend: olmo_core or hf_deepspeed.")
    recipe = Parameter("recipe", default="embedded_addition", help="Named configuration to start from.")
    overrides = Parameter("set", type=str, multiple=True, default=[], help="key.path=value, repeatable.")
    seed = Parameter("seed", type=int, default=None, help="Run seed; the recipe's when absent.")
    profile = Config("profile", default=str(_PROFILES / "local.json"), help="Where steps run.")

    @users_mistakes
    @pool("cpu")
    @step
    def start(self):
        """One frozen config, its origin, and whether this machine can hold the run."""
        from grpo_lib.stages import begin

        setup = begin.run(
            recipe=self.recipe,
            overrides=list(self.overrides),
            trainer=self.trainer,
            seed=self.seed,
            pool=remote_pool(self.profile, "gpu"),
        )
        self.config, self.config_hash = setup.config, setup.config_hash
        self.lineage, self.preflight = setup.lineage, setup.preflight
        self.paths = begin.record(setup, f"{current.flow_name}/{current.run_id}")
        self.next(self.prepare_data)

    @users_mistakes
    @in_own_folder
    @pool("cpu")
    @step
    def prepare_data(self):
        """Rows to prompt shards, and the packing plan."""
        from grpo_lib.stages import prepare_data

        self.data = prepare_data.run(self.config, self.paths)
        self.next(self.shard_model)

    @users_mistakes
    @in_own_folder
    @pool("gpu")
    @step
    def shard_model(self):
        """The base model in the trainer's own sharding, gathered again and compared."""
        from grpo_lib.stages import shard_model

        self.shard_plan = shard_model.run(self.config, self.paths)
        self.next(self.sync_weights)

    @users_mistakes
    @in_own_folder
    @pool("gpu")
    @step
    def sync_weights(self):
        """The initial weight sync on the real parts, certified."""
        from grpo_lib.stages import sync_weights

        self.certificate = sync_weights.run(self.config, self.paths)
        self.next(self.fit)

    @users_mistakes
    @in_own_folder
    @pool("gpu")
    @card(type="blank", id="live", refresh_interval=1)
    @step
    def fit(self):
        """The GRPO loop, with a live card."""
        from grpo_lib.stages import fit

        live = LiveCard(total_steps=self.config.loop.steps)
        self.training = fit.run(
            self.config,
            self.paths,
            run_id=current.run_id,
            on_step=lambda record: live.update(record.step, record.metrics),
        )
        self.next(self.evaluate)

    @users_mistakes
    @in_own_folder
    @pool("gpu")
    @step
    def evaluate(self):
        """Held-out accuracy before and after, sampled and greedy."""
        from grpo_lib.stages import evaluate

        result = evaluate.run(self.config, self.paths, policy_version=self.training.policy_version)
        self.evaluation, self.probe_rollouts = result.evaluation, result.rollouts
        self.next(self.parity_report)

    @users_mistakes
    @in_own_folder
    @pool("gpu")
    @card(type="blank", id="report")
    @step
    def parity_report(self):
        """Engine, trainer and a plain forward score the same stored tokens; the verdict is stored, not raised."""
        from grpo_lib.stages import parity_report

        report = parity_report.run(
            self.config,
            self.paths,
            rollouts=self.probe_rollouts,
            evaluation=self.evaluation,
            policy_version=self.training.policy_version,
            shard_plan=self.shard_plan,
        )
        self.parity = report.parity
        report_card(report.parity, metrics=report.metrics, evaluation=self.evaluation, samples=report.samples)
        self.next(self.end)

    @users_mistakes
    @pool("cpu")
    @step
    def end(self):
        """Prints the verdict; a failed check fails the flow here, with everything stored."""
        from grpo_lib.parity.report import gate, summary

        print(summary(self.parity, self.evaluation))
        print(f"\nreport card:  python flows/grpo_flow.py card view {current.run_id}/parity_report --id report")
        gate(self.parity)


if __name__ == "__main__":
    GRPOFlow()
