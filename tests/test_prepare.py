"""`prepare` on datasets that people brought, and what holds for every snapshot."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data import snapshot, splits
from jobs import artifacts, config, prepare
from jobs.errors import UserError

ROOT = Path(__file__).parent.parent
Prepare = Callable[..., artifacts.Artifact]


@pytest.fixture
def prepared(tmp_path: Path, base_model: Path) -> Prepare:
    """Prepare a path under given settings, each time in a new run directory."""
    runs = iter(range(1000))

    def run(path: Path, *settings: str) -> artifacts.Artifact:
        where = [f"run.root={tmp_path / 'runs' / str(next(runs))}", f"model.source={base_model}", f"data.path={path}"]
        return prepare.run(config.load(None, [*where, *settings]))

    return run


@pytest.fixture(scope="session")
def tokenizer(base_model: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(base_model)


def rows_of(artifact: artifacts.Artifact, *columns: str) -> dict[str, Any]:
    """Rows of both splits by id: the whole row, or the values of some columns."""
    rows = [row for split in snapshot.SPLITS for row in snapshot.read(artifact.path, split).to_pylist()]
    return {row["id"]: tuple(row[c] for c in columns) if columns else row for row in rows}


def lines_in(error: UserError) -> set[int]:
    """The line numbers that a message lists."""
    return {
        int(line.split(":")[1].split()[-1])
        for line in str(error).splitlines()
        if line.startswith("  ") and not line.startswith("  …")
    }


def chats(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path


def chat(question: str, answer: str = "Yes, they do.", **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}], **more}


# C02: line framing and encodings


def test_c02_line_separators_in_text_do_not_cut_rows(cases: Path, prepared: Prepare) -> None:
    raw = prepared(cases / "a/c02_raw_u2028.jsonl")
    escaped = prepared(cases / "a/c02_escaped_u2028.jsonl")
    both = [rows_of(a, "messages", "answer", "input_ids", "loss_mask") for a in (raw, escaped)]
    assert both[0] == both[1]
    assert both[0]["s0"][1] == "First line.\u2028Second line.\u2029Third line."
    assert len(both[0]) == 3


def test_c02_u0085_is_refused_as_a_control_character_of_line_1(cases: Path, prepared: Prepare) -> None:
    with pytest.raises(UserError, match=r"c02_raw_u0085.jsonl:1: messages\[1\].content: control character U\+0085"):
        prepared(cases / "a/c02_raw_u0085.jsonl")


@pytest.mark.parametrize("name", ["bom", "bom_crlf_nofinal", "bom_each_line", "blank_lines", "array_named_jsonl"])
def test_c02_the_same_rows_however_they_are_framed(name: str, cases: Path, prepared: Prepare, capsys: Any) -> None:
    columns = ("messages", "answer", "input_ids", "loss_mask")
    plain, other = prepared(cases / "a/c02_plain.jsonl"), prepared(cases / f"a/c02_{name}.jsonl")
    assert rows_of(other, *columns) == rows_of(plain, *columns)
    assert len(rows_of(plain)) == 3
    assert other.numbers["snapshot_hash"] == plain.numbers["snapshot_hash"]
    if name == "blank_lines":
        assert {row["source"].split(":")[1] for row in rows_of(other).values()} == {"2", "5", "8"}
    if name == "array_named_jsonl":
        assert "JSON array" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("utf16le", "UTF-16"),
        ("cp1252", "jsonl:1: not UTF-8: byte 0xE9 at byte 62"),
        ("pretty", "put each on one line"),
        ("cut_off_last_line", "jsonl:3: not valid JSON"),
    ],
)
def test_c02_what_is_no_utf8_json_lines_is_refused(name: str, words: str, cases: Path, prepared: Prepare) -> None:
    with pytest.raises(UserError) as caught:
        prepared(cases / f"a/c02_{name}.jsonl")
    assert words in str(caught.value)
    assert "\ufffd" not in str(caught.value)
    if name == "cut_off_last_line":
        assert "cut off" in str(caught.value)
        assert lines_in(caught.value) == {3}
    if name == "cp1252":
        at = (cases / "a/c02_cp1252.jsonl").read_bytes().index(b"\xe9")
        assert f"offset {at} of the file" in str(caught.value)


# C03: tool calls and null content


def test_c03_tools_are_refused_by_name_and_empty_tool_fields_are_not(cases: Path, prepared: Prepare) -> None:
    path = cases / "a/c03_tools.jsonl"
    with pytest.raises(UserError) as caught:
        prepared(path)
    message = str(caught.value)
    assert lines_in(caught.value) == {1, 2, 3, 4, 7}
    for line, words in ((1, "tools"), (2, "tool_calls"), (3, "role 'tool'"), (4, "function_call"), (7, "found null")):
        assert any(f":{line}: " in text and words in text for text in message.splitlines())
    kept = prepared(path, "data.drop_invalid=true")
    assert sorted(rows_of(kept)) == ["t4", "t5"]
    assert kept.numbers["dropped"] == {"tools": 4, "empty_answer": 1}
    for row in rows_of(kept).values():
        assert not any(word in row["messages"] + row["answer"] for word in ("None", "null"))


# C04: Alpaca nulls and wrong types


def test_c04_alpaca_lines(cases: Path, prepared: Prepare, tokenizer: Any) -> None:
    path = cases / "a/c04_alpaca.jsonl"
    with pytest.raises(UserError) as caught:
        prepared(path)
    assert lines_in(caught.value) == {4, 5, 6, 7, 8, 9, 10, 11, 12}
    kept = rows_of(prepared(path, "data.drop_invalid=true"))
    assert sorted(int(row["source"].split(":")[1]) for row in kept.values()) == [1, 2, 3, 13]
    none = kept["c04_alpaca.jsonl:13"]
    assert json.loads(none["messages"])[0]["content"].endswith("None")
    assert none["answer"] == "None"
    first = tokenizer.decode(kept["c04_alpaca.jsonl:1"]["input_ids"])
    assert "<|im_start|>user\nName a planet with rings.<|im_end|>" in first


def test_c04_a_null_input_is_an_empty_input(cases: Path, prepared: Prepare, tmp_path: Path) -> None:
    rows = [json.loads(line) for line in (cases / "a/c04_alpaca.jsonl").read_text().splitlines()[:3]]
    texts = []
    for given in (None, ""):
        rows[0]["input"] = given
        kept = rows_of(prepared(chats(tmp_path / "rows.jsonl", rows)))
        texts.append(kept["rows.jsonl:1"])
    assert texts[0] == texts[1]


def test_c04_alpaca_parquet(cases: Path, prepared: Prepare) -> None:
    path = cases / "a/c04_alpaca.parquet"
    with pytest.raises(UserError, match=r"c04_alpaca.parquet: row 2: output: expected text, found null"):
        prepared(path)
    kept = prepared(path, "data.drop_invalid=true")
    assert sorted(rows_of(kept)) == ["c04_alpaca.parquet:1", "c04_alpaca.parquet:3", "c04_alpaca.parquet:4"]
    assert "__index_level_0__" not in json.dumps(list(rows_of(kept).values()))


# C05: ShareGPT with odd keys


def test_c05_sharegpt(cases: Path, prepared: Prepare, capsys: Any) -> None:
    path = cases / "a/c05_sharegpt.jsonl"
    with pytest.raises(UserError) as caught:
        prepared(path)
    message = str(caught.value)
    assert lines_in(caught.value) == {*range(4, 10), *range(11, 18)}
    assert capsys.readouterr().out.count("are taken for 'human' and 'gpt'") == 1
    said = {
        4: "'Human'", 5: "'chatgpt'", 6: "'bing'", 7: "'gpt'", 8: "'system'", 9: "'function_call'", 11: "text",
        12: "no turns", 13: "conversations[1]", 14: "'messages'", 15: "list of turns", 16: "conversation",
        17: "jsonl:1",
    }  # fmt: skip
    for line, words in said.items():
        assert any(f"jsonl:{line}: " in text and words in text for text in message.splitlines()), line
    kept = prepared(path, "data.drop_invalid=true")
    assert sorted(rows_of(kept)) == ["g0", "g1", "g2", "g9"]


def test_c05_the_array_form_gives_the_same_rows(cases: Path, prepared: Prepare) -> None:
    array = rows_of(prepared(cases / "a/c05_sharegpt_good.json"), "messages", "answer", "input_ids")
    lines = rows_of(
        prepared(cases / "a/c05_sharegpt.jsonl", "data.drop_invalid=true"), "messages", "answer", "input_ids"
    )
    assert array == {name: lines[name] for name in ("g0", "g1", "g2")}


# C06: role order


def test_c06_every_order_but_the_right_one_is_refused(cases: Path, prepared: Prepare, capsys: Any) -> None:
    path = cases / "a/c06_roles.jsonl"
    with pytest.raises(UserError) as caught:
        prepared(path)
    # r17 (text parts) and r27 (a closed think block) are accepted by the rules in data/formats.py, r30 as it is
    assert lines_in(caught.value) == set(range(1, 32)) - {18, 28, 31}
    assert "one text part is taken as that text" in capsys.readouterr().out
    for line in range(1, 25):
        if line not in (18, 25):
            assert f"jsonl:{line}: messages" in str(caught.value)
    kept = rows_of(prepared(path, "data.drop_invalid=true"))
    assert sorted(kept) == ["r17", "r27", "r30"]
    assert kept["r27"]["answer"] == "<think>\nhm\n</think>\n\nA."


# Snapshots


@pytest.fixture(scope="module")
def science(base_model: Path, tmp_path_factory: pytest.TempPathFactory) -> artifacts.Artifact:
    """The project's own dataset, prepared."""
    root = tmp_path_factory.mktemp("science")
    where = [f"run.root={root}", f"model.source={base_model}", f"data.path={ROOT / 'data/science'}"]
    return prepare.run(config.load(None, where))


def test_the_answer_and_its_end_of_turn_token_are_supervised_and_nothing_else(
    science: artifacts.Artifact, tokenizer: Any
) -> None:
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    for row in rows_of(science).values():
        assert len(row["input_ids"]) == len(row["loss_mask"]) == row["length"]
        assert row["loss_mask"] == [0] * row["prompt_length"] + [1] * (row["length"] - row["prompt_length"])
        supervised = [token for token, on in zip(row["input_ids"], row["loss_mask"], strict=True) if on]
        assert supervised[-1] == end
        assert tokenizer.decode(supervised) == row["answer"] + "<|im_end|>"


def test_tokens_are_those_of_the_chat_template(science: artifacts.Artifact, tokenizer: Any) -> None:
    for row in list(rows_of(science).values())[::9]:
        messages = json.loads(row["messages"])
        prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        assert row["input_ids"][: row["prompt_length"]] == prompt
        whole = [*messages, {"role": "assistant", "content": row["answer"]}]
        assert tokenizer.apply_chat_template(whole, return_dict=False)[: row["length"]] == row["input_ids"]


def test_no_fact_is_in_two_splits_and_all_rows_are_there(science: artifacts.Artifact) -> None:
    examples = [json.loads(line) for line in (ROOT / "data/science/examples.jsonl").open(encoding="utf-8")]
    facts = {example["id"]: set(example["fact_ids"]) for example in examples}
    seen = {split: snapshot.read(science.path, split).column("id").to_pylist() for split in snapshot.SPLITS}
    assert sorted(seen["train"] + seen["eval"]) == sorted(facts)
    used = {split: set().union(*(facts[i] for i in ids)) for split, ids in seen.items()}
    assert not used["train"] & used["eval"]
    assert 0.05 < len(seen["eval"]) / len(facts) < 0.3
    assert science.numbers["rows"] == {split: len(ids) for split, ids in seen.items()}


def test_a_second_run_finds_the_snapshot_and_another_setting_is_named(
    science: artifacts.Artifact, base_model: Path, capsys: Any
) -> None:
    root = science.path.parent.parent
    where = [f"run.root={root}", f"model.source={base_model}", f"data.path={ROOT / 'data/science'}"]
    assert prepare.run(config.load(None, where)).sha256 == science.sha256
    assert "up to date" in capsys.readouterr().out
    with pytest.raises(UserError, match=r"data.eval_fraction = 0.15, now 0.2"):
        prepare.run(config.load(None, [*where, "data.eval_fraction=0.2"]))


def test_the_length_report_is_that_of_numpy(science: artifacts.Artifact) -> None:
    rows = list(rows_of(science).values())
    lengths = sorted(row["length"] for row in rows)
    report = science.numbers["lengths"]
    assert report["row"]["max"] == lengths[-1]
    assert report["row"]["p50"] == lengths[int(np.ceil(0.5 * (len(lengths) - 1)))]
    assert report["prompt"]["max"] == max(row["prompt_length"] for row in rows)
    assert report["answer"]["max"] == max(row["length"] - row["prompt_length"] for row in rows)
    assert report["rows_over"] == 0
    assert report["tokens"] == sum(lengths)


def test_padding_saved_is_counted_in_batches_of_eight(prepared: Prepare, tmp_path: Path) -> None:
    rows = [chat(f"Is {i} a number?", "yes " * (10 if i % 2 else 30)) for i in range(10, 26)]
    report = prepared(chats(tmp_path / "rows.jsonl", rows)).numbers["lengths"]
    longest = report["row"]["max"]
    assert report["padding_saved_by_packing"] == pytest.approx(1 - report["tokens"] / (16 * longest), abs=1e-4)


def test_the_hash_does_not_depend_on_where_or_in_how_many_files_the_rows_lie(prepared: Prepare, tmp_path: Path) -> None:
    rows = [chat(f"Is {i} a number?", id=f"r{i}") for i in range(40)]
    (tmp_path / "a").mkdir()
    (tmp_path / "b" / "deep").mkdir(parents=True)
    chats(tmp_path / "a" / "all.jsonl", rows)
    chats(tmp_path / "b" / "1.jsonl", rows[:7])
    chats(tmp_path / "b" / "deep" / "2.jsonl", rows[7:])
    one, two = prepared(tmp_path / "a"), prepared(tmp_path / "b", "data.format=openai")
    assert one.numbers["snapshot_hash"] == two.numbers["snapshot_hash"]


CHANGES = {
    "a word": lambda rows: rows[3]["messages"][0].update(content="Is 3 a numeral?"),
    "an id": lambda rows: rows[3].update(id="other"),
    "the order": lambda rows: rows.reverse(),
    "a row less": lambda rows: rows.pop(),
}


@pytest.mark.parametrize("what", [*CHANGES, "run.seed=1", "data.eval_fraction=0.3", "data.max_seq_len=512"])
def test_any_change_of_rows_or_settings_gives_another_hash(what: str, prepared: Prepare, tmp_path: Path) -> None:
    rows = [chat(f"Is {i} a number?", id=f"r{i}") for i in range(40)]
    before = prepared(chats(tmp_path / "rows.jsonl", rows)).numbers["snapshot_hash"]
    CHANGES.get(what, lambda rows: None)(rows)
    settings = [] if what in CHANGES else [what]
    assert prepared(chats(tmp_path / "rows.jsonl", rows), *settings).numbers["snapshot_hash"] != before


def test_another_tokenizer_gives_another_hash(prepared: Prepare, tmp_path: Path, base_model: Path) -> None:
    path = chats(tmp_path / "rows.jsonl", [chat(f"Is {i} a number?") for i in range(9)])
    other = tmp_path / "model"
    shutil.copytree(base_model, other)
    template = (other / "chat_template.jinja").read_text()
    (other / "chat_template.jinja").write_text(template.replace("You are a helpful AI", "You are an AI"))
    hashes = {prepared(path, *s).numbers["snapshot_hash"] for s in ([], [f"model.source={other}"])}
    assert len(hashes) == 2


def test_check_verifies_a_snapshot_and_finds_every_alteration(prepared: Prepare, tmp_path: Path) -> None:
    path = chats(tmp_path / "rows.jsonl", [chat(f"Is {i} a number?", id=f"r{i}") for i in range(20)])
    artifact = prepared(path)
    assert snapshot.verify(artifact.path) == artifact.numbers["snapshot_hash"]
    file = artifact.path / "train" / "part-00000.parquet"
    table = pq.read_table(file, partitioning=None)
    pq.write_table(table, file, row_group_size=3, compression="gzip")  # other bytes, the same rows
    assert snapshot.verify(artifact.path) == artifact.numbers["snapshot_hash"]
    altered = {
        "answer": table.set_column(7, "answer", pa.array(["No."] * len(table))),
        "rows": table.slice(1),
        "order": table.take(list(range(len(table)))[::-1]),
        "id": table.set_column(0, "id", pa.array([f"x{i}" for i in range(len(table))])),
        "prompt_length": table.set_column(5, "prompt_length", pa.array([1] * len(table), pa.int32())),
    }
    for name, other in altered.items():
        pq.write_table(other, file)
        with pytest.raises(UserError, match=str(artifact.path)):
            snapshot.verify(artifact.path)
        assert other.num_rows, name
    masks = table.column("loss_mask").to_pylist()
    masks[5][0] = 1
    pq.write_table(table.set_column(3, "loss_mask", pa.array(masks, pa.list_(pa.int8()))), file)
    with pytest.raises(UserError, match=r"part-00000.parquet: row 5: its loss mask"):
        snapshot.verify(artifact.path)
    moved = table.take([0])
    pq.write_table(table.slice(1), file)
    rest = pq.read_table(artifact.path / "eval" / "part-00000.parquet", partitioning=None)
    pq.write_table(pa.concat_tables([rest, moved]), artifact.path / "eval" / "part-00000.parquet")
    with pytest.raises(UserError, match="altered"):
        snapshot.verify(artifact.path)


def test_check_on_the_command_line(science: artifacts.Artifact, tmp_path: Path) -> None:
    def check(*where: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "jobs.prepare", "--check", *where]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=120)

    done = check(str(science.path))
    assert (done.returncode, done.stderr) == (0, "")
    assert science.numbers["snapshot_hash"] in done.stdout
    done = check(str(tmp_path))
    assert done.returncode == 1
    assert "no manifest.json" in done.stderr


def test_drop_invalid_is_a_flag_too(cases: Path, tmp_path: Path, base_model: Path) -> None:
    command = [sys.executable, "-m", "jobs.prepare", "--drop-invalid", f"run.root={tmp_path}"]
    more = [f"model.source={base_model}", f"data.path={cases / 'a/c03_tools.jsonl'}"]
    done = subprocess.run([*command, *more], cwd=ROOT, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "dropped 5 bad rows: tools 4, empty_answer 1" in done.stdout


def test_every_bad_row_is_listed_up_to_the_limit_and_the_rest_counted(prepared: Prepare, tmp_path: Path) -> None:
    rows = [chat(f"Is {i} a number?", "" if i % 2 else "Yes.") for i in range(60)]
    with pytest.raises(UserError) as caught:
        prepared(chats(tmp_path / "rows.jsonl", rows), "data.max_errors=7")
    assert lines_in(caught.value) == {2, 4, 6, 8, 10, 12, 14}
    assert "30 of 60 rows are bad (empty_answer 30)" in str(caught.value)
    assert "and 23 more bad rows" in str(caught.value)


def test_over_long_rows_are_refused_and_never_cut(prepared: Prepare, tmp_path: Path) -> None:
    rows = [chat(f"Is {i} a number?", "very " * (200 if i == 4 else 3) + "true") for i in range(12)]
    path = chats(tmp_path / "rows.jsonl", rows)
    with pytest.raises(UserError, match=r"rows.jsonl:5: \d+ tokens, over data.max_seq_len 100"):
        prepared(path, "data.max_seq_len=100")
    kept = prepared(path, "data.max_seq_len=100", "data.drop_invalid=true")
    assert kept.numbers["dropped"] == {"too_long": 1}
    assert kept.numbers["lengths"]["rows_over"] == 1
    assert {row["answer"] for row in rows_of(kept).values()} == {"very very very true"}


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 130), (signal.SIGKILL, -9)])
def test_a_run_that_is_ended_leaves_nothing_that_looks_complete(
    number: int, status: int, tmp_path: Path, base_model: Path
) -> None:
    path = chats(tmp_path / "rows.jsonl", [chat(f"Is {i} a number?", "It is. " * 60) for i in range(12_000)])
    command = [
        sys.executable,
        "-u",
        "-m",
        "jobs.prepare",
        f"run.root={tmp_path / 'runs'}",
        f"model.source={base_model}",
    ]
    process = subprocess.Popen(
        [*command, f"data.path={path}"], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None
    assert b"format openai" in process.stdout.readline()
    time.sleep(0.3)
    process.send_signal(number)
    _, error = process.communicate(timeout=60)
    assert process.returncode == status
    assert b"Traceback" not in error
    assert list(tmp_path.rglob("manifest.json")) == []
    assert os.listdir(tmp_path) == ["rows.jsonl"]


# Splits


def keyed(rows: list[list[str]]) -> tuple[Any, Any]:
    flat = np.array([splits.hash64(key) for keys in rows for key in keys], dtype=np.uint64)
    return flat, np.array([len(keys) for keys in rows])


def test_components_are_those_of_a_graph_search() -> None:
    rng = random.Random(3)
    rows = [rng.sample([f"k{i}" for i in range(80)], rng.choice([1, 1, 1, 2, 3])) for _ in range(60)]
    found = splits.components(*keyed(rows), seed=0).of_row.tolist()
    left = set(range(len(rows)))
    groups = set()
    while left:
        group, queue = set(), [left.pop()]
        while queue:
            at = queue.pop()
            group.add(at)
            near = {i for i in left if set(rows[i]) & set(rows[at])}
            left -= near
            queue += near
        groups.add(frozenset(group))
    assert {frozenset(i for i in range(len(rows)) if found[i] == c) for c in set(found)} == groups


def test_splits_stay_when_rows_are_added_and_change_with_the_seed() -> None:
    rows = [[f"fact-{i % 100}"] for i in range(300)]
    keep = np.ones(300, bool)
    first = splits.assign(splits.components(*keyed(rows), seed=0), keep, eval_fraction=0.2)
    more = [[f"new-{i}"] for i in range(50)] + rows + [["fact-7"], ["new-60"]]
    second = splits.assign(splits.components(*keyed(more), seed=0), np.ones(len(more), bool), eval_fraction=0.2)
    assert (first == second[50:350]).all()
    other = splits.assign(splits.components(*keyed(rows), seed=1), keep, eval_fraction=0.2)
    assert (first != other).any()


def test_the_share_held_out_is_near_the_one_asked_for_whatever_the_size_of_components() -> None:
    rows = [[f"g{i}-{j}" for j in range(5)] if i % 2 else [f"g{i}-0"] for i in range(20_000)]
    held = splits.assign(splits.components(*keyed(rows), seed=0), np.ones(len(rows), bool), eval_fraction=0.15)
    assert held[::2].mean() == pytest.approx(0.15, abs=0.012)  # five standard deviations of 10,000 draws
    assert held[1::2].mean() == pytest.approx(0.15, abs=0.018)


@pytest.mark.parametrize("rows", [2, 3, 5])
@pytest.mark.parametrize("seed", range(8))
def test_a_few_rows_on_different_subjects_fill_both_splits(rows: int, seed: int) -> None:
    parts = splits.components(*keyed([[f"q{i}"] for i in range(rows)]), seed=seed)
    held = splits.assign(parts, np.ones(rows, bool), eval_fraction=0.1)
    assert held.any()
    assert not held.all()


def test_repeated_values_name_their_first_row() -> None:
    values = np.array([5, 3, 5, 5, 9, 3], dtype=np.uint64)
    assert splits.repeated(values) == [(2, 0), (3, 0), (5, 1)]
    assert splits.repeated(np.array([], dtype=np.uint64)) == []


def test_leaks_are_later_rows_in_the_other_split() -> None:
    questions = np.array([1, 2, 1, 2, 1, 3, 3], dtype=np.uint64)
    held = np.array([0, 1, 1, 1, 0, 0, 1], dtype=bool)
    keep = np.array([1, 1, 1, 1, 1, 1, 0], dtype=bool)
    assert splits.leaking(questions, held, keep) == [(2, 0)]


def test_rows_of_a_group_stay_together(prepared: Prepare, tmp_path: Path) -> None:
    rows = [chat(f"Is {i} a number?", id=f"r{i}", book=f"b{i // 3}") for i in range(30)]
    artifact = prepared(chats(tmp_path / "rows.jsonl", rows), "data.split_by=group", "data.group_key=book")
    for split in snapshot.SPLITS:
        ids = snapshot.read(artifact.path, split).column("id").to_pylist()
        books = [int(name[1:]) // 3 for name in ids]
        assert all(books.count(book) == 3 for book in set(books))


def test_rows_with_one_question_stay_together_when_there_are_no_facts(prepared: Prepare, tmp_path: Path) -> None:
    rows = [chat(f"Is {i // 2} a number{'!' * (i % 2)}?", f"Answer {i}.", id=f"r{i}") for i in range(40)]
    artifact = prepared(chats(tmp_path / "rows.jsonl", rows))
    ids = [int(name[1:]) for name in snapshot.read(artifact.path, "eval").column("id").to_pylist()]
    assert {i ^ 1 for i in ids} == set(ids)


def test_group_without_a_key_is_refused(prepared: Prepare, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"data.group_key"):
        prepared(chats(tmp_path / "rows.jsonl", [chat("Is it?")]), "data.split_by=group")


def test_dropping_near_duplicates_keeps_the_first_row_and_counts(prepared: Prepare, tmp_path: Path) -> None:
    (tmp_path / "ours").mkdir()
    facts = [{"id": f"f{i}", "text": "A fact.", "kind": "cause", "scope": "Earth"} for i in range(20)]
    example = {"grade_band": "1-2", "language": "en", "history": [], "answer": "Yes."}
    rows = [{"id": f"e{i}", "fact_ids": [f"f{i}"], "user": f"What is {i}?", **example} for i in range(20)]
    chats(tmp_path / "ours" / "facts.jsonl", facts)
    clean = prepared(chats(tmp_path / "ours" / "examples.jsonl", rows).parent)
    train = snapshot.read(clean.path, "train").column("id").to_pylist()
    held = snapshot.read(clean.path, "eval").column("id").to_pylist()
    one, two = sorted([int(train[0][1:]), int(held[0][1:])])
    rows[two]["user"] = rows[one]["user"].upper()
    chats(tmp_path / "ours" / "examples.jsonl", rows)
    with pytest.raises(UserError, match=rf"examples.jsonl:{two + 1}: question: .* examples.jsonl:{one + 1} "):
        prepared(tmp_path / "ours")
    kept = prepared(tmp_path / "ours", "data.drop_invalid=true")
    assert kept.numbers["dropped"] == {"near_duplicate": 1}
    assert sorted(rows_of(kept)) == sorted({f"e{i}" for i in range(20)} - {f"e{two}"})
