"""Responses that exist already, of this verifier or refused."""

from pathlib import Path

from jobs.context import Context
from jobs.errors import MustFix
from jobs.stages.conversations import seeded
from jobs.storage.responses import RESPONSES, Response, scan_responses
from jobs.storage.shards import STORE
from jobs.storage.states import StateLayout
from jobs.verifier.facts import VerifierFacts


def existing_responses(context: Context, split: str, facts: VerifierFacts, layout: StateLayout) -> list[Response]:
    """The responses under `generate.responses`, in seeded order and within the token budget.

    Raises MustFix for a missing file, one of another verifier or tokenizer, or ids out of the vocabulary.
    """
    assert context.settings.generate.responses is not None
    folder = Path(context.settings.generate.responses) / split
    if not (folder / RESPONSES).is_file():
        raise MustFix(
            "There are no responses",
            where=str(folder / RESPONSES),
            remedy="name a folder with eval/responses.jsonl and train/responses.jsonl in generate.responses",
        )
    refuse_other_verifier(folder, layout)
    found = [response for _, _, response in scan_responses(folder / RESPONSES)]
    for response in found:
        largest = max([*response.prompt_token_ids, *response.response_token_ids], default=0)
        if largest >= facts.vocab_size:
            raise MustFix(
                f"The response {response.id} holds token {largest}, the verifier has {facts.vocab_size}: it is another verifier's",
                where=str(folder / RESPONSES), remedy="give responses of this verifier",
            )  # fmt: skip
    seed, budget = context.settings.job.seed, context.settings.generate.train_token_budget
    found.sort(key=lambda response: seeded(seed, response.id))
    if split == "train" and budget is not None:
        total, kept = 0, []
        for response in found:
            if total >= budget:
                break
            kept.append(response)
            total += response.tokens
        found = kept
    return found


def refuse_other_verifier(folder: Path, layout: StateLayout) -> None:
    """Responses beside a `store.json` say whose they are."""
    if not (folder / STORE).exists():
        return
    theirs = StateLayout.load(folder)
    for what in ("verifier_revision", "tokenizer_sha256"):
        if getattr(theirs, what) != getattr(layout, what):
            raise MustFix(
                f"The responses are of another {'verifier' if what == 'verifier_revision' else 'tokenizer'}: "
                f"{theirs.verifier} at {getattr(theirs, what)[:12]}, this one is {getattr(layout, what)[:12]}",
                where=str(folder / STORE), remedy="use that verifier, or generate the responses again",
            )  # fmt: skip
