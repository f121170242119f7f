"""Every kind of broken dataset in tests/malformed gets one clear message, exit status 1, and nothing is written."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from jobs import config, prepare
from jobs.errors import UserError

ROOT = Path(__file__).parent.parent
CORPUS = ROOT / "tests" / "malformed"
CASES = json.loads((CORPUS / "cases.json").read_text())


def test_the_corpus_is_large_and_no_two_cases_expect_the_same_words() -> None:
    assert len(CASES) >= 60
    assert len({tuple(case["says"]) for case in CASES.values()}) >= len(CASES) - 8
    named = {name.partition("/")[0] for name in CASES} - {"not_there.jsonl"}
    assert named == {p.name for p in CORPUS.iterdir()} - {"cases.json", ".gitattributes"}


@pytest.mark.parametrize("name", CASES)
def test_a_malformed_dataset_is_refused_in_words(name: str, tmp_path: Path, base_model: Path) -> None:
    case = CASES[name]
    where = [f"run.root={tmp_path / 'runs'}", f"model.source={base_model}", f"data.path={CORPUS / name}"]
    settings = config.load(None, [*where, *case.get("set", [])])
    with pytest.raises(UserError) as caught:
        prepare.run(settings)
    message = str(caught.value)
    for words in case["says"]:
        assert words in message
    assert "\n\n" not in message
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("name", ["two_answers.jsonl", "gzip_cut_off.jsonl.gz", "ours_unknown_fact"])
def test_the_command_line_says_it_and_exits_with_1(name: str, tmp_path: Path, base_model: Path) -> None:
    command = [sys.executable, "-m", "jobs.prepare", f"run.root={tmp_path / 'runs'}", f"model.source={base_model}"]
    done = subprocess.run(
        [*command, f"data.path={CORPUS / name}"], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 1
    assert done.stderr.startswith("error: ")
    assert all(words in done.stderr for words in CASES[name]["says"])
    assert "Traceback" not in done.stderr + done.stdout
    assert os.listdir(tmp_path) == []
