"""The nightly gate: `python flows/parity_flow.py run`.

Two trainers do the same with the same frozen rollouts, or the run ends with an error. On a laptop one trainer follows
the other; on a cluster they run side by side.
"""

# pyright: reportPrivateImportUsage=false, reportAttributeAccessIssue=false
# pyright: reportArgumentType=false, reportCallIssue=false, reportOptionalMemberAccess=false
# (metaflow declares no exports, and its decorators and artifacts are made at run time)

from __future__ import annotations

import getpass
import logging
import os
from pathlib import Path

# Metaflow refuses to run as an unknown user, which root in a container is; its own variable settles that.
os.environ.setdefault("METAFLOW_USER", user if (user := getpass.getuser()) != "root" else "grpo")

from cards import LiveCard
from cards_parity import comparison_card, gate_card
from metaflow import Config, FlowSpec, Parameter, card, current, project, step
from mutators import in_own_folder, limited, listed, pool, remote_pool, scheduled, users_mistakes

logging.basicConfig(format="%(message)s")
logging.getLogger("grpo_lib").setLevel(logging.INFO)

_PROFILES = Path(__file__).resolve().parent / "profiles"


@limited
@scheduled
@project(name="grpo")
class ParityFlow(FlowSpec):
    """Frozen rollouts and two trainers in; one verdict on whether they compute the same out."""

    trainers = Parameter("trainers", default="olmo_core,hf_deepspeed", help="Two backends; the first one leads.")
    rollouts_of = Parameter("rollouts", default=None, type=str, help="Run id or folder; fresh rollouts when absent.")
    recipe = Parameter("recipe", default=None, type=str, help="Named configuration to start from.")
    overrides = Parameter("set", type=str, multiple=True, default=[], help="key.path=value, repeatable.")
    seed = Parameter("seed", type=int, default=None, help="Run seed; the recipe's when absent.")
    runs_a = Parameter("runs-a", default="", type=str, help="Finished runs to compare, by id or folder, with commas.")
    runs_b = Parameter("runs-b", default="", type=str, help="Those of the other side.")
    profile = Config("profile", default=str(_PROFILES / "local.json"), help="Where steps run.")

    @users_mistakes
    @pool("cpu")
    @step
    def start(self):
        """One frozen config, every named run opened, and whether this machine can hold two trainers."""
        from grpo_lib.stages import begin, parity_begin

        self.setup = parity_begin.run(
            recipe=self.recipe,
            overrides=list(self.overrides),
            trainers=listed(self.trainers),
            seed=self.seed,
            rollouts=self.rollouts_of,
            runs_a=listed(self.runs_a),
            runs_b=listed(self.runs_b),
            pool=remote_pool(self.profile, "gpu"),
        )
        self.config, self.lineage, self.backends = self.setup.run.config, self.setup.run.lineage, self.setup.trainers
        self.config_hash = self.setup.run.config_hash
        self.paths = begin.record(self.setup.run, f"{current.flow_name}/{current.run_id}")
        current.run.add_tags(self.tags())
        self.next(self.rollouts)

    @users_mistakes
    @in_own_folder
    @pool("gpu")
    @card(type="blank", id="live", refresh_interval=1)
    @step
    def rollouts(self):
        """Rollouts that nobody changes any more: of a short run made here, or of a finished one."""
        from grpo_lib.stages import frozen_rollouts

        if self.setup.rollouts is not None:
            self.frozen = frozen_rollouts.adopt(self.config, self.paths, source=self.setup.rollouts)
        else:
            live = LiveCard(total_steps=self.config.loop.steps)
            self.frozen = frozen_rollouts.run(
                self.config,
                self.paths,
                run_id=current.run_id,
                on_step=lambda record: live.update(record.step, record.metrics),
            )
        self.next(self.measure, foreach="backends")

    @users_mistakes
    @pool("gpu")
    @step
    def measure(self):
        """One trainer: scores of the probe rollouts, and two free-running trajectories."""
        from grpo_lib.stages import parity_gate

        self.measured = parity_gate.measure(self.config, self.paths, self.frozen, trainer=self.input)
        self.next(self.join)

    @users_mistakes
    @pool("gpu")
    @step
    def join(self, inputs):
        """Scores and trajectories against each other; trainers that read different rollouts are refused."""
        from grpo_lib.stages import parity_gate

        self.measurements = [branch.measured for branch in inputs]
        self.config = inputs[0].config  # equal in all branches, but pickled anew by each, and not to the same bytes
        self.merge_artifacts(inputs, exclude=["measured"])
        self.joined = parity_gate.join(self.config, self.paths, self.frozen, measurements=self.measurements)
        self.next(self.lockstep)

    @users_mistakes
    @pool("gpu")
    @step
    def lockstep(self):
        """Both trainers live: every stored step from the same weights and optimiser state; a FAIL is bisected."""
        from grpo_lib.stages import parity_gate

        self.replayed = parity_gate.lockstep(self.config, self.frozen, trainers=self.backends, free=self.joined.free)
        self.next(self.gate)

    @users_mistakes
    @pool("cpu")
    @card(type="blank", id="gate")
    @step
    def gate(self):
        """The verdict, the night's line in the history, and what drifted; stored, not raised."""
        from grpo_lib.stages import parity_gate

        report = parity_gate.report(
            self.config,
            self.paths,
            self.frozen,
            run_id=current.run.pathspec,
            lineage=self.lineage,
            measurements=self.measurements,
            joined=self.joined,
            lockstep=self.replayed,
        )
        self.parity, self.drift_lines, self.seconds = report.parity, report.drift_lines, report.seconds
        gate_card(report.parity, self.config.parity)
        current.run.add_tags([*self.tags(), f"verdict:{self.parity['verdict']}"])
        self.next(self.compare)

    @users_mistakes
    @pool("cpu")
    @card(type="blank", id="compare")
    @step
    def compare(self):
        """Finished runs against each other, if any were named; outside of the gate's time."""
        self.comparison = None
        if self.setup.runs_a:
            from grpo_lib.stages import parity_gate

            self.comparison = parity_gate.compare(self.config, self.setup)
            comparison_card(self.comparison)
        self.next(self.end)

    @users_mistakes
    @pool("cpu")
    @step
    def end(self):
        """Prints the verdicts; a failed check fails the flow here, with everything stored."""
        from grpo_lib.parity.report import gate, render

        reports = [self.parity] if self.comparison is None else [self.comparison, self.parity]
        print("\n\n".join(render(report) for report in reports))
        print(*self.drift_lines, sep="\n")
        print(f"\ngate card:  python flows/parity_flow.py card view {current.run_id}/gate --id gate")
        for report in reports:
            gate(report)

    def tags(self) -> list[str]:
        """By which nights are found; a resumed run does not inherit them."""
        return ["parity", *(f"trainer:{name}" for name in self.backends)]


if __name__ == "__main__":
    ParityFlow()
