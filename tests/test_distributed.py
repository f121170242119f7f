"""Ray Data gives what one process gives: the same snapshot, the same complaints, and nothing left behind."""

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
# Both ways in one process: first here, then through Ray Data, in spans of some 25 rows.
SCRIPT = """
import json, os, sys
from jobs import config, prepare
from jobs.errors import UserError

root, model, *paths = sys.argv[1:]
results = []
for way, small in (("here", 1 << 30), ("ray", -1)):
    prepare.SMALL_BYTES, prepare.SPAN_BYTES = small, 4096
    for path in paths:
        settings = [f"run.root={root}/{way}", f"run.name={os.path.basename(path)}", f"model.source={model}"]
        try:
            numbers = prepare.run(config.load(None, [*settings, f"data.path={path}", "data.max_errors=30"])).numbers
            results.append([numbers[key] for key in ("snapshot_hash", "rows", "lengths", "notes")])
        except UserError as error:
            results.append(str(error))
print(json.dumps(results))
"""


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory, base_model: Path) -> tuple[list[object], list[object], Path]:
    """What three datasets gave here and through Ray: a good one, one with bad rows, and a cut-off file."""
    import gzip

    work = tmp_path_factory.mktemp("ways")
    rng = random.Random(1)
    words = (ROOT / "tests/test_distributed.py").read_text().split()
    rows = [
        {"id": f"r{i}", "messages": [
            {"role": "user", "content": f"Why {i} {' '.join(rng.choices(words, k=12))}?"},
            {"role": "assistant", "content": " ".join(rng.choices(words, k=rng.randrange(3, 40)))},
        ]}
        for i in range(300)
    ]  # fmt: skip
    lines = [json.dumps(row) + "\n" for row in rows]
    (work / "good.jsonl").write_text("".join(lines))
    rows[250]["id"] = "r3"
    rows[120]["messages"][1]["content"] = ""
    rows[7]["messages"][1]["role"] = "bot"
    rows[260]["messages"][1]["content"] = "very " * 2000
    (work / "bad.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (work / "cut.jsonl.gz").write_bytes(gzip.compress("".join(lines).encode())[:-99])
    paths = [str(work / name) for name in ("good.jsonl", "bad.jsonl", "cut.jsonl.gz")]
    command = [sys.executable, "-c", SCRIPT, str(work / "runs"), str(base_model), *paths]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout.splitlines()[-1])
    return results[:3], results[3:], work / "runs"


def test_the_snapshot_is_the_same(outcomes: tuple[list[object], list[object], Path]) -> None:
    here, ray, _ = outcomes
    assert here[0] == ray[0]
    assert isinstance(here[0], list)
    assert sum(here[0][1].values()) == 300


def test_bad_rows_are_listed_alike_and_in_order(outcomes: tuple[list[object], list[object], Path]) -> None:
    here, ray, _ = outcomes
    assert here[1] == ray[1]
    assert [line.split(":")[1] for line in str(ray[1]).splitlines()[1:-1]] == ["8", "121", "251", "261"]
    assert "id: 'r3' is also the id of bad.jsonl:4" in str(ray[1])


def test_a_broken_file_is_named_alike(outcomes: tuple[list[object], list[object], Path]) -> None:
    here, ray, _ = outcomes
    assert here[2] == ray[2]
    assert "cut.jsonl.gz: cannot be read" in str(ray[2])


def test_nothing_is_left_but_the_snapshots(outcomes: tuple[list[object], list[object], Path]) -> None:
    *_, runs = outcomes
    found = sorted(str(p.relative_to(runs)) for p in runs.rglob("*") if p.is_file() or not os.listdir(p))
    each = ["eval/part-00000.parquet", "manifest.json", "train/part-00000.parquet"]
    assert found == [f"{way}/good.jsonl/prepare/{name}" for way in ("here", "ray") for name in each]
