"""Requests that real clients sent, on the real service: cases C15, C16, C18 and C19, sent by their own runner."""

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Server

# Where an entry's `expect` allows several statuses, the one that vLLM 0.29 was seen to give is not pinned.
OK, BAD = {200}, {400}
EITHER = {200, 400}
CASES: dict[str, dict[str, set[int]]] = {
    "c15_history_shapes": {
        "a": EITHER, "b": EITHER, "c": OK, "d": EITHER, "e": EITHER, "f": OK, "g": BAD, "h": OK, "i": BAD,
        "j": EITHER, "k": BAD, "l": BAD, "m": EITHER, "n": OK,
    },
    "c16_limits_and_stream_options": {
        "a": EITHER, "b": EITHER, "c": EITHER, "d": OK, "e": OK, "f": BAD, "g": EITHER, "h": EITHER, "i": BAD,
        "j": OK, "k": OK, "l": EITHER, "m": BAD, "n": BAD, "o": EITHER, "p": OK, "q": BAD, "r": OK, "s": OK,
        "t": BAD, "u": BAD, "v": EITHER, "w": EITHER, "x": OK,
    },
    "c18_ids_out_of_vocab": {
        "a": BAD, "b": EITHER, "c": BAD, "d": {400, 422}, "e": BAD, "f": BAD, "g": BAD, "h": BAD, "i": BAD,
        "j": BAD, "k": BAD, "l": {400, 422}, "m": OK,
    },
    "c19_structured_sequence": {
        "a": OK, "b": BAD, "c": BAD, "d": EITHER, "e": BAD, "f": BAD, "g": BAD, "h": OK, "i": BAD, "j": BAD,
        "k": OK, "l": OK,
    },
}  # fmt: skip
# Words that the message must hold, where `expect` asks for a name.
NAMED = {
    "c15_history_shapes": {"i": ["continue_final_message", "add_generation_prompt"], "k": ["messages"]},
    "c16_limits_and_stream_options": {
        "f": ["1024"], "i": ["stream_options"], "m": ["n"], "q": ["seed"], "t": ["logprobs"], "u": ["20"],
    },
    "c18_ids_out_of_vocab": {"a": ["stop_token_ids"], "c": ["logit_bias"], "h": ["vocab"], "i": ["prompt"]},
    "c19_structured_sequence": {},
}  # fmt: skip


@pytest.mark.parametrize("case", list(CASES))
def test_every_request_of_the_case_gets_what_it_expects(server: Server, cases: Path, case: str) -> None:
    seen = send(server, cases, case)
    assert set(seen) == set(CASES[case])
    wrong = {name: line for name, (status, _, line) in seen.items() if status not in CASES[case][name]}
    assert not wrong
    unnamed = {
        name: seen[name][2] for name, words in NAMED[case].items() for word in words if word not in seen[name][2]
    }
    assert not unnamed
    slow = {name: line for name, (status, seconds, line) in seen.items() if status != 200 and seconds > 2}
    assert not slow


def send(server: Server, cases: Path, case: str) -> dict[str, tuple[int, float, str]]:
    """Letter of the entry -> status, seconds, the runner's line."""
    runner = [sys.executable, str(cases / "c" / "send.py"), str(cases / "c" / f"{case}.json"), server.url, server.model]
    done = subprocess.run([*runner, "none", "48000"], capture_output=True, text=True, timeout=200, check=True)
    found: dict[str, tuple[int, float, str]] = {}
    for line in done.stdout.splitlines():
        if match := re.match(r"([a-z])_\S+ +(\d{3}|---) +([\d.]+)s ", line):
            found[match[1]] = (int(match[2].replace("---", "0")), float(match[3]), line)
    return found


def test_two_choices_streamed_end_both_with_one_usage_for_both(server: Server, cases: Path) -> None:
    events = stream(server, entry(cases, "c16_limits_and_stream_options", "k"))
    assert events[-1] == "[DONE]"
    chunks = [json.loads(e) for e in events[:-1]]
    ended = {c["choices"][0]["index"] for c in chunks if c["choices"] and c["choices"][0]["finish_reason"]}
    usage = [c["usage"] for c in chunks if not c["choices"]]
    assert ended == {0, 1}
    assert len(usage) == 1
    assert 8 < usage[0]["completion_tokens"] <= 16


def test_empty_stream_options_bring_no_usage(server: Server, cases: Path) -> None:
    events = stream(server, entry(cases, "c16_limits_and_stream_options", "j"))
    assert all(json.loads(e).get("usage") is None for e in events[:-1])


def test_the_smaller_of_two_limits_wins(server: Server, cases: Path) -> None:
    answer = json.loads(post(server, entry(cases, "c16_limits_and_stream_options", "e")))
    assert answer["usage"]["completion_tokens"] <= 3


def test_text_parts_mean_the_same_as_one_string(server: Server, cases: Path) -> None:
    body = entry(cases, "c15_history_shapes", "f")
    parts = json.loads(post(server, body))
    body["messages"][0]["content"] = "".join(part["text"] for part in body["messages"][0]["content"])
    assert (
        parts["choices"][0]["message"]["content"] == json.loads(post(server, body))["choices"][0]["message"]["content"]
    )


def test_null_content_does_not_become_the_word_none(server: Server, cases: Path) -> None:
    """The prompt is as long as with an empty turn, and shorter than with the word."""
    body = entry(cases, "c15_history_shapes", "d")
    count: Callable[[Any], int] = lambda b: json.loads(post(server, b))["usage"]["prompt_tokens"]  # noqa: E731
    null = count(body)
    body["messages"][1]["content"] = ""
    assert null == count(body)
    body["messages"][1]["content"] = "None"
    assert null < count(body)


def test_a_schema_is_kept_and_its_numbers_are_json(server: Server, cases: Path) -> None:
    body = entry(cases, "c19_structured_sequence", "a") | {"max_tokens": 200}
    assert "answer" in json.loads(json.loads(post(server, body))["choices"][0]["message"]["content"])

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    json.loads(post(server, entry(cases, "c19_structured_sequence", "k")), parse_constant=refuse)


def entry(cases: Path, case: str, letter: str) -> dict[str, Any]:
    entries = json.loads((cases / "c" / f"{case}.json").read_text())
    return next(e["body"] for e in entries if e["name"].startswith(f"{letter}_"))


def post(server: Server, body: dict[str, Any]) -> str:
    import http.client

    connection = http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=60)
    headers = {"Content-Type": "application/json"}
    connection.request("POST", "/v1/chat/completions", json.dumps(body | {"model": server.model}), headers)
    answer = connection.getresponse()
    text = answer.read().decode()
    assert answer.status == 200, text
    return text


def stream(server: Server, body: dict[str, Any]) -> list[str]:
    return [line.removeprefix("data: ") for line in post(server, body).splitlines() if line]
