"""The written rules of the science dataset, as code: what every row must keep, and what a reader may rely on.

`check` looks at a row that `data.schema` accepts already. It reads style and safety, not truth: people judge truth,
by `data/science/RUBRIC.md`. Standard library only. The patterns are ours, made for short answers to children in
English, Japanese and Chinese; a pattern may stop a harmless sentence, and then the sentence is reworded.
"""

import re
from collections.abc import Callable, Iterator, Mapping

from data.safety import unsafe
from data.schema import Card, Example

GRADE_BANDS = ("1-2", "3-4", "5-6")

# Shortest and longest answer: words in English, characters otherwise. The second pair is for "just the answer".
LENGTH = {"en": (20, 90), "ja": (40, 180), "zh": (30, 140)}
BRIEF_LENGTH = {"en": (2, 25), "ja": (4, 60), "zh": (4, 50)}
# The longest sentence by grade band, in the same units.
SENTENCE = {
    "en": {"1-2": 18, "3-4": 22, "5-6": 25},
    "ja": {"1-2": 45, "3-4": 55, "5-6": 65},
    "zh": {"1-2": 35, "3-4": 45, "5-6": 55},
}

WANTS_ANSWER_ONLY = re.compile(
    r"\b(?:just|only|quick)\b[^.?!]{0,15}\banswer\b|\banswer only\b|\bonly say\b|\bno (?:more )?talk\b"
    r"|\b(?:one|a single) (?:short answer|line|word|sentence)\b|\bjust (?:tell me,|give me the)"
    r"|(?:こたえ|答え)だけ|(?:只要|只说|直接给)答案",
    re.IGNORECASE,
)
WANTS_NO_QUESTION = re.compile(
    r"\bno (?:more )?(?:questions?|quiz|quizzes)\b|\b(?:don't|do not|without) ask(?:ing)?\b|\bask me nothing\b"
    r"|\bdon't want (?:any )?questions\b|(?:しつもん|質問)(?:は|も)?(?:なし|いらない|いりません|しない)"
    r"|别问我|不用提问|不要(?:问|提问)",
    re.IGNORECASE,
)

KANA = re.compile(r"[\u3041-\u3096\u30a1-\u30fa]")
HAN = re.compile(r"[\u4e00-\u9fff]")
LATIN = re.compile(r"[A-Za-z]")
# Characters of traditional Chinese that simplified text writes otherwise, and Japanese forms that neither uses.
NOT_SIMPLIFIED = re.compile(r"[們這個會來說對時過還樣從們開關電氣陽長熱氣気対円広図売読]")

SENTENCE_END = re.compile(r"(?<=[.?!])[\"')]*\s+|(?<=[。？！])[”」』]*")

SPELT = {
    word: value
    for value, words in {
        2: "two", 3: "three", 4: "four", 5: "five", 6: "six", 7: "seven", 8: "eight", 9: "nine", 10: "ten",
        11: "eleven", 12: "twelve", 13: "thirteen", 14: "fourteen", 15: "fifteen", 16: "sixteen", 17: "seventeen",
        18: "eighteen", 19: "nineteen", 20: "twenty", 30: "thirty", 40: "forty", 50: "fifty", 60: "sixty",
        70: "seventy", 80: "eighty", 90: "ninety", 100: "hundred hundreds", 1000: "thousand thousands",
    }.items()
    for word in words.split()
}  # fmt: skip
# Amounts that are not counted in ones: each must be in the sources by the same name.
AMOUNTS = re.compile(
    r"\b(?:half|halves|twice|double|triple|dozens?|millions?|billions?|percent|sixth|quarter|a third of)\b|%"
    r"|一半|两倍|万分|百分之|亿|半分|[0-9]*倍",
    re.IGNORECASE,
)
HAN_DIGIT = {c: i for i, c in enumerate("零一二三四五六七八九")} | {"两": 2, "〇": 0, "二": 2}
HAN_UNIT = {"十": 10, "百": 100, "千": 1000, "万": 10000}
# Han numerals count only before a counter: 一 and 十 are also parts of words (一起, 十分).
HAN_NUMBER = re.compile(
    r"([零〇一二两三四五六七八九十百千万]+)"
    r"(?=[个颗次天年月岁秒度种只条倍层米本匹歳才回人枚対]|小时|分钟|分間|公里|阶段|つ|か月|時間|メートル)"
)

PRIVATE = re.compile(
    r"\b(?:what(?:'s| is) your (?:name|address|phone|school)|where do you live|your password)\b"
    r"|(?:名前|住所|電話番号)(?:は(?:何|なん|なに)|を教えて|は？)|你叫什么|你住在哪|电话号码",
    re.IGNORECASE,
)
FILLER = re.compile(
    r"^(?:what a )?(?:great|good|excellent|wonderful) question|\bas an ai\b|^(?:いい|よい)質問|^(?:好|这是个好)问题",
    re.IGNORECASE,
)
MARKUP = re.compile(r"[*_#`|<>~\[\]{}\\\n\r\t]|https?:|[\u2600-\u27bf\U0001f000-\U0001faff]|  ")


def check(example: Example, facts: Mapping[str, Card]) -> list[str]:
    """The rules that a row breaks, as `rule: what was found`; an empty list for a good row.

    `facts` maps card id to card. The row must have passed `data.schema.check_example`, and have an answer.
    """
    return [f"{rule.__name__}: {found}" for rule in RULES for found in rule(example, facts)]


def grade(example: Example, facts: Mapping[str, Card]) -> Iterator[str]:
    """One of the three bands that the dataset is written for."""
    if example["grade_band"] not in GRADE_BANDS:
        yield f"{example['grade_band']!r} is none of {', '.join(GRADE_BANDS)}"


def length(example: Example, facts: Mapping[str, Card]) -> Iterator[str]:
    """Short enough for a child and a small model; shorter still when only the answer was asked for."""
    low, high = (BRIEF_LENGTH if _brief(example) else LENGTH)[example["language"]]
    if not low <= (size := _size(_answer(example), example["language"])) <= high:
        yield f"{size} {_unit(example['language'])}, expected {low} to {high}"


def sentence(example: Example, facts: Mapping[str, Card]) -> Iterator[str]:
    """No sentence longer than the grade band can read in one go."""
    high = SENTENCE[example["language"]].get(example["grade_band"], 0)
    for text in filter(None, SENTENCE_END.split(_answer(example))):
        if (size := _size(text, example["language"])) > high > 0:
            yield f"{size} {_unit(example['language'])} in {text!r}, expected at most {high}"


def number(example: Example, facts: Mapping[str, Card]) -> Iterator[str]:
    """No number that is in neither the cards nor the conversation. "One" is free, for it is mostly a pronoun."""
    sources = [card["text"] for card in _cards(example, facts)] + [card["scope"] for card in _cards(example, facts)]
    known = _numbers(" ".join([*sources, *_turns(example)]))
    if invented := sorted(_numbers(_answer(example)) - known):
        yield f"{', '.join(invented)} in neither the cards nor the conversation"


def questions(example: Example, facts: Mapping[str, Card]) -> Iterator[str]:
    """At most one question, at the end or not; none when the child asked for none, now or earlier."""
    asked = len(re.findall(r"[?？]", _answer(example)))
    users = " ".join([m["content"] for m in example["history"] if m["role"] == "user"] + [example["user"]])
    allowed = 0 if WANTS_NO_QUESTION.search(users) or _brief(example) else 1
    if asked > allowed:
        yield f"{asked} questions, expected at most {allowed}"


def safety(example: Example, facts: Mapping[str, Card]) -> Iterator[str]:
    """Nothing that tells a child to do a dangerous thing; a clause that forbids it is fine.

    The earlier answers of the history are held to it too: they are what the model sees itself have said.
    """
    for text in [_answer(example), *(m["content"] for m in example["history"] if m["role"] == "assistant")]:
        for clause, danger in unsafe(text):
            yield f"{danger} in {clause!r}"


def script(example: Example, facts: Mapping[str, Card]) -> Iterator[str]:
    """Question, answer and cards are written in the row's language."""
    language = example["language"]
    texts = {"user": example["user"], "answer": _answer(example)}
    texts |= {card["id"]: card["text"] for card in _cards(example, facts)}
    for name, text in texts.items():
        kana, han, latin = (len(pattern.findall(text)) for pattern in (KANA, HAN, LATIN))
        right = {
            "en": not kana and not han and latin > 0,
            "ja": kana > 0 and kana + han > 3 * latin,
            "zh": not kana and han > 3 * latin and not NOT_SIMPLIFIED.search(text),
        }[language]
        if not right:
            yield f"{name} is not written as {language}: {text!r}"


def grounding(example: Example, facts: Mapping[str, Card]) -> Iterator[str]:
    """The answer speaks of what its cards speak of, also where it says that they do not tell; a bare one need not."""
    if _brief(example):
        return
    cards = " ".join(card["text"] for card in _cards(example, facts))
    if not _terms(_answer(example), example["language"]) & _terms(cards, example["language"]):
        yield f"no word in common with {', '.join(example['fact_ids'])}"


def manner(example: Example, facts: Mapping[str, Card]) -> Iterator[str]:
    """Plain text, the fact first, and no question about the child's private life."""
    answer = _answer(example)
    for what, pattern in {"markup": MARKUP, "filler": FILLER, "private question": PRIVATE}.items():
        if found := pattern.search(answer):
            yield f"{what} {found[0]!r}"
    if not re.search('[.?!。？！]["”」』)）]?$', answer):
        yield "the answer does not end as a sentence does"


RULES: tuple[Callable[[Example, Mapping[str, Card]], Iterator[str]], ...] = (
    grade, length, sentence, number, questions, safety, script, grounding, manner,
)  # fmt: skip


def _answer(example: Example) -> str:
    return example.get("answer", "")


def _cards(example: Example, facts: Mapping[str, Card]) -> list[Card]:
    return [facts[i] for i in example["fact_ids"]]


def _turns(example: Example) -> list[str]:
    return [m["content"] for m in example["history"]] + [example["user"]]


def _brief(example: Example) -> bool:
    return WANTS_ANSWER_ONLY.search(example["user"]) is not None


def _size(text: str, language: str) -> int:
    return len(text.split()) if language == "en" else len(text)


def _unit(language: str) -> str:
    return "words" if language == "en" else "characters"


def _numbers(text: str) -> set[str]:
    """Every amount named in a text, whole numbers as digits however they are written."""
    found = {str(int(d)) for d in re.findall(r"\d+", text.replace(",", ""))}
    found |= {str(SPELT[w]) for w in re.findall(r"[a-z]+", text.lower()) if w in SPELT}
    found |= {m.lower() for m in AMOUNTS.findall(text)}
    return (found | {str(_han(m)) for m in HAN_NUMBER.findall(text)}) - {"1"}


def _han(numeral: str) -> int:
    """The value of a numeral such as 二十四."""
    total = digit = 0
    for c in numeral:
        if c in HAN_UNIT:
            total, digit = total + (digit or 1) * HAN_UNIT[c], 0
        else:
            digit = HAN_DIGIT[c]
    return total + digit


def _terms(text: str, language: str) -> set[str]:
    """Word beginnings in English, pairs of characters otherwise; words under four letters tell nothing."""
    if language == "en":
        return {w[:5] for w in re.findall(r"[a-z]{4,}", text.lower())} - {
            "that",
            "this",
            "with",
            "from",
            "when",
            "they",
        }
    kept = re.sub(r"[\W\u3041-\u3096]+", " ", text) if language == "ja" else re.sub(r"\W+", " ", text)
    return {word[i : i + 2] for word in kept.split() for i in range(max(1, len(word) - 1))}
