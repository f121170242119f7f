"""A thin wrapper on the `openai` client: bounded retries, and never half an answer that looks whole.

It retries what a later try can put right (no connection, 429, 5xx), only before anything was received, and never a
400. A stream that ends without each answer's `finish_reason` raises: a replica that died leaves such a body, which
the plain client takes for a finished answer.
"""

import random
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar
from urllib.parse import urlsplit

import openai
from openai.types.chat import ChatCompletion, ChatCompletionChunk

T = TypeVar("T")
LONGEST_PAUSE_S = 8.0


class CutOff(RuntimeError):
    """A stream ended before its answer did; `text` is what had arrived."""

    def __init__(self, message: str, text: str) -> None:
        super().__init__(message)
        self.text = text


class Client:
    """A client of one service. `timeout_s` bounds the wait for an answer, or for the next part of a stream."""

    def __init__(
        self,
        base_url: str,
        *,
        api_key: str | None = None,
        timeout_s: float = 600,
        connect_s: float = 5,
        retries: int = 4,
    ) -> None:
        host = urlsplit(base_url).hostname or ""
        # HTTP_PROXY must not swallow what goes to this machine.
        local = host in ("localhost", "::1") or host.startswith("127.")
        self.retries = retries
        self.openai = openai.OpenAI(
            base_url=base_url.rstrip("/").removesuffix("/v1") + "/v1",
            api_key=api_key or "none",
            max_retries=0,
            timeout=openai.Timeout(timeout_s, connect=connect_s),
            http_client=openai.DefaultHttpxClient(trust_env=not local),
        )

    def models(self) -> list[str]:
        """Names that the service answers to."""
        return [model.id for model in self._tried(self.openai.models.list).data]

    def chat(self, messages: Sequence[Any], *, model: str, **options: Any) -> ChatCompletion:
        """One whole answer. Raises openai's errors once the retries are used up."""
        create = self.openai.chat.completions.create
        return self._tried(lambda: create(model=model, messages=list(messages), **options))

    def stream(self, messages: Sequence[Any], *, model: str, **options: Any) -> Iterator[ChatCompletionChunk]:
        """The chunks of a streamed answer. CutOff when it ends early, openai.APIError for an error event in it."""
        create = self.openai.chat.completions.create
        chunks = self._tried(lambda: create(model=model, messages=list(messages), stream=True, **options))
        text: list[str] = []
        open_answers: set[int] = set()
        finished: set[int] = set()
        try:
            for chunk in chunks:
                for choice in chunk.choices:
                    open_answers.add(choice.index)
                    text.append(choice.delta.content or "")
                    if choice.finish_reason is not None:
                        finished.add(choice.index)
                yield chunk
        except openai.APIConnectionError as error:
            raise CutOff(f"the stream broke off: {error}", "".join(text)) from error
        if not open_answers or open_answers - finished:
            raise CutOff("the stream ended before the answer did", "".join(text))

    def _tried(self, request: Callable[[], T]) -> T:
        for attempt in range(self.retries + 1):
            try:
                return request()
            except openai.APITimeoutError:
                raise  # the service may still be at work on it: a second one would only add to its load
            except (openai.APIConnectionError, openai.RateLimitError, openai.InternalServerError) as error:
                if attempt == self.retries:
                    raise
                time.sleep(_pause(error, attempt))
        raise AssertionError("not reached")


def _pause(error: openai.APIError, attempt: int) -> float:
    """Seconds until the next try: what the service asks for, else doubling from a quarter, with jitter."""
    response = getattr(error, "response", None)
    asked = response.headers.get("retry-after", "") if response is not None else ""
    if asked.isdigit():
        return min(float(asked), LONGEST_PAUSE_S) * (1 + random.random() / 4)
    return min(0.25 * 2**attempt, LONGEST_PAUSE_S) * (0.75 + random.random() / 2)
