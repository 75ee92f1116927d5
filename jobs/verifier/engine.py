"""The driver's side of the verifier: one vLLM engine start, kept full, its answers handed out at once.

Decision: vLLM's engine is driven request by request and step by step (jobs/verifier/cores.py) instead of through
`LLM.generate`. So a finished answer is committed while the others are still decoded, the next turn
of a conversation joins the running batch, and a kill loses only what is in flight. The states
never pass through here: the worker writes them (jobs/verifier/capture.py) and is only asked, by one
`collective_rpc` a step at most, to make finished samples durable. The engine does not wait for the
disk: a sample finished in one step is handed out in a later one, when its rows are fsynced.

Prefix caching is off: a cached prefix is not computed, so it has no rows.
"""

import contextlib
import dataclasses
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from jobs.errors import Interrupted, JobError, MustFix, TryAgain
from jobs.settings import StatesSettings, VerifierSettings
from jobs.storage.states import StateLayout
from jobs.verifier.capture import LAST_TOKEN_KEY, SAMPLE_KEY, rebuild
from jobs.verifier.drafter import Drafter, counters
from jobs.verifier.facts import VerifierFacts
from jobs.verifier.fit import refuse_too_large
from jobs.verifier.loading import load_arguments
from jobs.verifier.parallel import parallel
from jobs.verifier.repetition import loops_now
from jobs.verifier.requests import Finished, Request
from jobs.verifier.seeded_sampler import SEED_KEY
from jobs.verifier.start_failures import Raised
from jobs.verifier.starting import start
from jobs.verifier.watchdog import Watchdog

__all__ = ["Finished", "Request", "VerifierEngine", "VerifierFacts"]

# Requests given to the engine beyond those it decodes, so that a freed place is taken in the same step.
WAITING_SHARE = 0.25
# Seconds between two looks at the number of tokens, for the watchdog and the display.
COUNT_EVERY = 0.5
# Seconds between two looks for answers that go round in circles; what is decoded meanwhile is cut off again.
LOOP_EVERY = 5.0
# kv_lora_rank + qk_rope_head_dim that vLLM's GPU kernels for MLA take; another width (the tiny verifier's) runs as
# plain attention. Source: get_supported_head_sizes, vllm/model_executor/layers/attention/mla_attention.py.
MLA_WIDTH = 576


class VerifierEngine:
    """One engine start of the verifier in `model`, with the states at `capture_taps` put out by its forward.

    seed: for what is not seeded by a request. drafter: who drafts, None for plain decoding. engine_arguments: further arguments of `vllm.LLM`
    (the tests force preemption with `num_gpu_blocks_override`). Raises MustFix for what cannot be
    loaded on this machine, TryAgain for an engine that did not start otherwise or in `verifier.start_minutes`.
    """

    def __init__(
        self,
        model: Path,
        settings: VerifierSettings,
        *,
        seed: int,
        capture_taps: tuple[int, ...] = (),
        drafter: Drafter | None = None,
        engine_arguments: dict[str, Any] | None = None,
    ):
        self.model, self.settings, self.capture_taps, self.drafter = Path(model), settings, tuple(sorted(capture_taps)), drafter
        self.facts = VerifierFacts.read(self.model)
        self.tokens = 0  # decoded by this engine so far, running answers included
        self._ended_tokens, self._counted_at, self._looked_at = 0, 0.0, time.monotonic()
        self._open, self._check_one_in = False, 0
        self.waits = (0.0, 0.0)  # seconds since `open_store`: it waited for its states to be taken in; they waited for the disk
        self._dead = False  # it failed or hangs: it is closed, and not asked anything any more
        self._running: dict[str, Request] = {}
        self._backlog: deque[Request] = deque()  # follow-ups, not yet given to vLLM
        self._at: dict[str, int] = {}  # sample -> the replica that answers it, until its states are durable
        prepare_environment(settings, self.facts)
        self.parallel = parallel(self.model, settings)
        arguments = _arguments(self.model, settings, self.facts, seed, self.capture_taps, drafter) | (engine_arguments or {})
        if arguments["dtype"] not in ("bfloat16", "float32"):
            raise MustFix(
                f"The verifier cannot run in {arguments['dtype']}: vLLM rescales DeepSeek's residual in it, and the taps with it",
                where="verifier.dtype", remedy="use bfloat16",
            )  # fmt: skip
        refuse_too_large(self.model, settings, drafter)
        self._core = start(arguments, self.model, settings.start_minutes)
        self._llm = self._core.llm
        try:
            self._rpc("draw_by_seed")
        except BaseException:
            self.close()
            raise

    # ------------------------------------------------------------------ the store

    def open_store(self, folder: Path, layout: StateLayout, states: StatesSettings) -> None:
        """Write states into `folder` from now on (`layout.taps` of `capture_taps`); an earlier store is closed."""
        missing = set(layout.taps) - set(self.capture_taps)
        if missing:
            raise MustFix(f"The engine does not put out tap {min(missing)}", where="verifier.taps", remedy="start it with these taps")
        given = (
            str(folder),
            dataclasses.asdict(layout) | {"taps": list(layout.taps)},
            list(self.capture_taps),
            states.shard_mib << 20,
            states.extent_rows,
            [str(self.model), self.facts.lm_head_name] if states.check_one_in else None,
            len(self._core.replicas),
        )
        # The first replica opens the store for all, the others join it (jobs/storage/writer_group.py).
        for replicas in ([0], self._core.replicas[1:]):
            for failure in self._core.call("capture_open", dict.fromkeys(replicas, given)):
                if failure:
                    raise rebuild(failure)
        self._open, self._check_one_in, self.waits = True, states.check_one_in, (0.0, 0.0)

    def close_store(self) -> None:
        if self._open:
            self._open = False
            if not self._dead:
                self._rpc("capture_close")

    def discard(self, samples: Iterable[str]) -> None:
        """Forget the rows of samples that will not be committed, and stop those still being decoded."""
        samples = list(samples)
        kept = [request for request in self._backlog if request.id not in samples]
        self._backlog.clear()  # in place: `run` may be about to extend it
        self._backlog.extend(kept)
        if running := [sample for sample in samples if self._running.pop(sample, None) and self._at.pop(sample) is not None]:
            self._core.abort(running)
        if samples and self._open:
            self._rpc("capture_discard", samples)

    def speculation(self) -> dict[str, Any] | None:
        """vLLM's own counters since the start (see `drafter.counters`); None without a drafter."""
        return self.drafter and counters(self._core.metrics(), self.drafter.config["num_speculative_tokens"])

    # ------------------------------------------------------------------ the loop

    def run(
        self,
        requests: Iterable[Request],
        on_finished: Callable[[Finished], Iterable[Request]],
        should_stop: Callable[[], bool] = lambda: False,
    ) -> None:
        """Answer every request; returns when all are handed to `on_finished`.

        The iterable is read only as fast as there is room. `on_finished` is called once a sequence,
        in the order in which they become durable, and may return follow-ups (they go first).
        Raises Interrupted after `should_stop`, with everything finished handed out; TryAgain when
        the engine fails or gives no token for `verifier.stall_seconds`; whatever the writer failed with.
        """
        source = iter(requests)
        durable_soon: dict[str, Finished] = {}
        with Watchdog(self.settings.stall_seconds, lambda: self.tokens) as watchdog, self._abandoning():
            while True:
                stopping = should_stop()
                if not stopping:
                    self._fill(source)
                with self._as_try_again(should_stop):
                    fresh = self._step() if self._running and not stopping else []
                    watchdog.look()
                    durable_soon |= {finished.request.id: finished for finished in fresh}
                    idle = stopping or not self._running
                    settled = self._settle(fresh, durable_soon, wait=idle)
                for finished in settled:
                    self._backlog.extend(on_finished(finished))
                if stopping:
                    raise Interrupted("Stopped while the verifier was answering", remedy="run the same command again to continue")
                if idle and not durable_soon and not self._backlog and not self._fill(source):
                    return

    def _fill(self, source: Iterator[Request]) -> bool:
        """Give the engine requests until it is full; False if there was none left."""
        places = self.settings.max_num_seqs
        while len(self._running) < places + max(1, int(places * WAITING_SHARE)):
            request = self._backlog.popleft() if self._backlog else next(source, None)
            if request is None:
                break
            self._add(request)
        return bool(self._running)

    def _add(self, request: Request) -> None:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        prefill = request.response_token_ids is not None
        tokens = request.prompt_token_ids + (request.response_token_ids or [])
        extra = {SAMPLE_KEY: request.id} if self._open else {}
        if prefill:
            extra[LAST_TOKEN_KEY] = tokens[-1]
        seed = request.seed if request.temperature > 0 else None
        if seed is not None:
            extra[SEED_KEY] = seed
        parameters = SamplingParams(
            max_tokens=1 if prefill else request.max_tokens,
            temperature=request.temperature,
            top_p=request.top_p,
            seed=seed if self.drafter else None,  # a generator of vLLM's for each request, which only the check of drafts needs
            stop_token_ids=list(request.stop_token_ids),
            ignore_eos=request.ignore_eos,
            # The engine computes its raw log-probability of the sampled token; the worker keeps it.
            logprobs=0 if self._open and not prefill else None,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
            extra_args=extra,
        )
        # The last token of an existing answer is never fed back, as in decoding.
        fed = tokens[:-1] if prefill else tokens
        self._at[request.id] = self._core.add(request.id, fed, parameters)
        self._running[request.id] = request

    def _step(self) -> list[Finished]:
        """The sequences that ended in a step of the engine, or since the last look at replicas."""
        finished = []
        for answer in self._core.step():
            request = self._running.pop(answer.request, None)
            if request is None:
                continue
            self._ended_tokens += len(answer.tokens)
            if request.response_token_ids is not None:
                finished.append(Finished(request, request.response_token_ids, "prefill"))
            else:
                finished.append(Finished.of(request, answer.tokens, answer.reason))
        self._count_tokens()
        return finished + self._stop_loops()

    def _stop_loops(self) -> list[Finished]:
        """End answers that repeat themselves, now and then; they are finished as any other."""
        now, ended = time.monotonic(), []
        if now - self._looked_at < LOOP_EVERY:
            return ended
        self._looked_at = now
        for state in list(self._core.process.request_states.values()):
            request = self._running.get(state.external_req_id)
            if request and request.loop_window and loops_now(tokens := state.detokenizer.output_token_ids, request.loop_window):
                ended.append(Finished.of(request, list(tokens), "repetition"))
        for finished in ended:
            del self._running[finished.request.id]
            self._ended_tokens += len(finished.response_token_ids)
        if ended:
            self._core.abort([finished.request.id for finished in ended])
        return ended

    def _settle(self, fresh: list[Finished], durable_soon: dict[str, Finished], *, wait: bool) -> list[Finished]:
        """Those of `durable_soon` whose rows are on disk by now; `fresh` are asked for."""
        if not durable_soon:
            return []
        if not self._open:
            settled = list(durable_soon.values())
            for sample in list(durable_soon):
                del durable_soon[sample], self._at[sample]
            return settled
        asked: dict[int, list[tuple]] = {self._at[sample]: [] for sample in durable_soon}
        for item in fresh:
            asked[self._at[item.request.id]].append((item.request.id, item.tokens, item.checks(self._check_one_in)))
        settled, failures = [], []
        for reply in self._core.call("capture_finish", {replica: (samples, wait) for replica, samples in asked.items()}):
            if reply is None:  # a rank that does not write
                continue
            failures += [reply["failure"]] if reply["failure"] else []
            self.waits = tuple(map(max, self.waits, reply["waits"]))
            for sample, reason in reply["done"].items():
                if sample in durable_soon:
                    settled.append(dataclasses.replace(durable_soon.pop(sample), dropped=reason))
                    del self._at[sample]
        if failures:
            raise rebuild(failures[0])
        return settled

    def _count_tokens(self) -> None:
        """Bring `tokens` up to date. Outputs are reported at the end of an answer only, which spares
        the driver an object a token; the running ones are looked up in vLLM's output processor."""
        now = time.monotonic()
        if now - self._counted_at >= COUNT_EVERY or not self._running:
            self._counted_at = now
            states = list(self._core.process.request_states.values())  # at once: replicas are looked after in another thread
            self.tokens = self._ended_tokens + sum(len(state.detokenizer.output_token_ids) for state in states)

    def _rpc(self, method: str, *arguments: Any) -> list[Any]:
        return self._core.call(method, dict.fromkeys(self._core.replicas, arguments))

    @contextlib.contextmanager
    def _as_try_again(self, should_stop: Callable[[], bool]) -> Iterator[None]:
        """What vLLM raises while it runs is a dead worker or a failing device: the run may be continued."""
        try:
            yield
        except (JobError, OSError):
            raise
        except Exception as error:
            self._dead = True
            if should_stop():  # Ctrl-C reaches the workers too, and they are gone first
                raise Interrupted("Stopped while the verifier was answering", remedy="run the same command again to continue") from error
            raise TryAgain(
                f"The verifier engine failed: {type(error).__name__}: {Raised.of(error).words()}", where=str(self.model),
                remedy="run the same command again, finished answers are kept",
            ) from error  # fmt: skip

    @contextlib.contextmanager
    def _abandoning(self) -> Iterator[None]:
        """Drop what is in flight if the run does not end by itself, so that the engine can serve another one."""
        try:
            yield
        except BaseException as error:
            if isinstance(error, TryAgain) and not isinstance(error, Interrupted):
                self._dead = True
            if not self._dead:
                with contextlib.suppress(Exception):
                    self.discard(list(self._running))
            for waiting in (self._running, self._backlog, self._at):
                waiting.clear()
            raise

    def close(self) -> None:
        """Close the store, end every process of the engine and give its memory back."""
        if self._core is None:
            return
        with contextlib.suppress(Exception):
            self.close_store()
        core, self._core, self._llm = self._core, None, None
        core.close()


def prepare_environment(settings: VerifierSettings, facts: VerifierFacts) -> None:
    """What vLLM reads from the environment; must be set before it is imported. A value already there wins."""
    # Else the question itself makes CUDA unusable in a forked child; vLLM sets it too, but only when it is imported.
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    import torch

    defaults = {"VLLM_LOGGING_LEVEL": "WARNING", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    if torch.cuda.is_available():
        # A forked engine would inherit the lock of the run directory, and threads that are not there.
        defaults |= {"VLLM_WORKER_MULTIPROC_METHOD": "spawn"}
        if facts.mla_width not in (None, MLA_WIDTH):
            defaults |= {"VLLM_MLA_DISABLE": "1"}
    else:
        defaults |= {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # 6 s to load instead of 48
            "VLLM_MLA_DISABLE": "1",  # MLA is not implemented on CPU
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_CPU_KVCACHE_SPACE": str(max(1, round(settings.kv_cache_gib or 1))),
        }
    for name, value in defaults.items():
        os.environ.setdefault(name, value)


def _arguments(
    model: Path, settings: VerifierSettings, facts: VerifierFacts, seed: int, taps: tuple[int, ...], drafter: Drafter | None = None
) -> dict[str, Any]:
    spread = parallel(model, settings)
    arguments: dict[str, Any] = {
        "model": str(model),
        "dtype": settings.dtype,
        "trust_remote_code": settings.trust_remote_code,
        "max_model_len": settings.max_model_len,
        "max_num_seqs": spread.each(settings.max_num_seqs),
        "max_num_batched_tokens": spread.each(settings.max_num_batched_tokens),
        "tensor_parallel_size": settings.tensor_parallel_size // spread.replicas,
        "enable_expert_parallel": spread.experts,
        "gpu_memory_utilization": settings.gpu_memory_utilization,
        "enforce_eager": settings.enforce_eager,
        "enable_prefix_caching": False,
        "seed": seed,
        "disable_log_stats": drafter is None,  # vLLM counts what is accepted among its statistics
        "worker_extension_cls": "jobs.verifier.capture.CaptureExtension",
        # Part of vLLM's compile-cache key, which otherwise does not contain the taps.
        "additional_config": {"eagle3_job_taps": list(taps)},
    }
    arguments |= load_arguments(settings)
    if spread.replicas > 1:
        arguments["data_parallel_size"] = spread.replicas
    if drafter is not None:
        arguments["speculative_config"] = dict(drafter.config)
    if facts.architecture == "KimiK25ForConditionalGeneration":
        # Text only; else start-up profiling feeds the vision tower 3000 x 3000 images.
        arguments["limit_mm_per_prompt"] = {"vision_chunk": 0}
    return arguments
