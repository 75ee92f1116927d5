"""Right results of speculators' generator for any number and length of sequences.

Three silent or late faults of `generate` (measured; NOTES.md):

- 0.3.0 aborts a request after its first chunk, so a batch of more tokens than one forward pass
  takes comes back with rows of other sequences in it.
- 0.4.0.1 returns results in the lexicographic order of request ids (`req_0_10` before `req_0_2`),
  so any batch of more than ten sequences comes back permuted.
- both hold `MAX_NUM_SEQS` running requests and none is ever told that it is finished, so in
  0.4.0.1 a larger batch raises.

`generate` is given at most as many sequences and, where chunks are lost, tokens as one pass takes,
and the results of each call are put back into the order of its sequences.
"""

import functools
from collections.abc import Iterator
from types import ModuleType

from compat import registry
from compat.importing import when_imported
from jobs.errors import JobError, MustFix

NAME = "speculators_results"
GENERATOR = "speculators.data_generation.vllm_hidden_states_generator"


def needed() -> bool:
    """Whether the installed generator loses chunks or sorts its results by request id."""
    from importlib import import_module

    module = import_module(GENERATOR)
    return _loses_chunks(module) or _sorts_by_id(module)


def apply() -> None:
    when_imported(GENERATOR, _patch)


def _loses_chunks(module: ModuleType) -> bool:
    return "for req_id in scheduler_output.num_scheduled_tokens:" in registry.source(module.VllmHiddenStatesGenerator.generate)


def _sorts_by_id(module: ModuleType) -> bool:
    return "sorted(request_id_to_idx.keys())" in registry.source(module.VllmHiddenStatesGenerator.generate)


def batches(lengths: list[int], most: int, tokens: int | None) -> Iterator[slice]:
    """Consecutive slices of at most `most` sequences and, if given, `tokens` tokens in all (one longer sequence alone)."""
    first = total = 0
    for place, length in enumerate(lengths):
        full = place - first == most or (tokens is not None and total + length > tokens)
        if place > first and full:
            yield slice(first, place)
            first, total = place, 0
        total += length
    if first < len(lengths):
        yield slice(first, len(lengths))


def _patch(module: ModuleType) -> None:
    generator = module.VllmHiddenStatesGenerator
    loses_chunks, sorts_by_id = _loses_chunks(module), _sorts_by_id(module)
    if not (loses_chunks or sorts_by_id):
        return
    registry.expect(NAME, generator.generate, ["self", "token_ids"])
    generate = generator.generate

    @functools.wraps(generate)
    def in_order(self, token_ids):
        sequences = token_ids.tolist() if hasattr(token_ids, "tolist") else list(token_ids)
        if not sequences:
            return generate(self, token_ids)
        scheduler = self.vllm_config.scheduler_config
        budget = scheduler.max_num_batched_tokens if loses_chunks else None
        longest = max(map(len, sequences))
        if budget is not None and longest > budget:
            raise MustFix(
                f"A sequence of {longest} tokens does not fit into one forward pass of {budget}",
                where="speculators 0.3.0 loses later chunks",
                remedy="raise max_model_len of the generator",
            )
        results = []
        for part in batches([len(ids) for ids in sequences], scheduler.max_num_seqs, budget):
            given = generate(self, sequences[part])
            order = sorted(range(len(given)), key=str) if sorts_by_id else range(len(given))
            results += [result for _, result in sorted(zip(order, given, strict=True), key=lambda pair: pair[0])]
        _check(self, sequences, results)
        return results

    registry.replace(generator, "generate", in_order, NAME)


def _check(generator, sequences: list[list[int]], results: list[dict]) -> None:
    """Every result belongs to its sequence and has one row a token; a bug of this shim otherwise."""
    longest = generator.vllm_config.model_config.max_model_len - 1
    for place, (ids, result) in enumerate(zip(sequences, results, strict=True)):
        rows = {len(state) for state in result["hidden_states"]}
        if result["input_ids"].tolist() != list(ids)[:longest] or rows != {len(result["input_ids"])}:
            raise JobError(
                f"speculators' generator returned another sequence at place {place}, or {rows} rows for {len(ids)} tokens",
                where="compat.speculators_results",
            )


SHIM = registry.Shim(
    name=NAME,
    of="speculators",
    patches=(f"{GENERATOR}.VllmHiddenStatesGenerator.generate",),
    why="0.3.0 mixes up rows once a batch needs two passes; 0.4.0.1 permutes batches over 10 and refuses those over 32",
    upstream="none yet; later releases of speculators drop the generator",
    needed=needed,
    apply=apply,
)
