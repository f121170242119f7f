"""The served model against the compared one: the same prompts over HTTP, greedy, beside the answers of compare."""

import json
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jobs import artifacts, judging
from jobs import config as config_module
from jobs.config import Config
from jobs.errors import UserError
from jobs.progress import Progress, say


def run(config: Config, url: str) -> Path:
    """Ask `url` the prompts of the run's compare artifact; returns the JSON file with what was found.

    Raises UserError when the server renders another prompt than was compared (another template), or when its
    answers are nearer to the base's than to the merged model's.
    """
    compared = artifacts.read(artifacts.location(config, "compare"))
    rows = [json.loads(line) for line in (compared.path / "answers.jsonl").read_text(encoding="utf-8").splitlines()]
    found = ask(config, url, rows, max_new_tokens=compared.numbers["max_new_tokens"])
    found |= {"endpoint": url, "compare": compared.sha256, "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())}
    file = Path(config_module.resolve_storage(config.run.root)) / config.run.name / "served-answers.json"
    file.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    for name, share in found["shared_words"].items():
        same = found["identical"][name]
        say("compare", f"served answers share {share:.0%} of their words from the start with {name}, {same} identical")
    say("compare", f"{found['served']['model']} at {url} is the compared model; {file}")
    return file


def ask(config: Config, url: str, rows: Sequence[Mapping[str, Any]], *, max_new_tokens: int) -> dict[str, Any]:
    """Figures and answers of the served model: {served, shared_words, identical, faults, answers}."""
    import openai

    from serve_app.client import Client

    client = Client(url, api_key=os.environ.get(config.load.api_key_env), timeout_s=config.load.request_timeout_s)
    try:
        model = config.load.model or _model(client.models(), config.serve.served_model_name)
        extra: dict[str, Any] = {}
        if config.model.enable_thinking is not None:
            extra["chat_template_kwargs"] = {"enable_thinking": config.model.enable_thinking}
        texts: list[str] = []
        ended: list[bool] = []
        with Progress("compare", len(rows), unit=" served answers") as progress:
            for row in rows:
                answer = client.chat(
                    row["messages"], model=model, temperature=0, max_tokens=max_new_tokens, extra_body=extra
                )
                if answer.usage is not None and answer.usage.prompt_tokens != row["prompt_tokens"]:
                    raise UserError(
                        f"{url}: rendered row {row['id']} to {answer.usage.prompt_tokens} tokens, compared were "
                        f"{row['prompt_tokens']}: it serves another tokenizer or chat template than merge/model has"
                    )
                texts.append((answer.choices[0].message.content or "").strip())
                ended.append(answer.choices[0].finish_reason == "stop")
                progress.update(len(texts))
    except openai.OpenAIError as error:
        raise UserError(f"{url}: cannot be asked: {error}. Is it up? `python -m jobs.serve` starts it") from None
    names = list(rows[0]["answers"])
    shared = {name: _shared([row["answers"][name] for row in rows], texts) for name in names}
    nearest = max(names, key=lambda name: (shared[name], name != "base"))
    if nearest == "base":
        raise UserError(
            f"{url}: its answers share {shared['base']:.0%} of their words with the base's and "
            f"{shared['merged']:.0%} with the merged model's: it serves the base, deploy merge/model"
        )
    return {
        "served": {"model": model},
        "nearest": nearest,
        "shared_words": {name: round(share, 4) for name, share in shared.items()},
        "identical": {name: sum(r["answers"][name] == t for r, t in zip(rows, texts, strict=True)) for name in names},
        "faults": judging.faults(texts, ended, enable_thinking=config.model.enable_thinking),
        "answers": [{"id": row["id"], "served": text} for row, text in zip(rows, texts, strict=True)],
    }


def _shared(compared: Sequence[str], served: Sequence[str]) -> float:
    """Share of words that the answers have in common from their start: rounding makes right models part ways later."""
    pairs = [(one.split(), two.split()) for one, two in zip(compared, served, strict=True)]
    longest = sum(max(len(one), len(two)) for one, two in pairs)
    return sum(judging.common_prefix(one, two) for one, two in pairs) / max(longest, 1)


def _model(names: Sequence[str], wanted: str) -> str:
    if wanted in names or not names:
        return wanted
    if len(names) == 1:
        return names[0]
    raise UserError(f"the endpoint serves {', '.join(names)}, not {wanted}: name one with load.model")
