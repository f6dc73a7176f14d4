"""Rows → prompts: template, token ids, filters. Every row is either a prompt or counted under the reason it is not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from grpo_lib.config import DataConfig, VerifierConfig
from grpo_lib.data.chat import PromptEncoder, tokenizer_sha256
from grpo_lib.data.prompts import PromptRow, Split, load_rows
from grpo_lib.errors import DataError
from grpo_lib.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


class DropReason(StrEnum):
    """Why a row became no prompt."""

    EMPTY_PROMPT = "empty_prompt"
    EMPTY_ANSWER = "empty_answer"
    UNJUDGEABLE_ANSWER = "unjudgeable_answer"  # the verifier could never call any completion right
    HELDOUT_OVERLAP = "heldout_overlap"  # a training row whose text is held out
    PROMPT_TOO_LONG = "prompt_too_long"


_ADVICE = {
    DropReason.EMPTY_PROMPT: "look at data.prompt_field",
    DropReason.EMPTY_ANSWER: "look at data.answer_field",
    DropReason.UNJUDGEABLE_ANSWER: "choose another verifier.name",
    DropReason.HELDOUT_OVERLAP: "give other files as data.train_path and data.heldout_path",
    DropReason.PROMPT_TOO_LONG: "raise data.max_prompt_tokens",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedPrompts:
    """Both splits, tokenized and filtered, in the order of their rows."""

    train: tuple[Prompt, ...]
    heldout: tuple[Prompt, ...]
    rows_read: Mapping[str, int]  # by split
    drops: Mapping[str, Mapping[str, int]]  # by split and `DropReason`; reasons that did not occur are absent
    template: str
    tokenizer_sha256: str


def prepare_prompts(
    config: DataConfig,
    verifier: VerifierConfig,
    tokenizer: PreTrainedTokenizerFast,
    *,
    accepts_answer: Callable[[str], bool],
) -> PreparedPrompts:
    """Read, template, tokenize and filter both splits.

    Args:
        accepts_answer: Whether the verifier can judge against a reference answer, see `verifiers.registry`.

    Raises:
        DataError: the source is unusable, or no row of a split is left; the message has the counts.
    """
    train_rows, heldout_rows = load_rows(config)
    encoder = PromptEncoder(tokenizer, config.template)
    heldout_texts = {row.prompt.strip() for row in heldout_rows}

    def prepare(rows: Sequence[PromptRow], split: Split) -> tuple[tuple[Prompt, ...], dict[str, int]]:
        prompts: list[Prompt] = []
        drops: Counter[str] = Counter()
        for row in rows:
            result = _prepare_row(row, config, verifier, encoder, heldout_texts, accepts_answer)
            if isinstance(result, DropReason):
                drops[result.value] += 1
            else:
                prompts.append(result)
        if not prompts:
            raise DataError(_all_dropped(split, len(rows), drops, config))
        return tuple(prompts), dict(drops)

    train, train_drops = prepare(train_rows, Split.TRAIN)
    heldout, heldout_drops = prepare(heldout_rows, Split.HELDOUT)
    return PreparedPrompts(
        train=train,
        heldout=heldout,
        rows_read={Split.TRAIN.value: len(train_rows), Split.HELDOUT.value: len(heldout_rows)},
        drops={Split.TRAIN.value: train_drops, Split.HELDOUT.value: heldout_drops},
        template=config.template,
        tokenizer_sha256=tokenizer_sha256(tokenizer),
    )


def _prepare_row(
    row: PromptRow,
    config: DataConfig,
    verifier: VerifierConfig,
    encoder: PromptEncoder,
    heldout_texts: set[str],
    accepts_answer: Callable[[str], bool],
) -> Prompt | DropReason:
    if not row.prompt.strip():
        return DropReason.EMPTY_PROMPT
    if not row.answer.strip():
        return DropReason.EMPTY_ANSWER
    if not accepts_answer(row.answer):
        return DropReason.UNJUDGEABLE_ANSWER
    if row.split is Split.TRAIN and row.prompt.strip() in heldout_texts:
        return DropReason.HELDOUT_OVERLAP
    encoded = encoder.encode(row.prompt)
    if len(encoded.token_ids) > config.max_prompt_tokens:
        return DropReason.PROMPT_TOO_LONG
    return Prompt(
        prompt_id=row.prompt_id,
        text=encoded.text,
        token_ids=encoded.token_ids,
        answer=row.answer,
        dataset=row.dataset,
        verifier=verifier.name,
    )


def _all_dropped(split: Split, num_rows: int, drops: Mapping[str, int], config: DataConfig) -> str:
    counts = ", ".join(f"{count} {reason}" for reason, count in sorted(drops.items(), key=lambda item: -item[1]))
    most = DropReason(max(drops, key=lambda reason: drops[reason]))
    limit = f" (data.max_prompt_tokens is {config.max_prompt_tokens})" if most is DropReason.PROMPT_TOO_LONG else ""
    return f"none of the {num_rows} {split} rows is usable: {counts}{limit}; {_ADVICE[most]}"
