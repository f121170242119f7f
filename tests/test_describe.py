"""describe: counted against safetensors, gguf, tokenizers, torch and transformers themselves, and on broken inputs."""

import json
import pickle
import shutil
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy
import pytest
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from jobs import architecture, chat_template, describe, gguf_header, safetensors_header, tensor_facts, text_page
from jobs.errors import UserError
from tests.conftest import ROOT

CONFIG = json.loads((ROOT / "tests" / "qwen3" / "config.json").read_text())


def run(*args: str | Path, code: int = 0) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "jobs.describe", *map(str, args)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    return done


@pytest.fixture
def model(cases: Path, tmp_path: Path) -> Path:
    """A small complete model to break."""
    return Path(shutil.copytree(cases / "b" / "base_tied", tmp_path / "model"))


# --- shape and parameters


def test_kv_cache_of_qwen3_4b_is_147456_bytes_a_token() -> None:
    arch = architecture.from_config(CONFIG, "config.json")
    assert architecture.kv_bytes_per_token(arch, "bfloat16") == 147_456
    assert architecture.kv_arithmetic(arch, "bfloat16").startswith("2 (K and V) x 36 layers x 8 KV heads x 128 x 2")
    assert arch == architecture.KNOWN["Qwen/Qwen3-4B"]


# Counts that the publishers' model cards and hub pages state.
@pytest.mark.parametrize(
    ("name", "published"),
    [
        ("Qwen/Qwen3-0.6B", 596_049_920),
        ("Qwen/Qwen3-4B", 4_022_468_096),
        ("Qwen/Qwen3-8B", 8_190_735_360),
        ("Qwen/Qwen3-32B", 32_762_123_264),
        ("smollm2-135m-instruct", 134_515_008),
    ],
)
def test_known_models_have_their_published_parameter_counts(name: str, published: int) -> None:
    assert sum(architecture.parameters(architecture.KNOWN[name]).values()) == published


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
@pytest.mark.parametrize("tied", [True, False])
def test_parameter_formula_counts_what_transformers_builds(family: str, tied: bool) -> None:
    import torch
    import transformers

    sizes = {"hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 3, "num_attention_heads": 6}
    more = {"num_key_value_heads": 2, "head_dim": 8, "vocab_size": 50, "tie_word_embeddings": tied}
    config = transformers.AutoConfig.for_model(family, **sizes, **more)
    with torch.device("meta"):
        built: Any = transformers.AutoModelForCausalLM.from_config(config)
    arch = architecture.from_config(config.to_dict(), family)
    assert sum(architecture.parameters(arch).values()) == built.num_parameters()


def test_an_unknown_family_without_weights_is_refused_not_guessed() -> None:
    arch = architecture.from_config({**CONFIG, "model_type": "mamba"}, "config.json")
    with pytest.raises(UserError, match="known for llama"):
        architecture.parameters(arch)


def test_config_without_layers_is_named(model: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    del config["num_hidden_layers"]
    (model / "config.json").write_text(json.dumps(config))
    assert "no num_hidden_layers" in run(model, code=1).stderr


# --- safetensors


def shards(directory: Path) -> dict[str, str]:
    """Two shards and their index, written by the library."""
    (directory / "model.safetensors").unlink(missing_ok=True)
    first = {"model.embed_tokens.weight": numpy.ones((48, 16), numpy.float16)}
    second = {"model.norm.weight": numpy.ones(16, numpy.float32), "empty": numpy.ones((0, 3), numpy.int64)}
    names = [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    where: dict[str, str] = {}
    for name, tensors in zip(names, (first, second), strict=True):
        save_file(tensors, directory / name, metadata={"format": "pt"})
        where |= dict.fromkeys(tensors, name)
    (directory / safetensors_header.INDEX).write_text(json.dumps({"metadata": {}, "weight_map": where}))
    return where


def test_sharded_headers_agree_with_the_library(model: Path) -> None:
    where = shards(model)
    read = safetensors_header.read_model(model)
    assert set(read) == set(where)
    for name, tensor in read.items():
        with safe_open(tensor.file, "numpy") as library:
            part = library.get_slice(name)
            assert (tensor.dtype, list(tensor.shape)) == (part.get_dtype(), part.get_shape())
            with open(tensor.file, "rb") as handle:
                handle.seek(tensor.start)
                assert handle.read(tensor.bytes) == library.get_tensor(name).tobytes()


def header(text: bytes, data: bytes = b"") -> bytes:
    return struct.pack("<Q", len(text)) + text + data


def entry(shape: list[int], start: int, end: int, dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


BROKEN = {
    "header of 8 GB": (struct.pack("<Q", 8_000_000_000) + b"{}", "8,000,000,000 bytes"),
    "too short": (b"\x01\x02", "too few"),
    "header past the end": (struct.pack("<Q", 5000) + b"{}", "cut off inside its header"),
    "not JSON": (header(b"{broken"), "not JSON"),
    "deep JSON": (header(b"[" * 50_000), "not JSON"),
    "a list": (header(b"[]"), "not a JSON object"),
    "name twice": (header(b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"a":1}', b"0"), "a name twice"),
    "data cut off": (header(json.dumps({"a": entry([4], 0, 16)}).encode(), bytes(15)), "cut off"),
    "data too long": (header(json.dumps({"a": entry([4], 0, 16)}).encode(), bytes(17)), "too long"),
    "overlap": (header(json.dumps({"a": entry([2], 0, 8), "b": entry([2], 4, 12)}).encode(), bytes(12)), "overlaps"),
    "gap": (header(json.dumps({"a": entry([2], 4, 12)}).encode(), bytes(12)), "gap"),
    "wrong size": (header(json.dumps({"a": entry([3], 0, 16)}).encode(), bytes(16)), "needs 12 bytes"),
    "negative": (header(json.dumps({"a": entry([-1], 0, 4)}).encode(), bytes(4)), "shape"),
    "backwards": (header(json.dumps({"a": entry([1], 4, 0)}).encode(), bytes(4)), "needs 4 bytes"),
    "huge shape": (header(json.dumps({"a": entry([2**62, 2**62], 0, 4)}).encode(), bytes(4)), "needs"),
    "unknown dtype": (header(json.dumps({"a": entry([1], 0, 4, "X9")}).encode(), bytes(4)), "dtype 'X9'"),
    "no offsets": (header(b'{"a":{"dtype":"F32","shape":[1]}}', bytes(4)), "lacks dtype"),
    "a pickle": (pickle.dumps({"a": list(range(100))}, protocol=4), "pickle"),
    "a zip": (b"PK\x03\x04" + bytes(100), "zip archive"),
    "an LFS pointer": (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "git lfs pull"),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_broken_safetensors_get_one_clear_message(kind: str, model: Path) -> None:
    data, says = BROKEN[kind]
    file = model / "model.safetensors"
    file.write_bytes(data)
    with pytest.raises(UserError, match="copy or download it again") as caught:
        safetensors_header.read_model(model)
    assert says in str(caught.value)
    assert str(file) in str(caught.value)
    with pytest.raises(SafetensorError):  # the library refuses each of them too
        safe_open(file, "numpy")


def test_truncated_weights_are_told_and_the_rest_is_still_described(model: Path) -> None:
    whole = (model / "model.safetensors").read_bytes()
    (model / "model.safetensors").write_bytes(whole[:-1])
    done = run(model, code=1)
    assert f"cut off: {len(whole) - 1:,} bytes where its header says {len(whole):,}" in done.stderr
    assert "CHAT TEMPLATE" in done.stdout


@pytest.mark.parametrize("name", ["../secret.safetensors", "/etc/passwd", "a/b.safetensors", "..", "weights.bin", ""])
def test_index_that_points_elsewhere_is_refused(name: str, model: Path) -> None:
    save_file({"a": numpy.ones(2)}, model.parent / "secret.safetensors")
    (model / safetensors_header.INDEX).write_text(json.dumps({"weight_map": {"a": name}}))
    assert "only safetensors files beside the index are read" in run(model, code=1).stderr


def test_missing_shard_is_listed_as_missing(model: Path) -> None:
    where = shards(model)
    (model / where["model.norm.weight"]).unlink()
    assert where["model.norm.weight"] in describe.describe(model)["missing"]


@pytest.mark.parametrize("change", ["lost", "moved", "unnamed"])
def test_index_that_disagrees_with_its_shards_is_told(change: str, model: Path) -> None:
    where = shards(model)
    if change == "lost":
        where["ghost"] = where["model.norm.weight"]
    elif change == "moved":
        where["empty"] = where["model.embed_tokens.weight"]
    else:
        del where["empty"]
    (model / safetensors_header.INDEX).write_text(json.dumps({"weight_map": where}))
    with pytest.raises(UserError, match="do not belong together"):
        safetensors_header.read_model(model)


class Trap:
    """Unpickling this writes a file."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.write_text, (self.target, "ran"))


def test_pickles_and_python_files_are_never_run(model: Path, tmp_path: Path) -> None:
    target = tmp_path / "ran"
    (model / "model.safetensors").unlink()
    (model / "pytorch_model.bin").write_bytes(pickle.dumps(Trap(target)))
    (model / "modeling.py").write_text(f"open({str(target)!r}, 'w')")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "auto_map": {"AutoConfig": "modeling.Config"}}))
    done = run(model)
    assert "only pickles, pytorch_model.bin" in done.stdout
    assert "asks for Python code (AutoConfig)" in " ".join(done.stdout.split())
    assert "a pickle" in run(model / "pytorch_model.bin", code=1).stderr
    assert not target.exists()


# --- adapters


def test_adapter_says_rank_scale_modules_and_base(cases: Path) -> None:
    facts = describe.describe(cases / "b" / "c12_good")["adapter"]
    library: dict[str, int] = {}
    with safe_open(cases / "b" / "c12_good" / "adapter_model.safetensors", "numpy") as file:
        library = {name: file.get_tensor(name).size for name in file.keys()}  # noqa: SIM118 - not a dict
    assert (facts["r"], facts["scale"], facts["base"]) == (4, 2.0, "example/tiny-qwen3")
    assert facts["parameters"] == sum(library.values())
    assert facts["modules"] == {"q_proj": 2, "v_proj": 2, "down_proj": 2}


@pytest.mark.parametrize(
    ("case", "says"), [("c14_missing_B", "only one of lora_A"), ("c14_no_tensors", "no LoRA tensors")]
)
def test_adapters_that_change_nothing_or_half_are_told(case: str, says: str, cases: Path) -> None:
    assert says in run(cases / "b" / case, code=1).stderr


def test_base_lock_beside_a_train_artifact_is_shown(cases: Path, tmp_path: Path) -> None:
    shutil.copytree(cases / "b" / "c12_good", tmp_path / "adapter")
    lock = {"source": "example/tiny-qwen3", "revision": "abc", "files": {"model.safetensors": "00"}}
    (tmp_path / "base.lock.json").write_text(json.dumps(lock))
    assert describe.describe(tmp_path)["base_lock"] == lock


# --- GGUF


def gguf_file(path: Path) -> None:
    """A GGUF file of the library's own writer."""
    import gguf

    packed = gguf.GGMLQuantizationType.Q4_0
    query = gguf.quants.quantize(numpy.ones((64, 64), numpy.float32), packed)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_embedding_length(64)
    writer.add_feed_forward_length(128)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_context_length(512)
    writer.add_token_list([f"t{i}" for i in range(300)])
    writer.add_chat_template("{% for m in messages %}{{ m.content }}{% endfor %}")
    writer.add_tensor("token_embd.weight", numpy.ones((300, 64), numpy.float32))
    writer.add_tensor("blk.0.ffn_up.weight", numpy.ones((128, 64), numpy.float16))
    writer.add_tensor("blk.0.attn_q.weight", query, raw_dtype=packed)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_gguf_header_agrees_with_the_library(tmp_path: Path) -> None:
    import gguf

    file = tmp_path / "m.gguf"
    gguf_file(file)
    ours, library = gguf_header.read(file), gguf.GGUFReader(file)
    assert {t.name: (t.tensor_type.name, t.n_bytes, t.data_offset) for t in library.tensors} == {
        t.name: (t.dtype, t.bytes, t.start) for t in ours.tensors.values()
    }
    assert {t.name: tuple(reversed(t.shape.tolist())) for t in library.tensors} == {
        t.name: t.shape for t in ours.tensors.values()
    }
    facts = describe.describe(file)
    assert facts["kv_cache"]["bytes_per_token"] == 2 * 1 * 2 * 16 * 2  # K and V, one layer, two heads of 64/4, float16
    assert facts["architecture"]["vocab"] == 300
    assert facts["chat_template"]["behaviour"]["stable_prefix"] is True


def test_gguf_block_sizes_are_the_library_s() -> None:
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    assert {int(t): (t.name, *GGML_QUANT_SIZES[t]) for t in GGMLQuantizationType} == gguf_header.TYPES


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda data: data[:4] + struct.pack("<I", 1) + data[8:], "GGUF version 1"),
        (lambda data: data[:4] + struct.pack("<I", 4) + data[8:], "GGUF version 4"),
        (lambda data: data[:4] + struct.pack(">I", 3) + data[8:], "big-endian"),
        (lambda data: data[:8] + struct.pack("<Q", 2**60) + data[16:], "more than its"),
        (lambda data: data[:16] + struct.pack("<Q", 2**63) + data[24:], "more than its"),
        (lambda data: data[:-1000], "cut off"),
        (lambda data: data[:100], "cut off"),
        (lambda data: b"GGML" + data[4:], "no GGUF file"),
    ],
)
def test_broken_gguf_gets_one_clear_message(change: Any, says: str, tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    gguf_file(file)
    file.write_bytes(change(file.read_bytes()))
    with pytest.raises(UserError) as caught:
        describe.describe(file)
    assert says in str(caught.value)


# --- tokenizer and template


@pytest.mark.parametrize("thinking", [None, True, False])
@pytest.mark.parametrize("tools", [None, [chat_template.TOOL]])
def test_template_renders_as_transformers_does(thinking: bool | None, tools: Any, qwen3: Path) -> None:
    from transformers import AutoTokenizer

    reference: Any = AutoTokenizer.from_pretrained(qwen3)
    extra = {} if thinking is None else {"enable_thinking": thinking}
    thought = {"role": "assistant", "content": "<think>\nhm\n</think>\n\nAh, über 'quotes' & <b>."}
    messages = [*chat_template.SAMPLE, thought, {"role": "user", "content": "再见"}]
    ours = chat_template.Template(reference.chat_template, where="test", special={"eos_token": reference.eos_token})
    expected = reference.apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=True, **extra)
    assert ours.render(messages, tools=tools, add_generation_prompt=True, **extra) == expected


def test_template_of_qwen3_drops_earlier_thinking_and_marks_nothing(qwen3: Path) -> None:
    does = describe.describe(qwen3)["chat_template"]["behaviour"]
    assert does["keeps_earlier_thinking"] is False
    assert does["marks_assistant"] is False
    assert does["end_of_turn"] == "<|im_end|>\n"
    assert does["default_system"] == ""


def test_generation_marks_render_what_is_inside() -> None:
    source = "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %};{% endfor %}"
    template = chat_template.Template(source, where="test")
    assert template.render([{"role": "assistant", "content": "a"}]) == "a;"
    assert chat_template.behaviour(template)["marks_assistant"] is True


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ cycler.__init__.__globals__.os.system('true') }}",
        "{{ messages.append(1) }}",
        "{{ 'x' * 10000000000 }}",
        "{{ 9 ** 1000000 }}",
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{{ raise_exception('Roles must alternate') }}",
        "{{ messages[99].content.x }}",
    ],
)
def test_hostile_and_refusing_templates_end_in_a_message(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "TIME_LIMIT_S", 1)
    with pytest.raises(UserError, match="here: the chat template"):
        chat_template.Template(source, where="here").render(chat_template.SAMPLE)


# Counts that the model's publisher's tokenizer gives, as stated by the people who asked for this.
@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("Why is the sky blue?", ["Why", " is", " the", " sky", " blue", "?"]),
        ("我喜欢吃火锅!", ["我喜欢", "吃", "火锅", "!"]),
        ("김치찌개를 좋아해요!", ["김", "치", "찌", "개", "를", " 좋아", "해", "요", "!"]),
    ],
)
def test_pieces_under_the_qwen3_tokenizer(text: str, pieces: list[str], qwen3: Path) -> None:
    from transformers import AutoTokenizer

    found = describe.tokens(qwen3, text)
    assert [token["piece"] for token in found] == pieces
    reference: Any = AutoTokenizer.from_pretrained(qwen3)
    assert [token["id"] for token in found] == reference(text, add_special_tokens=False)["input_ids"]


def test_bytes_of_one_character_are_shown_as_parts(qwen3: Path) -> None:
    assert [t["whole"] for t in describe.tokens(qwen3, "\u200d")] == [False, False]  # U+200D is three bytes, two tokens
    assert run(qwen3, "--text", "\u200d").stdout.count("(part of a character)") == 4  # joined, and one a line


def test_tokenizer_larger_than_the_model_is_told(model: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "vocab_size": 40}))
    assert "tokenizer and model do not belong together" in run(model, code=1).stderr


def test_end_of_turn_that_no_end_id_names_is_told(model: Path) -> None:
    for name in ("config.json", "generation_config.json"):
        value = json.loads((model / name).read_text())
        (model / name).write_text(json.dumps({**value, "eos_token_id": 0}))
    settings = json.loads((model / "tokenizer_config.json").read_text())
    (model / "tokenizer_config.json").write_text(json.dumps({**settings, "eos_token": "<pad>"}))
    assert "would not stop" in run(model, code=1).stderr


# --- one tensor


def test_statistics_agree_with_numpy_and_read_only_the_slice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_facts, "BLOCK", 1000)  # several blocks
    values = numpy.random.default_rng(0).normal(3, 2, (70, 50)).astype(numpy.float32)
    values[0, 0], values[69, 49], values[5, 5] = numpy.nan, numpy.inf, 0
    save_file({"other": numpy.full((1000,), 7.0), "w": values}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    found, finite = describe.tensor(tmp_path, "w"), values[numpy.isfinite(values)].astype(numpy.float64)
    assert found["mean"] == pytest.approx(finite.mean())
    assert found["std"] == pytest.approx(finite.std())
    assert (found["min"], found["max"]) == (finite.min(), finite.max())
    assert (found["nan"], found["infinite"], found["zeros"]) == (1, 1, 1)
    assert numpy.array_equal(found["corner"], values[:4, :4].astype(float), equal_nan=True)


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2", "bfloat16"])
def test_short_floats_are_read_as_torch_reads_them(dtype: str, tmp_path: Path) -> None:
    import torch
    from safetensors.torch import save_file as save

    codes = torch.arange(256, dtype=torch.uint8).reshape(16, 16)
    stored = codes.view(getattr(torch, dtype))
    save({"w": stored}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    found, expected = describe.tensor(tmp_path, "w"), stored.float()
    finite = expected[expected.isfinite()]
    assert (found["min"], found["max"]) == (finite.min().item(), finite.max().item())
    assert found["mean"] == pytest.approx(finite.double().mean().item())
    assert found["nan"] == int(expected.isnan().sum())
    assert numpy.array_equal(found["corner"], expected[:4, :4].numpy(), equal_nan=True)


def test_unknown_tensor_names_the_nearest(model: Path) -> None:
    assert "model.norm.weight" in run(model, "--tensor", "model.norm.wieght", code=1).stderr


# --- the command


def test_command_answers_without_torch_and_transformers(model: Path) -> None:
    script = (
        "import sys, runpy; sys.argv = ['describe', sys.argv[1]]\n"
        "try: runpy.run_module('jobs.describe', run_name='__main__')\n"
        "except SystemExit as e: assert not e.code\n"
        "heavy = {'torch', 'transformers', 'tokenizers', 'ray', 'vllm', 'numpy'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    command = [sys.executable, "-c", script, str(model)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_json_and_page_fit_and_hold_the_same_numbers(qwen3: Path) -> None:
    facts = json.loads(run(qwen3, "--json").stdout)
    page = run(qwen3).stdout
    assert facts["kv_cache"]["bytes_per_token"] == 147_456
    assert "= 147,456 bytes per token" in page
    assert "PARAMETERS: 4,022,468,096 (7.49 GiB), counted from config.json" in page
    assert max(text_page.columns(line) for line in page.splitlines()) <= 110


def test_names_cannot_move_the_cursor(tmp_path: Path) -> None:
    save_file({"\x1b[2Jmodel.norm.weight\u202e": numpy.ones(2)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    page = run(tmp_path).stdout
    assert "\x1b" not in page
    assert "\u202e" not in page
    assert "\\u001b[2Jmodel.norm.weight\\u202e" in page


def test_nothing_there_is_one_message(tmp_path: Path) -> None:
    assert "no model here" in run(tmp_path, code=1).stderr
    assert "no such file or directory" in run(tmp_path / "none" / "such" / "x", code=1).stderr
