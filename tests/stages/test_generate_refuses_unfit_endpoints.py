"""Servers that cannot answer for the verifier are refused in one sentence, and a failing one costs no answer.

The servers here are small HTTP servers that speak as vLLM's does, or deliberately do not; two real ones are in
test_generate_answers_from_two_endpoints.py.
"""

import contextlib
import io
import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from generate_in_process import context_of, prepare, prompt

from jobs.context import Context
from jobs.errors import MustFix, TryAgain
from jobs.job_file import load
from jobs.ports import free_port
from jobs.reporting.display import Display
from jobs.run import RunDirectory
from jobs.stages import preflight
from jobs.verifier.endpoints import require_endpoints, unfit
from jobs.verifier.remote import Traffic
from jobs.verifier.requests import Request

CARD = {"id": "tiny", "object": "model", "root": "/somewhere/tiny", "max_model_len": 512}


class Small:
    """What a small server says: its models, and the answer to a prompt: its ids, each plus 1."""

    def __init__(self):
        self.card, self.key, self.returns_ids, self.changes_prompt, self.page = dict(CARD), None, True, False, None
        self.status, self.hangs, self.endless = 200, False, False  # for requests that are not the probe
        self.asked, self.closed_early, self.url = [], 0, ""

    def answer(self, handler, body) -> None:
        prompt = body["prompt"]
        if prompt != [0]:
            self.asked.append(body)
            if self.status != 200:
                return reply(handler, self.status, {"error": {"message": "out of order"}})
            if self.hangs:
                return time.sleep(20)
        handler.send_response(200)
        handler.send_header("Content-Type", "text/event-stream")
        handler.end_headers()
        ids = [token + 1 for token in prompt] if not self.endless or prompt == [0] else [5] * 10**6
        for place, token in enumerate(ids):
            choice = {"index": 0, "text": "", "finish_reason": "length" if place == len(ids) - 1 else None}
            if self.returns_ids:
                choice |= {"token_ids": [token], "prompt_token_ids": (prompt + [9] * self.changes_prompt) if place == 0 else None}
            try:
                handler.wfile.write(b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n")
            except OSError:
                self.closed_early += 1
                return
        handler.wfile.write(b"data: [DONE]\n\n")


def reply(handler, status: int, value) -> None:
    text = value if isinstance(value, bytes) else json.dumps(value).encode()
    handler.send_response(status)
    handler.send_header("Content-Length", str(len(text)))
    handler.end_headers()
    handler.wfile.write(text)


@contextlib.contextmanager
def served():
    small = Small()

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_):
            pass

        def may(self) -> bool:
            if small.key and self.headers.get("Authorization") != f"Bearer {small.key}":
                reply(self, 401, {"error": "Unauthorized"})
                return False
            return True

        def do_GET(self):
            if self.may():
                reply(self, 200, small.page or {"object": "list", "data": [small.card]})

        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if self.may():
                small.answer(self, body)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads, small.stop = True, server.shutdown
    small.url = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    try:
        yield small
    finally:
        server.shutdown()
        server.server_close()


@pytest.fixture
def small():
    with served() as server:
        yield server


def nobody() -> str:
    return f"http://127.0.0.1:{free_port()}"


def settings(*urls, **more):
    wanted = [f"generate.endpoints={json.dumps(urls)}", *(f"{key.replace('__', '.')}={value}" for key, value in more.items())]
    return load("smoke", overrides=wanted, environment={})


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"card": CARD | {"id": "Qwen/Qwen3-8B", "root": "Qwen/Qwen3-8B"}}, "It serves Qwen/Qwen3-8B, the verifier is tiny"),
        ({"card": CARD | {"max_model_len": 511}}, "It takes 511 tokens, verifier.max_model_len is 512"),
        ({"returns_ids": False}, "It returns no token ids"),
        ({"changes_prompt": True}, "It changed the prompt of probe"),
        ({"key": "k"}, "give the servers' key in the environment variable VLLM_API_KEY"),
        ({"page": b"<html>"}, "It does not list its models as an OpenAI server does"),
        ({"page": b'{"data": "none"}'}, "It does not list its models as an OpenAI server does"),
    ],
)
def test_the_wrong_server_is_one_sentence_and_78(small, change, expected, monkeypatch):
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    vars(small).update(change)
    with served() as right, pytest.raises(MustFix) as error:
        require_endpoints(settings(right.url, small.url))
    assert expected in str(error.value) and small.url in str(error.value) and "\n" not in str(error.value)


def test_the_right_server_is_known_by_either_name_and_with_its_key(small, monkeypatch):
    small.key = "k"
    monkeypatch.setenv("VLLM_API_KEY", "k")
    assert unfit(settings(small.url + "/v1/")) == {}
    assert unfit(settings(small.url, generate__endpoint_model="/somewhere/tiny")) == {}
    assert small.asked == [], "looking costs one token"


def test_preflight_names_a_wrong_server_and_only_tells_of_one_that_is_away(small, tmp_path):
    gone, text = nobody(), io.StringIO()
    context = Context(settings(gone, small.url), RunDirectory(tmp_path), Display.open("plain", stream=text))
    context.run.begin(context.settings)
    assert list(preflight.CHECKS["endpoints"](context, {})) == [] and gone in text.getvalue()
    small.card["max_model_len"] = 100
    assert [small.url in sentence for sentence in preflight.CHECKS["endpoints"](context, {})] == [True]
    context.run.stage("generate.train")["state"] = "done"
    assert list(preflight.CHECKS["endpoints"](context, {})) == [], "what is answered needs no server"
    context.run.close()


def test_no_server_at_the_start_is_one_sentence_and_75(small):
    gone = nobody()
    with pytest.raises(TryAgain) as error:
        require_endpoints(settings(gone))
    assert "The server does not answer" in str(error.value) and gone in str(error.value) and "\n" not in str(error.value)
    with pytest.raises(TryAgain, match="None of 2 servers answers"):
        require_endpoints(settings(gone, nobody()))
    require_endpoints(settings(gone, small.url))


def test_the_servers_are_looked_at_before_the_verifier_is_loaded(tmp_path):
    gone = nobody()
    folder = prepare(tmp_path / "run", [prompt(1, "Hello")], generate={"max_new_tokens": 24, "endpoints": [gone]})
    context = context_of(folder)
    with pytest.raises(TryAgain, match="The server does not answer"):
        context.engine()
    assert context.loads == 0
    context.run.close()


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ('generate.endpoints=["host:8000"]', "such as http://host:8000"),
        ('generate.endpoints=["http://me:hidden@host:8000"]', "VLLM_API_KEY"),
        ('generate.endpoints=["http://a:1","http://a:1"]', "names a server twice"),
        ("generate.responses=/answers", "give one of them"),
    ],
)
def test_addresses_that_cannot_be_meant_are_refused_and_no_password_is_repeated(override, expected):
    with pytest.raises(MustFix) as error:
        load("smoke", overrides=['generate.endpoints=["http://host:8000"]', override], environment={})
    assert expected in str(error.value) and "hidden" not in str(error.value)


def answers(wanted: list[Request], *urls, **more) -> tuple[dict, list[str], Traffic]:
    """What the servers answer, what was said, and the traffic afterwards; stops at a failure."""
    found, said, until = {}, [], time.monotonic() + 20
    with Traffic(settings(*urls, **more)) as traffic:
        for request in wanted:
            traffic.ask(request)
        while len(found) < len(wanted) and not traffic.failure:
            assert time.monotonic() < until
            time.sleep(0.005)
            while not traffic.arrived.empty():
                finished = traffic.arrived.get()
                assert finished.request.id not in found
                found[finished.request.id] = finished
        while not traffic.news.empty():
            said.append(traffic.news.get())
    return found, said, traffic


def questions(count: int) -> list[Request]:
    return [Request(f"p{i}#0", [i + 1, i + 2], max_tokens=8, temperature=0.6, top_p=0.9, seed=i, stop_token_ids=(7,)) for i in range(count)]


def test_a_request_holds_everything_that_its_answer_depends_on(small):
    found, said, _ = answers(questions(1), small.url)
    assert found["p0#0"].response_token_ids == [2, 3] and found["p0#0"].finish_reason == "length" and said == []
    sent = small.asked[0]
    assert (sent["prompt"], sent["seed"], sent["temperature"], sent["top_p"], sent["max_tokens"], sent["stop_token_ids"]) == (
        [1, 2],
        0,
        0.6,
        0.9,
        8,
        [7],
    )
    assert (sent["top_k"], sent["min_p"], sent["repetition_penalty"]) == (0, 0.0, 1.0), (
        "else the server takes them from generation_config.json"
    )


def test_what_a_hung_server_was_asked_is_answered_by_the_others_and_said_once(small):
    with served() as hung:
        hung.hangs = True
        # It lists its models all the same: only its silence shows that it hangs.
        found, said, _ = answers(questions(12), hung.url, small.url, verifier__stall_seconds=1, generate__endpoint_connections=4)
        assert {i: f.response_token_ids for i, f in found.items()} == {f"p{i}#0": [i + 2, i + 3] for i in range(12)}
        assert hung.asked and said == []
    dead = nobody()
    found, said, _ = answers(questions(12), dead, small.url)
    assert len(found) == 12 and len(said) == 1 and dead in said[0] and "its requests go to the other servers" in said[0]


def test_a_request_that_fails_everywhere_ends_the_run_in_one_sentence(small):
    small.status = 500
    found, _, traffic = answers(questions(1), small.url)
    assert found == {} and traffic.failure.exit_code == 75 and "p0#0 failed 5 times, at last with: HTTP 500" in str(traffic.failure)
    small.status = 400
    found, _, traffic = answers(questions(1), small.url)
    assert found == {} and traffic.failure.exit_code == 78 and "out of order" in str(traffic.failure)


def test_a_loop_is_stopped_at_the_server(small):
    small.endless = True
    found, _, _ = answers([Request("p0#0", [1, 2], max_tokens=10**6, loop_window=64)], small.url)
    assert (found["p0#0"].response_token_ids, found["p0#0"].finish_reason) == ([5] * 64, "repetition")
    until = time.monotonic() + 5
    while not small.closed_early and time.monotonic() < until:
        time.sleep(0.01)
    assert small.closed_early == 1
