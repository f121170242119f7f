"""Rows come out of every format, framing and compression as they went in."""

import contextlib
import gzip
import json
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from data import files, reading
from data.formats import Row, Rules, convert, detect, question_key
from data.schema import Problem
from jobs.errors import UserError

QUESTION, ANSWER = {"role": "user", "content": "Do fish sleep?"}, {"role": "assistant", "content": "Yes."}
CHAT = {"id": "x", "messages": [QUESTION, ANSWER]}
TEXT = st.text(st.characters(exclude_categories=("C",)), min_size=1).filter(lambda text: text.strip() != "")


def read_all(path: Path | str, *, span_bytes: int = 1 << 20) -> list[reading.Raw]:
    rows: list[reading.Raw] = []
    for uri, name in files.find(str(path)).rows:
        for span in files.plan(uri, name, index=0, span_bytes=span_bytes)[1]:
            rows += reading.read(span)
    return rows


def converted(value: Any, format: str, **rules: Any) -> tuple[Row, Counter[str]]:
    notes: Counter[str] = Counter()
    row = convert(value, Rules(format, **rules), lambda text: notes.update([text]))
    assert isinstance(row, Row), row
    return row, notes


def refused(value: Any, format: str, **rules: Any) -> list[Problem]:
    row = convert(value, Rules(format, **rules), lambda text: None)
    assert not isinstance(row, Row), row
    return row


@settings(deadline=None)
@given(st.lists(TEXT, min_size=2, max_size=6).filter(lambda t: len(t) % 2 == 0), st.none() | TEXT)
def test_any_valid_chat_survives_openai_and_sharegpt(texts: list[str], system: str | None) -> None:
    names = {"system": "system", "user": "human", "assistant": "gpt"}
    turns = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]
    turns = ([{"role": "system", "content": system}] if system is not None else []) + turns
    if any("<think>" in turn["content"] or "</think>" in turn["content"] for turn in turns):
        return
    line = json.dumps({"messages": turns})
    row, _ = converted(reading.parse(line)[0], "openai")
    assert [*row.messages, {"role": "assistant", "content": row.answer}] == turns
    other = {"conversations": [{"from": names[turn["role"]], "value": turn["content"]} for turn in turns]}
    assert converted(other, "sharegpt")[0][1:] == row[1:]


@settings(deadline=None)
@given(TEXT, st.none() | TEXT, TEXT)
def test_any_valid_alpaca_row_survives(instruction: str, given_input: str | None, output: str) -> None:
    if "think>" in output:
        return
    row, _ = converted({"instruction": instruction, "input": given_input, "output": output}, "alpaca")
    wanted = instruction if given_input is None else f"{instruction}\n\n{given_input}"
    assert (row.messages, row.answer) == ([{"role": "user", "content": wanted}], output)


@settings(deadline=None)
@given(st.lists(st.dictionaries(st.text(), st.text() | st.integers() | st.none()), min_size=1, max_size=9))
def test_json_lines_split_at_line_feeds_only(values: list[dict[str, Any]]) -> None:
    with tempfile.TemporaryDirectory() as work:
        path = Path(work) / "rows.jsonl"
        path.write_bytes(b"\n".join(json.dumps(v, ensure_ascii=False).encode("utf-8", "surrogatepass") for v in values))
        try:
            path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            return
        rows = read_all(path)
        assert [row.value for row in rows] == values
        assert [row.source for row in rows] == [f"rows.jsonl:{i + 1}" for i in range(len(values))]


@pytest.mark.parametrize("size", [7, 64, 1000, 1 << 20])
@pytest.mark.parametrize("ending", [b"\n", b"\r\n"])
@pytest.mark.parametrize("last", [b"", b"\n"])
def test_rows_and_line_numbers_do_not_depend_on_where_a_file_is_cut(
    size: int, ending: bytes, last: bytes, tmp_path: Path
) -> None:
    lines = [json.dumps({"n": i, "pad": "é" * (i % 13)}, ensure_ascii=False).encode() for i in range(60)]
    lines[7] = lines[30] = b""
    (tmp_path / "rows.jsonl").write_bytes(b"\xef\xbb\xbf" + ending.join(lines) + last)
    rows = read_all(tmp_path / "rows.jsonl", span_bytes=size)
    assert [row.value["n"] for row in rows] == [i for i in range(60) if i not in (7, 30)]
    assert [row.source for row in rows] == [f"rows.jsonl:{i + 1}" for i in range(60) if i not in (7, 30)]


def test_compressed_files_and_arrays_hold_the_same_rows(tmp_path: Path) -> None:
    rows = [{**CHAT, "id": f"r{i}"} for i in range(50)]
    plain = "".join(json.dumps(row) + "\n" for row in rows).encode()
    (tmp_path / "plain.jsonl").write_bytes(plain)
    (tmp_path / "one.jsonl.gz").write_bytes(gzip.compress(plain))
    (tmp_path / "two_members.jsonl.gz").write_bytes(gzip.compress(plain[:999]) + gzip.compress(plain[999:]))
    (tmp_path / "one.jsonl.zst").write_bytes(zstandard.compress(plain))
    (tmp_path / "two_frames.jsonl.zst").write_bytes(zstandard.compress(plain[:999]) + zstandard.compress(plain[999:]))
    (tmp_path / "no_suffix").write_bytes(gzip.compress(plain))
    (tmp_path / "array.json").write_text(json.dumps(rows))
    (tmp_path / "array_on_lines.json").write_text(json.dumps(rows, indent=2))
    (tmp_path / "array.json.gz").write_bytes(gzip.compress(json.dumps(rows).encode()))
    for file in tmp_path.iterdir():
        found = read_all(file)
        assert [row.value for row in found] == rows, file.name
        assert len({row.source for row in found}) == 50, file.name


def test_an_element_of_an_array_is_named_by_line_and_place(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('[{"a": 1},\n {"a": 2}, {"a": 3}\n]\n')
    assert [row.source for row in read_all(tmp_path / "a.json")] == ["a.json:1[0]", "a.json:2[1]", "a.json:2[2]"]
    (tmp_path / "empty.json").write_text("[ ]")
    assert read_all(tmp_path / "empty.json") == []


def test_parquet_gives_rows_with_their_numbers_and_without_the_index_of_pandas(tmp_path: Path) -> None:
    import pandas

    frame = pandas.DataFrame({"instruction": [f"q{i}?" for i in range(9)], "output": ["a"] * 9}, index=range(9, 0, -1))
    frame.to_parquet(tmp_path / "a.parquet", row_group_size=2)
    rows = read_all(tmp_path / "a.parquet", span_bytes=1)
    assert [row.value for row in rows] == [{"instruction": f"q{i}?", "output": "a"} for i in range(9)]
    assert [row.source for row in rows] == [f"a.parquet:{i}" for i in range(1, 10)]


@pytest.mark.parametrize("format", ["openai", "sharegpt", "alpaca"])
def test_every_format_may_come_as_parquet(format: str, tmp_path: Path) -> None:
    value = {
        "openai": {
            "id": "x",
            "messages": [{**QUESTION, "tool_calls": None}, {**ANSWER, "tool_calls": []}],
            "tools": None,
        },
        "sharegpt": {
            "id": "x",
            "conversations": [{"from": "human", "value": "Do fish sleep?"}, {"from": "gpt", "value": "Yes."}],
        },
        "alpaca": {"id": "x", "instruction": "Do fish sleep?", "input": None, "output": "Yes."},
    }[format]
    pq.write_table(pa.Table.from_pylist([value]), tmp_path / "a.parquet")
    [raw] = read_all(tmp_path / "a.parquet")
    assert detect([raw.value]) == format
    row, _ = converted(raw.value, format)
    assert (row.id, row.messages, row.answer) == ("x", [QUESTION], "Yes.")


def test_directories_globs_and_uris_name_files_from_where_they_start(tmp_path: Path) -> None:
    for name in ("b.jsonl", "a/c.jsonl", "a/deep/d.jsonl.gz", "facts.jsonl", "README.md", ".hidden.jsonl"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("{}\n")
    found = files.find(str(tmp_path))
    assert [name for _, name in found.rows] == ["a/c.jsonl", "a/deep/d.jsonl.gz", "b.jsonl"]
    assert [name for _, name in found.facts] == ["facts.jsonl"]
    assert sorted(found.ignored) == [".hidden.jsonl", "README.md"]
    assert [name for _, name in files.find(f"{tmp_path}/*.jsonl").rows] == [".hidden.jsonl", "b.jsonl"]
    assert [name for _, name in files.find(f"{tmp_path}/a/**/*.jsonl*").rows] == ["c.jsonl", "deep/d.jsonl.gz"]
    assert [name for _, name in files.find(f"{tmp_path}/a/?.jsonl").rows] == ["c.jsonl"]
    one = files.find(f"{tmp_path}/b.jsonl")
    assert [name for _, name in one.rows] == ["b.jsonl"]
    assert [name for _, name in one.facts] == ["facts.jsonl"]
    uri = files.find(f"file://{tmp_path}")
    assert [name for _, name in uri.rows] == ["a/c.jsonl", "a/deep/d.jsonl.gz", "b.jsonl"]
    assert read_all(f"file://{tmp_path}/b.jsonl") == [reading.Raw("b.jsonl:1", {})]


@pytest.mark.parametrize(
    ("values", "format"),
    [
        ([{"messages": []}], "openai"),
        ([{"conversations": None}], "sharegpt"),
        ([{"instruction": "a"}], "alpaca"),
        ([{"fact_ids": []}], "rankline"),
        ([{"messages": []}, {"instruction": ""}, {"instruction": ""}], "alpaca"),
        ([{"text": ""}, [], 3, None], None),
    ],
)
def test_the_format_is_what_most_rows_look_like(values: list[Any], format: str | None) -> None:
    assert detect(values) == format


def test_what_is_taken_for_something_else_is_said(tmp_path: Path) -> None:
    part = {"messages": [{"role": "user", "content": [{"type": "text", "text": "Do fish sleep?"}]}, ANSWER]}
    row, notes = converted(part, "openai")
    assert row.messages == [QUESTION]
    assert list(notes) == ["content given as one text part is taken as that text"]
    _, notes = converted({"conversations": [QUESTION, ANSWER]}, "sharegpt")
    assert len(notes) == 2
    assert (
        converted({"conversations": [{"from": "human", "value": "?"}, {"from": "gpt", "value": "."}]}, "sharegpt")[1]
        == {}
    )


def test_empty_fields_that_exports_write_mean_nothing() -> None:
    value = {"messages": [{**QUESTION, "tool_calls": None, "name": "kim"}, {**ANSWER, "tool_calls": [], "weight": 1}]}
    row, notes = converted({**value, "tools": [], "functions": None, "images": []}, "openai")
    assert (row.messages, row.answer, notes) == ([QUESTION], "Yes.", {})


def test_system_fields_become_a_system_message() -> None:
    system = {"role": "system", "content": "Be kind."}
    assert converted({"instruction": "a?", "output": "b", "system": "Be kind."}, "alpaca")[0].messages[0] == system
    turns = [{"from": "human", "value": "a?"}, {"from": "gpt", "value": "b"}]
    assert converted({"conversations": turns, "system": "Be kind."}, "sharegpt")[0].messages[0] == system


@pytest.mark.parametrize(
    ("one", "two", "same"),
    [
        ("Why is the sky blue?", "why is sky  BLUE", True),
        ("What’s a tide?", "What's a tide", True),
        ("Ｄｏ　ｆｉｓｈ　ｓｌｅｅｐ？", "do fish sleep?", True),
        ("なぜ空は青い？", "なぜ空は青い", True),
        ("天空为什么是蓝色的？", "天空为什么是蓝色的", True),
        ("Why is the sky blue?", "Why is the sea blue?", False),
        ("Is a cat bigger than a dog?", "Is a dog bigger than a cat?", False),
        ("How many legs has an ant?", "How many legs has a spider?", False),
        ("What is 3 + 4?", "What is 3 + 5?", False),
        ("なぜ空は青い？", "なぜ海は青い？", False),
    ],
)
def test_near_duplicates_are_the_same_words(one: str, two: str, same: bool) -> None:
    keys = [question_key([{"role": "user", "content": text}]) for text in (one, two)]
    assert (keys[0] == keys[1]) == same


def test_earlier_turns_tell_questions_apart() -> None:
    follow_up = {"role": "user", "content": "I still don't get it."}
    keys = {
        question_key([{"role": "user", "content": first}, ANSWER, follow_up])
        for first in ("Why is the sky blue?", "How do magnets pull?")
    }
    assert len(keys) == 2


def test_what_keeps_rows_together() -> None:
    assert converted(CHAT, "openai")[0].keys == ["question:fish sleep"]
    group = converted({**CHAT, "topic": 7}, "openai", split_by="group", group_key="topic")[0]
    assert group.keys == ["group:7"]
    assert refused(CHAT, "openai", split_by="group", group_key="topic")[0].kind == "group"


def test_ids_may_be_numbers_in_formats_of_others() -> None:
    assert converted({**CHAT, "id": 14}, "openai")[0].id == "14"
    assert converted({"messages": CHAT["messages"]}, "openai")[0].id is None
    assert refused({**CHAT, "id": True}, "openai")[0].field == "id"


@settings(deadline=None)
@given(st.binary(max_size=60))
def test_no_bytes_make_the_reader_fail_otherwise_than_in_words(blob: bytes) -> None:
    with tempfile.TemporaryDirectory() as work:
        path = Path(work) / "rows.jsonl"
        path.write_bytes(blob)
        with contextlib.suppress(UserError):
            assert len(read_all(path)) <= blob.count(b"\n") + 1
