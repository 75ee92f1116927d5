"""What a person sees while a run is going on: a live line on a terminal, plain lines otherwise.

Everything goes to STANDARD ERROR: standard output belongs to `--json`. A rented machine is watched
through ssh, docker logs or a CI page, and none of the three may end the run: a terminal that goes
away, a closed pipe or a locale without Unicode silences or replaces what is shown, and nothing else.

Plain lines carry a UTC time, no control codes, and at most one progress line (and one line of
training figures) every five seconds, so that a night of logs stays readable.

What the whole run still takes and costs is computed elsewhere (forecast.py) and handed in as `outlook`.
"""

import contextlib
import io
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any, Literal, TextIO

from rich import box
from rich.console import Console, Group, RenderableType
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn
from rich.table import Table
from rich.text import Text

from jobs.reporting import figures
from jobs.reporting.progress import Outlook, RateMeter

SECONDS_BETWEEN_LINES = 5.0
STANDARD_ERROR = 2
# Of a line of the training log, what a person watches; the rest is for the curves.
METRICS = (
    "step", "loss", "accuracy_by_step", "acceptance_estimate", "evaluation", "learning_rate", "grad_norm", "data_wait", "bad_steps",
)  # fmt: skip


class ForgivingStream(io.TextIOBase):
    """A text stream that never raises: what cannot be written is lost, the run goes on.

    Covers a closed pipe (EPIPE), a terminal that hung up (EIO), a stream closed by somebody else, a
    full disk behind a redirection, characters the locale cannot write (replaced by `?`) and a write
    from a signal handler in the middle of another one.
    """

    def __init__(self, stream: TextIO):
        self._stream = stream
        self.gone = False

    @property
    def encoding(self) -> str:  # rich picks ASCII boxes by this
        return getattr(self._stream, "encoding", None) or "ascii"

    def isatty(self) -> bool:
        try:
            return self._stream.isatty()
        except (OSError, ValueError):
            return False

    def fileno(self) -> int:
        return self._stream.fileno()

    def write(self, text: str) -> int:
        self._try(lambda: self._stream.write(self._encodable(text)))
        return len(text)

    def flush(self) -> None:
        self._try(self._stream.flush)

    def _encodable(self, text: str) -> str:
        return text.encode(self.encoding, errors="replace").decode(self.encoding, errors="replace")

    def _try(self, action: Callable[[], object]) -> None:
        if self.gone:
            return
        try:
            action()
        except RuntimeError:  # "reentrant call inside BufferedWriter": this once only
            return
        except (OSError, ValueError):
            self.gone = True
            self._leave_others_a_sink()

    def _leave_others_a_sink(self) -> None:
        """Libraries and child processes write to standard error too, and they do not forgive."""
        with contextlib.suppress(OSError, ValueError):
            if self._stream.fileno() == STANDARD_ERROR:
                sink = os.open(os.devnull, os.O_WRONLY)
                os.dup2(sink, STANDARD_ERROR)
                os.close(sink)


class _Screen(Progress):
    """The live part of a terminal: the running stage, one line of its latest figures, one about the whole run."""

    figures_line = ""
    outlook: Outlook | None = None

    def get_renderables(self):
        yield self.make_tasks_table(self.tasks)
        if self.figures_line:
            yield Text("  " + self.figures_line, style="dim", no_wrap=True, overflow="ellipsis")
        if self.outlook and self.tasks:
            yield Text(f"  run: {_clean(self.outlook.line())}")  # money at its end: rather a second line than an ellipsis


class Display:
    """Made by `Display.open`; every method may be called from any thread, and none raises because of the screen."""

    def __init__(self, stream: TextIO, *, live: bool, outlook: Callable[[], str | None] | None = None):
        self.stream = ForgivingStream(stream)
        self._lock = threading.RLock()
        self._outlook = Outlook(outlook)
        self._stage = ""
        self._meter = RateMeter()
        self._measured: dict[str, Any] | None = None
        self._shown: dict[str, float] = {}
        self._held_metrics: dict[str, Any] = {}
        self._task: TaskID | None = None
        self._screen: _Screen | None = self._open_screen() if live else None

    @classmethod
    def open(
        cls,
        mode: Literal["auto", "plain"] = "auto",
        *,
        stream: TextIO | None = None,
        outlook: Callable[[], str | None] | None = None,
    ) -> "Display":
        """`auto` is live on a terminal that can be redrawn, else plain; `stream` is standard error.

        `outlook` says in a few words what the whole run has taken and still takes; without it the time since now is shown.
        """
        stream = stream or sys.stderr
        able = ForgivingStream(stream).isatty() and os.environ.get("TERM", "dumb") not in ("dumb", "unknown", "")
        return cls(stream, live=mode == "auto" and able, outlook=outlook)

    def __enter__(self) -> "Display":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _open_screen(self) -> _Screen:
        self._console = Console(file=self.stream, force_terminal=True)
        unicode = self.stream.encoding.lower().replace("-", "").startswith("utf")
        screen = _Screen(
            SpinnerColumn("dots" if unicode else "line"),
            TextColumn("{task.description}", style="bold", markup=False),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[line]}", markup=False),
            console=self._console,
            refresh_per_second=4,
            # Log lines of libraries then scroll above the live part instead of through it. Standard
            # output is left alone: it is not ours.
            redirect_stdout=False,
            redirect_stderr=self.stream._stream is sys.stderr,
        )
        screen.outlook = self._outlook
        screen.start()
        return screen

    # What the pipeline reports ------------------------------------------------------------------

    def stage_started(self, name: str) -> None:
        with self._lock:
            self._stage = name
            self._meter, self._measured = RateMeter(), None
            self._shown.clear()
            self._held_metrics = {}
            if self._screen:
                self._drop_task()
                self._task = self._screen.add_task(_clean(name), total=None, line="")
            else:
                self._line(f"{name}: started; run: {self._outlook.line(at_once=True)}")

    def progress(self, done: float, total: float | None = None, unit: str = "", **extra: Any) -> None:
        """`done` of `total` (None: unknown) `unit` of the running stage; `extra` is shown as key=value."""
        with self._lock:
            self._meter.add(done)
            self._measured = self._meter.measured(total, unit)
            finished = total is not None and done >= total
            line = self._progress_line(done, total, unit, extra)
            if self._screen and self._task is not None:
                self._screen.update(self._task, completed=done, total=total, line=_clean(line))
            elif not self._screen and self._due("progress", at_once=finished and "complete" not in self._shown):
                if finished:
                    self._shown["complete"] = time.monotonic()
                self._line(f"{self._stage}: {line}; run: {self._outlook.line()}")

    def measured(self) -> dict[str, Any] | None:
        """How far the running stage is (`RateMeter.measured`), None before it said so. Takes no lock: the outlook asks for it."""
        return self._measured

    def _progress_line(self, done: float, total: float | None, unit: str, extra: Mapping[str, Any]) -> str:
        counted = figures.bytes_text if unit == "bytes" else figures.count_text
        label = "" if unit == "bytes" else f" {unit}" if unit else ""
        parts = [f"{counted(done)}{label}"]
        if total:
            parts = [f"{counted(done)}/{counted(total)}{label} ({100 * done / total:.0f} %)"]
        rate = self._meter.rate()
        if rate is not None:
            parts.append(figures.rate_text(rate, unit or "done"))
        eta = self._meter.eta(total)
        if eta:
            parts.append(f"ETA {figures.clock_text(eta)}")
        parts += [f"{key}={figures.count_text(value)}" for key, value in extra.items()]
        return ", ".join(parts)

    def metrics(self, values: Mapping[str, Any]) -> None:
        """The latest figures of training (a line of train.jsonl); a line that is a remark is shown at once."""
        with self._lock:
            if "note" in values:
                self._line(f"{self._stage}: {values['note']}")
            elif self._screen:
                self._screen.figures_line = _clean(_metrics_line(values))
            elif self._due("metrics"):
                self._held_metrics = {}
                self._line(f"{self._stage}: {_metrics_line(values)}")
            else:
                self._held_metrics = dict(values)

    def stage_finished(self, name: str, state: str, seconds: float | None = None, counts: Mapping[str, Any] | None = None) -> None:
        """`state` is the ledger's: done, failed, or pending where it was interrupted."""
        with self._lock:
            if self._held_metrics:  # the last figures are the ones people look for
                self._line(f"{self._stage}: {_metrics_line(self._held_metrics)}")
                self._held_metrics = {}
            row = figures.stage_rows({"stages": {name: {"state": state, "seconds": seconds, "counts": counts or {}}}})[0]
            stopped = state == "pending"
            parts = [f"{name}: {'interrupted' if stopped else state}"]
            if seconds is not None:
                parts[0] += f" {'after' if stopped else 'in'} {figures.seconds_text(seconds)}"
            parts += [text for text in (figures.main_counts(row), _rates(row)) if text]
            self._drop_task()
            self._line(", ".join(parts), style={"done": "green", "failed": "bold red"}.get(state, ""))

    def note(self, text: str) -> None:
        """One line for a person, shown at once."""
        with self._lock:
            self._line(text)

    def summary_table(self, ledger: Mapping[str, Any]) -> None:
        """Stages with state, time, main counts and rates, and the acceptance length of every head."""
        with self._lock:
            self._stop_screen()
            self.stream.write(render(summary(ledger), self.stream) + "\n")
            self.stream.flush()

    def print(self, text: str) -> None:
        """Text of several lines as it is, without a time: the last words of a run. Ends the live part."""
        with self._lock:
            self._stop_screen()
            self.stream.write("".join(f"{_clean(line)}\n" for line in text.splitlines()))
            self.stream.flush()

    def close(self) -> None:
        """Ends the live part and gives the terminal back; calling it twice is fine."""
        with self._lock:
            self._stop_screen()

    # The two ways out ---------------------------------------------------------------------------

    def _due(self, kind: str, at_once: bool = False) -> bool:
        now = time.monotonic()
        if not at_once and now - self._shown.get(kind, -SECONDS_BETWEEN_LINES) < SECONDS_BETWEEN_LINES:
            return False
        self._shown[kind] = now
        return True

    def _line(self, text: str, style: str = "") -> None:
        text = _clean(text)
        if self._screen:
            self._console.print(Text(text, style=style), soft_wrap=True)
        else:
            now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
            self.stream.write(f"{now} {text}\n")
            self.stream.flush()

    def _drop_task(self) -> None:
        if self._screen:
            self._screen.figures_line = ""
            if self._task is not None:
                self._screen.remove_task(self._task)
                self._task = None

    def _stop_screen(self) -> None:
        if self._screen:
            self._drop_task()
            self._screen.stop()
            self._screen = None


def summary(ledger: Mapping[str, Any]) -> RenderableType:
    """The end-of-run tables of a ledger, as something rich can print."""
    stages = Table(box=box.SIMPLE_HEAD)
    for column in ("stage", "state"):
        stages.add_column(column, no_wrap=True)
    stages.add_column("time", justify="right", no_wrap=True)
    stages.add_column("counts")
    stages.add_column("rate")
    for row in figures.stage_rows(ledger):
        stages.add_row(
            *(Text(_clean(cell)) for cell in (row.name, row.state, figures.seconds_text(row.seconds))),
            *(Text(_clean(cell)) for cell in (figures.main_counts(row), _rates(row))),
        )
    heads = figures.head_rows(ledger)
    if not heads:
        return Group(Text("Stages"), stages)
    acceptance = Table(box=box.SIMPLE_HEAD)
    for name, justify in (("head", "left"), ("mean", "right"), ("95 % interval", "right")):
        acceptance.add_column(name, justify=justify, no_wrap=True)
    for name, mean, low, high in heads:
        interval = "-" if low is None or high is None else f"{low:.2f} to {high:.2f}"
        acceptance.add_row(Text(_clean(name)), f"{mean:.2f}", interval)
    return Group(Text("Stages"), stages, Text("Acceptance length (tokens a step, the bonus token included)"), acceptance)


def summary_text(ledger: Mapping[str, Any]) -> str:
    """The same as plain text."""
    return render(summary(ledger))


def render(renderable: RenderableType, stream: Any = None) -> str:
    """`renderable` as text: coloured for a terminal, without any control code for everything else."""
    stream = stream if stream is not None else io.StringIO()
    live = stream.isatty() and os.environ.get("TERM", "dumb") not in ("dumb", "unknown", "")
    text = io.StringIO()
    sizes = {} if live else {"width": 110}
    console = Console(file=_Encoded(text, getattr(stream, "encoding", None) or "utf-8"), force_terminal=live, **sizes)
    if not live:
        console.no_color = True
    console.print(renderable)
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines())


class _Encoded:
    """A StringIO that says which characters its reader can show (rich chooses ASCII boxes by that)."""

    def __init__(self, text: io.StringIO, encoding: str):
        self.encoding = encoding
        self.write, self.flush = text.write, text.flush


def _rates(row: figures.StageRow) -> str:
    return ", ".join(figures.rate_text(rate, name) for name, rate in [*row.given_rates.items(), *row.rates.items()][:3])


def _metrics_line(values: Mapping[str, Any]) -> str:
    parts = []
    for key in [key for key in METRICS if key in values] or list(values):
        value = values[key]
        if isinstance(value, list | tuple):
            value = "[" + " ".join(figures.count_text(item) for item in value) + "]"
        elif isinstance(value, Mapping):
            value = " ".join(f"{name}={figures.count_text(item)}" for name, item in value.items() if figures.number(item) is not None)
        parts.append(f"{key}={figures.count_text(value)}")
    return " ".join(parts)


def _clean(text: str) -> str:
    """No control characters: neither a line break in a note nor an escape code in a file name reaches the screen."""
    return "".join(character if character.isprintable() else " " for character in text)
