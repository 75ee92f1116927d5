"""Answers from vLLM servers on other machines, their states from the verifier on this one.

`RemoteAnswers` stands before the engine and is to the stage what the engine is. Requests go to the servers, a bounded
number to each; an answer that arrives is prefilled here at once, as an existing response is, so the GPUs of this
machine work while the others decode, and it is handed out when its states are durable.

Decision: which server answers, and in which order answers arrive, changes nothing that is kept (jobs/verifier/endpoints.py).
So what a lost server was doing is simply asked of the others again, from the start. (Drawn answers differ from those of
this project's own engine, which seeds every position anew, jobs/verifier/capture.py; greedy ones do not.) A lost server is asked now and then
whether it is back. Sockets live in a thread with an event loop; everything else happens in the caller's thread.
"""

import asyncio
import contextlib
import queue
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from jobs.errors import Interrupted, JobError, MustFix, TryAgain
from jobs.settings import Settings, StatesSettings
from jobs.storage.states import StateLayout
from jobs.verifier.endpoints import Expected, Unanswered, addresses, answer, require_endpoints, served_name, session
from jobs.verifier.requests import Finished, Request

# Seconds until a lost server is asked again whether it is there.
RETRY_SECONDS = 20.0
# A request that fails so often, whatever the servers say of themselves, ends the run.
ATTEMPTS = 5
# Longest wait for an answer before the caller looks up again.
WAIT_SECONDS = 0.1
# Answers kept for the prefill, in batches of the engine: more would only be lost if the run ends.
AHEAD = 2


@dataclass
class Server:
    """One address; `name` is what the verifier is called there once it has answered."""

    url: str
    state: str = "new"  # "new" | "there" | "doubted" (a request failed, it is being asked) | "lost"
    name: str = ""
    running: dict[str, tuple[Request, asyncio.Task]] = field(default_factory=dict)


class Traffic:
    """Requests in flight, in a thread with an event loop of its own, for as long as the context lasts.

    For the caller: `ask`, `cancel`, and what came of it in `arrived` (Finished), `news` (sentences) and `failure`, after
    which nothing is asked any more. Whatever begins with `_` runs in the loop.
    """

    def __init__(self, settings: Settings):
        self._expected, self._connections = Expected.of(settings), settings.generate.endpoint_connections
        self._servers = [Server(url) for url in addresses(settings)]
        self._waiting: deque[Request] = deque()
        self._attempts = Counter[str]()
        self._said: set[tuple[str, str]] = set()
        self._background: set[asyncio.Task] = set()
        self.arrived: queue.SimpleQueue[Finished] = queue.SimpleQueue()
        self.news: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.failure: JobError | None = None
        self.tokens = 0

    @property
    def places(self) -> int:
        """Requests that the servers which are not lost take at once."""
        return self._connections * max(1, sum(server.state != "lost" for server in self._servers))

    def ask(self, request: Request, *, first: bool = False) -> None:
        self._loop.call_soon_threadsafe(self._queue, request, first)

    def cancel(self, samples: Iterable[str]) -> None:
        self._loop.call_soon_threadsafe(self._cancel, set(samples))

    def __enter__(self) -> "Traffic":
        started = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._main(started)), name="endpoints", daemon=True)
        self._thread.start()
        started.wait()
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._over.set)
        self._thread.join()

    async def _main(self, started: threading.Event) -> None:
        self._loop, self._over = asyncio.get_running_loop(), asyncio.Event()
        started.set()
        async with session() as self._client:
            for server in self._servers:
                self._start(self._reach(server))
            await self._over.wait()
            tasks = [*self._background, *(task for server in self._servers for _, task in server.running.values())]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _start(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self._background.add(task)  # else nobody holds it
        task.add_done_callback(self._background.discard)

    def _queue(self, request: Request, first: bool) -> None:
        (self._waiting.appendleft if first else self._waiting.append)(request)
        self._dispatch()

    def _cancel(self, samples: set[str]) -> None:
        self._waiting = deque(request for request in self._waiting if request.id not in samples)
        for server in self._servers:
            for sample in samples & server.running.keys():
                server.running.pop(sample)[1].cancel()
        self._dispatch()

    def _dispatch(self) -> None:
        """Give waiting requests to the servers that have the most room."""
        while self._waiting and self.failure is None:
            free = [server for server in self._servers if server.state == "there" and len(server.running) < self._connections]
            if not free:
                return
            server, request = min(free, key=lambda server: len(server.running)), self._waiting.popleft()
            server.running[request.id] = (request, asyncio.ensure_future(self._ask(server, request)))

    async def _ask(self, server: Server, request: Request) -> None:
        error: Unanswered | None = None
        try:
            finished = await answer(self._client, server.url, server.name, request, self._expected.silence, self._count)
        except Unanswered as failed:
            error = failed
        except Exception as failed:
            self._fail(failed)
            return
        if server.running.pop(request.id, None) is None:
            return  # cancelled, or asked of another server, in this very moment
        if error is None:
            self.arrived.put(finished)
        else:
            self._again(server, request, str(error))
        self._dispatch()

    def _count(self, tokens: int) -> None:
        self.tokens += tokens

    def _again(self, server: Server, request: Request, why: str) -> None:
        """A request failed: it is asked again, and the server whether it is still there."""
        self._waiting.appendleft(request)
        self._attempts[request.id] += 1
        if self._attempts[request.id] >= ATTEMPTS:
            self._fail(TryAgain(
                f"{request.id} failed {ATTEMPTS} times, at last with: {why}", where=f"generate.endpoints, {server.url}",
                remedy="see the servers' logs, and run the same command again",
            ))  # fmt: skip
        elif server.state == "there":
            server.state = "doubted"
            self._start(self._reach(server, why))

    async def _reach(self, server: Server, why: str | None = None) -> None:
        """Ask a server whether it is there until it is."""
        while self.failure is None:
            try:
                server.name = await served_name(self._client, server.url, self._expected)
            except Unanswered as error:
                self._lost(server, why or str(error))
                await asyncio.sleep(RETRY_SECONDS)
            except Exception as error:
                if server.state != "lost" or not isinstance(error, MustFix):
                    return self._fail(error)
                # Somebody else's server at that address by now: the others go on.
                return self._say(server, "other", f"{server.url} is not asked any more: {error}")
            else:
                if server.state == "lost":
                    self._say(server, "back", f"{server.url} answers again and gets its share of the requests")
                server.state = "there"
                self._dispatch()
                return

    def _lost(self, server: Server, why: str) -> None:
        taken = [request for request, _ in server.running.values()]
        for _, task in server.running.values():
            task.cancel()
        server.running.clear()
        server.state = "lost"
        self._waiting.extendleft(reversed(taken))
        if all(other.state == "lost" for other in self._servers):
            all_gone = (
                "No server for generation answers any more, the last one failed with"
                if len(self._servers) > 1
                else "The server for generation does not answer"
            )
            self._fail(TryAgain(
                f"{all_gone}: {why}",
                where=f"generate.endpoints, {server.url}", remedy="start the servers, and run the same command again, finished answers are kept",
            ))  # fmt: skip
        else:
            self._say(server, "lost", f"{server.url} does not answer ({why}): its requests go to the other servers")
            self._dispatch()

    def _say(self, server: Server, what: str, text: str) -> None:
        if (server.url, what) not in self._said:
            self._said.add((server.url, what))
            self.news.put(text)

    def _fail(self, error: Exception) -> None:
        self.failure = self.failure or (
            error if isinstance(error, JobError) else JobError(f"A request to the servers failed with {type(error).__name__}: {error}")
        )


def start(settings: Settings, engine: Callable[[], Any], say: Callable[[str], None]) -> "RemoteAnswers":
    """The servers are looked at first: loading the verifier costs more. Raises as `require_endpoints` and the engine's start do."""
    require_endpoints(settings)
    return RemoteAnswers(engine(), settings, say)


class RemoteAnswers:
    """The engine for the stage `generate` with `generate.endpoints`: the servers answer, `engine` makes the states.

    engine: a VerifierEngine, which this owns from now on. say: told what a person should know, once.
    """

    def __init__(self, engine: Any, settings: Settings, say: Callable[[str], None]):
        self._engine, self._settings, self._say = engine, settings, say
        self._traffic: Traffic | None = None
        self._earlier_tokens = 0
        self._asked: dict[str, Request] = {}  # no answer yet
        self._answered: deque[Finished] = deque()  # not yet given to the engine
        self._prefilled: dict[str, Finished] = {}  # being given to the engine

    @property
    def tokens(self) -> int:
        """Tokens that the servers have decoded so far, running answers included."""
        return self._earlier_tokens + (self._traffic.tokens if self._traffic else 0)

    @property
    def waits(self) -> tuple[float, float]:
        return self._engine.waits

    def open_store(self, folder: Path, layout: StateLayout, states: StatesSettings) -> None:
        self._engine.open_store(folder, layout, states)

    def close_store(self) -> None:
        self._engine.close_store()

    def close(self) -> None:
        self._engine.close()

    def discard(self, samples: Iterable[str]) -> None:
        """Forget samples that will not be committed, wherever they are."""
        samples = set(samples)
        if self._traffic and (asked := samples & self._asked.keys()):
            self._traffic.cancel(asked)
        for sample in samples:
            self._asked.pop(sample, None)
        kept = [finished for finished in self._answered if finished.request.id not in samples]
        self._answered.clear()
        self._answered.extend(kept)
        self._engine.discard(samples)

    def run(
        self,
        requests: Iterable[Request],
        on_finished: Callable[[Finished], Iterable[Request]],
        should_stop: Callable[[], bool] = lambda: False,
    ) -> None:
        """As VerifierEngine.run. TryAgain when no server answers, MustFix for one that serves something else: in both
        cases what has been answered is prefilled and handed out first."""
        source = iter(requests)

        def durable(finished: Finished) -> Iterable[Request]:
            answered = self._prefilled.pop(finished.request.id)
            for following in on_finished(replace(answered, dropped=finished.dropped)):
                self._ask(following, first=True)
            return ()

        def stop_after_feeding() -> bool:
            self._feed(source)
            return should_stop()

        try:
            with Traffic(self._settings) as self._traffic:
                while not self._over(source):
                    if self._answered:
                        self._engine.run(_Arrived(self), durable, stop_after_feeding)
                    elif self._traffic.failure:
                        raise self._traffic.failure
                    elif should_stop():
                        raise Interrupted("Stopped while the verifier was answering", remedy="run the same command again to continue")
                    else:
                        self._wait()
        finally:
            self._earlier_tokens, self._traffic = self.tokens, None
            for waiting in (self._asked, self._answered, self._prefilled):
                waiting.clear()

    def _over(self, source: Iterator[Request]) -> bool:
        self._feed(source)
        return not self._asked and not self._answered

    def _feed(self, source: Iterator[Request]) -> None:
        """Keep the servers as full as they may be, unless the engine here does not keep up with them."""
        self._collect()
        while len(self._asked) < self._traffic.places and len(self._answered) < AHEAD * self._settings.verifier.max_num_seqs:
            if (request := next(source, None)) is None:
                return
            self._ask(request)

    def _ask(self, request: Request, *, first: bool = False) -> None:
        self._asked[request.id] = request
        self._traffic.ask(request, first=first)

    def _collect(self) -> None:
        while not self._traffic.news.empty():
            self._say(self._traffic.news.get())
        while not self._traffic.arrived.empty():
            self._take(self._traffic.arrived.get())

    def _wait(self) -> None:
        with contextlib.suppress(queue.Empty):
            self._take(self._traffic.arrived.get(timeout=WAIT_SECONDS))

    def _take(self, finished: Finished) -> None:
        if self._asked.pop(finished.request.id, None) is None:
            return  # discarded meanwhile
        if (largest := max(finished.response_token_ids)) >= self._engine.facts.vocab_size:
            raise MustFix(
                f"A server answered {finished.request.id} with token {largest}, the verifier has {self._engine.facts.vocab_size}",
                where="generate.endpoints", remedy="serve this verifier",
            )  # fmt: skip
        self._answered.append(finished)

    def _next_prefill(self) -> Request | None:
        self._collect()
        if not self._answered:
            return None
        finished = self._answered.popleft()
        self._prefilled[finished.request.id] = finished
        return Request(
            id=finished.request.id, prompt_token_ids=finished.request.prompt_token_ids, response_token_ids=finished.response_token_ids
        )


class _Arrived:
    """What there is to prefill at this moment. It may be empty now and not later, which the engine, that asks at every step, makes use of."""

    def __init__(self, owner: RemoteAnswers):
        self._owner = owner

    def __iter__(self) -> "_Arrived":
        return self

    def __next__(self) -> Request:
        request = self._owner._next_prefill()
        if request is None:
            raise StopIteration
        return request
