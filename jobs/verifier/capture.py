"""The worker's side of generation: rows of hidden states go to disk from the process that has them.

Decision: the states are outputs of the model's own forward, taken between the model runner's
`execute_model` and the end of `sample_tokens` (`execute_model_state`). That is the one place where
they exist in eager and compiled mode alike, belong to a known batch layout, and are exactly what
vLLM would hand to an EAGLE-3 head. `compat` makes the runner put the taps out; this file only
reads them. Nothing passes through the driver process.

What is read from vLLM 0.16.0's `v1/worker/gpu_model_runner.py`, for whoever moves the pin:

- `input_batch.req_ids[i]`, `query_start_loc.np[i:i+2]` and `input_batch.num_computed_tokens_cpu[i]`
  say which rows of the flat batch belong to which request and at which position they start. They
  are set in `_prepare_inputs` and stay until the next `execute_model`. Rows past
  `total_num_scheduled_tokens` are padding of a CUDA graph.
- `discard_request_mask.np[i]`: the request has more known tokens than this step computes (a chunk of
  a prompt, or of a preempted request), so its sampled token is thrown away.
- With speculation the last `d + 1` rows of a request are d drafts and the token before them; row j
  of those is real only while drafts 0..j-1 were accepted. Later rows come again in the next step.
- Graph outputs are weak references into a shared pool: they are copied on the compute stream here,
  before the next launch, and go to the host on a side stream.
- vLLM gives request ids a random suffix; the sample's own id travels in `SamplingParams.extra_args`.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from jobs.errors import EXIT_MUST_FIX, EXIT_TRY_AGAIN, JobError, MustFix, TryAgain
from jobs.storage.reader import LOGPROB_TOLERANCE
from jobs.storage.row_pages import LIMIT_BYTES
from jobs.storage.shards import encode
from jobs.storage.states import StateLayout, StateWriter
from jobs.storage.writer_group import Member
from jobs.verifier import orphans
from jobs.verifier.seeded_sampler import SeededSampler
from jobs.verifier.state_thread import Ended, Spans, Step, StoreThread

SAMPLE_KEY = "eagle3_sample"  # extra_args: id of the sample the request's rows belong to
LAST_TOKEN_KEY = "eagle3_last_token"  # extra_args of a prefill: the token after the fed ones
# Logits formed at once where they have to be formed again: 256 rows of 163,840, in fp32 168 MB.
LOGITS = 256 * 163_840


class Capture:
    """Reads the runner's steps and feeds one store. Every tensor-parallel rank has one, rank 0 writes."""

    def __init__(self, runner: Any):
        self.runner = runner
        self.tap_ids: tuple[int, ...] = ()
        self.keep: list[int] = []
        self.sink: StoreThread | None = None
        self.is_open = False
        self._state: Any = None
        device = runner.device
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # for copies to the host
        self._sample_tokens, self._sample = runner.sample_tokens, runner._sample
        runner.sample_tokens, runner._sample = self._around_sample_tokens, self._around_sample

    def open(self, tap_ids: Sequence[int], keep: Sequence[int], sink: "StoreThread | None") -> None:
        """Start capturing: `tap_ids` is what the model puts out, `keep` what the store wants."""
        self.tap_ids = tuple(tap_ids)
        self.keep = [self.tap_ids.index(tap) for tap in keep]
        self.sink, self.is_open = sink, True

    def _around_sample_tokens(self, grammar_output: Any) -> Any:
        state = self.runner.execute_model_state
        if state is None:
            return self._sample_tokens(grammar_output)
        self._state = state
        return self._sample_tokens(grammar_output)

    def _around_sample(self, logits: torch.Tensor, spec_decode_metadata: Any) -> Any:
        output = self._sample(logits, spec_decode_metadata)
        state, self._state = self._state, None
        if self.is_open:
            with torch.inference_mode():
                step = self._read(state, output)
            if step is not None and self.sink is not None:
                self.sink.put(step)
        # The rows carry the log-probabilities; sending them to the driver as well would cost more than the copy.
        output.logprobs_tensors = None
        return output

    def _read(self, state: Any, output: Any) -> Step | None:
        spans = self._spans(state.scheduler_output)
        if spans is None:
            return None
        # With a drafter the model puts out the union of its taps and ours (compat.aux_capture).
        places = self.runner.eagle3_job_capture_places
        rows = state.scheduler_output.total_num_scheduled_tokens
        logprob = self._known_logprobs(spans, state.hidden_states, rows)  # [R]
        if self.sink is None:  # ranks other than 0 only take part in the logits' all-gather
            return None
        tensors = output.logprobs_tensors
        sampled = output.sampled_token_ids  # [B, 1 + drafts]
        taps = torch.stack([state.aux_hidden_states[places[k]][:rows] for k in self.keep], dim=1)  # [R, T, H]
        final = state.hidden_states[:rows].clone()  # [R, H]
        return Step(
            spans=spans,
            # FP8 is made here, on the device: it does so in no time, and half the bytes go to the host.
            rows=encode(self.sink.writer.layout, taps, final, logprob),
            sampled_logprob=None if tensors is None else tensors.logprobs[:, 0].reshape(sampled.shape).float().clone(),
            sampled_ids=sampled.clone() if sampled.shape[1] > 1 else None,
        )

    def _spans(self, scheduler_output: Any) -> Spans | None:
        """Whose rows the step has; None where none are captured."""
        runner, batch = self.runner, self.runner.input_batch
        requests, count = batch.req_ids[: batch.num_reqs], batch.num_reqs
        extras = [runner.requests[request].sampling_params.extra_args or {} for request in requests]
        samples, drafted = [extra.get(SAMPLE_KEY) for extra in extras], scheduler_output.scheduled_spec_decode_tokens
        captured = np.array([sample is not None for sample in samples], dtype=bool)
        if not captured.any():
            return None
        starts = runner.query_start_loc.np[: count + 1]
        return Spans(
            # Copies: the runner writes the next step into its arrays.
            samples, starts[:-1].astype(np.int64), np.diff(starts).astype(np.int64), batch.num_computed_tokens_cpu[:count].astype(np.int64), np.arange(count),
            np.array([len(drafted.get(request, ())) for request in requests]) if drafted else np.zeros(count, np.int64),
            ~runner.discard_request_mask.np[:count], np.array([extra.get(LAST_TOKEN_KEY, -1) for extra in extras]),
        ).only(captured)  # fmt: skip

    def _known_logprobs(self, spans: Spans, hidden: torch.Tensor, rows: int) -> torch.Tensor:
        """[R] fp32: log-probability of the next token where it was known before this step, else NaN.

        These are the rows of a prefill over an existing response, and response rows that a
        preempted request computes again. Their logits are formed here from the rows themselves.
        """
        result = torch.full((rows,), float("nan"), device=hidden.device)  # [R]
        index: list[int] = []
        tokens: list[int] = []
        for place in np.flatnonzero(spans.may_know_next()).tolist():
            span = spans.span(place)
            request = self.runner.requests[self.runner.input_batch.req_ids[span.request]]
            end = span.position + span.rows
            if span.last_token < 0:
                begin, stop = max(span.position, request.num_prompt_tokens - 1), end - (1 + span.drafts if span.sampled else 0)
            else:
                begin, stop = span.position, end
            if begin >= stop:
                continue
            following = self.runner.input_batch.token_ids_cpu[span.request, begin + 1 : stop + 1].tolist()
            if span.last_token >= 0 and stop == request.num_prompt_tokens:
                following[-1] = span.last_token
            first = span.first_row + begin - span.position
            # -1 stands for a token that so far only the GPU knows (asynchronous scheduling).
            known = [place for place, token in enumerate(following) if token >= 0]
            index += [first + place for place in known]
            tokens += [following[place] for place in known]
        if not index:
            return result
        # One copy from pinned memory, which the compute stream does not wait for.
        table = torch.tensor([index, tokens], pin_memory=self.stream is not None).to(hidden.device, non_blocking=True)  # [2, k]
        at_once = max(1, LOGITS // self.runner.model_config.get_vocab_size())
        for where, token in zip(table[0].split(at_once), table[1].split(at_once), strict=True):
            logits = self.runner.model.compute_logits(hidden[where])  # [r, V]
            result[where] = logits.log_softmax(dim=-1, dtype=torch.float32).gather(1, token[:, None])[:, 0]
        return result


class CaptureExtension:
    """Methods vLLM adds to its worker class (`worker_extension_cls`), called by `collective_rpc`.

    Arguments and results are plain values: they cross process borders under tensor parallelism.
    An error is returned, not raised: vLLM would turn it into text.
    """

    def capture_open(
        self,
        folder: str,
        layout: dict,
        tap_ids: list[int],
        shard_bytes: int,
        extent_rows: int,
        lm_head: list[str] | None,
        replicas: int = 1,
    ) -> dict | None:
        """Open (or recover) the store in `folder` and capture into it from the next step on.

        lm_head: folder of the checkpoint and name of its output head, for the rows that are to be checked.
        replicas: data-parallel ones, each of which writes its own requests; the first has opened the store before the others do.
        """
        try:
            self.capture_close()
            if not hasattr(self, "_capture"):
                self._capture = Capture(self.model_runner)
            layout = StateLayout(**(layout | {"taps": tuple(layout["taps"])}))
            sink = None
            if _writes():
                member = Member(self.parallel_config.data_parallel_index, replicas) if replicas > 1 else Member()
                memory = LIMIT_BYTES // replicas  # of one machine
                writer = StateWriter(
                    Path(folder), layout, shard_bytes=shard_bytes, extent_rows=extent_rows, memory_bytes=memory, member=member
                )
                sink = StoreThread(writer, self._capture.stream)
                if lm_head:
                    sink.check_with(Path(lm_head[0]), lm_head[1], LOGPROB_TOLERANCE[layout.dtype])
            self._capture.open(tap_ids, layout.taps, sink)
        except JobError as error:
            return describe(error)
        return None

    def capture_finish(self, samples: list[tuple[str, int, list[tuple[int, int]]]], wait: bool) -> dict | None:
        """{"done": {sample: None or reason}, "failure": None or description, "waits": see `VerifierEngine.waits`}; None on ranks that do not write.

        samples: the fields of `state_thread.Ended`.
        """
        sink = self._capture.sink
        if sink is None:
            return None
        done = sink.finish([Ended(*sample) for sample in samples], wait)
        return {
            "done": done,
            "failure": None if sink.failure is None else describe(sink.failure),
            "waits": (sink.waited, sink.writer.waited),
        }

    def capture_discard(self, samples: list[str]) -> None:
        if self._capture.sink is not None:
            self._capture.sink.discard(samples)

    def draw_by_seed(self) -> None:
        """Tokens are drawn by the seeds that requests bring along, from the next step on."""
        SeededSampler(self.model_runner)

    def end_with_process(self, driver: int, others: list[int]) -> None:
        """End this engine, and `others` of its processes, when the process that started it ends (jobs/verifier/orphans.py)."""
        orphans.end_with(driver, others)

    def capture_close(self) -> None:
        capture = getattr(self, "_capture", None)
        if capture is not None and capture.is_open:
            capture.is_open = False
            if capture.sink is not None:
                capture.sink.close()
                capture.sink = None


def _writes() -> bool:
    """Hidden states are whole on every tensor-parallel rank: the first one writes them."""
    from vllm.distributed import get_tensor_model_parallel_rank

    return get_tensor_model_parallel_rank() == 0


def describe(error: BaseException) -> dict:
    """An exception as plain values for the way to the driver; `rebuild` makes it one again."""
    if isinstance(error, JobError):
        return {"exit_code": error.exit_code, "message": error.message, "where": error.where, "remedy": error.remedy}
    return {"exit_code": None, "message": f"{type(error).__name__}: {error}", "where": None, "remedy": None}


def rebuild(failure: dict) -> Exception:
    if failure["exit_code"] is None:
        return RuntimeError(f"the writer of the hidden states failed: {failure['message']}")
    kind = {EXIT_MUST_FIX: MustFix, EXIT_TRY_AGAIN: TryAgain}.get(failure["exit_code"], JobError)
    return kind(failure["message"], where=failure["where"], remedy=failure["remedy"])
