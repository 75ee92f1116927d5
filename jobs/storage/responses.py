"""`responses.jsonl`: the verifier's answers, one JSON line each, and the commit of a sample's states.

Decision: a sample exists exactly when its line stands here with its newline. The line is written and
fsynced last, after the states, so a reader needs no other sign of completeness and a crash at any
moment loses at most the answers in flight. Token ids are the engine's own, never re-tokenized (a
second tokenization of the same text may differ), the stop id kept.
"""

import contextlib
import dataclasses
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from jobs.errors import JobError, MustFix
from jobs.storage.files import JsonLog, held, whole_lines

RESPONSES = "responses.jsonl"


@dataclass(frozen=True)
class Response:
    """One answered turn. `rows` hidden states belong to it: the last token is never fed back."""

    id: str  # "<prompt id>#<turn>"
    prompt_token_ids: list[int]
    response_token_ids: list[int]
    finish_reason: str  # "stop", "length" or "repetition"
    sampling: dict  # temperature, top_p, seed: what the answer was drawn with
    source: str
    thinking: bool

    @property
    def tokens(self) -> int:
        return len(self.prompt_token_ids) + len(self.response_token_ids)

    @property
    def rows(self) -> int:
        return max(self.tokens - 1, 0)

    @classmethod
    def parse(cls, line: bytes, *, path: Path, number: int | None = None) -> "Response":
        """Read one line; anything but exactly the fields above is a MustFix naming file and line."""
        fields = {field.name for field in dataclasses.fields(cls)}
        try:
            value = json.loads(line)
            if not isinstance(value, dict) or set(value) != fields:
                raise ValueError(f"the fields are not {', '.join(sorted(fields))}")
        except ValueError as error:
            place = f"Line {number} of {path.name}" if number else f"A line of {path.name}"
            raise MustFix(f"{place} is not a response: {error}", where=str(path), remedy="restore the file") from None
        return cls(**value)


def scan_responses(path: Path) -> Iterator[tuple[int, int, Response]]:
    """Yield (byte offset, bytes, response) of every whole line; an id that stands there twice is a MustFix."""
    seen: set[str] = set()
    for number, offset, line in whole_lines(path):
        response = Response.parse(line, path=path, number=number)
        if response.id in seen:
            raise MustFix(
                f"Line {number} of {path.name} repeats the answer {response.id}",
                where=str(path),
                remedy="remove the folder and generate the split again",
            )
        seen.add(response.id)
        yield offset, len(line), response


class ResponseLog:
    """The driver's side of a state folder. Opening it cuts a torn last line off; one process at a time.

    `append` is THE commit: call it only after `StateWriter.finish` and `StateWriter.sync` of that sample.
    """

    def __init__(self, folder: Path):
        self.path = Path(folder) / RESPONSES
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._lock = threading.Lock()
        with contextlib.ExitStack() as stack:
            stack.enter_context(held(self.path.with_name("responses.lock"), what="these responses"))
            self._log = JsonLog(self.path)
            stack.callback(self._log.close)
            self._ids = {response.id for _, _, response in scan_responses(self.path)}
            self._open = stack.pop_all()

    def append(self, response: Response) -> None:
        """Write the line and fsync it. An id that is already there is refused: an answer is never repeated."""
        with self._lock:
            if response.id in self._ids:
                raise JobError(f"The answer {response.id} is already committed", where=str(self.path))
            self._log.append_json(dataclasses.asdict(response), sync=True)
            self._ids.add(response.id)

    def ids(self) -> set[str]:
        with self._lock:
            return set(self._ids)

    def __iter__(self) -> Iterator[Response]:
        return (response for _, _, response in scan_responses(self.path))

    def __len__(self) -> int:
        return len(self._ids)

    def close(self) -> None:
        self._open.close()

    def __enter__(self) -> "ResponseLog":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
