"""One vLLM server on another machine: whether it serves this verifier, and one turn asked of it.

Decision: token ids both ways, through `/v1/completions` (`prompt` as ids, `return_token_ids`). The chat template is
applied here, once for all servers, and an answer comes back as the ids that the server's engine drew. Every sampling
parameter is sent, because a server fills in what is missing from the checkpoint's generation_config.json. So a turn
depends on its prompt and its seed, and not on the server that answers it.

Answers are streamed: a server that hangs is noticed by its silence, and one that goes round in circles is stopped.
Source of the fields: vllm/entrypoints/openai/completion/protocol.py, 0.16.0. aiohttp is vLLM's own dependency.
"""

import asyncio
import json
import os
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import aiohttp

from jobs.errors import MustFix, TryAgain
from jobs.settings import Settings
from jobs.verifier.repetition import loops_now
from jobs.verifier.requests import Finished, Request

# vLLM's server reads its key from the variable of this name.
KEY_VARIABLE = "VLLM_API_KEY"
# A question that costs a server nothing but one token waits so long at most.
PROBE_SECONDS = 60.0
CONNECT_SECONDS = 10.0
# A machine that is gone closes no connection: seconds of silence, between questions, and how many go unanswered.
KEEPALIVE = {socket.TCP_KEEPIDLE: 15, socket.TCP_KEEPINTVL: 10, socket.TCP_KEEPCNT: 3}
# The first event of a stream repeats the prompt, in one line.
LONGEST_LINE = 1 << 24
SERVE = "serve the verifier with vLLM 0.16.0 at that address"
# Seeded as every other request: on CPU vLLM 0.16.0 ignores the seeds of a step in which one request has none.
PROBE = Request("probe", [0], max_tokens=1, temperature=1.0, seed=1)
# New tokens between two looks for a loop.
LOOK_EVERY = 32


class Unanswered(Exception):
    """This server did not answer, for a reason that may not hold for another one or at another time."""


@dataclass(frozen=True)
class Expected:
    """What every server must be: the names the verifier may have there, and the tokens a request may take."""

    names: tuple[str, ...]
    max_model_len: int
    silence: float  # seconds without a token after which a server counts as hung

    @classmethod
    def of(cls, settings: Settings) -> "Expected":
        return cls(
            (settings.generate.endpoint_model or settings.verifier.model,), settings.verifier.max_model_len, settings.verifier.stall_seconds
        )


def addresses(settings: Settings) -> list[str]:
    """The servers' addresses without the `/v1` that many people write behind them."""
    return [url.rstrip("/").removesuffix("/v1") for url in settings.generate.endpoints]


def session() -> aiohttp.ClientSession:
    """A session for one event loop. A connection is used once: one that was left open may be closed by the server just
    when it is used again, which looks like a fault of the server's, and an answer takes far longer than connecting."""
    connector = aiohttp.TCPConnector(limit=0, force_close=True, socket_factory=_watched_socket)
    headers = {"Authorization": f"Bearer {key}"} if (key := os.environ.get(KEY_VARIABLE)) else {}
    return aiohttp.ClientSession(connector=connector, headers=headers, read_bufsize=LONGEST_LINE)


def _watched_socket(address: Any) -> socket.socket:
    family, kind, protocol, _, _ = address
    made = socket.socket(family=family, type=kind, proto=protocol)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in KEEPALIVE.items():
        made.setsockopt(socket.IPPROTO_TCP, option, value)
    return made


async def served_name(client: aiohttp.ClientSession, url: str, expected: Expected) -> str:
    """The name under which `url` serves the verifier, proved by one token.

    Raises MustFix for a server of another model, with too little context, that refuses the key or returns no token
    ids; Unanswered for one that does not answer.
    """
    limit = aiohttp.ClientTimeout(total=PROBE_SECONDS, sock_connect=CONNECT_SECONDS)
    try:
        async with client.get(f"{url}/v1/models", timeout=limit) as reply:
            await _refuse(reply, url)
            listed = json.loads(await reply.read())
        cards = [(str(card["id"]), str(card.get("root") or card["id"]), card.get("max_model_len")) for card in listed["data"]]
    except (aiohttp.ClientError, OSError, TimeoutError) as error:
        raise Unanswered(_reason(error)) from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise MustFix("It does not list its models as an OpenAI server does", where=f"generate.endpoints, {url}", remedy=SERVE) from error
    card = next((card for card in cards if set(card[:2]) & set(expected.names)), None)
    if card is None:
        raise MustFix(
            f"It serves {', '.join(name for name, _, _ in cards) or 'no model'}, the verifier is {expected.names[0]}", where=f"generate.endpoints, {url}",
            remedy=f"start it with --served-model-name {expected.names[0]}, or say in generate.endpoint_model what the verifier is called there",
        )  # fmt: skip
    name, _, longest = card
    if longest is not None and longest < expected.max_model_len:
        raise MustFix(
            f"It takes {longest} tokens, verifier.max_model_len is {expected.max_model_len}", where=f"generate.endpoints, {url}",
            remedy=f"start it with --max-model-len {expected.max_model_len}",
        )  # fmt: skip
    try:
        async with asyncio.timeout(PROBE_SECONDS):
            await answer(client, url, name, PROBE, PROBE_SECONDS)
    except TimeoutError as error:
        raise Unanswered(f"it gave no token for {PROBE_SECONDS:g} s") from error
    return name


async def answer(
    client: aiohttp.ClientSession,
    url: str,
    model: str,
    request: Request,
    silence: float,
    on_tokens: Callable[[int], None] = lambda count: None,
) -> Finished:
    """One turn answered by the server, told token by token to `on_tokens`; raises as `served_name` does."""
    limit = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS, sock_read=silence)
    try:
        async with client.post(f"{url}/v1/completions", json=_body(model, request), timeout=limit) as reply:
            await _refuse(reply, url)
            return await _read(reply, url, request, on_tokens)
    except aiohttp.SocketTimeoutError as error:
        raise Unanswered(f"it gave no token for {silence:g} s") from error
    except (aiohttp.ClientError, OSError) as error:
        raise Unanswered(_reason(error)) from error
    except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        raise MustFix(
            f"Its answer is not a vLLM server's: {type(error).__name__} {error}", where=f"generate.endpoints, {url}", remedy=SERVE
        ) from error


def _body(model: str, request: Request) -> dict[str, Any]:
    return {
        "model": model, "prompt": request.prompt_token_ids, "max_tokens": request.max_tokens, "stream": True, "return_token_ids": True,
        "temperature": request.temperature, "top_p": request.top_p, "seed": request.seed if request.temperature > 0 else None,
        "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0, "stop_token_ids": list(request.stop_token_ids), "ignore_eos": request.ignore_eos,
    }  # fmt: skip


async def _refuse(reply: aiohttp.ClientResponse, url: str) -> None:
    """Raise for any status but 200, with what the server says."""
    if reply.status == 200:
        return
    said = " ".join((await reply.text(errors="replace")).split())[:300]
    if reply.status in (401, 403):
        raise MustFix(
            f"It refuses the key (HTTP {reply.status})",
            where=f"generate.endpoints, {url}",
            remedy=f"give the servers' key in the environment variable {KEY_VARIABLE}",
        )
    if reply.status in (408, 429) or reply.status >= 500:
        raise Unanswered(f"HTTP {reply.status} {said}".strip())
    raise MustFix(
        f"It refuses a request with HTTP {reply.status}: {said or reply.reason}", where=f"generate.endpoints, {url}", remedy=SERVE
    )


async def _read(reply: aiohttp.ClientResponse, url: str, request: Request, on_tokens: Callable[[int], None]) -> Finished:
    """The server-sent events of one answer; leaving early closes the connection, which ends the answer there too."""
    tokens: list[int] = []
    reason, looked, prompt = None, 0, None
    async for line in reply.content:
        if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
            continue
        try:
            event = json.loads(line[len(b"data: ") :])
        except ValueError as error:
            raise Unanswered("an answer broke off within a line") from error
        if "error" in event:
            raise Unanswered(str(event["error"].get("message") or event["error"])[:300])
        for choice in event["choices"]:
            prompt = prompt or choice.get("prompt_token_ids")
            if (new := choice.get("token_ids")) is None or prompt is None:
                raise MustFix(
                    "It returns no token ids, and an answer is never tokenized again", where=f"generate.endpoints, {url}", remedy=SERVE
                )
            tokens += new
            on_tokens(len(new))
            reason = choice.get("finish_reason") or reason
        if request.loop_window and reason is None and len(tokens) - looked >= LOOK_EVERY:
            looked = len(tokens)
            if loops_now(tokens, request.loop_window):
                reason = "repetition"
                break
    if prompt is not None and prompt != request.prompt_token_ids:
        raise MustFix(f"It changed the prompt of {request.id} before it answered", where=f"generate.endpoints, {url}", remedy=SERVE)
    if reason not in ("stop", "length", "repetition") or not tokens:
        raise Unanswered(f"an answer ended with {reason!r}" if reason else "an answer broke off")
    return Finished.of(request, tokens, reason)


def _reason(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return "it does not answer in time"
    return str(error).strip() or type(error).__name__


def unfit(settings: Settings) -> dict[str, MustFix | TryAgain]:
    """The servers of the settings that cannot be used, each with its sentence: MustFix for the wrong one, TryAgain for one that does not answer."""
    expected = Expected.of(settings)

    async def look(client: aiohttp.ClientSession, url: str) -> MustFix | TryAgain | None:
        try:
            await served_name(client, url, expected)
        except MustFix as error:
            return error
        except Unanswered as error:
            return TryAgain(
                f"The server does not answer: {error}",
                where=f"generate.endpoints, {url}",
                remedy="start it, and run the same command again",
            )
        return None

    async def look_at_all() -> list[MustFix | TryAgain | None]:
        async with session() as client:
            return await asyncio.gather(*(look(client, url) for url in addresses(settings)))

    return {url: error for url, error in zip(addresses(settings), asyncio.run(look_at_all()), strict=True) if error}


def require_endpoints(settings: Settings) -> None:
    """Before the verifier is loaded: raise MustFix for a server that is wrong, TryAgain if none answers."""
    errors = unfit(settings)
    if wrong := [error for error in errors.values() if isinstance(error, MustFix)]:
        raise wrong[0]
    if len(errors) == len(settings.generate.endpoints):
        error = next(iter(errors.values()))
        raise error if len(errors) == 1 else TryAgain(
            f"None of {len(errors)} servers answers: {error.message}", where=error.where, remedy="start them, and run the same command again"
        )  # fmt: skip
