"""How far the trainer's log-probabilities are from the sampler's, on the tokens the sampler drew.

d = new - rollout. The tokens come from the rollout policy, so mean(-d) and mean(expm1(d) - d) estimate
KL(rollout ‖ new). A value that is not finite is counted in `mismatch/nan_count` and as outside the band, and left out
of the means, which it would hide.
"""

from __future__ import annotations

import numpy as np

from grpo_lib.types import Stat, StepMetrics

_BAND = (0.9, 1.1)  # of the ratio exp(d)
MAX_LOG_RHO = 10.0  # rho = exp(clamp(old - rollout, ±10))


def token_mismatch(
    new_n: np.ndarray, rollout_n: np.ndarray, *, cap: float, old_n: np.ndarray | None = None
) -> StepMetrics:
    """Mismatch statistics of n tokens.

    `tis_*` describe rho = exp(clamp(old - rollout, ±10)) against the cap, one-sided: they say nothing about ratios
    below 1, and with stale rollouts they mix staleness in. `k3` and `outside_band` see both sides.

    Args:
        new_n: [n] log-probabilities by the current policy.
        rollout_n: [n] by the sampler.
        old_n: [n] by the proximal policy; None where that is the current one.
    """
    d = np.asarray(new_n, dtype=np.float64) - np.asarray(rollout_n, dtype=np.float64)
    log_rho = d if old_n is None else np.asarray(old_n, dtype=np.float64) - np.asarray(rollout_n, dtype=np.float64)
    finite = d[np.isfinite(d)]
    size, absolute, ratio = len(d), np.abs(finite), np.exp(finite)
    rho = np.exp(np.clip(log_rho[~np.isnan(log_rho)], -MAX_LOG_RHO, MAX_LOG_RHO))
    num_over_cap = int((rho > cap).sum())
    num_outside = size - int(((ratio >= _BAND[0]) & (ratio <= _BAND[1])).sum())
    stats = {
        "mismatch/abs_mean": Stat.mean(absolute.sum(), finite.size),
        "mismatch/abs_p99": Stat.of_quantile(absolute, 0.99),
        "mismatch/k1": Stat.mean(-finite.sum(), finite.size),
        "mismatch/k3": Stat.mean((np.expm1(finite) - finite).sum(), finite.size),
        "mismatch/outside_band": Stat.mean(num_outside, size),
        "mismatch/nan_count": Stat.sum(size - finite.size),
        "mismatch/tis_clipfrac": Stat.mean(num_over_cap, size),
        "mismatch/tis_clip_count": Stat.sum(num_over_cap),
        "mismatch/tis_ratio": Stat.mean(np.minimum(rho, cap).sum(), rho.size),
    }
    if finite.size:
        stats["mismatch/abs_max"] = Stat.max(absolute.max())
    return StepMetrics(stats=stats)
