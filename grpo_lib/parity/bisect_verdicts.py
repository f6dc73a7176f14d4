"""Every rule of bisect: each scorer and trainer against an independent model.

| check | value | tolerance | evidence it needs |
|---|---|---|---|
| log-probabilities, trainer | largest difference from a plain forward, nats | `parity.replay_max_abs` | 1 token |
| log-probabilities, engine | likewise, as stored; over the drift of replayed weights | `parity.max_abs` | 1 token |
| gradient | relative L2 distance from a plain model's (if scores are right) | `parity.replay_relative` | 1 step |
| update | relative L2 distance from AdamW on the trainer's own gradient | 0.001 | 1 step |
| causes | findings, those from the run's records included | 0 | 1 step or record |
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from grpo_lib.config import ParityConfig
from grpo_lib.parity.bisect import Diagnosis, with_diagnosis
from grpo_lib.parity.bisect_replay import JudgedStep
from grpo_lib.parity.bisect_training import UPDATE_TOLERANCE
from grpo_lib.parity.verdicts import check
from grpo_lib.types import ParityCheck, ParityReport


def bisect_report(judged: Sequence[JudgedStep], records: Diagnosis, config: ParityConfig) -> ParityReport:
    """All checks, the causes, and the tables behind them.

    Args:
        judged: From `bisect_replay`.
        records: What the run's own records say.
    """
    diagnosis = Diagnosis.merged([records, *(step.diagnosis for step in judged)])
    names = list(dict.fromkeys(step.name for step in judged))
    checks = [
        made for name in names for made in _checks_of(name, [step for step in judged if step.name == name], config)
    ]
    checks.append(
        check(
            "causes",
            len(diagnosis.findings),
            0.0,
            num_observations=len(judged),
            needed=1,
            evidence="; ".join(finding.text() for finding in diagnosis.findings) or "none",
        )
    )
    rows = [
        {
            "step": step.step,
            "name": step.name,
            "version": step.version,
            "tokens": step.num_tokens,
            "max |dlogprob|": step.logprob_max_abs,
            "gradient": step.gradient_relative,
            "update": step.update_relative,
        }
        for step in judged
    ]
    return with_diagnosis(ParityReport(checks=tuple(checks), tables={"judged_steps": rows}), diagnosis)


def _checks_of(name: str, steps: Sequence[JudgedStep], config: ParityConfig) -> list[ParityCheck]:
    tokens = sum(step.num_tokens for step in steps)
    worst = max(steps, key=lambda step: _badness(step.logprob_max_abs / step.tolerance))
    checks = [
        check(
            f"{name}: max |dlogprob| from a plain forward",
            worst.logprob_max_abs,
            worst.tolerance,
            num_observations=tokens,
            needed=1,
            evidence=_at(worst),
        )
    ]
    trained = [step for step in steps if not math.isnan(step.update_relative)]
    differentiated = [step for step in trained if not math.isnan(step.gradient_relative)]
    if differentiated:
        checks.append(
            _worst(
                f"{name}: gradient from a plain model's",
                differentiated,
                lambda step: step.gradient_relative,
                config.replay_relative,
                observed=len(differentiated),
            )
        )
    if trained:
        checks.append(
            _worst(
                f"{name}: update from AdamW's",
                trained,
                lambda step: step.update_relative,
                UPDATE_TOLERANCE,
                observed=len(trained),
            )
        )
    return checks


def _worst(
    name: str,
    steps: Sequence[JudgedStep],
    value: Callable[[JudgedStep], float],
    tolerance: float,
    *,
    observed: int,
) -> ParityCheck:
    worst = max(steps, key=lambda step: _badness(value(step)))
    return check(name, value(worst), tolerance, num_observations=observed, needed=1, evidence=_at(worst))


def _at(step: JudgedStep) -> str:
    return f"step {step.step}, from version {step.version}"


def _badness(value: float) -> float:
    return math.inf if math.isnan(value) else value
