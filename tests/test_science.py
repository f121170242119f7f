"""The science dataset: what the issue promises about it, and that each rule can fail."""

import json
import re
from collections import Counter
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from data import rules, safety, schema
from data.schema import Card, Example

SCIENCE = Path(__file__).parent.parent / "data" / "science"


def lines(name: str) -> list[Any]:
    return [json.loads(line) for line in (SCIENCE / name).read_text(encoding="utf-8").splitlines()]


CARDS: list[Card] = lines("facts.jsonl")
ROWS: list[Example] = lines("examples.jsonl")
FACTS = {card["id"]: card for card in CARDS}


def test_there_are_as_many_cards_and_rows_as_promised() -> None:
    languages = Counter(row["language"] for row in ROWS)
    assert len(CARDS) >= 40
    assert len(ROWS) >= 400
    assert languages["en"] >= 280
    assert languages["ja"] >= 60
    assert languages["zh"] >= 60
    assert sum(bool(row["history"]) for row in ROWS) >= 120
    assert sum(len(row["history"]) >= 4 for row in ROWS) >= 20
    for language in languages:
        bands = Counter(row["grade_band"] for row in ROWS if row["language"] == language)
        assert set(bands) == {"1-2", "3-4", "5-6"}
        assert min(bands.values()) >= 20


@pytest.mark.parametrize(
    ("field", "pattern", "least"),
    [
        ("user", r"(no|any) (more )?questions?|don't ask|質問は|しつもんは|别问|提问", 15),
        ("user", r"\banswer|答えだけ|こたえだけ|答案", 15),
        ("user", r"don't get|lost|confused|not clear|don't understand|explain it one|わからな|不懂|不明白", 10),
        ("user", r"I think|guess|bet|right\?|isn't it|思う|よね|吧？|对吗|我猜", 20),
        ("answer", r"facts? (do|are|say|is|don't|about)|no (fact|number)|知識|我的资料|资料里", 40),
        ("answer", r"\b(try|watch|test|compare|look at|you can)\b|てみ|试|看看|比一比", 80),
    ],
    ids=["no questions", "just the answer", "still not clear", "wrong guess", "not on the cards", "observation"],
)
def test_the_promised_kinds_of_row_are_there(field: str, pattern: str, least: int) -> None:
    texts = [str(row[field]) for row in ROWS]  # type: ignore[literal-required]
    assert sum(re.search(pattern, text, re.IGNORECASE) is not None for text in texts) >= least


def test_every_card_and_row_is_well_formed_and_ids_are_unique() -> None:
    assert [problem for card in CARDS for problem in schema.check_card(card)] == []
    assert [problem for row in ROWS for problem in schema.check_example(row, FACTS)] == []
    assert len(FACTS) == len(CARDS)
    assert len({row["id"] for row in ROWS}) == len(ROWS)
    assert {i for row in ROWS for i in row["fact_ids"]} == set(FACTS), "every card is used"


def test_every_row_keeps_every_rule() -> None:
    broken = {row["id"]: found for row in ROWS if (found := rules.check(row, FACTS))}
    assert broken == {}


@pytest.mark.parametrize(("field", "limit"), [("user", 0.6), ("answer", 0.6)])
def test_no_two_rows_say_nearly_the_same(field: str, limit: float) -> None:
    def tokens(row: Example) -> frozenset[str]:
        text = str(row[field]).lower()  # type: ignore[literal-required]
        if row["language"] == "en":
            return frozenset(re.findall(r"[a-z0-9']+", text))
        letters = re.sub(r"\W", "", text)
        return frozenset(letters[i : i + 2] for i in range(len(letters) - 1))

    for language in schema.LANGUAGES:
        rows = [(row["id"], tokens(row)) for row in ROWS if row["language"] == language]
        near = [(i, j) for (i, a), (j, b) in combinations(rows, 2) if len(a & b) > limit * len(a | b)]
        assert near == [], language


def test_rows_fall_apart_into_many_small_components() -> None:
    parent = {i: i for i in FACTS}

    def root(i: str) -> str:
        while parent[i] != i:
            i = parent[i]
        return i

    for row in ROWS:
        for i in row["fact_ids"]:
            parent[root(i)] = root(row["fact_ids"][0])
    sizes = Counter(root(row["fact_ids"][0]) for row in ROWS)
    assert len(sizes) >= 25
    assert max(sizes.values()) < 0.1 * len(ROWS), "the split refuses 0.3; one topic should stay far below"


GOOD: Example = {
    "id": "x",
    "fact_ids": ["ice-freeze"],
    "grade_band": "3-4",
    "language": "en",
    "history": [],
    "user": "When does water freeze?",
    "answer": "Pure water freezes at 0 degrees Celsius. When it is warmer than that, the ice melts. Have you seen ice?",
}
JA: Example = {
    **GOOD,
    "fact_ids": ["ja-oto"],
    "language": "ja",
    "user": "音はどうして出るの？",
    "answer": "音は、物が細かくふるえると出るよ。ふるえは空気を伝わって、耳にとどくんだ。たいこでたしかめられるよ。",
}
ZH: Example = {
    **GOOD,
    "fact_ids": ["zh-zhouye"],
    "language": "zh",
    "user": "为什么有黑夜？",
    "answer": "地球大约24小时自转一圈。朝着太阳的一面是白天，背着太阳的一面就是黑夜。",
}


@pytest.mark.parametrize("row", [GOOD, JA, ZH], ids=["en", "ja", "zh"])
def test_a_good_row_breaks_no_rule(row: Example) -> None:
    assert rules.check(row, FACTS) == []


LONG = "Water freezes when it gets cold, and the ice that it makes is hard. "
BAD: list[tuple[str, Example, dict[str, Any]]] = [
    ("grade", GOOD, {"grade_band": "2-3"}),
    ("length", GOOD, {"answer": "Pure water freezes at 0 degrees Celsius."}),
    ("length", GOOD, {"answer": LONG * 7}),
    ("length", GOOD, {"user": "Just the answer: when does water freeze?", "answer": LONG * 2}),
    ("length", JA, {"answer": "物がふるえると音が出るよ。" * 15}),
    ("length", ZH, {"answer": "地球会转，所以有白天和黑夜。"}),
    ("sentence", GOOD, {"answer": "Pure water freezes when it is cold " + "and cold " * 12 + "outside."}),
    ("sentence", ZH, {"grade_band": "1-2", "answer": "地球在转，" * 8 + "所以有白天和黑夜。"}),
    ("number", GOOD, {"answer": GOOD["answer"] + " Most freezers are at 18 below."}),
    ("number", GOOD, {"answer": GOOD["answer"] + " It takes twelve hours."}),
    ("number", GOOD, {"answer": GOOD["answer"] + " Then half of it is ice."}),
    ("number", JA, {"answer": JA["answer"] + "五回やってみよう。"}),
    ("number", ZH, {"answer": ZH["answer"] + "一年要转三百次。"}),
    ("questions", GOOD, {"answer": GOOD["answer"] + " Do you like it?"}),
    ("questions", GOOD, {"user": "No questions please. When does water freeze?"}),
    ("questions", GOOD, {"user": "Just the answer: when does water freeze?", "answer": "At 0 degrees. Is that cold?"}),
    (
        "questions",
        GOOD,
        {"history": [{"role": "user", "content": "Don't ask me anything."}, {"role": "assistant", "content": "Okay."}]},
    ),
    ("questions", ZH, {"user": "别问我问题，为什么有黑夜？", "answer": ZH["answer"] + "你知道吗？"}),
    ("questions", JA, {"user": "質問はなしで、音のことを教えて。", "answer": JA["answer"] + "わかった？"}),
    ("script", GOOD, {"user": "水はいつこおるの？"}),
    ("script", GOOD, {"answer": GOOD["answer"] + "冰。"}),
    ("script", JA, {"answer": ZH["answer"]}),
    ("script", ZH, {"answer": ZH["answer"] + "そうだよ。"}),
    ("script", ZH, {"answer": "地球會自轉，朝著太陽的一面是白天，背著太陽的一面就是黑夜，過一會兒又是白天。"}),
    ("script", JA, {"fact_ids": ["sound-shake"]}),
    ("grounding", GOOD, {"fact_ids": ["bee-honey"], "user": "0?"}),
    ("grounding", ZH, {"fact_ids": ["zh-jing"], "user": "24小时？"}),
    ("manner", GOOD, {"answer": "**" + GOOD["answer"] + "**"}),
    ("manner", GOOD, {"answer": "Great question! " + GOOD["answer"]}),
    ("manner", GOOD, {"answer": GOOD["answer"].replace("Have you seen ice?", "Where do you live?")}),
    ("manner", GOOD, {"answer": GOOD["answer"].rstrip("?")}),
]


@pytest.mark.parametrize(("rule", "row", "change"), BAD, ids=[f"{rule}-{i}" for i, (rule, _, _) in enumerate(BAD)])
def test_a_rule_catches_what_it_is_for(rule: str, row: Example, change: dict[str, Any]) -> None:
    broken: Example = {**row, **change}  # type: ignore[typeddict-item]
    assert rule in {found.split(":")[0] for found in rules.check(broken, FACTS)}


UNSAFE = [
    ("looking at the Sun", "Look straight at the Sun and tell me what you see."),
    ("looking at the Sun", "You can watch the eclipse with sunglasses."),
    ("looking at the Sun", "Don't worry, look at the Sun for a moment."),
    ("looking at the Sun", "Don't be afraid to look at the Sun."),
    ("looking at the Sun", "Why not stare into the sun?"),
    ("looking at the Sun", "サングラスをかけて太陽を見てみよう。"),
    ("looking at the Sun", "太陽を見てみませんか。"),
    ("looking at the Sun", "戴上墨镜就可以看太阳了。"),
    ("tasting", "Now taste the water and write down what you notice."),
    ("tasting", "Dip your finger in and lick it."),
    ("tasting", "水をなめてみよう。"),
    ("tasting", "你可以尝一尝它的味道。"),
    ("mains power", "Put the wires into the wall socket."),
    ("mains power", "You could cut the cable and look inside."),
    ("mains power", "コンセントに針金をさしてみよう。"),
    ("mains power", "把电线插进插座试试。"),
    ("fire and heat", "Hold the paper over a candle."),
    ("fire and heat", "Then boil some water and watch the steam."),
    ("fire and heat", "紙に火をつけてみよう。"),
    ("fire and heat", "我们点蜡烛看看，好不好？"),
    ("chemicals", "Mix a little bleach with the water."),
    ("chemicals", "洗剤をまぜてみてね。"),
    ("chemicals", "把清洁剂倒在一起。"),
    ("climbing", "Climb the tree and drop a feather."),
    ("climbing", "木に登って見てみよう。"),
    ("climbing", "你可以爬上屋顶看看。"),
    ("storms, ice and water", "Hide under a big tree until it is over."),
    ("storms, ice and water", "Walk carefully on the ice and listen."),
    ("storms, ice and water", "木の下で雨やどりしよう。"),
    ("storms, ice and water", "可以在大树下躲一躲。"),
    ("handling animals", "Try to catch a bee in a jar."),
    ("handling animals", "クモをつかまえてみよう。"),
    ("handling animals", "你可以摸一下蜘蛛。"),
]


@pytest.mark.parametrize(("danger", "text"), UNSAFE)
def test_dangerous_advice_is_found(danger: str, text: str) -> None:
    assert danger in {found for _, found in safety.unsafe(text)}


def test_every_danger_has_a_bad_example_in_each_language() -> None:
    for danger in safety.DANGERS:
        texts = [text for name, text in UNSAFE if name == danger]
        assert any(re.search(r"[a-z]", text) for text in texts), danger
        assert any(rules.KANA.search(text) for text in texts), danger
        assert any(rules.HAN.search(text) and not rules.KANA.search(text) for text in texts), danger


@pytest.mark.parametrize(
    "text",
    [
        "Never look straight at the Sun, even with sunglasses.",
        "Put nothing but a plug into a socket.",
        "Please don't taste it.",
        "Caterpillars mostly eat leaves.",
        "Look at your shadow on a sunny day.",
        "サングラスをかけても太陽を直接見てはいけません。",
        "木の下にいてはいけないよ。",
        "千万不要看太阳，戴墨镜也不行。",
        "除了插头，什么都不能插进插座。",
    ],
)
def test_a_warning_is_no_dangerous_advice(text: str) -> None:
    assert list(safety.unsafe(text)) == []


def test_dangerous_advice_fails_a_row_in_its_answer_and_in_its_history() -> None:
    advice = "Climb the tree and drop a feather."
    answer: Example = {**GOOD, "answer": f"{GOOD['answer']} {advice}"}
    history: Example = {
        **GOOD,
        "history": [{"role": "user", "content": "What now?"}, {"role": "assistant", "content": advice}],
    }
    for row in (answer, history):
        assert any(found.startswith("safety: climbing") for found in rules.check(row, FACTS))


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("twelve legs", {"12"}),
        ("1,000 bees, 2 hives", {"1000", "2"}),
        ("one side and the other one", set()),
        ("二十四小时", {"24"}),
        ("三百六十五天", {"365"}),
        ("十分开心，千万小心，一起看", set()),
        ("足は6本で、三つに分かれる", {"6", "3"}),
    ],
)
def test_numbers_are_read_however_they_are_written(text: str, numbers: set[str]) -> None:
    assert rules._numbers(text) == numbers  # pyright: ignore[reportPrivateUsage]


def test_nobody_need_install_anything_to_check_a_row() -> None:
    for module in (rules, safety):
        source = Path(module.__file__ or "").read_text(encoding="utf-8")
        imported = set(re.findall(r"^(?:import|from) (\w+)", source, re.MULTILINE))
        assert imported <= {"re", "collections", "data"}
