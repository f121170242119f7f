"""Messages, and what both models' templates make of them: expected text is written by hand, ids are transformers'."""

import json
import lzma
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.prompts import ROLE_PROMPT, build_messages
from data.rendering import COPYING_TEMPLATES, Renderer, Text, load_assets
from data.schema import Problem
from jobs.errors import UserError

ROOT = Path(__file__).parent.parent
CARD = {
    "id": "echo",
    "text": "Sound bounces off walls: 「やまびこ」.",
    "kind": "cause",
    "scope": "caves",
    "note": "not shown",
}
ROW = {
    "id": "r",
    "fact_ids": ["echo"],
    "grade_band": "1-2",
    "language": "zh",
    "history": [{"role": "user", "content": "你好"}, {"role": "assistant", "content": "你好呀！"}],
    "user": "回声是什么？",
    "answer": "声音碰到墙弹回来。",
}
CARDS = '[{"id": "echo", "text": "Sound bounces off walls: 「やまびこ」.", "kind": "cause", "scope": "caves"}]'


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The real Qwen3 tokenizer and chat template, without a model."""
    where = tmp_path_factory.mktemp("qwen3")
    shutil.copy(ROOT / "tests/qwen3/tokenizer_config.json", where)
    with lzma.open(ROOT / "tests/qwen3/tokenizer.json.xz") as packed:
        (where / "tokenizer.json").write_bytes(packed.read())
    return where


@pytest.fixture(scope="module", params=["smollm2", "qwen3", "qwen3-thinking", "qwen3-no-thinking"])
def model(request: pytest.FixtureRequest) -> tuple[Renderer, Any, dict[str, bool]]:
    """Our renderer, transformers' tokenizer and the template's variables, for both models and all ways to think."""
    from transformers import AutoTokenizer

    name, _, thinking = request.param.partition("-")
    where = request.getfixturevalue("base_model" if name == "smollm2" else "qwen3")
    enabled = {"": None, "thinking": True, "no-thinking": False}[thinking]
    variables = {} if enabled is None else {"enable_thinking": enabled}
    return Renderer(load_assets(where, enable_thinking=enabled)), AutoTokenizer.from_pretrained(where), variables


def test_the_system_message_is_exactly_as_agreed() -> None:
    messages = build_messages([CARD], ROW, "Role.")
    assert messages[0] == {
        "role": "system",
        "content": f"Role.\n小学学段：1-2 年级。\nCURRENT REFERENCE FACTS:\n{CARDS}",
    }
    assert messages[1:] == [*ROW["history"], {"role": "user", "content": "回声是什么？"}]
    assert build_messages({"echo": CARD}, ROW, "Role.") == messages


@pytest.mark.parametrize(
    ("language", "line"),
    [("en", "Primary school level: grades 1-2."), ("ja", "小学校の学年：1-2年生。"), ("zh", "小学学段：1-2 年级。")],
)
def test_the_grade_line_is_in_the_language_of_the_row(language: str, line: str) -> None:
    system = build_messages([CARD], {**ROW, "language": language})[0]["content"]
    assert system.split("\n")[1] == line
    assert system.split("\n")[0] == ROLE_PROMPT


def test_cards_come_in_the_order_the_row_names_them() -> None:
    other = {**CARD, "id": "a"}
    system = build_messages([CARD, other], {**ROW, "fact_ids": ["a", "echo"]})[0]["content"]
    assert [card["id"] for card in json.loads(system.split("\n")[-1])] == ["a", "echo"]


def test_an_unknown_fact_is_named() -> None:
    with pytest.raises(ValueError, match="'moon'"):
        build_messages([CARD], {**ROW, "fact_ids": ["moon"]})


GOLDEN = f"""<|im_start|>system
Role.
小学学段：1-2 年级。
CURRENT REFERENCE FACTS:
{CARDS}<|im_end|>
<|im_start|>user
你好<|im_end|>
<|im_start|>assistant
你好呀！<|im_end|>
<|im_start|>user
回声是什么？<|im_end|>
<|im_start|>assistant
"""


def test_the_rendered_text_is_the_one_written_by_hand(model: tuple[Renderer, Any, dict[str, bool]]) -> None:
    renderer, _, variables = model
    thinking, qwen3 = variables.get("enable_thinking"), "<think>" in renderer.template.source
    empty = "<think>\n\n</think>\n\n"
    text = renderer.text(build_messages([CARD], ROW, "Role."), ROW["answer"])
    assert isinstance(text, Text)
    assert text.prompt == GOLDEN + (empty if qwen3 and thinking is False else "")
    assert text.answer == (empty if qwen3 and thinking is not False else "") + "声音碰到墙弹回来。<|im_end|>"


def test_token_ids_are_those_of_transformers(model: tuple[Renderer, Any, dict[str, bool]]) -> None:
    renderer, tokenizer, variables = model
    facts = [json.loads(line) for line in (ROOT / "data/science/facts.jsonl").open(encoding="utf-8")]
    rows = [json.loads(line) for line in (ROOT / "data/science/examples.jsonl").open(encoding="utf-8")]
    chosen = [*rows[::7], {**ROW, "fact_ids": [facts[0]["id"]]}]
    assert {row["language"] for row in chosen} >= {"en", "zh"}
    texts = [renderer.text(build_messages(facts, row), row["answer"]) for row in chosen]
    for row, (prompt, answer) in zip(chosen, renderer.encode(texts), strict=True):
        messages = build_messages(facts, row)
        whole = [*messages, {"role": "assistant", "content": row["answer"]}]
        make = dict(tokenize=True, return_dict=False, **variables)
        assert prompt == tokenizer.apply_chat_template(messages, add_generation_prompt=True, **make)
        assert prompt + answer == tokenizer.apply_chat_template(whole, **make)[: len(prompt) + len(answer)]
        assert answer[-1] == tokenizer.convert_tokens_to_ids("<|im_end|>")


# Anything a row may hold, and what templates are known to look for.
CONTENT = st.text(st.characters(exclude_categories=("Cs", "Cc")), min_size=1, max_size=12) | st.sampled_from(
    [
        "<think>\nhm\n</think>\n\nYes.",
        "<tool_response>\n3\n</tool_response>",
        "\n\nLate.",
        "Early. \n",
        "{{ x }}",
        "{% if %}",
    ]
)


@settings(max_examples=150, deadline=None)
@given(
    turns=st.lists(CONTENT, min_size=1, max_size=5).filter(lambda t: len(t) % 2 == 1),
    system=st.none() | CONTENT,
    answer=CONTENT,
)
def test_the_short_cut_for_known_templates_equals_the_template(
    model: tuple[Renderer, Any, dict[str, bool]], turns: list[str], system: str | None, answer: str
) -> None:
    renderer, tokenizer, variables = model
    assert renderer.copies
    messages = [{"role": "system", "content": system}] if system is not None else []
    messages += [{"role": ("user", "assistant")[i % 2], "content": turn} for i, turn in enumerate(turns)]
    text = renderer.text(messages, answer)
    slow = renderer.rendered(messages, answer)
    assert text == slow
    if isinstance(text, Text):
        whole = [*messages, {"role": "assistant", "content": answer}]
        assert text.prompt == tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True, **variables
        )
        assert tokenizer.apply_chat_template(whole, tokenize=False, **variables).startswith(text.prompt + text.answer)


def test_both_templates_are_the_ones_proven_to_copy() -> None:
    assert set(COPYING_TEMPLATES.values()) == {"SmolLM2-Instruct", "Qwen3"}


def test_qwen3_marks_no_answer_by_itself_and_ours_does(qwen3: Path) -> None:
    from transformers import AutoTokenizer

    chat = [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "Because."}]
    tokenizer = AutoTokenizer.from_pretrained(qwen3)
    theirs = tokenizer.apply_chat_template(chat, tokenize=True, return_dict=True, return_assistant_tokens_mask=True)
    assert sum(theirs["assistant_masks"]) == 0
    renderer = Renderer(load_assets(qwen3, enable_thinking=False))
    text = renderer.text(chat[:-1], "Because.")
    assert isinstance(text, Text)
    [(_, answer)] = renderer.encode([text])
    assert tokenizer.decode(answer) == "Because.<|im_end|>"


def test_reasoning_of_earlier_turns_is_dropped_by_qwen3_and_that_is_said(qwen3: Path) -> None:
    chat = [
        {"role": "user", "content": "One?"},
        {"role": "assistant", "content": "<think>\nsecret\n</think>\n\nFirst."},
        {"role": "user", "content": "Two?"},
    ]
    text = Renderer(load_assets(qwen3, enable_thinking=None)).text(chat, "<think>\nhm\n</think>\n\nSecond.")
    assert isinstance(text, Text)
    assert "secret" not in text.prompt
    assert "assistant\nFirst.<|im_end|>" in text.prompt
    assert text.answer == "<think>\nhm\n</think>\n\nSecond.<|im_end|>"
    assert text.note == "the chat template leaves out the reasoning of earlier turns"


def test_reasoning_in_an_answer_is_refused_when_thinking_is_off(qwen3: Path) -> None:
    renderer = Renderer(load_assets(qwen3, enable_thinking=False))
    found = renderer.text([{"role": "user", "content": "Why?"}], "<think>\nhm\n</think>\n\nSo.")
    assert isinstance(found, Problem)
    assert "model.enable_thinking is false" in found.text


def changed(where: Path, tmp_path: Path, template: str) -> Path:
    shutil.copytree(where, tmp_path / "model", ignore=shutil.ignore_patterns("*.safetensors"))
    (tmp_path / "model" / "chat_template.jinja").write_text(template)
    return tmp_path / "model"


def test_a_template_without_an_end_of_turn_token_is_refused(base_model: Path, tmp_path: Path) -> None:
    where = changed(
        base_model, tmp_path, "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"
    )
    with pytest.raises(UserError, match=r"end-of-turn token|differently"):
        Renderer(load_assets(where, enable_thinking=None))


def test_a_template_that_loses_a_turn_is_found_out(base_model: Path, tmp_path: Path) -> None:
    source = (base_model / "chat_template.jinja").read_text()
    where = changed(base_model, tmp_path, source.replace("message['content']", "message['content'][:20]"))
    renderer = Renderer(load_assets(where, enable_thinking=None))
    assert not renderer.copies
    assert isinstance(renderer.text([{"role": "user", "content": "Short?"}], "Yes."), Text)
    lost = renderer.text([{"role": "user", "content": "This question is longer than that."}], "Yes.")
    assert isinstance(lost, Problem)
    assert (lost.field, lost.kind) == ("messages[0]", "template")
    cut = renderer.text([{"role": "user", "content": "Short?"}], "This answer is longer than that.")
    assert isinstance(cut, Problem)
    assert cut.field == "answer"


def test_a_tokenizer_that_sees_the_start_of_a_text_is_not_given_halves(tmp_path: Path) -> None:
    """SentencePiece-like tokenizers put a mark before the first word: an answer encoded alone has other ids."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = ["<|user|>", "<|bot|>", "<|end|>", "▁Why?", "Why?", "▁So.", "So.", "<unk>", "▁A", "A"]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.add_special_tokens(["<|user|>", "<|bot|>", "<|end|>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    template = (
        "{% for m in messages %}{{ '<|user|>' if m.role == 'user' else '<|bot|>' }}{{ m.content }}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}<|bot|>{% endif %}"
    )
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": template, "eos_token": "<|end|>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    renderer = Renderer(load_assets(tmp_path, enable_thinking=None))
    assert not renderer.splits
    text = renderer.text([{"role": "user", "content": "Why?"}], "So.")
    assert isinstance(text, Text)
    assert (text.prompt, text.answer) == ("<|user|>Why?<|end|><|bot|>", "So.<|end|>")
    assert renderer.encode([text]) == [([0, 4, 2, 1], [6, 2])]  # alone, "So." would be ▁So., number 5
