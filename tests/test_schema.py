"""Rows are checked field by field; the checks are hand-written expectations, not our own output."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.schema import check_card, check_example, check_messages, check_text

ROOT = Path(__file__).parent.parent
FACTS = {"rain": {"id": "rain", "text": "Drops fall.", "kind": "process", "scope": "clouds"}}
EXAMPLE = {
    "id": "e1",
    "fact_ids": ["rain"],
    "grade_band": "3-4",
    "language": "en",
    "history": [{"role": "user", "content": "Hi?"}, {"role": "assistant", "content": "Hello."}],
    "user": "Why does it rain?",
    "answer": "Drops grow and fall.",
}
# What Unicode itself lists as letters, marks, numbers, punctuation, symbols and spaces: text by anyone's reading.
TEXT = st.text(st.characters(exclude_categories=("C", "Zl", "Zp")), min_size=1).filter(lambda text: text.strip() != "")


def fields(problems: list) -> list[tuple[str, str]]:
    return [(problem.field, problem.kind) for problem in problems]


def test_a_right_example_and_card_have_no_problems() -> None:
    assert check_example(EXAMPLE, FACTS) == []
    assert check_card(FACTS["rain"]) == []


def test_schema_and_prompts_work_with_the_standard_library_alone(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    for name in ("__init__.py", "schema.py", "prompts.py"):
        (tmp_path / "data" / name).write_bytes((ROOT / "data" / name).read_bytes())
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        "from data import prompts, schema\n"
        f"facts, row = {FACTS!r}, {EXAMPLE!r}\n"
        "assert schema.check_example(row, facts) == []\n"
        "print(len(prompts.build_messages(facts, row)))\n"
        "outside = [n for n, m in sys.modules.items() if 'site-packages' in (getattr(m, '__file__', None) or '')]\n"
        "assert not outside, outside\n"
    )
    done = subprocess.run([sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "4\n", "")


@pytest.mark.parametrize("key", list(EXAMPLE))
def test_every_missing_key_of_an_example_is_named(key: str) -> None:
    row = {k: v for k, v in EXAMPLE.items() if k != key}
    assert fields(check_example(row, FACTS)) == [(key, "missing")]


def test_all_problems_of_a_row_are_reported_not_only_the_first() -> None:
    row = {
        **EXAMPLE,
        "user": "",
        "answer": None,
        "fact_ids": ["snow"],
        "grade_band": "9",
        "language": "fr",
        "history": 3,
    }
    assert fields(check_example(row, FACTS)) == [
        ("user", "empty"),
        ("answer", "empty_answer"),
        ("fact_ids[0]", "unknown_fact"),
        ("grade_band", "value"),
        ("language", "value"),
        ("history", "type"),
    ]


@pytest.mark.parametrize("band", ["1-2", "3-4", "5-6", "1", "6", "1-6"])
def test_grade_bands_of_primary_school_are_accepted(band: str) -> None:
    assert check_example({**EXAMPLE, "grade_band": band}, FACTS) == []


@pytest.mark.parametrize("band", ["", "0-1", "6-1", "7", "1-2-3", "1 - 2", "1-2\n", "one", 1, None])
def test_other_grade_bands_are_refused(band: object) -> None:
    assert fields(check_example({**EXAMPLE, "grade_band": band}, FACTS)) == [("grade_band", "value")]


@settings(deadline=None)
@given(TEXT)
def test_any_ordinary_text_passes(text: str) -> None:
    assert check_text(text, "x") is None


@settings(deadline=None)
@given(st.characters(categories=("Cc", "Cs")), TEXT)
def test_any_control_character_or_surrogate_is_found(char: str, text: str) -> None:
    problem = check_text(text + char + text, "x")
    if char in "\t\n":
        assert problem is None
    else:
        assert problem is not None
        assert problem.kind == ("surrogate" if "\ud800" <= char <= "\udfff" else "control")
        assert f"U+{ord(char):04X} at character {len(text)}" in problem.text


def test_windows_line_ends_are_text() -> None:
    assert check_text("one\r\ntwo", "x") is None


ROLES = st.lists(st.sampled_from(["system", "user", "assistant"]), min_size=1, max_size=7)


@settings(deadline=None)
@given(ROLES)
def test_exactly_the_alternating_chats_pass(roles: list[str]) -> None:
    turns = [{"role": role, "content": "text"} for role in roles]
    body = roles[1:] if roles[0] == "system" else roles
    right = len(body) > 0 and len(body) % 2 == 0 and body == ["user", "assistant"] * (len(body) // 2)
    assert (check_messages(turns) == []) == right


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


@settings(deadline=None)
@given(JSON)
def test_no_value_at_all_makes_a_check_raise(value: object) -> None:
    for check in (check_messages, check_card, lambda v: check_example(v, FACTS)):
        assert all(str(problem) for problem in check(value))


@settings(deadline=None)
@given(st.dictionaries(st.sampled_from([*EXAMPLE, "messages"]), JSON), st.sampled_from(list(EXAMPLE)))
def test_no_value_in_any_field_makes_a_check_raise(row: dict[str, object], key: str) -> None:
    assert check_example({**EXAMPLE, **row, key: {"a": [None]}}, FACTS) != []


def test_the_dataset_of_the_project_is_valid() -> None:
    facts = {card["id"]: card for card in map(json.loads, (ROOT / "data/science/facts.jsonl").open(encoding="utf-8"))}
    assert all(check_card(card) == [] for card in facts.values())
    for line in (ROOT / "data/science/examples.jsonl").open(encoding="utf-8"):
        assert check_example(json.loads(line), facts) == []
