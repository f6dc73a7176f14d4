"""What `gpu_trainers.py` measures: trainers with their settings, and the packs for each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

DOCUMENTS = (10, 4, 1)  # of a pack


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A trainer and its settings."""

    name: str
    trainer: str  # olmo_core, hf_deepspeed or plain_hf
    settings: Mapping[str, Any] = field(default_factory=dict)
    documents: tuple[int, ...] = DOCUMENTS[:1]  # of the packs that it is measured with


# Best against best first, then both with every block recomputed, then what explains the difference.
CASES = (
    Case(
        name="OLMo-core, compiled",
        trainer="olmo_core",
        settings={"compile": True, "activation_memory_budget": 1.0},
        documents=DOCUMENTS,
    ),
    Case(
        name="HF + ZeRO-2, compiled",
        trainer="hf_deepspeed",
        settings={"zero_stage": 2, "compile": True},
        documents=DOCUMENTS,
    ),
    Case(name="plain HF, bfloat16 AdamW, whole logits", trainer="plain_hf", documents=DOCUMENTS),
    Case(
        name="OLMo-core, compiled, blocks recomputed",
        trainer="olmo_core",
        settings={"compile": True, "activation_checkpointing": True},
    ),
    Case(
        name="HF + ZeRO-2, compiled, blocks recomputed",
        trainer="hf_deepspeed",
        settings={"zero_stage": 2, "compile": True, "activation_checkpointing": True},
    ),
    Case(
        name="OLMo-core, compiled, budget 0.9",
        trainer="olmo_core",
        settings={"compile": True, "activation_memory_budget": 0.9},
    ),
)
# With `--all`: what users also run, and the ends of the scale.
MORE_CASES = (
    Case(
        name="OLMo-core, compiled, budget 0.5",
        trainer="olmo_core",
        settings={"compile": True, "activation_memory_budget": 0.5},
    ),
    Case(
        name="HF + ZeRO-3, blocks recomputed",
        trainer="hf_deepspeed",
        settings={"zero_stage": 3, "activation_checkpointing": True},
    ),
    Case(name="OLMo-core, eager", trainer="olmo_core"),
    Case(name="HF + ZeRO-3", trainer="hf_deepspeed", settings={"zero_stage": 3}),
)


def every_case(*, every_pack: bool) -> tuple[Case, ...]:
    """All cases by name; with `every_pack` each of them has all packs."""
    cases = CASES + MORE_CASES
    return tuple(replace(case, documents=DOCUMENTS) for case in cases) if every_pack else cases


def chosen_cases(only: str | None, *, further: bool) -> list[Case]:
    """The case named `only`, or those whose name contains it; without it the usual ones, and `further` ones.

    Raises:
        SystemExit: no case has that name.
    """
    cases = every_case(every_pack=further)
    if only is None:
        return list(cases if further else cases[: len(CASES)])
    chosen = [case for case in cases if case.name == only]
    chosen = chosen or [case for case in cases if only in case.name]
    if not chosen:
        raise SystemExit(f"--only {only!r} is in no name; cases: {', '.join(case.name for case in cases)}")
    return chosen
