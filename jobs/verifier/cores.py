"""vLLM's engine cores behind one interface: one that this process steps, or replicas that run by themselves.

Decision: tensor parallelism keeps `vllm.LLM`, whose engine is stepped from here and whose outputs come where they are
waited for. `LLM` of vLLM 0.16.0 refuses data parallelism, so replicas are `AsyncLLM`'s: vLLM starts a core a replica and
a coordinator that keeps their steps together, and the sockets live in a thread with an event loop, as those of
jobs/verifier/remote.py. Which replica answers a request is decided here (the one with the fewest), not by vLLM's
balancer, because that replica's worker has the rows, and only it can be asked to make them durable.

What is read from vLLM 0.16.0's `v1/engine/core_client.py`, for whoever moves the pin: `AsyncMPClient.core_engines` and
`_call_utility_async(method, *arguments, engine=)`, since `collective_rpc` asks all cores and keeps the first one's answer
only; `resources.coordinator`; `AsyncLLM.errored`, because a call to a core that dies is never answered.
"""

import asyncio
import concurrent.futures
import contextlib
import os
import queue
import threading
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

# Longest wait for an answer before the caller looks up again, and between two looks whether the cores live.
STEP_SECONDS = 0.05
LIVE_SECONDS = 0.5
END_SECONDS = 10


class Answered(NamedTuple):
    """A request that ended by itself: the engine's own ids, and why it ended."""

    request: str
    tokens: list[int]
    reason: str


class OneCore:
    """`vllm.LLM`, stepped by whoever asks for its answers. llm: started; `only` is the one replica."""

    def __init__(self, arguments: dict[str, Any]):
        from vllm import LLM

        self.llm = LLM(**arguments)
        self.replicas = range(1)
        self._engine = self.llm.llm_engine
        self.process = self._engine.output_processor
        self.call("end_with_process", {0: (os.getpid(), [])})

    def add(self, request: str, prompt: list[int], parameters: Any) -> int:
        """Give the engine a request; returns the replica that answers it."""
        self._engine.add_request(request, {"prompt_token_ids": prompt}, parameters)
        return 0

    def abort(self, requests: Iterable[str]) -> None:
        self._engine.abort_request(list(requests))

    def step(self) -> list[Answered]:
        """One step of the engine; what ended in it. Raises whatever vLLM raises: the engine is of no use then."""
        ended = [output for output in self._engine.step() if output.finished]
        return [
            Answered(output.request_id, list(output.outputs[0].token_ids), output.outputs[0].finish_reason or "abort") for output in ended
        ]

    def call(self, method: str, arguments: Mapping[int, tuple]) -> list[Any]:
        """Call the workers' `method` with the arguments of each replica; the answers of all their workers."""
        return self._engine.collective_rpc(method, args=arguments[0]) if arguments else []

    def metrics(self) -> list[Any]:
        """vLLM's counters since the start, where it keeps any."""
        return self._engine.get_metrics()

    def close(self) -> None:
        core, layers = self._engine.engine_core, self._engine.vllm_config.compilation_config.static_forward_context
        # Where the core is this very process, something of vLLM holds its cache beyond the end (1 GB an engine); elsewhere there is none here.
        caches = [tensor for layer in layers.values() for tensor in getattr(layer, "kv_cache", ())]
        self._engine = self.llm = self.process = None
        core.shutdown()
        for tensor in caches:
            tensor.untyped_storage().resize_(0)
        del core
        from vllm.distributed import cleanup_dist_env_and_memory

        cleanup_dist_env_and_memory()


class Replicas:
    """`AsyncLLM` with `data_parallel_size` cores; the interface of OneCore."""

    def __init__(self, arguments: dict[str, Any]):
        from vllm import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        self.llm = AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))
        self.process = self.llm.output_processor
        self.replicas = range(len(self.llm.engine_core.core_engines))
        self._at: dict[str, tuple[int, int]] = {}  # running request -> replica, and its number among all
        self._added = 0
        self._load = [0 for _ in self.replicas]
        self._tasks: dict[str, asyncio.Task] = {}  # of the loop's thread
        self._arrived: queue.SimpleQueue[tuple[int, Answered | Exception]] = queue.SimpleQueue()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="engine-cores", daemon=True)
        self._thread.start()
        coordinator = self.llm.engine_core.resources.coordinator
        try:
            self.call("end_with_process", dict.fromkeys(self.replicas, (os.getpid(), [coordinator.proc.pid] if coordinator else [])))
        except BaseException:
            self.close()
            raise

    def add(self, request: str, prompt: list[int], parameters: Any) -> int:
        replica = min(self.replicas, key=self._load.__getitem__)
        self._added += 1
        self._at[request] = replica, self._added
        self._load[replica] += 1
        self._loop.call_soon_threadsafe(self._ask, request, self._added, prompt, parameters, replica)
        return replica

    def abort(self, requests: Iterable[str]) -> None:
        for request in requests:
            if request in self._at:
                self._forget(request)
                self._loop.call_soon_threadsafe(self._cancel, request)

    def step(self) -> list[Answered]:
        """What ended since the last call; waits a moment for the first."""
        ended = []
        with contextlib.suppress(queue.Empty):
            number, answer = self._arrived.get(timeout=STEP_SECONDS)
            while True:
                if isinstance(answer, Exception):
                    raise answer
                if self._at.get(answer.request, (0, 0))[1] == number:  # else it was aborted in this very moment
                    self._forget(answer.request)
                    ended.append(answer)
                number, answer = self._arrived.get_nowait()
        if not ended:
            self._require_alive()
        return ended

    def call(self, method: str, arguments: Mapping[int, tuple]) -> list[Any]:
        client = self.llm.engine_core
        waiting = {
            asyncio.run_coroutine_threadsafe(
                client._call_utility_async("collective_rpc", method, None, given, None, engine=client.core_engines[replica]), self._loop
            )
            for replica, given in arguments.items()
        }
        answers = list(waiting)
        while waiting := concurrent.futures.wait(waiting, timeout=LIVE_SECONDS).not_done:
            self._require_alive()
        return [reply for answer in answers for reply in answer.result()]

    def metrics(self) -> list[Any]:
        from vllm.v1.metrics.reader import get_metrics_snapshot

        return get_metrics_snapshot()

    def close(self) -> None:
        """End every process of the engine, whatever it is doing; returns when they have ended."""
        llm, self.llm, self.process = self.llm, None, None
        resources = llm.engine_core.resources
        processes = [*resources.engine_manager.processes, *([resources.coordinator.proc] if resources.coordinator else [])]
        llm.shutdown()  # returns at once where vLLM has noticed a dead core and does so in a thread of its own
        for process in processes:
            process.join(timeout=END_SECONDS)
            if process.is_alive():
                process.kill()
                process.join(timeout=END_SECONDS)
        with contextlib.suppress(concurrent.futures.TimeoutError):
            asyncio.run_coroutine_threadsafe(self._end_tasks(), self._loop).result(timeout=10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=10)

    def _forget(self, request: str) -> None:
        replica, _ = self._at.pop(request)
        self._load[replica] -= 1

    def _require_alive(self) -> None:
        if self.llm.errored:
            raise self.llm.dead_error

    # -- in the loop's thread --------------------------------------------------------------------------

    def _ask(self, request: str, number: int, prompt: list[int], parameters: Any, replica: int) -> None:
        self._tasks[request] = self._loop.create_task(self._answer(request, number, prompt, parameters, replica))

    def _cancel(self, request: str) -> None:
        if task := self._tasks.pop(request, None):
            task.cancel()

    async def _answer(self, request: str, number: int, prompt: list[int], parameters: Any, replica: int) -> None:
        try:
            async for output in self.llm.generate({"prompt_token_ids": prompt}, parameters, request, data_parallel_rank=replica):
                if output.finished:
                    answer = output.outputs[0]
                    self._arrived.put((number, Answered(request, list(answer.token_ids), answer.finish_reason or "abort")))
        except Exception as error:  # noqa: BLE001  raised in the caller's thread
            self._arrived.put((number, error))
        if self._tasks.get(request) is asyncio.current_task():
            del self._tasks[request]

    async def _end_tasks(self) -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
