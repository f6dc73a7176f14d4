"""What counts as right, wrong and no answer; nothing here starts a process."""

import time

import pytest

from grpo_lib.config import VerifierConfig
from grpo_lib.errors import ConfigError
from grpo_lib.types import Prompt, VerdictReason, VerdictState
from grpo_lib.verifiers.integer import MAX_DIGITS, parse_integer
from grpo_lib.verifiers.registry import VERIFIERS, get_verifier


def prompt(answer: str, verifier: str = "integer") -> Prompt:
    return Prompt(prompt_id="p", text="t", token_ids=(1,), answer=answer, dataset="d", verifier=verifier)


def test_every_configurable_verifier_exists() -> None:
    choices = VerifierConfig.model_json_schema()["properties"]["name"]["enum"]
    assert sorted(choices) == sorted(VERIFIERS)
    assert all(name == spec.name for name, spec in VERIFIERS.items())


def test_unknown_verifier_suggests() -> None:
    with pytest.raises(ConfigError, match=r"verifier\.name \(intager\) is not a verifier; did you mean integer\?"):
        get_verifier("intager")
    with pytest.raises(ConfigError, match="there are integer, exact"):
        get_verifier("llm")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("42", "42"), (" 42\n", "42"), ("+42", "42"), ("-42", "-42"), ("007", "7"), ("-007", "-7"), ("0", "0"),
        ("-0", "0"), ("000", "0"), ("9" * MAX_DIGITS, "9" * MAX_DIGITS),
    ],
)  # fmt: skip
def test_integers(text: str, value: str) -> None:
    assert parse_integer(text) == value


@pytest.mark.parametrize(
    "text",
    [
        "", " ", "+", "-", "--1", "+-1", "- 1", "1 2", "1.0", "1.", "1e3", "0x10", "1_000", "10,000", r"10\,000",
        "x = 1", "1=", "\\boxed{1}", "None", "nan", "1\x00", "４２", "٤٢", "²", "9" * (MAX_DIGITS + 1),
        "9**9**9**9", "9^9^9^9", "__import__('os')._exit(1)",
    ],
)  # fmt: skip
def test_no_integers(text: str) -> None:
    assert parse_integer(text) is None
    verdict = get_verifier("integer").build(1.0)(prompt("1"), text)
    assert (verdict.state, verdict.reason) == (VerdictState.ZERO, VerdictReason.NO_ANSWER)
    assert (verdict.reward, verdict.extracted) == (0.0, None)


def test_agrees_with_python_where_both_can() -> None:
    for number in (*range(-120, 120), 10**40, -(10**40) + 1):
        for text in (str(number), f" {number:+d} ", f"{number:06d}"):
            parsed = parse_integer(text)
            assert parsed is not None
            assert int(parsed) == int(text)


def test_integer_verdicts() -> None:
    verify = get_verifier("integer").build(10.0)
    right = verify(prompt(" 07"), "7 ")
    assert (right.state, right.reason, right.reward, right.extracted) == (
        VerdictState.VALID, VerdictReason.CORRECT, 10.0, "7",
    )  # fmt: skip
    wrong = verify(prompt("7"), "-7")
    assert (wrong.state, wrong.reason, wrong.reward) == (VerdictState.VALID, VerdictReason.WRONG, 0.0)
    assert verify(prompt("not a number"), "7").reason is VerdictReason.WRONG
    assert [get_verifier("integer").accepts_answer(answer) for answer in ("7", "-0", "7.0", "")] == [1, 1, 0, 0]


@pytest.mark.parametrize("text", ["9" * 5_000_000, " " * 5_000_000, " " * 2_500_000 + "x" + " " * 2_500_000])
def test_huge_texts_cost_a_scan(text: str) -> None:
    """`int()` of such digits would raise or take minutes."""
    started = time.perf_counter()
    assert parse_integer(text) is None
    assert time.perf_counter() - started < 1.0


def test_exact_verdicts() -> None:
    spec = get_verifier("exact")
    verify = spec.build(2.0)
    cases = {" blue\n": (VerdictReason.CORRECT, 2.0), "Blue": (VerdictReason.WRONG, 0.0),
             "blue blue": (VerdictReason.WRONG, 0.0), " ": (VerdictReason.NO_ANSWER, 0.0)}  # fmt: skip
    for text, expected in cases.items():
        verdict = verify(prompt("blue", "exact"), text)
        assert (verdict.reason, verdict.reward) == expected
    long = verify(prompt("blue", "exact"), "x" * 10_000)
    assert long.extracted is not None
    assert len(long.extracted) == 80
    assert [spec.accepts_answer(answer) for answer in ("blue", " ")] == [True, False]
