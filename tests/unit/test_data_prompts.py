import json
import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from grpo_lib.config import DataConfig
from grpo_lib.data.prompts import Split, addition_rows, load_rows
from grpo_lib.errors import DataError


def write(path: Path, *lines: object) -> Path:
    path.write_text("".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines))
    return path


def jsonl_config(train: Path, heldout: Path | None = None, **fields: Any) -> DataConfig:
    return DataConfig(source="jsonl", train_path=str(train), heldout_path=str(heldout or train), **fields)


def parquet_config(path: Path, **fields: Any) -> DataConfig:
    return DataConfig(source="parquet", train_path=str(path), heldout_path=str(path), **fields)


class TestAddition:
    def test_sums_are_right_distinct_and_disjoint(self) -> None:
        train, heldout = addition_rows(DataConfig(num_train=800, num_heldout=150, max_x=100, max_y=10))
        assert (len(train), len(heldout)) == (800, 150)
        for row in (*train, *heldout):
            x, y = map(int, row.prompt.removesuffix("=").split("+"))
            assert 0 <= x < 100
            assert 0 <= y < 10
            assert int(row.answer) == x + y
        texts = [row.prompt for row in (*train, *heldout)]
        assert len(set(texts)) == len(texts)
        assert {row.split for row in train} == {Split.TRAIN}
        assert {row.split for row in heldout} == {Split.HELDOUT}
        assert train[17].prompt_id == "addition-train-000017"
        assert heldout[0].prompt_id == "addition-heldout-000000"

    def test_is_the_same_every_time_and_another_for_another_seed(self) -> None:
        config = DataConfig()
        assert addition_rows(config) == addition_rows(config)
        assert addition_rows(config) != addition_rows(config, seed=2)
        # A fixed point in time: a change of these changes what the shipped model has never seen.
        assert [row.prompt for row in addition_rows(config)[1][:4]] == ["13+4=", "84+7=", "76+3=", "25+5="]

    def test_training_size_leaves_the_heldout_sums_alone(self) -> None:
        few, many = (addition_rows(DataConfig(num_train=n)) for n in (16, 800))
        assert few[1] == many[1]
        assert few[0] == many[0][:16]

    def test_shots_are_solved_sums_of_neither_split(self) -> None:
        config = DataConfig(num_train=400, num_heldout=100, max_x=30, max_y=20, num_shots=3, template="raw")
        train, heldout = addition_rows(config)
        shown, asked = set(), []
        for row in (*train, *heldout):
            *solved, open_question = row.prompt.split("\n\n")
            assert open_question.endswith("?\nAnswer:")
            for text in solved:
                x, y, total = map(int, re.findall(r"\d+", text))
                assert x + y == total
                shown.add((x, y))
            x, y = map(int, re.findall(r"\d+", open_question))
            assert int(row.answer) == x + y
            asked.append((x, y))
        assert len(shown) == 3, "the same shots for all"
        assert len(set(asked)) == len(asked) == 500
        assert not shown & set(asked)

    def test_shots_and_training_size_leave_the_heldout_sums_alone(self) -> None:
        def heldout(num_train: int, num_shots: int) -> list[str]:
            rows = addition_rows(DataConfig(num_train=num_train, num_shots=num_shots, template="raw"))[1]
            return [row.answer for row in rows]

        assert heldout(800, 0) == heldout(100, 3) == heldout(800, 7)

    def test_all_of_the_space_can_be_used_and_no_more(self) -> None:
        train, heldout = addition_rows(DataConfig(num_train=15, num_heldout=5, max_x=4, max_y=5))
        assert {row.prompt for row in (*train, *heldout)} == {f"{x}+{y}=" for x in range(4) for y in range(5)}
        with pytest.raises(DataError, match=r"\(16\) \+ data.num_heldout \(5\) = 21 exceeds the 20 sums"):
            addition_rows(DataConfig(num_train=16, num_heldout=5, max_x=4, max_y=5))


class TestJsonl:
    def test_rows_in_order_with_integers_nulls_and_duplicates(self, tmp_path: Path) -> None:
        path = write(
            tmp_path / "a.jsonl",
            {"q": "1+1=", "a": 2, "more": [1]},
            "",
            {"q": "1+1=", "a": "2"},
            {"q": None, "a": None},
        )
        train, heldout = load_rows(jsonl_config(path, prompt_field="q", answer_field="a"))
        assert [(row.prompt, row.answer) for row in train] == [("1+1=", "2"), ("1+1=", "2"), ("", "")]
        assert [row.prompt_id for row in train] == ["jsonl-train-000000", "jsonl-train-000002", "jsonl-train-000003"]
        assert len({row.prompt_id for row in (*train, *heldout)}) == 6

    def test_ids_do_not_depend_on_the_file_name(self, tmp_path: Path) -> None:
        row = {"prompt": "p", "answer": "a"}
        first, second = write(tmp_path / "a.jsonl", row), write(tmp_path / "b.jsonl", row)
        assert load_rows(jsonl_config(first)) == load_rows(jsonl_config(second))

    @pytest.mark.parametrize(
        ("lines", "message"),
        [
            ((), r"a\.jsonl has no rows"),
            (("", "  "), r"a\.jsonl has no rows"),
            (
                ({"prompt": "p", "answer": "a"}, {"prompt": "p", "solution": "a"}),
                r"line 2: no column 'answer'; columns present: 'prompt', 'solution'; set data\.answer_field",
            ),
            (({"x": 1},), "no column 'prompt' and 'answer'"),
            (({"prompt": "p", "answer": 1.5},), "line 1: column 'answer' holds float 1.5; expected text or an integer"),
            (({"prompt": "p", "answer": True},), "column 'answer' holds bool True"),
            (({"prompt": ["p"], "answer": "a"},), r"column 'prompt' holds list \['p'\]; expected text"),
            (({"prompt": 3, "answer": "a"},), "column 'prompt' holds int 3; expected text"),
            (('{"prompt": "p", "answer": "a"}', "{"), r"a\.jsonl, line 2: not JSON"),
            (("[1]",), "line 1: expected a JSON object, found list"),
            (('{"prompt": "\\ud800", "answer": "a"}',), "half a surrogate pair"),
        ],
    )
    def test_mistakes_name_file_place_and_what_is_there(
        self, tmp_path: Path, lines: tuple[object, ...], message: str
    ) -> None:
        with pytest.raises(DataError, match=message) as caught:
            load_rows(jsonl_config(write(tmp_path / "a.jsonl", *lines)))
        assert "a.jsonl" in str(caught.value)

    def test_unreadable_files(self, tmp_path: Path) -> None:
        with pytest.raises(DataError, match=r"data\.train_path: .*nowhere.jsonl is not a file"):
            load_rows(jsonl_config(tmp_path / "nowhere.jsonl"))
        (tmp_path / "latin.jsonl").write_bytes(b'{"prompt": "\xe4"}\n')
        with pytest.raises(DataError, match="not UTF-8"):
            load_rows(jsonl_config(tmp_path / "latin.jsonl"))
        good = write(tmp_path / "good.jsonl", {"prompt": "p", "answer": "a"})
        with pytest.raises(DataError, match=r"data\.heldout_path: .* is not a file"):
            load_rows(jsonl_config(good, tmp_path))
        with pytest.raises(DataError, match=r"needs data\.heldout_path"):
            load_rows(DataConfig(source="jsonl", train_path=str(good)))


class TestParquet:
    def test_columns_are_mapped_and_others_ignored(self, tmp_path: Path) -> None:
        path = tmp_path / "a.parquet"
        table = pa.table({"id": [1, 2], "question": ["p", None], "target": [7, -8]})
        pq.write_table(table, path, row_group_size=1)
        train, _ = load_rows(parquet_config(path, prompt_field="question", answer_field="target"))
        assert [(row.prompt, row.answer, row.row) for row in train] == [("p", "7", 0), ("", "-8", 1)]

    def test_one_column_may_be_both(self, tmp_path: Path) -> None:
        pq.write_table(pa.table({"text": ["echo"]}), tmp_path / "a.parquet")
        train, _ = load_rows(parquet_config(tmp_path / "a.parquet", prompt_field="text", answer_field="text"))
        assert (train[0].prompt, train[0].answer) == ("echo", "echo")

    @pytest.mark.parametrize(
        ("columns", "message"),
        [
            ({"prompt": ["p"], "solution": ["a"]}, "no column 'answer'; columns present: 'prompt', 'solution'"),
            ({"prompt": ["p", "q"], "answer": [1.0, 2.0]}, "row 0: column 'answer' holds float"),
            ({"prompt": pa.array([b"p"]), "answer": ["a"]}, "column 'prompt' holds bytes"),
            ({"prompt": pa.array([], pa.string()), "answer": pa.array([], pa.string())}, "has no rows"),
        ],
    )
    def test_mistakes(self, tmp_path: Path, columns: dict[str, object], message: str) -> None:
        pq.write_table(pa.table(columns), tmp_path / "a.parquet")
        with pytest.raises(DataError, match=message) as caught:
            load_rows(parquet_config(tmp_path / "a.parquet"))
        assert "a.parquet" in str(caught.value)

    def test_what_is_no_parquet(self, tmp_path: Path) -> None:
        for content in (b"", b"PAR1 nonsense PAR1"):
            (tmp_path / "a.parquet").write_bytes(content)
            with pytest.raises(DataError, match="not a readable Parquet file"):
                load_rows(parquet_config(tmp_path / "a.parquet"))
