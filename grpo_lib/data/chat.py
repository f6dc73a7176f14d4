"""From a user's text to the exact token ids that are sampled from and trained on, once.

What this module tokenizes is never tokenized again: engine, trainer and storage pass the ids on (trl 5224,
prime-rl 1334).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from grpo_lib.errors import DataError
from grpo_lib.interfaces import TokenDecoder

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

TemplateKind = Literal["tokenizer", "raw"]
StopKind = Literal["end_of_text", "line"]


def load_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    """The tokenizer of a local model folder; nothing is fetched and no code of the folder runs.

    Raises:
        DataError: there is none, or it is not a fast one, whose definition can be hashed.
    """
    from transformers import PreTrainedTokenizerFast

    config = folder / "tokenizer_config.json"
    if not config.is_file() and not (folder / "tokenizer.json").is_file():
        raise DataError(f"model folder {folder} has no tokenizer (tokenizer.json, {config.name})")
    try:
        named = json.loads(config.read_bytes()).get("tokenizer_class") if config.is_file() else None
        if named == PreTrainedTokenizerFast.__name__:
            tokenizer = PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True)
        else:
            # Chooses a model's own class; importing it takes seconds, torch among them, so not without need.
            from transformers import AutoTokenizer

            tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ImportError) as error:
        raise DataError(f"the tokenizer of {folder} cannot be loaded: {error}") from error
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise DataError(f"the tokenizer of {folder} is a {type(tokenizer).__name__}; save it with a tokenizer.json")
    return tokenizer


def tokenizer_sha256(tokenizer: PreTrainedTokenizerFast) -> str:
    """Hash of everything that decides the ids of a prompt: vocabulary, merges, special tokens, chat template."""
    parts = [tokenizer.backend_tokenizer.to_str(), tokenizer.chat_template]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def stop_token_ids(
    folder: Path, tokenizer: PreTrainedTokenizerFast, stop_at: StopKind = "end_of_text"
) -> tuple[int, ...]:
    """Every id that ends a completion: the tokenizer's, and all that config and generation config name (trl 7039).

    Args:
        stop_at: `line` adds all tokens whose text has a newline, such as ``"\\n\\n"`` or ``".\\n"``. A stop *text*
            would not do: the engine reads no text, and the token that ended a completion is part of it and is trained.

    Raises:
        DataError: there is none, so every completion would run to the limit.
    """
    paths = [folder / name for name in ("config.json", "generation_config.json")]
    named: list[object] = [json.loads(path.read_bytes()).get("eos_token_id") for path in paths if path.is_file()]
    named.append(tokenizer.eos_token_id)
    found = {one for ids in named for one in (ids if isinstance(ids, list) else [ids]) if isinstance(one, int)}
    if not found:
        raise DataError(f"model folder {folder} names no stop token; set eos_token_id in its generation_config.json")
    if stop_at == "line":
        newlines = {one for one, text in enumerate(_token_texts(tokenizer)) if "\n" in text}
        if not newlines:
            raise DataError(f"no token of {folder} has a newline in it; set rollout.stop_at=end_of_text")
        found |= newlines
    return tuple(sorted(found))


def _token_texts(tokenizer: PreTrainedTokenizerFast) -> list[str]:
    """The text of each id by itself; half a character reads as a replacement mark."""
    texts = tokenizer.batch_decode([[one] for one in range(len(tokenizer))], clean_up_tokenization_spaces=False)
    assert isinstance(texts, list)
    return texts


def token_decoder(tokenizer: PreTrainedTokenizerFast) -> TokenDecoder:
    """Ids → text without special tokens, for verifiers and people."""

    def decode(token_ids: Sequence[int]) -> str:
        text = tokenizer.decode(list(token_ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)
        assert isinstance(text, str)
        return text

    return decode


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedPrompt:
    """A prompt as the model sees it."""

    text: str
    token_ids: tuple[int, ...]


class PromptEncoder:
    """Applies one template with one tokenizer.

    `tokenizer` puts the text into a user turn of the chat template and opens the assistant's; the template spells out
    all special tokens, so none is added. `raw` takes the text as it is and prepends what the model expects before any
    text (a BOS token, where the tokenizer has that habit).
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast, template: TemplateKind) -> None:
        if template == "tokenizer" and not tokenizer.chat_template:
            raise DataError(
                "data.template=tokenizer, but the model's tokenizer has no chat template; add chat_template.jinja to "
                "the model folder, or set data.template=raw"
            )
        self._tokenizer = tokenizer
        self._template = template

    def encode(self, user_text: str) -> EncodedPrompt:
        """Exact text and token ids.

        Raises:
            DataError: the template rejects the text, or the tokenizer appends tokens, which would end the prompt.
        """
        if self._template == "raw":
            return self._encode_raw(user_text)
        from jinja2 import TemplateError

        try:
            text = self._tokenizer.apply_chat_template(
                [{"role": "user", "content": user_text}], add_generation_prompt=True, tokenize=False
            )
        except TemplateError as error:
            raise DataError(f"the chat template rejects the text {user_text!r:.80}: {error}") from error
        assert isinstance(text, str)
        return EncodedPrompt(text=text, token_ids=tuple(self._tokenizer.encode(text, add_special_tokens=False)))

    def _encode_raw(self, text: str) -> EncodedPrompt:
        plain = self._tokenizer.encode(text, add_special_tokens=False)
        full = self._tokenizer.encode(text, add_special_tokens=True)
        if full[len(full) - len(plain) :] != plain:
            appended = self._tokenizer.convert_ids_to_tokens(full[-1:])
            raise DataError(f"the tokenizer appends {appended} to every text, so data.template=raw cannot end a prompt")
        return EncodedPrompt(text=text, token_ids=tuple(full))
