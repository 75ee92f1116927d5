"""Writes tests/storage/golden: `python tests/storage/make_golden.py NEW_FOLDER`, once for a format, never again."""

import sys
from pathlib import Path

from stored_rows import write_golden

if __name__ == "__main__":
    for dtype in ("bfloat16", "float32", "float8_e4m3fn"):
        target = Path(sys.argv[1]) / dtype
        if target.exists():
            raise SystemExit(f"{target} is there already: a golden store is never written again")
        write_golden(target, dtype)
        for lock in target.glob("*.lock"):
            lock.unlink()
