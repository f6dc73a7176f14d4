"""A step's spans and the rest add up to the step, and the steps add up to the run."""

import pytest

from grpo_lib.timing import SPANS, StepTimer


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_spans_and_other_add_up_to_the_step() -> None:
    clock = Clock()
    timer = StepTimer(clock)
    clock.now += 0.5  # nobody's
    with timer.span("verify"):
        clock.now += 2.0
    with timer.span("verify"):
        clock.now += 1.0
    with timer.span("optim"):
        clock.now += 4.0
    times = timer.finish_step()
    assert times["verify_s"] == 3.0
    assert times["optim_s"] == 4.0
    assert times["other_s"] == 0.5
    assert times["step_s"] == 7.5
    assert sum(times[f"{name}_s"] for name in SPANS) + times["other_s"] == times["step_s"]


def test_the_next_step_starts_where_the_last_one_ended() -> None:
    clock = Clock()
    timer = StepTimer(clock)
    clock.now += 1.0
    first = timer.finish_step()
    clock.now += 3.0  # between two steps: belongs to the second, or the run's wall time would have a hole
    second = timer.finish_step()
    assert first["step_s"] + second["step_s"] == 4.0
    assert second["other_s"] == 3.0


def test_a_failed_span_is_charged_and_closed() -> None:
    clock = Clock()
    timer = StepTimer(clock)

    def fail() -> None:
        with timer.span("pack"):
            clock.now += 1.0
            raise RuntimeError("boom")

    with pytest.raises(RuntimeError, match="boom"):
        fail()
    assert timer.finish_step()["pack_s"] == 1.0


def test_spans_do_not_nest() -> None:
    timer = StepTimer()
    with timer.span("pack"), pytest.raises(ValueError, match="'optim' opened inside 'pack'"), timer.span("optim"):
        pass


def test_unknown_span_names_the_known_ones() -> None:
    timer = StepTimer()
    with pytest.raises(ValueError, match="wait_for_rollouts"), timer.span("waiting"):
        pass


def test_a_step_cannot_finish_inside_a_span() -> None:
    timer = StepTimer()
    with timer.span("pack"), pytest.raises(ValueError, match="inside the time span 'pack'"):
        timer.finish_step()


def test_moving_cannot_invent_time() -> None:
    clock = Clock()
    timer = StepTimer(clock)
    with timer.span("weight_sync"):
        clock.now += 2.0
    timer.move(0.5, source="weight_sync", target="canary")
    with pytest.raises(ValueError, match="cannot move"):
        timer.move(5.0, source="weight_sync", target="canary")
    times = timer.finish_step()
    assert (times["weight_sync_s"], times["canary_s"], times["step_s"]) == (1.5, 0.5, 2.0)


def test_a_listener_hears_of_a_span_before_its_work_begins_and_its_own_time_is_in_it() -> None:
    clock = Clock()
    heard: list[str] = []

    def listen(name: str) -> None:
        heard.append(name)
        clock.now += 0.25

    timer = StepTimer(clock, on_span=listen)
    with timer.span("pack"):
        assert heard == ["pack"]
        clock.now += 1.0
    with timer.span("optim"):
        pass
    assert heard == ["pack", "optim"]
    times = timer.finish_step()
    assert (times["pack_s"], times["optim_s"], times["other_s"]) == (1.25, 0.25, 0.0)
