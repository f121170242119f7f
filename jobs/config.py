"""The whole run as one frozen schema.

Precedence: defaults < YAML file < `key=value` on the command line. Unknown keys are refused with the nearest
known one named, and rules across fields fail here, before any GPU is asked for. Imports pydantic only, so that
`--help` and a client can read a config in a fraction of a second.
"""

import difflib
import json
import os
import re
import typing
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from jobs.errors import UserError

TEXT: tuple[Any, ...] = (str, str | None)  # annotations of fields that hold text
LoraTarget = Literal["all-linear"] | tuple[str, ...]
PositiveInt = Annotated[int, Field(ge=1)]
Fraction = Annotated[float, Field(gt=0, le=1)]


class Section(BaseModel):
    """Base of every section: frozen, unknown keys refused, no silent coercion of strings to numbers."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Run(Section):
    name: str = Field(default="demo", description="Name of the run; its artifacts lie under root/name/.")
    root: str = Field(
        default="runs", description="Where runs are kept: a directory or an s3:// or gs:// URI of all nodes."
    )
    seed: Annotated[int, Field(ge=0)] = Field(default=0, description="Seed of the split, the batches and the prompts.")

    @field_validator("name")
    @classmethod
    def _is_a_directory_name(cls, value: str) -> str:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,79}", value):
            raise ValueError(
                f"{value!r} cannot name a run: use 1 to 80 letters, digits, '.', '_' or '-', a letter or digit first"
            )
        return value


class Model(Section):
    source: str = Field(
        default="smollm2-135m-instruct",
        description="Base model: a directory, a hub id (org/name), or smollm2-135m-instruct from its wheel.",
    )
    revision: str | None = Field(
        default=None, description="Pinned revision of a hub id; a hub id without one is refused."
    )
    cache: str = Field(default="models", description="Where fetched models are kept.")
    dtype: Literal["bfloat16", "float32"] = Field(
        default="bfloat16", description="Precision of the unquantized weights."
    )
    enable_thinking: bool | None = Field(
        default=None,
        description="Passed to the chat template (Qwen3) in training, comparison and load; none leaves it out.",
    )


class Data(Section):
    path: str = Field(default="data/science", description="Dataset: a directory of ours, a file, a glob or a URI.")
    format: Literal["auto", "rankline", "openai", "alpaca", "sharegpt"] = Field(
        default="auto", description="Row format."
    )
    split_by: Literal["facts", "group", "hash"] = Field(default="facts", description="What may not lie in two splits.")
    group_key: str | None = Field(default=None, description="Row key that split_by=group keeps together.")
    eval_fraction: Annotated[float, Field(gt=0, lt=0.5)] = Field(default=0.15, description="Share of rows held out.")
    max_seq_len: PositiveInt = Field(
        default=1024, description="Longest row in tokens; longer rows are refused, never truncated."
    )
    drop_invalid: bool = Field(default=False, description="Drop and count bad rows instead of refusing the dataset.")
    max_errors: PositiveInt = Field(
        default=100, description="How many bad rows are listed before the rest is only counted."
    )
    role_prompt: str | None = Field(
        default=None, description="First lines of the system message of our own format; none is ours."
    )


class Lora(Section):
    r: PositiveInt = Field(default=8, description="Rank.")
    lora_alpha: PositiveInt = Field(default=16, description="Scale numerator: the update is multiplied by alpha/r.")
    lora_dropout: Annotated[float, Field(ge=0, lt=1)] = Field(default=0.0, description="Dropout before A.")
    target_modules: LoraTarget = Field(default="all-linear", description="Modules that get an adapter.")
    use_rslora: bool = Field(default=False, description="Scale by alpha/sqrt(r).")
    use_dora: bool = Field(default=False, description="Learn magnitude and direction apart.")
    loraplus_lr_ratio: Annotated[float, Field(ge=1)] = Field(
        default=1.0, description="Learning rate of B over that of A (LoRA+)."
    )

    @field_validator("target_modules")
    @classmethod
    def _no_embeddings(cls, value: LoraTarget) -> LoraTarget:
        bad = [m for m in value if m in ("embed_tokens", "lm_head")] if isinstance(value, tuple) else []
        if bad:
            raise ValueError(
                f"{bad} are the embeddings or the head, which tied models share: target linear layers only"
            )
        return value


class Train(Section):
    quantization: Literal["nf4", "none"] = Field(
        default="nf4", description="NF4 with double quantization, or BF16 base."
    )
    num_workers: PositiveInt = Field(default=1, description="Data-parallel workers, one GPU each where there are GPUs.")
    cpus_per_worker: PositiveInt = Field(
        default=1, description="CPUs, and compute threads without a GPU, of one worker."
    )
    num_epochs: Annotated[float, Field(gt=0)] = Field(default=1.0, description="Passes over the training rows.")
    max_steps: PositiveInt | None = Field(
        default=None, description="Stop after this many steps, before the epochs end."
    )
    batch_size: PositiveInt = Field(default=8, description="Rows per optimizer step over all workers.")
    micro_batch_tokens: PositiveInt = Field(default=2048, description="Most tokens in one forward pass of one worker.")
    learning_rate: Annotated[float, Field(gt=0)] = Field(
        default=2e-4, description="Peak rate; warm-up, then cosine to zero."
    )
    warmup_ratio: Annotated[float, Field(ge=0, lt=1)] = Field(default=0.05, description="Share of steps that warm up.")
    weight_decay: Annotated[float, Field(ge=0)] = Field(default=0.0, description="AdamW's decay.")
    max_grad_norm: Annotated[float, Field(gt=0)] = Field(default=1.0, description="Gradient norm is clipped to this.")
    gradient_checkpointing: bool = Field(
        default=False, description="Recompute activations: less memory, a third more work."
    )
    compile: bool | None = Field(default=None, description="Fuse norms, activations and rotary; none does so on a GPU.")
    eval_steps: PositiveInt | None = Field(
        default=None, description="Evaluate every N steps; always at the start and the end."
    )
    eval_rows: PositiveInt | None = Field(
        default=None, description="Evaluate on the first N held-out rows; none takes all."
    )
    checkpoint_steps: PositiveInt = Field(default=50, description="Checkpoint every N steps.")
    keep_checkpoints: PositiveInt = Field(default=2, description="How many checkpoints are kept.")
    max_failures: Annotated[int, Field(ge=0)] = Field(
        default=2, description="Restarts of the worker group before giving up."
    )


class Sweep(Section):
    ranks: tuple[PositiveInt, ...] = Field(
        default=(), description="Ranks to try; empty means one train run and no sweep."
    )
    alpha_over_r: Annotated[float, Field(gt=0)] | None = Field(
        default=2.0, description="alpha of each trial is this times its rank; none keeps lora.lora_alpha."
    )
    seeds: tuple[Annotated[int, Field(ge=0)], ...] = Field(
        default=(), description="Seeds per rank; empty takes run.seed."
    )
    max_concurrent_trials: PositiveInt = Field(default=2, description="Trials at a time.")
    gpus_per_trial: Annotated[float, Field(gt=0)] = Field(default=1.0, description="GPUs of one trial's worker.")


class Merge(Section):
    max_shard_size_gb: Annotated[float, Field(gt=0)] = Field(
        default=4.0, description="Largest weight file, 10^9 bytes."
    )
    adapter: str | None = Field(
        default=None, description="Adapter directory; none takes the sweep's winner or the train run's."
    )


class Compare(Section):
    num_prompts: PositiveInt = Field(default=3, description="Held-out rows answered by base, adapter and merged model.")
    max_new_tokens: PositiveInt = Field(default=64, description="Longest answer in tokens.")
    loss_rows: PositiveInt = Field(default=64, description="Held-out rows, the first ones, whose loss is measured.")
    nf4: Literal["off", "loss", "answers"] = Field(
        default="answers",
        description="Also NF4 base + adapter, where it was trained so; its answers are slow without a GPU.",
    )


class Serve(Section):
    served_model_name: str = Field(default="rankline", description="Model name in /v1/models and requests.")
    host: str = Field(default="127.0.0.1", description="Address to listen on; beyond loopback an API key is required.")
    port: Annotated[int, Field(ge=1, le=65535)] = Field(default=8000, description="HTTP port.")
    num_replicas: PositiveInt = Field(default=1, description="Replicas when not autoscaling.")
    cpus_per_replica: Annotated[float, Field(gt=0)] = Field(default=1.0, description="Logical CPUs of one replica.")
    start_timeout_s: PositiveInt = Field(default=900, description="Longest wait until the endpoint answers.")
    max_model_len: PositiveInt = Field(default=2048, description="Longest prompt plus answer, tokens.")
    max_num_seqs: PositiveInt = Field(default=16, description="Sequences that decode together in one replica.")
    max_num_batched_tokens: PositiveInt | None = Field(
        default=None, description="Tokens of one engine step; none is vLLM's own."
    )
    gpu_memory_utilization: Fraction = Field(default=0.85, description="Share of GPU memory that the engine may take.")
    tensor_parallel_size: PositiveInt = Field(default=1, description="GPUs of one replica.")
    enable_prefix_caching: bool = Field(default=True, description="Reuse the KV cache of shared prefixes.")
    enforce_eager: bool = Field(
        default=False, description="No compilation and CUDA graphs: starts sooner, runs slower."
    )
    load_format: Literal["auto", "dummy"] = Field(
        default="auto", description="dummy: random weights, for speed tests only."
    )
    kv_cache_gib: Annotated[float, Field(gt=0)] = Field(default=1.0, description="KV cache without a GPU, GiB.")
    cpu_threads: PositiveInt | None = Field(
        default=None, description="Threads of a replica without a GPU; none shares the cores."
    )
    max_requests: PositiveInt | None = Field(
        default=None,
        description="Requests in one replica past which it answers 429; none is 4 x max_num_seqs, at least 1024.",
    )
    max_body_bytes: PositiveInt = Field(default=4 << 20, description="Largest request body; a larger one is 413.")
    body_timeout_s: Annotated[float, Field(gt=0)] = Field(
        default=30, description="A body that takes longer to arrive is 408."
    )
    drain_timeout_s: PositiveInt = Field(
        default=600, description="Longest answer that a stopping replica still finishes."
    )
    require_api_key: bool | None = Field(
        default=None, description="Ask for an API key; none does so beyond loopback only."
    )
    adapters: dict[str, str] = Field(
        default_factory=dict,
        description="Adapter directories mounted beside the model, by the name to serve them under.",
    )
    max_replicas: PositiveInt | None = Field(
        default=None, description="Autoscale up to this many; none keeps num_replicas."
    )
    min_replicas: Annotated[int, Field(ge=0)] = Field(
        default=1, description="Replicas that stay when idle; 0 scales to zero."
    )
    waiting_per_replica: Annotated[float, Field(gt=0)] = Field(
        default=4.0, description="Requests waiting per replica that autoscaling aims at."
    )
    scale_down_delay_s: Annotated[float, Field(gt=0)] = Field(
        default=300, description="Idle this long before scaling in."
    )
    engine_args: dict[str, Any] = Field(
        default_factory=dict, description="Any further vLLM engine flag, by its own name."
    )


class Load(Section):
    endpoint: str | None = Field(default=None, description="URL of the server; none is this run's own.")
    model: str | None = Field(
        default=None, description="Model name to ask for; none is serve.served_model_name, or the only one."
    )
    tokenizer: str | None = Field(
        default=None, description="Tokenizer of the served model; none is the run's own model's."
    )
    api: Literal["chat", "completions"] = Field(default="chat", description="/v1/chat/completions or /v1/completions.")
    api_key_env: str = Field(
        default="RANKLINE_API_KEY", description="Environment variable that holds the server's API key."
    )
    ignore_eos: bool = Field(
        default=True, description="Ask for exactly output_len tokens; servers other than vLLM may refuse it."
    )
    levels: tuple[PositiveInt, ...] = Field(default=(1, 4, 16), description="Concurrency levels, closed loop.")
    rates: tuple[Annotated[float, Field(gt=0)], ...] = Field(
        default=(), description="Requests/s, one level each, open loop instead of closed; empty is closed loop."
    )
    arrivals: Literal["poisson", "constant", "gamma", "ramp"] = Field(
        default="poisson", description="When open-loop requests come."
    )
    burstiness: Annotated[float, Field(gt=0)] = Field(
        default=1.0, description="Shape of arrivals=gamma: below 1 in bursts."
    )
    max_concurrency: PositiveInt | None = Field(
        default=None,
        description="Most open-loop requests out at once; waiting for it counts as latency. None is no limit.",
    )
    prompts: str = Field(
        default="random",
        description="random, heldout (this run's held-out rows, history and all) or a JSONL file of messages.",
    )
    slo: str | None = Field(
        default=None, description="Targets, like ttft_p99<500ms,tpot_p99<50ms: goodput, and the search."
    )
    search: Literal["rate", "concurrency"] | None = Field(
        default=None,
        description="Find the highest rate or concurrency within slo by bisection, instead of fixed levels.",
    )
    input_len: PositiveInt = Field(default=512, description="Prompt tokens.")
    output_len: PositiveInt = Field(default=128, description="Answer tokens.")
    num_prompts: PositiveInt = Field(default=64, description="Requests per level.")
    num_warmups: Annotated[int, Field(ge=0)] = Field(default=2, description="Requests before measuring, not counted.")
    sweep: str | None = Field(default=None, description="Redeploy and measure per value: serve.max_num_seqs:4,16.")
    num_clients: PositiveInt = Field(default=1, description="Client actors that share a level's load.")
    request_timeout_s: PositiveInt = Field(default=600, description="A request that takes longer counts as failed.")

    @field_validator("levels")
    @classmethod
    def _not_empty(cls, value: tuple[int, ...]) -> tuple[int, ...]:
        if not value:
            raise ValueError("needs at least one concurrency level, like [1, 4, 16]")
        return value

    @field_validator("slo")
    @classmethod
    def _targets(cls, value: str | None) -> str | None:
        if value is not None:
            from jobs.loadgen import slo

            slo.parse(value)
        return value

    @model_validator(mode="after")
    def _search_needs_targets(self) -> Self:
        if self.search is not None and self.slo is None:
            raise ValueError("load.search needs load.slo, like ttft_p99<500ms,tpot_p99<50ms")
        return self

    @field_validator("sweep")
    @classmethod
    def _sweeps_a_serve_flag(cls, value: str | None) -> str | None:
        if value is not None:
            key, _, values = value.partition(":")
            section, _, field = key.partition(".")
            if section != "serve" or field not in Serve.model_fields or not values:
                known = _nearest(field, list(Serve.model_fields))
                raise ValueError(f"{value!r} should look like serve.max_num_seqs:4,16{known}")
        return value

    def variants(self) -> list[tuple[str, Any]]:
        """The (serve field, value) pairs of `sweep`; empty without one."""
        if self.sweep is None:
            return []
        key, _, values = self.sweep.partition(":")
        return [(key.partition(".")[2], _scalar(v)) for v in values.split(",")]


class Cluster(Section):
    address: str | None = Field(
        default=None, description="Ray address; none joins the running cluster or starts a local one."
    )
    num_cpus: PositiveInt | None = Field(
        default=None, description="Logical CPUs of the local head; none is max(6, cores)."
    )
    dashboard_port: Annotated[int, Field(ge=1, le=65535)] = Field(
        default=8265, description="Port of Ray's dashboard, on loopback."
    )


class Config(Section):
    """One run. `config_hash` fields of artifacts are taken from this tree."""

    run: Run = Run()
    model: Model = Model()
    data: Data = Data()
    lora: Lora = Lora()
    train: Train = Train()
    sweep: Sweep = Sweep()
    merge: Merge = Merge()
    compare: Compare = Compare()
    serve: Serve = Serve()
    load: Load = Load()
    cluster: Cluster = Cluster()

    @model_validator(mode="after")
    def _rules_across_sections(self) -> Self:
        if self.load.endpoint is None and self.load.input_len + self.load.output_len > self.serve.max_model_len:
            raise ValueError(
                f"load.input_len {self.load.input_len} + load.output_len {self.load.output_len} is over "
                f"serve.max_model_len {self.serve.max_model_len}: every request would be refused"
            )
        if self.data.max_seq_len > self.train.micro_batch_tokens:
            raise ValueError(
                f"data.max_seq_len {self.data.max_seq_len} is over train.micro_batch_tokens "
                f"{self.train.micro_batch_tokens}: one row would not fit in a forward pass"
            )
        if self.train.batch_size % self.train.num_workers:
            raise ValueError(
                f"train.batch_size {self.train.batch_size} is not a multiple of "
                f"train.num_workers {self.train.num_workers}"
            )
        if self.data.split_by == "group" and not self.data.group_key:
            raise ValueError("data.split_by=group needs data.group_key, the row key whose rows stay together")
        if self.serve.require_api_key is False and not is_loopback(self.serve.host):
            raise ValueError(
                f"serve.host {self.serve.host} is beyond loopback, where serve.require_api_key cannot be false"
            )
        if self.serve.max_replicas is not None and self.serve.min_replicas > self.serve.max_replicas:
            raise ValueError(
                f"serve.min_replicas {self.serve.min_replicas} is over serve.max_replicas {self.serve.max_replicas}"
            )
        if self.load.endpoint is not None and self.load.sweep is not None:
            raise ValueError("load.sweep redeploys this run's own service, so it cannot be used with load.endpoint")
        batched = self.serve.max_num_batched_tokens
        if batched is not None and batched < self.serve.max_num_seqs:
            raise ValueError(
                f"serve.max_num_batched_tokens {batched} is under serve.max_num_seqs {self.serve.max_num_seqs}"
            )
        for field, value in self.load.variants():
            try:
                Serve.model_validate({**self.serve.model_dump(), field: value})
            except ValidationError as error:
                raise ValueError(
                    f"load.sweep: {value!r} is no value for serve.{field}: {error.errors()[0]['msg']}"
                ) from None
        return self


def load(path: str | Path | None, overrides: typing.Sequence[str] = ()) -> Config:
    """Read FILE (YAML; none is all defaults), apply `section.key=value` overrides and validate.

    Raises UserError naming the file and key for anything a user can put right.
    """
    tree: dict[str, Any] = {}
    where = "defaults"
    if path is not None:
        tree, where = _read_yaml(Path(path)), str(path)
    _refuse_unknown(tree, where)
    for item in overrides:
        key, equals, text = item.partition("=")
        section, dot, field = key.partition(".")
        if not equals or not dot:
            raise UserError(f"{item!r}: an override looks like section.key=value, for example run.name=mine")
        _refuse_unknown({section: {field.partition(".")[0]: None}}, f"override {item!r}")
        node = tree.setdefault(section, {})
        *parents, leaf = field.split(".")
        for part in parents:
            node = node.setdefault(part, {})
        node[leaf] = _value(section, field, text)
    return validate(tree, where if not overrides else f"{where} with {' '.join(overrides)}")


def validate(tree: dict[str, Any], where: str) -> Config:
    """Validate a whole tree; `where` is named in the UserError."""
    try:
        return Config.model_validate(tree)
    except ValidationError as error:
        lines = [f"  {'.'.join(map(str, e['loc'])) or 'config'}: {_plain(e)}" for e in error.errors()]
        raise UserError(f"{where}: invalid config\n" + "\n".join(lines)) from None


def is_loopback(host: str) -> bool:
    """Whether an address to listen on is reachable from this machine alone."""
    return host in ("localhost", "::1") or host.startswith("127.")


def resolve_storage(location: str) -> str:
    """Make a storage location absolute: under RANKLINE_ROOT if set (the local head exports it), else here.

    Inside a submitted job a relative path would land in Ray's temporary copy of the working directory, so
    without RANKLINE_ROOT it is refused (UserError).
    """
    if "://" in location or os.path.isabs(location):
        return location
    root = os.environ.get("RANKLINE_ROOT")
    if root is None and os.environ.get("RAY_JOB_CONFIG_JSON_ENV_VAR"):
        raise UserError(
            f"{location!r} is a relative path inside a submitted job, where it would be lost with Ray's copy of the "
            "working directory: give run.root and model.cache as absolute paths or URIs, or set RANKLINE_ROOT "
            "on the head"
        )
    return os.path.join(root or os.getcwd(), location)


def _read_yaml(path: Path) -> dict[str, Any]:
    import yaml

    try:
        tree = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{path}: cannot read the config: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: the config is not UTF-8 (byte {error.start})") from None
    except yaml.YAMLError as error:
        raise UserError(f"{path}: not valid YAML: {error}") from None
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise UserError(f"{path}: expected sections like `run:` at the top, found {type(tree).__name__}")
    return typing.cast(dict[str, Any], tree)


def _nearest(word: str, known: list[str]) -> str:
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else f"; known are {', '.join(known)}"


def _refuse_unknown(tree: dict[str, Any], where: str) -> None:
    for section, fields in tree.items():
        info = Config.model_fields.get(str(section))
        if info is None:
            raise UserError(f"{where}: unknown section {section!r}{_nearest(str(section), list(Config.model_fields))}")
        known = list(typing.cast(type[Section], info.annotation).model_fields)
        if not isinstance(fields, dict):
            raise UserError(f"{where}: section {section!r} should hold keys like {known[0]}, found {fields!r}")
        for field in typing.cast(dict[str, Any], fields):
            if field not in known:
                raise UserError(f"{where}: unknown key '{section}.{field}'{_nearest(str(field), known)}")


def _value(section: str, field: str, text: str) -> Any:
    """Fields that hold text take an override's characters as they are: nothing in a path is interpreted."""
    info = typing.cast(type[Section], Config.model_fields[section].annotation).model_fields.get(field)
    if info is not None and info.annotation in TEXT:
        return None if text == "null" and info.annotation == str | None else text
    return _scalar(text)


def _scalar(text: str) -> Any:
    import yaml

    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        return text
    if isinstance(value, str) and re.fullmatch(r"[+-]?\d+(\.\d+)?[eE][+-]?\d+", value):
        return float(value)  # YAML 1.1 reads 2e-4 as text
    return value


def _plain(error: Any) -> str:
    message = str(error["msg"]).removeprefix("Value error, ")
    return message if error["type"] == "value_error" else f"{message}, found {json.dumps(error['input'], default=str)}"
