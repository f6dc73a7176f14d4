import copy
import json
import shutil
from pathlib import Path

import pytest
from tokenizers.processors import TemplateProcessing

from grpo_lib.data.chat import PromptEncoder, load_tokenizer, stop_token_ids, token_decoder, tokenizer_sha256
from grpo_lib.data.models import resolve_model_path
from grpo_lib.errors import DataError

FOLDER = resolve_model_path("builtin:tiny_qwen3")
PAD, EOS, USER, ASSISTANT = 0, 1, 3, 4


@pytest.fixture(scope="module")
def shipped():
    return load_tokenizer(FOLDER)


@pytest.fixture
def tokenizer(shipped):
    """A copy to change."""
    return copy.deepcopy(shipped)


def ids_of(text: str) -> tuple[int, ...]:
    """Byte-level ids of printable ASCII, by hand: 8 special tokens come first."""
    return tuple(8 + ord(char) - ord("!") for char in text)


def add_tokens(tokenizer, single: str) -> None:
    """Make the tokenizer add special tokens to every text, as Llama's (front) and T5's (back) do."""
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=single, special_tokens=[("<|user|>", USER), ("<|eos|>", EOS)]
    )


def test_template_is_applied_once_and_nothing_is_added(tokenizer) -> None:
    add_tokens(tokenizer, "<|user|> $A <|eos|>")  # must not matter: the template spells out its special tokens
    encoded = PromptEncoder(tokenizer, "tokenizer").encode("12+3=")
    assert encoded.text == "<|user|>12+3=<|assistant|>"
    assert encoded.token_ids == (USER, *ids_of("12+3="), ASSISTANT)


def test_raw_text_is_taken_as_it_is(tokenizer) -> None:
    encoded = PromptEncoder(tokenizer, "raw").encode("1+1=")
    assert (encoded.text, encoded.token_ids) == ("1+1=", ids_of("1+1="))


def test_raw_prepends_what_the_model_expects_and_refuses_what_would_end_the_prompt(tokenizer) -> None:
    add_tokens(tokenizer, "<|user|> $A")
    assert PromptEncoder(tokenizer, "raw").encode("1").token_ids == (USER, *ids_of("1"))
    add_tokens(tokenizer, "$A <|eos|>")
    with pytest.raises(DataError, match=r"appends \['<\|eos\|>'\] to every text"):
        PromptEncoder(tokenizer, "raw").encode("1")


def test_missing_and_failing_templates(tokenizer) -> None:
    tokenizer.chat_template = "{{ raise_exception('only system turns') }}"
    with pytest.raises(DataError, match="rejects the text 'hi': only system turns"):
        PromptEncoder(tokenizer, "tokenizer").encode("hi")
    tokenizer.chat_template = None
    with pytest.raises(DataError, match=r"no chat template; .* or set data\.template=raw"):
        PromptEncoder(tokenizer, "tokenizer")
    assert PromptEncoder(tokenizer, "raw").encode("1").token_ids == ids_of("1")


def test_hash_covers_vocabulary_and_template_and_survives_use(tokenizer) -> None:
    before = tokenizer_sha256(tokenizer)
    PromptEncoder(tokenizer, "tokenizer").encode("x")
    assert tokenizer_sha256(tokenizer) == before == tokenizer_sha256(load_tokenizer(FOLDER))
    tokenizer.chat_template += " "
    with_template = tokenizer_sha256(tokenizer)
    tokenizer.add_tokens(["<|new|>"])
    assert len({before, with_template, tokenizer_sha256(tokenizer)}) == 3


def test_all_stop_tokens_are_found(tokenizer, tmp_path: Path) -> None:
    """Qwen's configs name one id and its generation config two; a stop token left out is a completion cut off."""
    folder = Path(shutil.copytree(FOLDER, tmp_path / "model"))
    assert stop_token_ids(folder, tokenizer) == (EOS,)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [9, 7]}))
    assert stop_token_ids(folder, tokenizer) == (EOS, 7, 9)
    for name in ("config.json", "generation_config.json"):
        (folder / name).write_text("{}")
    tokenizer.eos_token = None
    with pytest.raises(DataError, match="names no stop token"):
        stop_token_ids(folder, tokenizer)


def test_a_line_ends_at_every_token_with_a_newline(tokenizer) -> None:
    """A vocabulary has more of them than the newline itself: one that is left out lets the next question begin."""
    tokenizer.add_tokens(["\n\n", ".\n", "\t", "n"])
    stops = stop_token_ids(FOLDER, tokenizer, "line")
    texts = {one: tokenizer.decode([one]) for one in stops if one != EOS}
    assert sorted(texts.values()) == ["\n", "\n\n", ".\n"]
    assert EOS in stops
    assert tokenizer.encode("7\n", add_special_tokens=False)[-1] in stops


def test_decoder_leaves_out_special_tokens_only(tokenizer) -> None:
    decode = token_decoder(tokenizer)
    assert decode([*ids_of("1+1=2"), EOS, PAD]) == "1+1=2"
    spaced = "a , b .  n't"  # transformers used to tidy such spaces away
    assert decode(tokenizer.encode(spaced, add_special_tokens=False)) == spaced


def test_generic_tokenizer_is_what_auto_classes_choose(shipped, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    chosen = AutoTokenizer.from_pretrained(FOLDER)
    assert type(shipped) is type(chosen)
    assert tokenizer_sha256(shipped) == tokenizer_sha256(chosen)
    folder = Path(shutil.copytree(FOLDER, tmp_path / "model"))
    config = json.loads((folder / "tokenizer_config.json").read_text())
    assert config.pop("tokenizer_class") == type(shipped).__name__
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    assert PromptEncoder(load_tokenizer(folder), "tokenizer").encode("1+1=").token_ids == (
        USER, *ids_of("1+1="), ASSISTANT,
    )  # fmt: skip


def test_folder_without_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="has no tokenizer"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(DataError, match="cannot be loaded"):
        load_tokenizer(tmp_path)
