"""A shard whose `final` tensor is gone: 78 before the train split is paid for, in one sentence.

Replay itself reads only the taps, and an answer whose rows are incomplete is left out and told. But a shard that lacks a tensor
is not what was written: whoever cut one out of it may have touched the others, and `evaluate` would meet it again when
everything is paid for. So nothing is judged from it.
"""

import json
import subprocess
import sys

import untrained_head
from safetensors.torch import load_file, save_file
from test_baseline_goes_on_with_the_heads_it_can_judge import made


def test_it_is_one_sentence_and_exit_code_78(tmp_path):
    context = made(tmp_path, {"good": untrained_head.saved(tmp_path / "good", 1)})
    run = context.path
    floors = {f"min_gain_over_{name}": None for name in ("untrained", "ngram")}  # of an untrained head, which is not there
    context.run.ledger["settings"]["evaluate"] |= floors
    context.run.save()
    context.run.close()
    shard = run / "states" / "eval" / "shard-00000.safetensors"
    save_file({name: tensor for name, tensor in load_file(shard).items() if name != "final"}, shard)
    command = [sys.executable, "-m", "entrypoints.cli", "stage", "baseline", "--run-dir", str(run), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    result = json.loads(done.stdout)
    assert done.returncode == 78 == result["exit_code"] and result["status"] == "failed"
    assert (
        "'final'" in result["error"]["message"]
        and result["error"]["where"] == str(shard)
        and result["error"]["remedy"] == "restore the file"
    )
    assert "Traceback" not in done.stderr and str(shard) in done.stderr
    ledger = json.loads((run / "run.json").read_text())
    assert ledger["stages"]["baseline"]["state"] == "failed" and ledger["gate"] is None and not (run / "baseline.json").exists()
