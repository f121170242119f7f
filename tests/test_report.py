"""The report over artifacts made by hand: what it says, that it says it safely, and that gaps do not stop it."""

import json
import re
import shutil
import subprocess
from array import array
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jobs import artifacts, config, report, report_compare
from jobs.config import Config
from jobs.errors import UserError
from jobs.loadgen import intervals, keep, stats
from jobs.loadgen.stats import Record

NASTY = "<script>alert(1)</script> | **bold** & 'quote'"


def a_config(root: Path, *more: str) -> Config:
    return config.load(None, [f"run.root={root}", "run.name=r", *more])


def level(
    concurrency: int, per_token: float, seats: int, *, seed: int = 0, failed: int = 0
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Figures and requests of a made-up level: `seats` decode together, the rest waits."""
    rng = np.random.default_rng([seed, concurrency, seats])
    busy = min(concurrency, seats)
    records: list[Record] = []
    for i in range(32):
        start = 1e9 + (i // concurrency) * (0.6 + 0.1 * concurrency / seats)
        first = start + 0.05 * busy + (0.8 * (concurrency - busy) / seats) * rng.random() + 0.02 * rng.random()
        times = first + np.cumsum(np.full(32, per_token * (1 + 0.25 * busy)) * (0.8 + 0.4 * rng.random(32)))
        r = Record(i, 64, 32, scheduled=start, sent=start, first_token=float(times[0]), last_token=float(times[-1]))
        r.end, r.prompt_tokens, r.completion_tokens = float(times[-1]), 64, 32
        r.times, r.chars = array("d", times), array("i", [4] * 32)
        r.failure = "http 503" if i < failed else None
        records.append(r)
    figures = stats.summarize(records, lag_ms=[0.4, 0.9], cpu=0.1)
    row = {"variant": {"max_num_seqs": seats}, "concurrency": concurrency, "rate": None, **figures}
    row |= {"warnings": stats.warnings(figures), "intervals": intervals.bootstrap(records, seed=[0], closed=True)}
    at = {"at": 1e9 + 1, "replica": "a", "running": float(busy), "waiting": float(concurrency - busy)}
    row |= {"timeline": [at, {**at, "at": 1e9 + 2}]}
    kept = [keep.flat(r, variant=row["variant"], concurrency=concurrency, rate=None) for r in records]
    return row, kept


def a_run(c: Config, *stages: str, losses: dict[str, Any] | None = None) -> None:
    """Write small complete artifacts of these stages, in the shapes that the stages hand on."""
    sha: dict[str, str] = {}

    def make(stage: str, numbers: dict[str, Any], files: dict[str, str], *sections: str, **inputs: str) -> None:
        if stage not in stages:
            return
        with artifacts.create(c, stage, artifacts.sections_of(c, *sections), inputs) as draft:
            for name, text in files.items():
                (draft.path / name).parent.mkdir(parents=True, exist_ok=True)
                (draft.path / name).write_text(text)
            draft.numbers |= numbers
        sha[stage] = artifacts.read(artifacts.location(c, stage)).sha256

    lock = json.dumps({"source": "smollm2-135m-instruct", "revision": None, "files": {"model.safetensors": "ab" * 32}})
    curve = [{"step": i, "loss": 2.4 - 0.07 * i + 0.05 * (i % 3), "learning_rate": 1e-3} for i in range(1, 17)]
    curve += [{"step": 0, "eval_loss": 2.31}, {"step": 16, "eval_loss": 1.42}]
    metrics = "\n".join(json.dumps(m) for m in curve) + "\n"
    prepared = {"snapshot_hash": "cd" * 32, "rows": {"train": 51, "eval": 9}}
    make("prepare", prepared, {"train/part-0.parquet": "x"}, "data")
    numbers = {"eval_loss_base": 2.31, "eval_loss": 1.42, "steps": 16, "tokens": 9000, "tokens_per_s": 410.0, "r": 8}
    numbers |= {"trainable_parameters": 2_442_240, "peak_memory_gib": 1.9, "seconds": 44.0, "lora_alpha": 16}
    adapter = {"adapter/adapter_model.safetensors": "weights", "base.lock.json": lock, "metrics.jsonl": metrics}
    make("train", numbers, adapter, "lora", "train", prepare=sha.get("prepare", "0"))
    trials = [
        {"name": f"r{r}", "rank": r, "alpha": 2 * r, "use_rslora": False, "seed": 0, "parameters": r * 305_280}
        | {"eval_loss": loss, "eval_loss_base": 2.31, "seconds": 40.0 + r, "tokens_per_s": 400.0}
        for r, loss in ((4, 1.5), (8, 1.42), (16, 1.44))
    ]
    winner = {"name": "r8", "adapter": "trials/r8/adapter", "why": "It has the lowest held-out loss."}
    files = {f"trials/{t['name']}/{name}": text for t in trials for name, text in adapter.items()}
    swept = {"trials": trials, "winner": winner}
    make("sweep", swept, files, "lora", "train", "sweep", prepare=sha.get("prepare", "0"))
    make("merge", {"tensors_merged": 210, "seconds": 9.0, "reply": "Hi"}, {"model/config.json": "{}"}, "merge")
    row = {"id": "a", "split": "eval", "reference": "Air scatters blue light.", "messages": [{"role": "user"}]}
    row["messages"] = [{"role": "user", "content": "Why is the sky blue?"}]
    tuned = "Air scatters blue light most."
    row["answers"] = {"base": NASTY, "adapter": tuned, "merged": tuned}
    compared = {"prompts": 3, "identical_answers": 2, "max_abs_logit_difference": 0.25, "tolerance_max": 0.5}
    compared |= {"loss_rows": 9, "loss": losses} if losses else {}
    make("compare", compared, {"answers.jsonl": json.dumps(row) + "\n"}, "compare", merge=sha.get("merge", "0"))
    made = [level(n, 0.02, s, failed=1 if (n, s) == (16, 4) else 0) for s in (4, 16) for n in (1, 4, 16)]
    if "loadtest" not in stages:
        return
    rows = [row for row, _ in made]
    with artifacts.create(c, "loadtest", artifacts.sections_of(c, "load", "serve"), {"merge": "0"}) as draft:
        keep.write_timeline(rows, draft.path / "server.parquet")
        keep.write_requests([r for _, kept in made for r in kept], draft.path / "requests.parquet")
        (draft.path / "results.json").write_text(json.dumps(rows))
        draft.numbers["levels"] = rows


EVERYTHING = ("prepare", "sweep", "merge", "compare", "loadtest")


@pytest.fixture
def full(tmp_path: Path) -> Path:
    """Directory of a full run's report."""
    c = a_config(tmp_path, "sweep.ranks=[4,8,16]", "load.sweep=serve.max_num_seqs:4,16")
    a_run(c, *EVERYTHING)
    return report.run(c).path


class Page(HTMLParser):
    """Tags, attributes and visible text of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data


def test_the_answer_comes_first_with_its_numbers(full: Path) -> None:
    text = (full / "report.md").read_text()
    first = next(line for line in text.splitlines() if line.startswith("**"))
    assert "better than its base" in first
    assert "1.420 against 2.310" in first
    assert "4.14 against 10.07" in first  # e^1.42 and e^2.31
    assert text.index("better than its base") < text.index("## Load test") < text.index("## Training")


@pytest.mark.parametrize(
    ("low", "high", "says"),
    [(-0.9, -0.7, "is better than"), (-0.1, 0.1, "not proven better or worse than"), (0.1, 0.3, "is worse than")],
)
def test_the_verdict_follows_the_paired_interval(tmp_path: Path, low: float, high: float, says: str) -> None:
    c = a_config(tmp_path)
    loss = {"loss": 2.31, "loss_95": [2.2, 2.4], "perplexity": 10.074}
    merged = {**loss, "loss": 2.31 + (low + high) / 2, "minus_base": (low + high) / 2, "minus_base_95": [low, high]}
    a_run(c, "train", "compare", losses={"base": loss, "merged": merged})
    page = (report.run(c).path / "report.md").read_text()
    assert says in page
    assert "on 9 held-out rows" in page
    assert f"{low:+.4f} to {high:+.4f}" in page
    assert "2 of 3" in page


def test_the_html_opens_offline_and_holds_its_plots(full: Path) -> None:
    raw = (full / "report.html").read_text()
    page = Page()
    page.feed(raw)
    names = [tag for tag, _ in page.tags]
    assert not {"script", "link", "img", "iframe"} & set(names)
    assert not re.search(r"""(src|href)=["']?http|url\(|@import""", raw)
    figures = [attrs.get("id") for tag, attrs in page.tags if tag == "figure"]
    of_load = ["throughput", "ttft", "tpot", "ttft-distribution", "itl-distribution", "tokens-time", "queue-time"]
    assert figures == [*of_load, "loss", "sweep"]
    assert names.count("svg") == len(figures)
    assert all(attrs.get("aria-label") for tag, attrs in page.tags if tag == "svg")


def test_what_a_model_answered_is_text_not_markup(full: Path) -> None:
    page = Page()
    page.feed((full / "report.html").read_text())
    assert NASTY in page.text
    assert "<script" not in (full / "report.md").read_text()


def test_the_three_files_hold_the_same_numbers(full: Path) -> None:
    results = json.loads((full / "results.json").read_text())
    page = Page()
    page.feed((full / "report.html").read_text())
    markdown = (full / "report.md").read_text()
    assert len(results["load"]) == 6
    for row in results["load"]:
        for shown in (f"{row['output_throughput']:,.1f}", f"{row['median_tpot_ms']:,.1f}"):
            assert shown in page.text
            assert shown in markdown
    assert "1 of 32 requests failed (1 http 503)" in page.text


def test_numbers_can_be_traced(full: Path) -> None:
    page = Page()
    page.feed((full / "report.html").read_text())
    sweep = artifacts.read(full.parent / "sweep")
    for sought in ("cdcdcdcdcdcd", "abababababab", sweep.sha256[:12], "data/science"):
        assert sought in page.text
    assert "rank 8, alpha 16, trial r8 of sweep" in page.text


@pytest.mark.parametrize(
    ("stages", "says"),
    [
        (("prepare", "train", "merge", "loadtest"), "better than its base"),
        (("prepare", "train"), "The load test has not run"),
        (("loadtest",), "measured no held-out loss"),
        (("prepare",), "measured no held-out loss"),
    ],
)
def test_missing_stages_are_said_and_do_not_stop_it(tmp_path: Path, stages: tuple[str, ...], says: str) -> None:
    c = a_config(tmp_path)
    a_run(c, *stages)
    assert says in (report.run(c).path / "report.md").read_text()


def test_no_stage_at_all_is_a_users_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no finished stage"):
        report.run(a_config(tmp_path))


def test_a_second_run_changes_nothing(full: Path, tmp_path: Path) -> None:
    before = artifacts.read(full).sha256
    again = report.run(a_config(tmp_path, "sweep.ranks=[4,8,16]", "load.sweep=serve.max_num_seqs:4,16"))
    assert again.sha256 == before


# --- two runs


def test_what_changed_between_two_runs_is_marked_beyond_its_interval(tmp_path: Path) -> None:
    old, new = a_config(tmp_path), a_config(tmp_path, "run.name=s")
    a_run(old, "loadtest")
    a_run(new, "loadtest")
    file = tmp_path / "s/loadtest/results.json"
    rows = json.loads(file.read_text())
    for row in rows:
        row["output_throughput"] *= 2
        row["intervals"]["output_throughput"] = [2 * v for v in row["intervals"]["output_throughput"]]
        row["median_ttft_ms"] *= 1.001
    text = json.dumps(rows)
    file.write_text(text)
    manifest = json.loads((tmp_path / "s/loadtest/manifest.json").read_text())
    manifest["files"]["results.json"]["size"] = len(text)
    (tmp_path / "s/loadtest/manifest.json").write_text(json.dumps(manifest))
    lines = report_compare.compare(tmp_path / "r", tmp_path / "s").splitlines()
    speed = [line for line in lines if "out tok/s" in line]
    assert len(speed) == 6
    assert all("+100.0 %" in line and line.endswith("BETTER") for line in speed)
    assert all("within the intervals" in line for line in lines if "TTFT median" in line)
    back = report_compare.compare(tmp_path / "s", tmp_path / "r").splitlines()
    assert all(line.endswith("WORSE") for line in back if "out tok/s" in line)


def test_a_run_without_a_load_test_cannot_be_compared(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="missing or unfinished"):
        report_compare.compare(tmp_path, tmp_path)


# --- in a browser


@pytest.mark.slow
def test_a_browser_shows_the_page_without_a_network_or_an_error(full: Path, tmp_path: Path) -> None:
    browser = shutil.which("chromium") or shutil.which("google-chrome") or shutil.which("chromium-browser")
    if browser is None:
        pytest.skip("no Chromium here: apt-get install chromium")
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--hide-scrollbars"]
    flags += [f"--user-data-dir={tmp_path / 'profile'}", "--enable-logging=stderr", "--virtual-time-budget=2000"]
    page = f"file://{full / 'report.html'}"
    seen = subprocess.run([browser, *flags, "--dump-dom", page], capture_output=True, text=True, timeout=90)
    assert "better than its base" in seen.stdout
    assert seen.stdout.count("<svg") == 9
    assert "CONSOLE" not in seen.stderr
    shot = tmp_path / "page.png"
    for size in ("1200,1000", "420,900"):
        subprocess.run(
            [browser, *flags, f"--screenshot={shot}", f"--window-size={size}", page], capture_output=True, timeout=90
        )
        from PIL import Image

        grey = np.asarray(Image.open(shot).convert("L"))
        assert grey.shape == tuple(int(n) for n in reversed(size.split(",")))
        ink = (grey < 128).mean()
        assert 0.005 < ink < 0.3  # neither blank nor black
        assert (grey[:, -4:] > 200).all()  # nothing runs out of the page
