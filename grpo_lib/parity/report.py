"""From evidence to one verdict: the report as types, as plain JSON and as text for a terminal."""

from __future__ import annotations

import math
import textwrap
import unicodedata
from collections.abc import Mapping, Sequence
from typing import Any

from grpo_lib.config import RunConfig
from grpo_lib.errors import ParityFailure
from grpo_lib.parity.bisect import DIAGNOSIS
from grpo_lib.parity.free_running import QUANTITIES, FreeRunning
from grpo_lib.parity.probe import ENGINE_SCORE, HISTOGRAM_EDGES, PairStatistics
from grpo_lib.parity.replay import ReplayStep
from grpo_lib.parity.replay_inputs import InputAudit
from grpo_lib.parity.replay_verdicts import free_checks, input_checks, lockstep_checks
from grpo_lib.parity.verdicts import (
    MetricRow,
    clip_checks,
    evaluation_check,
    finite_check,
    learning_check,
    nan_check,
    pair_checks,
    schedule_check,
    shard_check,
    sync_check,
    time_check,
)
from grpo_lib.timing import SPANS
from grpo_lib.types import ParityReport, ParityVerdict, ShardPlan, SyncCertificate

WIDTH = 120

# What each number cannot show; part of every report, so that nobody reads more into it than is there.
LIMITS: Mapping[str, str] = {
    "tis_clipfrac": "Counts ratios above the cap only. 0 does not mean that two backends match: it is blind to "
    "ratios below 1 and to everything up to the cap, and with stale rollouts it mixes engine mismatch with "
    "staleness. The absolute differences decide.",
    "policy/clipfrac": "With one optimiser step per batch the ratio of new to old is 1 by construction, so 0 says "
    "nothing about parity.",
    "max |dlogprob|": "Grows with the number of tokens. Compare it between reports of similar size only.",
    "lockstep probe": "Frozen weights and stored tokens: it does not see drift over training, nor weights that were "
    "wrong at an earlier version. The sync certificates cover the latter.",
    "decode vs score": "Shows that the engine's two paths agree, not that either is right.",
    "reward/correct_rate_kept": "Only groups with both right and wrong members: near one half whatever the policy "
    "can do. reward/correct_rate is over all groups.",
    "time": "Spans have the same boundaries for every backend. A ratio of one trainer's compute to another's compute "
    "plus wait compares nothing.",
    "pass@1": "Sampling accuracy can rise while greedy accuracy falls; both are given. Intervals resample prompts, "
    "so they speak about prompts like these.",
}


REPLAY_LIMITS: Mapping[str, str] = {
    "lockstep": "Each step starts from common weights, so an error shows in the step that makes it and nowhere else. "
    "What is wrong only when carried over many steps, such as a checkpoint or a schedule beyond the replayed steps, "
    "does not. Both trainers get the leader's state: what that leaves out is not compared.",
    "stored rollouts": "Nothing is sampled. Whether the engine got the weights is for the certificates, whether it "
    "decodes with them for the probe.",
    "relative weight distance": "Is small beside |weights| whatever one step did; `update` compares the step alone, "
    "with a wide tolerance: AdamW moves a weight whose gradient is rounding noise by up to the whole learning rate, in "
    "either direction.",
    "free-running": "Rounding is amplified: differences grow by orders of magnitude with steps and learning rate. "
    "Within the noise floor nothing is shown to be equal, only not to differ more than a trainer does from itself.",
    "noise floor": "A few draws of an amplified quantity: a backend may be two of its own floors from itself by "
    "chance. The largest logprob difference hangs on one token and scatters more, so it is shown without a verdict.",
    "identical inputs": "Hashes are of what the trainer was handed. What it makes of them shows in the distances only.",
}


def probe_report(
    config: RunConfig, *, pairs: Sequence[PairStatistics], metrics: Sequence[MetricRow] | None, engine_scores: bool
) -> ParityReport:
    """Only the checks of scorers on stored tokens.

    Args:
        pairs: From `probe`.
        metrics: Of the run, for the clip counts of its steps; None where these are not asked for.
        engine_scores: False where the engine cannot score as it samples, so that its own pair is not asked for.
    """
    checks = pair_checks(pairs, config.parity)
    if not engine_scores:
        checks = [check for check in checks if ENGINE_SCORE not in check.name]
    limits = {name: LIMITS[name] for name in ("tis_clipfrac", "max |dlogprob|", "lockstep probe", "decode vs score")}
    return ParityReport(
        checks=(*checks, nan_check(pairs), *clip_checks(pairs, metrics, config.parity)),
        tables={
            "pairs": [pair.to_dict() for pair in pairs],
            "histogram": [row for pair in pairs for row in _histogram_rows(pair)],
            "limits": _limit_rows(limits),
        },
    )


def replay_report(
    config: RunConfig,
    *,
    lockstep: Sequence[Sequence[ReplayStep]],
    free: Sequence[FreeRunning],
    audits: Sequence[InputAudit],
    stored: Mapping[int, str],
) -> ParityReport:
    """All checks of a replay.

    Args:
        lockstep: Steps of each pair of trainers.
        free: Each pair of trainers on their own ways.
        audits: Of every stored step from the first to the last that was replayed.
        stored: Step → hash of its table as it is stored now.
    """
    given = {step.step: step.inputs_b for steps in (*lockstep, *(one.steps for one in free)) for step in steps}
    checks = [
        *input_checks(audits),
        *(c for steps in lockstep for c in lockstep_checks(steps, config.parity, config.trainer, stored=stored)),
        *(c for one in free for c in free_checks(one, config.parity, config.trainer)),
    ]
    tables = {
        "lockstep": [_lockstep_row(step) for steps in lockstep for step in steps],
        "free_running": [row for one in free for row in _free_rows(one)],
        "inputs": [
            {"step": step, "trained": step in given, "stored_table": digest, "samples": given.get(step, "")}
            for step, digest in stored.items()
        ],
        "limits": _limit_rows(REPLAY_LIMITS),
    }
    return ParityReport(checks=tuple(checks), tables=tables)


def _limit_rows(limits: Mapping[str, str]) -> list[dict[str, object]]:
    return [{"metric": metric, "cannot_show": text} for metric, text in limits.items()]


def _lockstep_row(step: ReplayStep) -> dict[str, object]:
    return {
        "step": step.step,
        "pair": f"{step.name_a} vs {step.name_b}",
        "tokens": step.pair.num_tokens,
        "max |dlogprob|": step.pair.max_abs,
        "gradient": step.gradient.whole.relative,
        "gradient cosine": step.gradient.whole.cosine,
        "gradient scale": step.gradient.whole.scale,
        "farthest gradient": step.gradient.tensors[0].name,
        "weight": step.weight.whole.relative,
        "update": step.update.whole.relative,
        "loss a": step.loss_a,
        "loss b": step.loss_b,
        "grad norm a": step.grad_norm_a,
        "grad norm b": step.grad_norm_b,
        "lr a": step.learning_rate_a,
        "lr b": step.learning_rate_b,
        "bf16 share a": step.bf16_share_a,
        "bf16 share b": step.bf16_share_b,
        "identical inputs": step.inputs_a == step.inputs_b,
    }


def _free_rows(free: FreeRunning) -> list[dict[str, object]]:
    """One row per step: each difference beside the noise floor it is measured by."""
    rows: list[dict[str, object]] = [{"step": step.step, "pair": free.pair} for step in free.steps]
    for quantity, measure in QUANTITIES.items():
        for row, step, floor in zip(rows, free.steps, free.floor(quantity), strict=True):
            row |= {quantity: measure(step), f"floor of {quantity}": floor}
    return rows


def build_report(
    config: RunConfig,
    *,
    pairs: Sequence[PairStatistics],
    metrics: Sequence[MetricRow],
    certificates: Sequence[SyncCertificate],
    evaluation: Mapping[str, Any],
    shard_plan: ShardPlan | None = None,
) -> ParityReport:
    """All checks of one run.

    Args:
        pairs: From `probe`.
        metrics: Rows of the metrics file, one per step.
        certificates: Of every push of `fit`, in order.
        evaluation: `EvaluationResult.to_dict()`.
        shard_plan: From `shard_model`, where there was one.
    """
    checks = [
        *pair_checks(pairs, config.parity),
        nan_check(pairs),
        *clip_checks(pairs, metrics, config.parity),
        *([shard_check(shard_plan)] if shard_plan else []),
        sync_check(certificates, metrics),
        learning_check(metrics),
        schedule_check(metrics, config.trainer),
        time_check(metrics),
        finite_check(metrics),
        evaluation_check(evaluation),
    ]
    tables = {
        "pairs": [pair.to_dict() for pair in pairs],
        "histogram": [row for pair in pairs for row in _histogram_rows(pair)],
        "time": _time_rows(metrics),
        "limits": _limit_rows(LIMITS),
    }
    return ParityReport(checks=tuple(checks), tables=tables)


def to_dict(report: ParityReport) -> dict[str, Any]:
    """Plain JSON: strings, numbers, lists and dicts; a number that is not finite becomes None."""
    return {
        "verdict": str(report.verdict),
        "checks": [{name: _plain(getattr(check, name)) for name in type(check).__slots__} for check in report.checks],
        "tables": {
            name: [{key: _plain(value) for key, value in row.items()} for row in rows]
            for name, rows in report.tables.items()
        },
    }


def _plain(value: object) -> object:
    if isinstance(value, ParityVerdict):
        return str(value)
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def _histogram_rows(pair: PairStatistics) -> list[dict[str, object]]:
    """Bins of |d| that hold tokens; `low` of the first bin is 0 and `high` of the last has no bound."""
    edges = (0.0, *HISTOGRAM_EDGES, math.inf)
    name = f"{pair.name_a} vs {pair.name_b}"
    return [
        {"pair": name, "low": edges[i], "high": edges[i + 1], "tokens": count}
        for i, count in enumerate(pair.histogram)
        if count
    ]


def _time_rows(rows: Sequence[MetricRow]) -> list[dict[str, object]]:
    """Mean seconds of each span and its share of the step, largest first."""
    if not rows:
        return []
    step_s = sum(row["time/step_s"] for row in rows)
    totals = {span: sum(row[f"time/{span}_s"] for row in rows) for span in (*SPANS, "other")}
    return [
        {"span": span, "seconds_per_step": total / len(rows), "share": total / step_s}
        for span, total in sorted(totals.items(), key=lambda item: -item[1])
    ]


def render(report: Mapping[str, Any]) -> str:
    """The report of `to_dict` as aligned text, at most 120 columns wide."""
    checks = [{**check, **{key: visible(check[key]) for key in ("name", "evidence")}} for check in report["checks"]]
    name_width = min(70, max((len(check["name"]) for check in checks), default=len("check")))
    lines = [f"{'verdict':<13}{'check':<{name_width}}  {'value':>10}  {'tolerance':>10}  {'observed':>11}"]
    lines.append("-" * len(lines[0]))
    for check in checks:
        name = check["name"] if len(check["name"]) <= name_width else f"{check['name'][: name_width - 3]}..."
        lines.append(
            f"{check['verdict']:<13}{name:<{name_width}}  {_figure(check['value']):>10}  "
            f"{_figure(check['tolerance']):>10}  {check['num_observations']:>11,}"
        )
        if check["verdict"] != ParityVerdict.PASS:
            lines += textwrap.wrap(check["evidence"], WIDTH, initial_indent=" " * 13, subsequent_indent=" " * 13)
    for row in report["tables"].get(DIAGNOSIS, ()):
        said = visible(f"{row['subject']}: {row['cause']}. Where: {row['where']}. Why: {row['evidence']}")
        lines += textwrap.wrap(said, WIDTH, initial_indent=f"{'cause':<13}", subsequent_indent=" " * 13)
    counts = {verdict: sum(check["verdict"] == verdict for check in checks) for verdict in ParityVerdict}
    lines += ["", f"{report['verdict']}: " + ", ".join(f"{count} {verdict}" for verdict, count in counts.items())]
    return "\n".join(lines)


def visible(value: object) -> str:
    """Text with control and direction-changing characters spelled out: models write some of what is shown."""
    return "".join(
        c if c == " " or unicodedata.category(c)[0] not in "CZ" else c.encode("unicode_escape").decode("ascii")
        for c in str(value)
    )


def _figure(value: float | None) -> str:
    if value is None:
        return "not finite"
    return f"{value:,.0f}" if float(value).is_integer() else f"{value:.3g}"


def summary(parity: Mapping[str, Any], evaluation: Mapping[str, Any]) -> str:
    """The verdict table and the accuracies, for a terminal."""
    lines = [render(parity), ""]
    for name in ("sampled_pass_at_1", "greedy_pass_at_1"):
        before, after, gain = (evaluation[part][name] for part in ("before", "after", "gain"))
        lines.append(
            f"{name:<18} {_accuracy(before['value'])} -> {_accuracy(after['value'])}   "
            f"gain {_accuracy(gain['value'])} [{_accuracy(gain['low'])}, {_accuracy(gain['high'])}]"
        )
    return "\n".join(lines)


def gate(parity: Mapping[str, Any]) -> None:
    """Raise `ParityFailure` for a FAIL; an INCONCLUSIVE report is not a failure, and says what it lacks."""
    failed = [check["name"] for check in parity["checks"] if check["verdict"] == ParityVerdict.FAIL]
    if failed:
        causes = [f"{row['subject']}: {row['cause']}" for row in parity["tables"].get(DIAGNOSIS, ())]
        raise ParityFailure(
            f"{len(failed)} of {len(parity['checks'])} parity checks failed: {'; '.join(failed)}"
            + (f". Cause, by bisect: {'; '.join(causes)}" if causes else "")
        )


def _accuracy(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.3f}"
