"""States of existing responses by speculators' own generator: the reference our capture is compared with.

`generate.backend = "speculators"`. An independent implementation by the people whose trainer made
most public heads: its worker replaces the decoder's forward and collects the residual stream in a
prefill pass, where ours reads outputs of the model's own forward. It is a reference and no second
way to work: no generation, no log-probabilities, one prefill a batch with the driver waiting.

What is put right here and in `compat`, which makes its releases 0.3.0 and 0.4.0.1 run on vLLM 0.16.0:

- Order and rows of its results: `compat.speculators_results`.
- Taps: its layer id i is the OUTPUT of layer i. EAGLE-3's id i is the INPUT of layer i, so it is asked for i-1.
- Final: it gives the last layer's output BEFORE the verifier's last norm; the norm is applied here
  (its 0.3.0 trained without: the targets then agree with the verifier's argmax in 82 % of the places).
- Rows: a sequence of n tokens has n-1, so it is fed without its last token.

The log-probability of every row is NaN: the generator does not form logits.
"""

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from jobs.errors import Interrupted, JobError, MustFix, TryAgain
from jobs.settings import VerifierSettings
from jobs.storage.states import Response, ResponseLog, StateLayout, StateWriter
from jobs.verifier.engine import prepare_environment
from jobs.verifier.facts import VerifierFacts, read_tensor

if TYPE_CHECKING:
    from jobs.context import Context

# Sequences of one call of the generator, which is also as many as it runs at once: after each the
# states are made durable and the responses committed.
SEQUENCES = 32
INSTALL = "install the pinned environment (compat/pins)"


class SpeculatorsVerifier:
    """One start of speculators' generator (vLLM in worker processes) that gives out states in our conventions.

    taps: the EAGLE-3 ids that will be asked for, from 1 to the number of layers. Raises MustFix for
    a generator that is not installed or whose signatures compat does not know, TryAgain for one
    that does not start.
    """

    def __init__(self, model: Path, settings: VerifierSettings, taps: Sequence[int]):
        self.model, self.facts = Path(model), VerifierFacts.read(Path(model))
        outside = [tap for tap in taps if not 1 <= tap <= self.facts.layers]
        if outside:
            raise MustFix(
                f"speculators gives no state for tap {outside[0]}",
                where="verifier.taps",
                remedy=f"choose ids from 1 to {self.facts.layers}",
            )
        # The output of the last layer is what the final norm is applied to.
        self._layers = sorted({tap - 1 for tap in taps} | {self.facts.layers - 1})
        self._norm = read_tensor(self.model, self.facts.final_norm_name).float()  # [H]
        self._generator = _start(self.model, settings, self._layers)

    def states(self, sequences: Sequence[list[int]], taps: Sequence[int]) -> list[tuple[Tensor, Tensor]]:
        """For each sequence of n tokens: taps [n, T, H] and final [n, H], in the verifier's dtype, on the CPU.

        Raises TryAgain if a worker fails.
        """
        try:
            results = self._generator.generate([list(ids) for ids in sequences])
        except JobError:
            raise
        except RuntimeError as error:
            raise TryAgain(f"speculators' generator failed: {error}", where=str(self.model), remedy="run the same command again") from error
        return [self._in_our_conventions(result["hidden_states"], taps) for result in results]

    def close(self) -> None:
        """End the worker processes and give their memory back."""
        generator, self._generator = self._generator, None
        if generator is not None:
            generator.executor.shutdown()

    def _in_our_conventions(self, outputs: list[Tensor], taps: Sequence[int]) -> tuple[Tensor, Tensor]:
        of_layer = dict(zip(self._layers, outputs, strict=True))  # output of a layer: [n, H]
        last = of_layer[self.facts.layers - 1]
        wide = last.float()
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.facts.rms_norm_eps) * self._norm  # [n, H]
        return torch.stack([of_layer[tap - 1] for tap in taps], dim=1), normed.to(last.dtype)


def start(context: "Context") -> SpeculatorsVerifier:
    """The generator for all splits of a run; the pipeline keeps it in the place of the engine and closes it."""
    settings = context.settings.verifier
    taps = VerifierFacts.read(context.verifier_path).both_readings(settings.taps)
    return SpeculatorsVerifier(context.verifier_path, settings, taps)


def extract(context: "Context", split: str, layout: StateLayout, responses: Sequence[Response]) -> dict[str, Any]:
    """Write the states of `responses` into `context.states(split)` and return the counts for the ledger.

    A killed run continues: responses already committed are skipped. Raises Interrupted between two
    batches, MustFix if more samples than `generate.max_dropped_share` are too long or too short.
    """
    settings, folder = context.settings, context.states(split)
    begun, dropped, tokens = time.monotonic(), Counter[str](), 0
    states = settings.states
    with (
        ResponseLog(folder) as log,
        StateWriter(folder, layout, shard_bytes=states.shard_mib << 20, extent_rows=states.extent_rows) as writer,
    ):
        done = log.ids()
        fitting = [response for response in responses if 2 <= response.tokens <= settings.verifier.max_model_len]
        dropped["length"] = len(responses) - len(fitting)
        _refuse_many_dropped(context, split, dropped["length"], len(responses))
        for batch in _batches([response for response in fitting if response.id not in done]):
            if context.should_stop():
                raise Interrupted("Stopped while states were extracted", remedy="run the same command again to continue")
            _write(context.engine(), writer, layout, batch)
            for response in batch:
                log.append(response)
                tokens += response.tokens
            context.progress(len(log), len(fitting), "responses", tokens=tokens)
        return _counts(split, log, dropped, tokens / max(time.monotonic() - begun, 1e-9))


def _write(verifier: SpeculatorsVerifier, writer: StateWriter, layout: StateLayout, batch: Sequence[Response]) -> None:
    """States of a batch, durable when this returns; the caller commits its responses."""
    sequences = [(*response.prompt_token_ids, *response.response_token_ids)[:-1] for response in batch]  # n-1 tokens
    for response, (taps, final) in zip(batch, verifier.states([list(ids) for ids in sequences], layout.taps), strict=True):
        writer.append(response.id, 0, taps, final, torch.full((len(final),), float("nan")))
        writer.finish(response.id, response.tokens)
    writer.sync()


def _batches(responses: list[Response]) -> Iterator[list[Response]]:
    for first in range(0, len(responses), SEQUENCES):
        yield responses[first : first + SEQUENCES]


def _refuse_many_dropped(context: "Context", split: str, dropped: int, of: int) -> None:
    share = context.settings.generate.max_dropped_share
    if dropped > share * of:
        raise MustFix(
            f"{dropped} of {of} responses of the {split} split have fewer than 2 tokens or more than {context.settings.verifier.max_model_len}",
            where=f"generate.max_dropped_share = {share}",
            remedy="raise verifier.max_model_len, or allow more",
        )


def _counts(split: str, log: ResponseLog, dropped: Counter[str], rate: float) -> dict[str, Any]:
    responses = list(log)
    if not responses:
        raise MustFix(
            f"The {split} split has no response", where=str(log.path), remedy="name a folder with responses in generate.responses"
        )
    tokens, answered = sum(r.tokens for r in responses), sum(len(r.response_token_ids) for r in responses)
    return {
        "turns": len(responses),
        "tokens": tokens,
        "response_tokens": answered,
        "rows": tokens - len(responses),
        "dropped": {reason: number for reason, number in dropped.items() if number},
        "tokens_per_second": round(rate, 1),
        "backend": "speculators",
    }


def _start(model: Path, settings: VerifierSettings, layers: list[int]):
    prepare_environment(settings, VerifierFacts.read(model))
    import compat

    compat.apply()
    try:
        from speculators.data_generation.vllm_hidden_states_generator import VllmHiddenStatesGenerator
    except ImportError as error:
        raise MustFix(
            f"speculators' generator cannot be imported: {error}", where='generate.backend = "speculators"', remedy=INSTALL
        ) from error

    class Generator(VllmHiddenStatesGenerator):
        def _create_vllm_config(self, **arguments):
            config = super()._create_vllm_config(**arguments)
            config.model_config.dtype = getattr(torch, settings.dtype)  # it asks for "auto", which turns fp32 into bf16
            return config

    try:
        return Generator(
            str(model),
            layer_ids=layers,
            max_model_len=settings.max_model_len,
            gpu_memory_utilization=settings.gpu_memory_utilization,
            tensor_parallel_size=settings.tensor_parallel_size,
        )
    except JobError:
        raise
    except (ValueError, NotImplementedError) as error:
        raise MustFix(
            f"speculators' generator refuses the verifier: {error}", where=str(model), remedy="correct the settings under [verifier]"
        ) from error
    except Exception as error:
        raise TryAgain(
            f"speculators' generator did not start: {type(error).__name__}: {error}", where=str(model), remedy="run the same command again"
        ) from error
