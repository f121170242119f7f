"""Drive an OpenAI-compatible endpoint level by level and measure it.

    python -m jobs.loadtest --config FILE
    python -m jobs.loadtest --config FILE load.sweep=serve.max_num_seqs:4,16     redeploys for each value
    python -m jobs.loadtest load.endpoint=http://127.0.0.1:8000 run.name=other   any server, no deployment

Writes results.json (one entry per variant and level), requests.parquet (one row per request) and tables.txt.
"""

import http.client
import json
import os
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jobs import artifacts, cli
from jobs.config import Config
from jobs.errors import UserError
from jobs.loadgen import keep, measure, tables
from jobs.loadgen import prompts as prompts_module
from jobs.loadgen.client import Server
from jobs.loadgen.prompts import Lexicon
from jobs.loadgen.runner import Hand
from jobs.progress import say

STAGE = measure.STAGE


def run(config: Config) -> artifacts.Artifact:
    """Measure every level of every variant; prints and stores both tables. Returns the artifact."""
    cli.offline(config)
    sections, inputs = _sections(config), _inputs(config)
    done = artifacts.existing(config, STAGE, sections, inputs)
    if done is not None:
        say(STAGE, f"up to date ({done.path}); run.name=… measures anew\n")
        print((done.path / "tables.txt").read_text(encoding="utf-8"))
        return done
    with artifacts.create(config, STAGE, sections, inputs) as draft:
        rows: list[dict[str, Any]] = []
        every: list[dict[str, Any]] = []
        texts: list[str] = []
        hands: list[Hand] = []
        try:
            for place, variant in enumerate(_variants(config)):
                server, source = _serving(config, variant)
                if not hands:  # the clients outlive the variants: only the server is redeployed
                    hands = measure.clients(config, server)
                of_variant, requests = measure.levels(config, server, source, hands, variant=variant, place=place)
                every += requests
                rows += of_variant
                texts.append(tables.table(of_variant, title=_title(config, variant)))
                print(f"\n{texts[-1]}\n", flush=True)
        finally:
            for hand in hands:
                hand.stop()
        side_by_side = tables.trade(rows)
        if side_by_side:
            texts.append(side_by_side)
            print(side_by_side + "\n", flush=True)
        keep.write_timeline(rows, draft.path / "server.parquet")
        (draft.path / "results.json").write_text(json.dumps(rows, indent=1), encoding="utf-8")
        (draft.path / "tables.txt").write_text("\n\n\n".join(texts) + "\n", encoding="utf-8")
        keep.write_requests(every, draft.path / "requests.parquet")
        draft.numbers["levels"] = [keep.key_numbers(r) for r in rows]
        draft.numbers["trade"] = tables.trade_sentence(rows) or None
        if config.load.search:
            draft.numbers["slo_best"] = [keep.key_numbers(r) for r in rows if r["slo_best"]]
    return artifacts.read(artifacts.location(config, STAGE))


def is_current(config: Config) -> bool:
    """Whether the endpoint of this config has been measured already (UserError if under another config)."""
    return artifacts.existing(config, STAGE, _sections(config), _inputs(config)) is not None


def _sections(config: Config) -> dict[str, Any]:
    return artifacts.sections_of(config, "load", *(() if config.load.endpoint else ("serve",)))


def _inputs(config: Config) -> dict[str, str]:
    used = [] if config.load.endpoint else ["merge"]
    used += ["prepare"] if config.load.prompts == "heldout" else []
    inputs = {stage: artifacts.read(artifacts.location(config, stage)).sha256 for stage in used}
    if config.load.prompts not in ("random", "heldout") and os.path.isfile(config.load.prompts):
        inputs["prompts"] = artifacts.sha256_file(config.load.prompts)
    return inputs


def _variants(config: Config) -> list[dict[str, Any]]:
    return [{field: value} for field, value in config.load.variants()] or [{}]


def _title(config: Config, variant: Mapping[str, Any]) -> str:
    load = config.load
    kind = "closed loop" if not load.rates and load.search != "rate" else f"open loop, {load.arrivals} arrivals"
    asked = f"{load.input_len} tokens in" if load.prompts == "random" else f"{load.prompts} prompts"
    limit = f"; {load.slo}" if load.slo else ""
    return (
        f"{tables.variant_name(variant)}: {asked}, {load.output_len} out, "
        f"{load.num_prompts} requests a level, {kind}{limit}"
    )


def _serving(config: Config, variant: Mapping[str, Any]) -> tuple[Server, Lexicon]:
    """The server to measure, deployed first where this run sweeps, and what its prompts are made of."""
    load, serve = config.load, config.serve
    if load.endpoint is not None:
        url, model_dir = load.endpoint, None
    else:
        model_dir = str(artifacts.read(artifacts.location(config, "merge")).path / "model")
        url = f"http://{'127.0.0.1' if serve.host in ('0.0.0.0', '::') else serve.host}:{serve.port}"
        if variant:
            from jobs.serve import deploy

            say(STAGE, f"deploying with {tables.variant_name(variant)} …")
            changed = serve.model_copy(update=dict(variant))
            url = deploy(config.model_copy(update={"serve": changed}), Path(model_dir))
    key = os.environ.get(load.api_key_env)
    listed = models_of(url, api_key=key, hint=_hint(config))
    name = load.model or (serve.served_model_name if load.endpoint is None or len(listed) != 1 else next(iter(listed)))
    if listed and name not in listed:
        raise UserError(f"{url} does not serve a model {name!r}; it serves {', '.join(listed)}: set load.model")
    found = listed.get(name, {})
    longest, root = found.get("max_model_len"), found.get("root")
    if model_dir and root and os.path.isdir(root) and os.path.realpath(root) != os.path.realpath(model_dir):
        raise UserError(f"{url} serves {root}, not this run's {model_dir}{_hint(config)}")
    if longest is not None and load.input_len + load.output_len > longest:
        raise UserError(
            f"load.input_len {load.input_len} + load.output_len {load.output_len} is over the {longest} tokens "
            f"that {name} takes at {url}"
        )
    server = Server(url, name, api_key=key, endpoint=load.api, timeout_s=float(load.request_timeout_s))
    return server, _lexicon(config, load.tokenizer or model_dir)


def _hint(config: Config) -> str:
    return "" if config.load.endpoint else ": start it with `python -m jobs.serve --config …`"


def models_of(url: str, *, api_key: str | None = None, hint: str = "") -> dict[str, dict[str, Any]]:
    """Model names that the server lists, each with all it says of it; {} if it has no such list.

    Goes to the server directly, whatever HTTP_PROXY says. UserError where nothing answers, or the key is wrong.
    """
    base = (url if "://" in url else f"http://{url}").rstrip("/").removesuffix("/v1")
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    asked = urllib.request.Request(f"{base}/v1/models", headers=headers)
    try:
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(asked, timeout=30) as answer:
            found = json.load(answer)["data"]
        return {m["id"]: m for m in found}
    except urllib.error.HTTPError as error:
        if error.code in (401, 403):
            raise UserError(f"{url}: wants an API key ({error.code}): load.api_key_env names its variable") from None
        if error.code >= 500:
            raise UserError(f"{url}: not ready, /v1/models answers {error.code}{hint}") from None
        return {}
    except (OSError, http.client.HTTPException, ValueError, KeyError, TypeError) as error:
        reason = getattr(error, "reason", None) or error
        raise UserError(f"{url}: no OpenAI-compatible server answers there ({reason}){hint}") from None


def _lexicon(config: Config, tokenizer: str | None) -> Lexicon:
    if tokenizer is None:
        from cluster import models

        try:
            tokenizer = str(models.fetch(config).path)
        except UserError as error:
            say(STAGE, f"no tokenizer for {config.load.endpoint}, so a word is taken for a token ({error})")
            return prompts_module.plain_lexicon()
    return prompts_module.lexicon(
        tokenizer, chat=config.load.api == "chat", enable_thinking=config.model.enable_thinking
    )


if __name__ == "__main__":
    cli.main("loadtest", run, __doc__)
