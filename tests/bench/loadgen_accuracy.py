"""Our load test and `vllm bench serve` in turn against one real server, closed loop: do they agree?

    python tests/bench/loadgen_accuracy.py URL MODEL TOKENIZER_DIR [--levels 1,4,16] [--prompts 32] [--rounds 2]

Both send random prompts that the server counts at the same length (vLLM's text plus the chat template), ask for the
same number of tokens with ignore_eos, and take turns, so that a server that drifts does so for both. vLLM's first
token is its first chunk, with or without text; ours is the first text.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
sys.path.insert(0, str(ROOT))

KEYS = ("output_throughput", "median_ttft_ms", "mean_tpot_ms", "median_tpot_ms", "mean_itl_ms")
VLLM = "import argparse,sys;from vllm.benchmarks.serve import add_cli_args,main;p=argparse.ArgumentParser();"
VLLM += "add_cli_args(p);main(p.parse_args(sys.argv[1:]))"


def by_vllm(asked: argparse.Namespace, level: int, seed: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as place:
        words = f"--backend openai-chat --base-url {asked.url} --endpoint /v1/chat/completions --model {asked.model}"
        words += f" --tokenizer {asked.tokenizer} --dataset-name random --random-input-len {asked.input_len}"
        words += f" --random-output-len {asked.output_len} --num-prompts {asked.prompts} --max-concurrency {level}"
        words += f" --ignore-eos --disable-tqdm --seed {seed} --num-warmups {min(level, 4)} --save-result"
        words += f" --result-dir {place} --result-filename r.json --percentile-metrics ttft,tpot,itl,e2el"
        subprocess.run([sys.executable, "-c", VLLM, *words.split()], check=True, stdout=subprocess.DEVNULL)
        return json.loads((Path(place) / "r.json").read_text())


def by_us(asked: argparse.Namespace, level: int, seed: int, frame: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as place:
        words = f"load.endpoint={asked.url} load.model={asked.model} load.tokenizer={asked.tokenizer} run.root={place}"
        words += f" load.levels=[{level}] load.num_prompts={asked.prompts} load.input_len={asked.input_len + frame}"
        words += f" load.output_len={asked.output_len} load.num_warmups={min(level, 4)} run.name=s{seed}"
        command = [sys.executable, "-m", "jobs.loadtest", *words.split()]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, cwd=ROOT)
        (row,) = json.loads((Path(place) / f"s{seed}" / "loadtest" / "results.json").read_text())
        return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url")
    parser.add_argument("model")
    parser.add_argument("tokenizer")
    parser.add_argument("--levels", default="1,4,16")
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--input-len", type=int, default=64)
    parser.add_argument("--output-len", type=int, default=32)
    asked = parser.parse_args()
    from jobs.loadgen import prompts

    frame = prompts.lexicon(asked.tokenizer).count([""])[0]
    print(f"{'level':>5}  {'figure':<18}{'vllm bench':>12}{'ours':>12}{'difference':>12}")
    for level in map(int, asked.levels.split(",")):
        theirs, ours = [], []
        for turn in range(asked.rounds):
            theirs.append(by_vllm(asked, level, seed=1000 + turn))
            ours.append(by_us(asked, level, 2000 + turn, frame))
        for key in KEYS:
            a, b = (statistics.mean(row[key] for row in rows) for rows in (theirs, ours))
            print(f"{level:>5}  {key:<18}{a:>12.2f}{b:>12.2f}{(b / a - 1) * 100:>+11.2f}%", flush=True)


if __name__ == "__main__":
    main()
