"""The state store: the verifier's hidden states of a split, written while it answers, read by training.

A folder `states/eval` or `states/train` holds

    store.json                     the layout: taps, width, type, verifier, tokenizer (shards.py)
    shard-00000.safetensors …      the rows (shards.py)
    index.jsonl                    which rows are which positions of which sample (extents.py)
    responses.jsonl                the answers; a line here commits a sample (responses.py)
    writer.lock, responses.lock    flocks of the processes that write

A sequence of n tokens has exactly n - 1 rows, positions 0 to n - 2: its last token is never fed back.

Decision: `StateWriter` runs inside the process that has the states (the vLLM worker), `ResponseLog`
in the driver, and they meet only in the folder. The order data -> fsync -> index -> fsync -> response
line makes every crash harmless: what has no response line never happened. So reopening needs no
repair beyond cutting torn last lines, and rows without a committed owner are simply free again.

The format is final: `tests/storage/golden` holds stores that every later reader must read, and a
change needs a new version number and a reader for the old one.

This module is the door; the rooms are the modules named above, reader.py, and writer.py with what it stands on:
recovery.py (opening what is there), free_rows.py, row_pages.py and tails.py (rows in memory), disk_thread.py (writing behind) and
writer_group.py (several processes that write one store).
"""

from jobs.storage.reader import Problem, Sample, StateStore, VerifyReport
from jobs.storage.responses import Response, ResponseLog
from jobs.storage.shards import StateLayout
from jobs.storage.writer import StateGap, StateWriter

__all__ = [
    "Problem",
    "Response",
    "ResponseLog",
    "Sample",
    "StateGap",
    "StateLayout",
    "StateStore",
    "StateWriter",
    "VerifyReport",
]
