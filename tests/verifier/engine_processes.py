"""A loaded engine with the processes it started, and what happens when one of them dies or hangs while it decodes."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from captured import TAPS, layout_of

from jobs.errors import TryAgain
from jobs.settings import StatesSettings, VerifierSettings
from jobs.verifier.engine import Request, VerifierEngine
from jobs.verifier.tiny import CHECKPOINT

ENDLESS = [Request(f"e{i}#0", [7, 8, 9], max_tokens=500, ignore_eos=True) for i in range(8)]


def children() -> set[psutil.Process]:
    alive = {child for child in psutil.Process().children(recursive=True) if child.status() != psutil.STATUS_ZOMBIE}
    return {child for child in alive if "resource_tracker" not in " ".join(child.cmdline())}


@contextlib.contextmanager
def engine_and_processes(settings: VerifierSettings) -> Iterator[tuple[VerifierEngine, set[psutil.Process]]]:
    """The tiny verifier's; all of them have ended afterwards."""
    before = children()  # servers of other tests may live on in this process
    made = VerifierEngine(CHECKPOINT, settings, seed=0, capture_taps=TAPS)
    try:
        yield made, children() - before
    finally:
        made.close()
    assert not children() - before, "processes were left behind"


def fault(engine: VerifierEngine, strike: Callable[[], None], folder: Path) -> float:
    """Strike in the middle of decoding; seconds until the run ended with TryAgain."""
    engine.open_store(folder, layout_of(engine), StatesSettings(shard_mib=16))
    sent, enough = [], engine.tokens + 100

    def when_decoding() -> None:
        while engine.tokens < enough:
            time.sleep(0.05)
        sent.append(time.monotonic())
        strike()

    threading.Thread(target=when_decoding, daemon=True).start()
    with ends_with_75():
        engine.run(ENDLESS, lambda finished: ())
    return time.monotonic() - sent[0]


@contextlib.contextmanager
def ends_with_75() -> Iterator[None]:
    """A passing fault, told in one line that says what is kept."""
    with pytest.raises(TryAgain) as failure:
        yield
    said = failure.value.sentence()
    assert failure.value.exit_code == 75
    assert "\n" not in said and said.endswith("run the same command again, finished answers are kept.")
