"""Requests that are hard on a scheduler, and a run of the real engine over them into a state store."""

import random
from collections.abc import Callable
from pathlib import Path

import torch
from deepseek_reference import Reference, largest_error

from jobs.settings import StatesSettings
from jobs.storage.states import Response, ResponseLog, Sample, StateLayout, StateStore
from jobs.verifier.engine import Finished, Request, VerifierEngine

TAPS = (2, 3, 5, 6, 7, 8)  # both readings of 2/5/7
TOLERANCE = 1e-4  # relative, fp32


def requests(count: int = 48) -> list[Request]:
    """Very unequal lengths; every third prompt shares a prefix of 70 tokens; sampled, each with its seed."""
    rng = random.Random(1)
    prefix = [rng.randrange(1500) for _ in range(70)]
    made = []
    for i in range(count):
        prompt = [rng.randrange(1500) for _ in range(rng.choice([2, 5, 20, 60, 150]))]
        prompt = prefix + prompt if i % 3 == 0 else prompt
        made.append(
            Request(
                f"s{i:02d}#0",
                prompt,
                max_tokens=rng.choice([1, 2, 9, 40, 110]),
                temperature=1.0,
                top_p=0.95,
                seed=1000 + i,
                ignore_eos=i % 2 == 0,
            )
        )
    return made


def answer_into(
    engine: VerifierEngine,
    folder: Path,
    wanted: list[Request],
    taps: tuple[int, ...] = TAPS,
    on_commit: Callable[[int], None] = lambda answers: None,
    dtype: str | None = None,
    **run,
) -> StateStore:
    """Answer (or prefill) `wanted` into the store in `folder` and return it; a dropped sample is a failure.

    on_commit: told how many are committed. dtype: of the store, else the engine's.
    """
    engine.open_store(folder, layout_of(engine, taps, dtype), StatesSettings(shard_mib=16, extent_rows=32, check_one_in=20))
    with ResponseLog(folder) as log:

        def commit(finished: Finished) -> tuple:
            assert finished.dropped is None, finished.dropped
            log.append(
                Response(
                    finished.request.id,
                    finished.request.prompt_token_ids,
                    finished.response_token_ids,
                    finished.finish_reason,
                    {},
                    "test",
                    False,
                )
            )
            on_commit(len(log))
            return ()

        engine.run(wanted, commit, **run)
    engine.close_store()
    return StateStore(folder)


def layout_of(engine: VerifierEngine, taps: tuple[int, ...] = TAPS, dtype: str | None = None) -> StateLayout:
    return StateLayout(
        taps=taps, hidden_size=engine.facts.hidden_size, dtype=dtype or engine.settings.dtype, verifier="tiny",
        verifier_revision=engine.facts.revision, tokenizer_sha256="0" * 64,
    )  # fmt: skip


def whole(sample: Sample) -> list[int]:
    return sample.response.prompt_token_ids + sample.response.response_token_ids


def logprobs_of(sample: Sample, reference: Reference) -> torch.Tensor:
    """[n-1] log-probability of each next token, from the stored final states and the lm_head."""
    logits = sample.final @ reference.lm_head.T  # [n-1, V]
    return logits.log_softmax(-1).gather(1, torch.tensor(whole(sample)[1:])[:, None])[:, 0]


def assert_equals_reference(store: StateStore, reference: Reference, every: int = 1) -> None:
    """Every stored row, and every log-probability from the first response token on.

    every: of every so many samples only; the reference computes one at a time.
    """
    for sample_id in store.ids()[::every]:
        sample = store.read(sample_id)
        tokens, prompt = whole(sample), len(sample.response.prompt_token_ids)
        assert len(sample.taps) == len(sample.final) == len(sample.logprob) == len(tokens) - 1
        taps, final = reference.states(tokens[:-1], store.layout.taps)
        assert largest_error(sample.taps, taps) < TOLERANCE, sample_id
        assert largest_error(sample.final, final) < TOLERANCE, sample_id
        torch.testing.assert_close(sample.logprob[prompt - 1 :], logprobs_of(sample, reference)[prompt - 1 :], rtol=0, atol=1e-3)
