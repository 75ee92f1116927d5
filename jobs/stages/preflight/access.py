"""What the run reaches for: repositories of the hub, prompts, existing heads, tokenizer, the bucket."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jobs.backup import backup_uri
from jobs.context import Context
from jobs.draft.statistics import MINIMUM_PROMPTS
from jobs.errors import JobError, MustFix, TryAgain
from jobs.settings import PromptSource, PromptsSettings, Settings
from jobs.stages import hub, push, speculation, standard
from jobs.stages import prompts as stages_prompts
from jobs.stages.preflight.described import stand_in
from jobs.stages.preflight.machine import FULL
from jobs.stages.preflight.problem import Problem, problem_of
from jobs.storage import bucket, saved_run
from jobs.storage.responses import RESPONSES
from jobs.verifier.facts import VerifierFacts, default_taps
from jobs.verifier.fit import refuse_too_large
from jobs.verifier.loading import refuse_missing_loader
from jobs.verifier.tiny import CHECKPOINT


def repositories(context: Context, found: dict[str, Any]) -> Iterator[Problem]:
    """Every repository of the hub is there, readable with this token, its revision a commit; `found` gets its bytes."""
    settings = context.settings
    wanted = [("verifier.model", settings.verifier.model, settings.verifier.revision, "model")]
    wanted += [(f"heads.candidates, {c.name}", c.model, c.revision, "model") for c in settings.heads.candidates]
    wanted += [("prompts", source, revision, "dataset") for source, revision in hub.prompt_repositories(settings.prompts)]
    for key, name, revision, kind in wanted:
        if hub.is_hub_id(name):
            try:
                found[name] = hub.check(name, hub.require_commit(name, revision, key), kind)
            except TryAgain as error:
                yield error
                return  # a hub that does not answer for one does not for the next: do not wait for each
            except JobError as error:
                yield error.sentence()
        elif name != "tiny" and not (Path(name) / "config.json").is_file():
            yield f"{key} = {name!r} is neither a hub id nor a folder with a config.json"


def endpoints(context: Context) -> Iterator[str]:
    """The servers of `generate.endpoints` are this verifier's. One that does not answer is told, it may be back when it is asked."""
    if not context.settings.generate.endpoints or context.run.stage("generate.train")["state"] == "done":
        return
    from jobs.verifier.endpoints import unfit

    for error in unfit(context.settings).values():
        if isinstance(error, TryAgain):
            context.note(error.sentence())
        else:
            yield error.sentence()


def prompts(context: Context) -> Iterator[str]:
    """Files whose every line is a prompt, standard sets that are known, and an eval split large enough for the intervals."""
    wanted = context.settings.prompts
    evaluation = wanted.model_copy(update={"source": wanted.eval_source})
    for part in (wanted, *((evaluation,) if wanted.eval_source else ()), *wanted.mix):
        if part.source.endswith((".jsonl", ".json")):
            yield from _lines(context, part)
    for each in wanted.standard:
        if each.source and each.source.endswith((".jsonl", ".json")) and not Path(each.source).is_file():
            yield f"the prompts {each.source} are no file: correct the source of {each.name} in prompts.standard"
    answers = context.settings.generate.responses
    for split in ("eval", "train") if answers else ():
        if not (Path(answers) / split / RESPONSES).is_file():
            yield f"generate.responses = {answers!r} holds no {split}/{RESPONSES}: give the folder of existing answers, or leave it out"
    for each in wanted.standard:
        if standard.source_of(each) is None:
            yield f"no standard set is called {each.name!r}: known are {', '.join(standard.KNOWN)}; for another one give its source"
    if wanted.eval_samples < MINIMUM_PROMPTS:
        yield f"prompts.eval_samples = {wanted.eval_samples} is too small for a confidence interval, which needs {MINIMUM_PROMPTS} prompts"


def _lines(context: Context, part: PromptsSettings | PromptSource) -> Iterator[str]:
    """The first line of a file that is no prompt: after `fetch` it would cost the time of half a terabyte."""
    try:
        for _ in stages_prompts.read(context, part):
            context.should_stop.raise_if_set()
    except MustFix as error:
        yield error.sentence()


def checkpoint_folder(settings: Settings) -> Path | None:
    """The verifier's folder where it needs no download: the tiny one, or a local path."""
    folder = CHECKPOINT if settings.verifier.model == "tiny" else Path(settings.verifier.model)
    return folder if (folder / "config.json").is_file() else None


def verifier_here(context: Context) -> Path | None:
    """The verifier's folder if it is on this machine already, whole: a local one, or a snapshot in the hub's cache."""
    wanted = context.settings.verifier
    if not hub.is_hub_id(wanted.model):
        return checkpoint_folder(context.settings)
    revision = _revision(context)
    return hub.cached(wanted.model, revision) if revision else None


def _revision(context: Context) -> str | None:
    """The verifier's commit, as set or as an earlier start of this run took it; None where the newest is still to be taken."""
    wanted = context.settings.verifier
    fetched = context.fetched()["verifier"] if (context.path / "fetched.json").exists() else {}
    return wanted.revision or (fetched.get("revision") if fetched.get("model") == wanted.model else None)


def fits(context: Context) -> Iterator[Problem]:
    """Loader, memory, settings, tokenizer and existing heads against the verifier, which may still be on the hub."""
    settings = context.settings
    try:
        refuse_missing_loader(settings.verifier)
    except JobError as error:
        yield error.sentence()
    facts, found = _against_the_verifier(context)
    yield from found
    configs = {c.name: config for c in settings.heads.candidates if (config := _config(c.model, c.revision)) is not None}
    for name, config in configs.items() if facts else ():
        yield from head_misfits(name, config, facts.hidden_size, facts.vocab_size)
    yield from speculation.problems(context, configs, default_taps(facts.layers if facts else 0))


def _against_the_verifier(context: Context) -> tuple[VerifierFacts | None, list[Problem]]:
    """What the verifier says of itself, None where it cannot be had, and what of settings and machine does not go with it."""
    model, here = context.settings.verifier.model, verifier_here(context)
    if here is not None:
        return _judged(here, context.settings)
    if not hub.is_hub_id(model):
        return None, []  # `repositories` says it
    try:
        with stand_in(context, _revision(context)) as folder:
            facts, found = _judged(folder, context.settings)
    except JobError as error:
        return None, [problem_of(error)]
    # The folder was made for the questions and is gone.
    return facts, [sentence.replace(str(folder), f"{model}@{folder.name[:8]}") for sentence in found]


def _judged(folder: Path, settings: Settings) -> tuple[VerifierFacts | None, list[str]]:
    try:
        facts = VerifierFacts.read(folder)
    except JobError as error:
        return None, [error.sentence()]
    found = []
    try:
        refuse_too_large(folder, settings.verifier)
    except JobError as error:
        found.append(error.sentence())
    return facts, [*found, *misfits(settings, facts), *_tokenizer(folder, facts, settings.verifier.trust_remote_code)]


def _config(model: str, revision: str | None) -> dict[str, Any] | None:
    """config.json of a folder or a repository; None where there is none, which another check says."""
    if hub.is_hub_id(model):
        return hub.config(model, revision)
    try:
        return json.loads((Path(model) / "config.json").read_text())
    except (OSError, ValueError):
        return None


def misfits(settings: Settings, facts: VerifierFacts) -> list[str]:
    """What the settings ask of this verifier that it cannot do."""
    found = []
    try:
        facts.checked_taps(settings.verifier.taps)
    except JobError as error:
        found.append(error.sentence())
    if settings.vocab.size is not None and settings.vocab.size > facts.vocab_size:
        found.append(f"vocab.size = {settings.vocab.size} exceeds the verifier's vocabulary of {facts.vocab_size}")
    if settings.verifier.max_model_len > facts.max_position_embeddings:
        found.append(
            f"verifier.max_model_len = {settings.verifier.max_model_len} exceeds the verifier's {facts.max_position_embeddings} positions"
        )
    return found


def head_misfits(name: str, config: dict[str, Any], hidden_size: int, vocab_size: int) -> list[str]:
    """What speaks against an existing head for a verifier of this shape, from the head's config.json alone."""
    layer = config.get("transformer_layer_config") or config
    hidden, vocab = config.get("target_hidden_size") or layer.get("hidden_size"), layer.get("vocab_size")
    found = []
    if hidden not in (None, hidden_size):
        found.append(f"head {name} is for a hidden size of {hidden}, the verifier has {hidden_size}: take it out of heads.candidates")
    if vocab not in (None, vocab_size):
        found.append(f"head {name} is for a vocabulary of {vocab}, the verifier has {vocab_size}: take it out of heads.candidates")
    return found


def _tokenizer(folder: Path, facts: VerifierFacts, trust: bool) -> Iterator[str]:
    """It loads as this user, has a chat template, and none of its ids lies outside the verifier's embedding."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(str(folder), trust_remote_code=trust)
    except Exception as error:  # remote code raises what it likes
        yield f"the tokenizer in {folder} does not load ({type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}): restore its files, and verifier.trust_remote_code if it is code"
        return
    if not getattr(tokenizer, "chat_template", None):
        yield f"the tokenizer in {folder} has no chat template: restore chat_template.jinja or tokenizer_config.json"
    if len(tokenizer) > facts.vocab_size:
        yield f"the tokenizer in {folder} knows {len(tokenizer)} ids, the verifier {facts.vocab_size}: they are not of one model"


def destination(context: Context, found: dict[str, Any]) -> Iterator[Problem]:
    """The bucket does everything a push asks of it, at what rate; and nobody else's run is saved where this one would be."""
    settings = context.settings.push
    try:
        found |= bucket.probe(push.destination(context), settings)
    except JobError as error:
        if isinstance(error.__cause__, OSError) and error.__cause__.errno in FULL:
            raise error.__cause__ from None  # told with all else that is wanted on that disk
        yield problem_of(error)
        return
    uri = backup_uri(context.settings, context.path)
    if uri is not None:
        try:
            problem = saved_run.refusal(uri, settings, context.run.ledger["run_id"], saved_run.record_of(context.path))
        except JobError as error:
            problem = error
        if problem is not None:
            yield problem_of(problem)
