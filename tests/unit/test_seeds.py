import subprocess
import sys
from collections import Counter

import numpy as np
import pytest

from grpo_lib.seeds import epoch_order, sample_seed


def test_seed_values_never_change():
    assert sample_seed(1, 0, "addition-train-17", 3) == 6867845349583158407
    assert epoch_order(1, 0, 8).tolist() == [5, 7, 0, 6, 2, 4, 3, 1]
    assert epoch_order(1, 1, 8).tolist() == [4, 6, 5, 7, 2, 3, 1, 0]


def test_members_prompts_epochs_and_runs_have_distinct_seeds():
    """UniRL 208, verl 6857: one seed for a whole group makes its members copies of each other."""
    seeds = [
        sample_seed(run, epoch, f"p{prompt}", index)
        for run in range(3)
        for epoch in range(3)
        for prompt in range(20)
        for index in range(16)
    ]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_fields_cannot_run_into_each_other():
    assert sample_seed(1, 0, "p1", 12) != sample_seed(1, 0, "p11", 2)
    assert sample_seed(1, 0, 'p", 1', 1) != sample_seed(1, 0, "p", 1)


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
def test_epoch_order_is_a_permutation_that_differs_by_epoch_and_run(size: int):
    order = epoch_order(5, 0, size)
    assert order.dtype == np.int64
    assert sorted(order.tolist()) == list(range(size))
    if size > 5:
        assert order.tolist() != epoch_order(5, 1, size).tolist()
        assert order.tolist() != epoch_order(6, 0, size).tolist()


def test_epoch_order_is_uniform():
    """All 6 orders of 3 rows, 3000 draws: a count outside 500 ± 100 is 4.9 standard deviations off."""
    counts = Counter(tuple(epoch_order(0, epoch, 3).tolist()) for epoch in range(3000))
    assert len(counts) == 6
    assert all(400 < count < 600 for count in counts.values()), counts


def test_empty_epoch_is_refused():
    with pytest.raises(ValueError, match="training set is empty"):
        epoch_order(1, 0, 0)


def test_seeds_need_no_torch():
    code = "import sys, grpo_lib.seeds; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
