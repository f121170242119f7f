"""The real service over HTTP: what a client sees, and that it says what vLLM says."""

import json
import shlex
import subprocess
import time
import urllib.error
import urllib.request
from typing import Any

import openai
import pytest

from jobs import config as config_module
from jobs import serve, serve_wait
from tests.conftest import Server


def post(server: Server, path: str, body: Any) -> tuple[int, Any]:
    request = urllib.request.Request(
        server.url + path, json.dumps(body).encode(), {"Content-Type": "application/json"}, method="POST"
    )
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=60) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


def get(server: Server, path: str) -> tuple[int, str]:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(server.url + path, timeout=60) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def chat(server: Server, **fields: Any) -> tuple[int, Any]:
    body = {"model": server.model, "messages": [{"role": "user", "content": "Name a colour."}], "max_tokens": 8}
    return post(server, "/v1/chat/completions", body | {"temperature": 0} | fields)


def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def test_health_answers_without_a_body(server: Server) -> None:
    assert get(server, "/health") == (200, "")


def test_the_served_name_is_listed_with_its_context_length(server: Server) -> None:
    models = client(server).models.list().data
    assert [m.id for m in models] == [server.model]
    assert models[0].model_dump()["max_model_len"] == 1024


def test_a_chat_is_answered_and_counted(server: Server) -> None:
    answer = client(server).chat.completions.create(
        model=server.model, messages=[{"role": "user", "content": "Name a colour."}], max_tokens=8, temperature=0
    )
    assert answer.model == server.model
    assert answer.choices[0].message.content
    assert answer.choices[0].finish_reason in ("stop", "length")
    assert answer.usage is not None
    assert answer.usage.completion_tokens <= 8
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_a_stream_says_the_same_as_the_whole_answer(server: Server) -> None:
    messages: Any = [{"role": "user", "content": "Count from one to five."}]
    asked: dict[str, Any] = {"model": server.model, "messages": messages, "max_tokens": 16, "temperature": 0}
    whole = client(server).chat.completions.create(**asked)
    chunks = list(client(server).chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == whole.choices[0].message.content
    assert chunks[-1].usage == whole.usage
    assert len([c for c in chunks if c.choices and c.choices[0].delta.content]) > 4  # token by token, not at once


def test_an_unknown_model_is_404_in_vllms_words(server: Server) -> None:
    status, body = chat(server, model="other")
    assert (status, body["error"]["type"], body["error"]["param"]) == (404, "NotFoundError", "model")
    assert body["error"]["message"] == "The model `other` does not exist."


def test_an_over_long_prompt_is_400_with_both_lengths(server: Server) -> None:
    status, body = chat(server, messages=[{"role": "user", "content": "word " * 1200}])
    assert (status, body["error"]["type"]) == (400, "BadRequestError")
    assert "maximum context length is 1024 tokens" in body["error"]["message"]


def test_the_models_own_generation_config_does_not_change_sampling(server: Server) -> None:
    """Two unseeded samples at the API's default temperature 1 differ; a generation_config could make them greedy."""
    answers = [chat(server, temperature=1, seed=seed, max_tokens=12)[1] for seed in range(6)]
    assert len({a["choices"][0]["message"]["content"] for a in answers}) > 1


def test_the_printed_curl_line_works_when_pasted(server: Server) -> None:
    port = server.url.rpartition(":")[2]
    config = config_module.load(None, [f"serve.served_model_name={server.model}", f"serve.port={port}"])
    line = serve.curl(config, server.url).strip()
    done = subprocess.run(["bash", "-c", line + " --silent"], capture_output=True, text=True, timeout=60, check=True)
    assert json.loads(done.stdout)["choices"][0]["message"]["content"]
    assert shlex.split(line)[0] == "curl"


def test_no_answer_waits_for_a_batch_of_tokens(server: Server) -> None:
    """Ours streams each token as the engine makes it: gaps are one decoding step, far under a batching interval."""
    began = time.monotonic()
    arrivals = [
        time.monotonic() - began
        for chunk in client(server).chat.completions.create(
            model=server.model, messages=[{"role": "user", "content": "Tell a story."}], max_tokens=24, stream=True,
            extra_body={"ignore_eos": True},
        )
        if chunk.choices and chunk.choices[0].delta.content
    ]  # fmt: skip
    assert len(arrivals) > 16
    assert len({round(t, 3) for t in arrivals}) > 0.8 * len(arrivals)


@pytest.mark.parametrize("name", ["missing", "empty"])
def test_a_broken_model_directory_is_refused_before_anything_starts(tmp_path: Any, name: str) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=name):
        serve.deploy(config_module.load(None), tmp_path / name)


def test_a_port_in_use_is_named() -> None:
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ValueError, match=str(port)):
            serve_wait.check_port_is_free("127.0.0.1", port)
