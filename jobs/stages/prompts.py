"""Prompts: conversations from a file, a `datasets` name or the shipped set, split into train and eval.

Only what the *user's side* says is kept (system, user and tool turns): the verifier answers every
turn itself, in the context of its own earlier answers, so a data set's assistant turns are
discarded. Train and eval are disjoint by content, not by id: a training row with a turn that opens
an eval conversation is dropped, and so is one that overlaps with a standard prompt
(`jobs.stages.standard`). The eval split has every source of the mix in its share. Which rows are taken depends on the seed and on their ids,
never on the order of the file.
"""

import hashlib
import itertools
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from jobs.context import Context
from jobs.errors import MustFix, TryAgain
from jobs.settings import PromptSource, PromptsSettings, StandardPrompts
from jobs.stages import standard
from jobs.stages.conversations import seeded, turns_of
from jobs.storage.files import write_atomically
from jobs.verifier.chat import Chat
from jobs.verifier.tiny import PROMPTS as SHIPPED
from jobs.wording import counted

NAME = "prompts"
SETTINGS = ("prompts", "job.seed", "verifier.model", "verifier.max_model_len")

ROLES = {"human": "user", "user": "user", "system": "system", "tool": "tool", "gpt": "assistant", "assistant": "assistant"}


def inputs(context: Context) -> list[Path]:
    files = [context.path / "fetched.json"]
    settings = context.settings.prompts
    for source in (settings.source, settings.eval_source, *(part.source for part in (*settings.mix, *settings.standard))):
        if source and source.endswith(".jsonl"):
            files.append(Path(source).absolute())
    return files


def outputs(context: Context) -> list[Path]:
    return [context.path / "prompts.jsonl"]


def run(context: Context) -> dict[str, Any]:
    settings, seed = context.settings.prompts, context.settings.job.seed
    counts = {"read": 0, "duplicate": 0, "too_long": 0, "in_eval_too": 0, "empty": 0}
    chat = Chat.load(context.verifier_path)
    sets = standard_sets(context, _Picker(context, chat, counts))
    pick = _Picker(context, chat, counts)
    pick.forbidden = standard.Overlap(map(_user_turns, sets))
    # Rows marked eval first: of two copies the one that was meant for judging stays.
    rows = pick.distinct(sorted(read(context, settings), key=lambda row: row["split"] != "eval"))
    marked = [row for row in rows if row["split"] == "eval"]
    if settings.eval_source:
        marked = pick.distinct(read(context, settings.model_copy(update={"source": settings.eval_source})))
    # Sources of the mix are judged too, in the share they are trained on, unless somebody chose the eval split.
    parts = [(part, pick.distinct(read(context, part))) for part in settings.mix]
    evaluation = []
    for part, found in parts if not marked else ():
        evaluation += pick.fitting(_seeded_order(found, seed), round(settings.eval_samples * part.samples / settings.train_samples))
    evaluation += pick.fitting(_seeded_order(marked or rows, seed), settings.eval_samples - len(evaluation))
    # The opening turn is what a conversation is about; "And then?" may follow in both splits.
    held_out = {_user_turns(row)[0] for row in evaluation}
    training: list[dict[str, Any]] = []
    for part, found in parts:
        training += pick.fitting(pick.disjoint(found, held_out, seed), part.samples)
    rest = pick.disjoint([row for row in rows if row["split"] != "eval"], held_out, seed)
    training += pick.fitting(rest, settings.train_samples - len(training))
    for split, chosen, wanted in (("eval", evaluation, settings.eval_samples), ("train", training, settings.train_samples)):
        if not chosen:
            raise MustFix(
                f"No usable prompt is left for the {split} split ({counts})", where=settings.source,
                remedy="give more prompts, or raise prompts.max_prompt_tokens",
            )  # fmt: skip
        if len(chosen) < wanted:
            context.note(f"prompts: {counted(len(chosen), f'{split} conversations')} instead of the {wanted} asked for")
        for row in chosen:
            row["split"] = split
    lines = [json.dumps(row, ensure_ascii=False) for row in evaluation + sets + training]
    write_atomically(context.path / "prompts.jsonl", ("\n".join(lines) + "\n").encode())
    return {"eval": len(evaluation), "train": len(training), **({"standard": len(sets)} if settings.standard else {}), **counts}


def standard_sets(context: Context, pick: "_Picker") -> list[dict[str, Any]]:
    """The rows of every standard set that was asked for; MustFix for one that is unknown, cannot be read or gives none."""
    chosen: list[dict[str, Any]] = []
    for wanted in context.settings.prompts.standard:
        part = standard.source_of(wanted)
        if part is None:
            raise MustFix(
                f"No standard set is called {wanted.name!r}", where="prompts.standard",
                remedy=f"known are {', '.join(standard.KNOWN)}; for another one give its source",
            )  # fmt: skip
        raw = _json_rows(Path(part.source)) if _is_file(part.source) else _dataset_rows(part, _revision(context, part))
        rows = [(where, _standard_row(wanted, number, where, row)) for number, (where, row) in enumerate(raw)]
        whole = [_row(row, "messages", where=where, name=wanted.name) for where, row in rows]
        found = pick.fitting(_seeded_order(pick.distinct(whole), context.settings.job.seed), wanted.samples or len(whole))
        if not found:
            raise MustFix(
                f"The standard set {wanted.name} gives no usable prompt",
                where=part.source,
                remedy="correct its source, or raise prompts.max_prompt_tokens",
            )
        chosen += found
    return chosen


def check_data_sets(settings: PromptsSettings, revisions: Mapping[str, str]) -> None:
    """The first row of every data set is a prompt; `fetch` asks before it downloads the verifier. Files are read by preflight.

    revisions: data set -> commit. MustFix for a wrong column, name, subset or split, TryAgain where the hub does not answer.
    """
    parts = [settings, *([settings.model_copy(update={"source": settings.eval_source})] if settings.eval_source else []), *settings.mix]
    for part in parts:
        if part.source != "shipped" and not _is_file(part.source):
            for where, row in itertools.islice(_dataset_rows(part, revisions.get(part.source)), 1):
                _row(row, part.messages_field, where=where, name=part.source)
    for wanted in settings.standard:
        part = standard.source_of(wanted)
        if part is not None and not _is_file(part.source):
            for where, row in itertools.islice(_dataset_rows(part, revisions.get(part.source)), 1):
                _standard_row(wanted, 0, where, row)


def _is_file(source: str) -> bool:
    return source.endswith((".jsonl", ".json"))


def _standard_row(wanted: StandardPrompts, number: int, where: str, row: dict[str, Any]) -> dict[str, Any]:
    found = standard.row_of(wanted, number, row)
    if found is None:
        raise MustFix("The row has no text of a question", where=where, remedy=f"give it in one of {', '.join(standard.FIELDS)}")
    return found


def read(context: Context, part: PromptsSettings | PromptSource) -> Iterator[dict[str, Any]]:
    """Rows {id, messages, source, split} of a source; MustFix names the line that is wrong."""
    if part.source == "shipped":
        yield from _read_jsonl(SHIPPED, part.messages_field)
    elif _is_file(part.source):
        yield from _read_jsonl(Path(part.source), part.messages_field)
    else:
        for where, row in _dataset_rows(part, _revision(context, part)):
            yield _row(row, part.messages_field, where=where, name=part.source)


def _revision(context: Context, part: PromptsSettings | PromptSource) -> str | None:
    return context.fetched()["prompts"].get(part.source, {}).get("revision")


def _read_jsonl(path: Path, field: str) -> Iterator[dict[str, Any]]:
    for where, row in _json_rows(path):
        yield _row(row, field, where=where, name=path.stem)


def _json_rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """(file and line, object) of every line that is not blank."""
    try:
        file = path.open(encoding="utf-8")
    except OSError as error:
        raise MustFix(
            f"The prompts cannot be read: {error.strerror}", where=str(path), remedy="name a JSONL file in prompts.source"
        ) from error
    with file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            where = f"{path}, line {number}"
            try:
                row = json.loads(line)
            except ValueError as error:
                raise MustFix(f"The line is not JSON: {error}", where=where, remedy="correct or remove it") from error
            if not isinstance(row, dict):
                raise MustFix("The line is no JSON object", where=where, remedy="write one object a line with `messages`")
            yield where, row


def _dataset_rows(part: PromptsSettings | PromptSource, revision: str | None) -> Iterator[tuple[str, dict[str, Any]]]:
    """(name and number, row). revision: the commit that `fetch` resolved; None for a folder on this machine."""
    import datasets  # heavy, and absent where only files are used
    from datasets.exceptions import DatasetNotFoundError

    name = part.source
    try:
        data = datasets.load_dataset(name, part.subset, split=part.dataset_split, revision=revision)
    except (DatasetNotFoundError, FileNotFoundError, ValueError) as error:
        raise MustFix(
            f"The data set {name!r} cannot be loaded: {error}",
            where="prompts",
            remedy="correct the name, subset, split or revision, or give a JSONL file",
        ) from error
    except (ConnectionError, OSError) as error:
        raise TryAgain(
            f"The data set {name!r} cannot be reached: {error}", where="prompts", remedy="run it again when the hub answers"
        ) from error
    for number, row in enumerate(data):
        yield f"{name}, row {number}", dict(row)


def _row(row: dict[str, Any], field: str, *, where: str, name: str) -> dict[str, Any]:
    turns = row.get(field)
    if isinstance(turns, str):
        turns = [{"role": "user", "content": turns}]
    if not isinstance(turns, list) or not turns:
        raise MustFix(
            f"`{field}` is missing or empty", where=where, remedy="write a list of {role, content}, or set prompts.messages_field"
        )
    messages = []
    for turn in turns:
        role = ROLES.get(str(turn.get("role", turn.get("from")))) if isinstance(turn, dict) else None
        content = turn.get("content", turn.get("value")) if isinstance(turn, dict) else None
        if role is None or not isinstance(content, str):
            raise MustFix(
                f"A turn is no message: {str(turn)[:80]!r}",
                where=where,
                remedy="each needs a role (system, user, tool, assistant) and text content",
            )
        if role != "assistant":
            messages.append({"role": role, "content": content})
    split = row.get("split", "train")
    if split not in ("train", "eval"):
        raise MustFix(f"`split` is {split!r}", where=where, remedy="write train or eval")
    identity = str(row.get("id") or hashlib.sha256(json.dumps(messages).encode()).hexdigest()[:16])
    if "#" in identity or any(c.isspace() for c in identity):
        raise MustFix(
            f"The id {identity!r} holds a # or white space", where=where, remedy="use another id, # separates the turns of a conversation"
        )
    return {"id": identity, "messages": messages, "source": str(row.get("source", name)), "split": split}


def _user_turns(row: dict[str, Any]) -> list[str]:
    """The user's turns as they count for sameness: case and white space do not."""
    return [" ".join(m["content"].casefold().split()) for m in row["messages"] if m["role"] == "user"]


def _seeded_order(rows: Iterable[dict[str, Any]], seed: int) -> list[dict[str, Any]]:
    return sorted(rows, key=lambda row: seeded(seed, row["id"]))


class _Picker:
    """Takes rows from several sources, counting what it leaves out and why."""

    def __init__(self, context: Context, chat: Chat, counts: dict[str, int]):
        self.context, self.chat, self.counts = context, chat, counts
        self.forbidden = standard.Overlap(())  # what no row taken from now on may overlap with
        self._seen_ids: set[str] = set()
        self._seen: set[tuple[str, ...]] = set()
        self._left_out: set[str] = set()
        self._taken = 0

    def distinct(self, rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
        """Rows whose id and whose content no earlier row had, over all sources."""
        kept = []
        for row in rows:
            self.counts["read"] += 1
            content = tuple(_user_turns(row))
            if not any(content):
                self.counts["empty"] += 1
            elif row["id"] in self._seen_ids or content in self._seen:
                self.counts["duplicate"] += 1
            else:
                self._seen_ids.add(row["id"])
                self._seen.add(content)
                kept.append(row)
        return kept

    def disjoint(self, rows: list[dict[str, Any]], held_out: set[str], seed: int) -> list[dict[str, Any]]:
        """Rows without a turn that opens an eval conversation, in seeded order."""
        kept = [row for row in rows if not held_out & set(_user_turns(row))]
        self.counts["in_eval_too"] += len(rows) - len(kept)
        return _seeded_order(kept, seed)

    def fitting(self, rows: Iterable[dict[str, Any]], wanted: int) -> list[dict[str, Any]]:
        """The first `wanted` rows whose first prompt is short enough, each with its mode of answering."""
        settings, seed, kept = self.context.settings.prompts, self.context.settings.job.seed, []
        for row in rows:
            if len(kept) == wanted:
                break
            self.context.should_stop.raise_if_set()
            draw = int.from_bytes(seeded(seed, f"thinking:{row['id']}")[:8]) / 2**64
            thinking = draw < settings.thinking_share
            if len(self.chat.render(turns_of(row["messages"])[0], thinking)) > settings.max_prompt_tokens:
                self._leave_out(row, "too_long")
                continue
            if any(turn in self.forbidden for turn in _user_turns(row)):
                self._leave_out(row, "in_standard_too")
                continue
            kept.append(row | {"thinking": thinking})
            self._taken += 1
            self.context.progress(self._taken, settings.eval_samples + settings.train_samples, "prompts")
        return kept

    def _leave_out(self, row: dict[str, Any], why: str) -> None:
        """Count a row once, whichever splits it was looked at for."""
        if row["id"] not in self._left_out:
            self._left_out.add(row["id"])
            self.counts[why] = self.counts.get(why, 0) + 1
