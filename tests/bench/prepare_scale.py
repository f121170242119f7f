"""How fast and in how much memory `prepare` works through millions of rows, against one plain process.

    python tests/bench/prepare_scale.py --rows 200000 2000000 [--model DIR] [--work DIR]

For each size: synthetic OpenAI chat rows (about 500 bytes each) are written, then prepared by the command line in a
process of its own, with every check. Memory is the sum of PSS over that process and all its descendants, Ray's
included, sampled twice a second. The peer is one process that only renders the chat template and batch-encodes the
same rows with transformers, using all cores for encoding; it reads nothing, checks nothing and writes nothing.
"""

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent.parent
PEER_ROWS = 40_000
SUBJECTS = ["the moon", "a whale", "our sun", "an old oak", "the tide", "a glacier", "some bees", "a magnet", "an echo"]
VERBS = ["moves", "grows", "changes", "glows", "rests", "bends", "melts", "sings", "turns", "sleeps", "floats", "spins"]
REASONS = ["because of heat", "at night", "in spring", "under pressure", "when it rains", "by itself", "near the sea"]
SYSTEM = "You are a patient guide for young readers. Answer in two or three plain sentences."


def make_rows(path: Path, rows: int) -> None:
    """Write `rows` distinct chat rows, a quarter of them with an earlier turn; the same for the same number."""
    rng = random.Random(rows)

    def sentence() -> str:
        one, two = (f"{rng.choice(SUBJECTS)} {rng.choice(VERBS)}" for _ in range(2))
        return f"{one} {rng.choice(REASONS)} and then {two}"

    with path.open("w", encoding="utf-8") as out:
        for i in range(rows):
            turns = [{"role": "system", "content": SYSTEM}] if i % 2 else []
            if i % 4 == 0:
                turns += [
                    {"role": "user", "content": f"Tell me first why {sentence()}."},
                    {"role": "assistant", "content": f"It is known that {sentence()}."},
                ]
            turns += [
                {"role": "user", "content": f"In story {i}, why is it said that {sentence()}?"},
                {"role": "assistant", "content": f"In story {i} {sentence()}. Also, {sentence()}; {sentence()}."},
            ]
            out.write(json.dumps({"id": f"row-{i}", "messages": turns}) + "\n")


def peer(path: Path, model: str) -> float:
    """Rows/s of one process that renders and batch-encodes, after the rows are in memory."""
    code = f"""
import json, itertools, time
from transformers import AutoTokenizer
rows = [json.loads(line)["messages"] for line in itertools.islice(open({str(path)!r}), {PEER_ROWS})]
tokenizer = AutoTokenizer.from_pretrained({model!r})
tokenizer(["warm up"] * 64)
best = 0.0
for _ in range(2):
    start = time.perf_counter()
    for i in range(0, len(rows), 1000):
        texts = [tokenizer.apply_chat_template(row, tokenize=False) for row in rows[i : i + 1000]]
        tokenizer(texts, add_special_tokens=False)
    best = max(best, len(rows) / (time.perf_counter() - start))
print(best)
"""
    environment = {**os.environ, "TOKENIZERS_PARALLELISM": "true", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    return float(done.stdout)


def prepare(path: Path, model: str, work: Path) -> dict[str, Any]:
    """Run the command; wall seconds, peak PSS in GiB, the snapshot's hash."""
    command = [sys.executable, "-m", "jobs.prepare", f"run.root={work / 'runs'}", f"model.source={model}"]
    start = time.perf_counter()
    process = subprocess.Popen([*command, f"data.path={path}"], cwd=ROOT, stdout=sys.stderr)
    peak = 0
    while process.poll() is None:
        peak = max(peak, sum(pss(pid) for pid in descendants(process.pid)))
        time.sleep(0.5)
    seconds = time.perf_counter() - start
    if process.returncode:
        raise SystemExit(f"prepare ended with {process.returncode}")
    manifest = json.loads((work / "runs/demo/prepare/manifest.json").read_text())
    return {"seconds": seconds, "peak_gib": peak / 2**30, "hash": manifest["numbers"]["snapshot_hash"]}


def descendants(pid: int) -> list[int]:
    """A process and everything it started, also through others."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                stat = Path(f"/proc/{entry}/stat").read_text()
            except OSError:
                continue
            children.setdefault(int(stat.rpartition(")")[2].split()[1]), []).append(int(entry))
    found, queue = [], [pid]
    while queue:
        found.append(queue.pop())
        queue += children.get(found[-1], [])
    return found


def pss(pid: int) -> int:
    """Proportional set size in bytes; 0 for a process that has ended."""
    try:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[200_000, 2_000_000])
    parser.add_argument("--model", default=str(ROOT / "models" / "smollm2-135m-instruct"))
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "prepare-scale")
    args = parser.parse_args()
    lines: list[str] = []
    for rows in args.rows:
        args.work.mkdir(parents=True, exist_ok=True)
        path = args.work / f"rows-{rows}.jsonl"
        if not path.exists():
            make_rows(path, rows)
        one = peer(path, args.model)
        result = prepare(path, args.model, args.work)
        rate = rows / result["seconds"]
        lines.append(
            f"{rows:>10,}{path.stat().st_size / 1e6:>9,.0f}{result['seconds']:>10,.1f}{rate:>10,.0f}{one:>12,.0f}"
            f"{rate / one:>8.2f}{result['peak_gib']:>11.2f}  {result['hash'][:12]}"
        )
        shutil.rmtree(args.work / "runs")
    print(f"{os.cpu_count()} cores, {Path(args.model).name}")
    print(f"{'rows':>10}{'MB':>9}{'seconds':>10}{'rows/s':>10}{'peer rows/s':>12}{'ratio':>8}{'peak GiB':>11}  hash")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
