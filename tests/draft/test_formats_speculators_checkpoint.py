"""speculators 0.4.0.1 and we read each other's checkpoints, and the two models compute the same."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from small_heads import H, V, random_sequence, small_head, small_verifier

from jobs.draft.attention import Documents
from jobs.draft.drafting import draft_chains
from jobs.draft.formats import load_head, read_head, save_speculators
from jobs.draft.model import UnrollCache

STEPS, ROWS = 3, 128  # rows: one block of speculators' attention mask


@pytest.fixture(scope="module")
def exchanged(tmp_path_factory):
    """One run of speculators: our head read by it, and one it made and saved."""
    folder = tmp_path_factory.mktemp("exchange")
    verifier, tokens_taps = small_verifier(), random_sequence(ROWS + 1)
    for name in ("verifier", "out"):
        (folder / name).mkdir()
    save_file(
        {"model.embed_tokens.weight": verifier.embedding, "model.norm.weight": verifier.final_norm, "lm_head.weight": verifier.lm_head},
        folder / "verifier" / "model.safetensors",
    )
    shape = dict(vocab_size=V, hidden_size=H, num_hidden_layers=10, num_attention_heads=4, intermediate_size=48, rms_norm_eps=1e-5)
    (folder / "verifier" / "config.json").write_text(json.dumps({"model_type": "llama", "architectures": ["LlamaForCausalLM"], **shape}))
    head = small_head(1, verifier)
    save_speculators(
        head, folder / "ours", verifier_name=str(folder / "verifier"), verifier_architecture="LlamaForCausalLM", dtype=torch.float32
    )
    save_file({"tokens": torch.tensor(tokens_taps[0]), "taps": tokens_taps[1]}, folder / "inputs.safetensors")
    script = Path(__file__).with_name("speculators_reference.py")
    arguments = [folder / "verifier", folder / "ours", folder / "inputs.safetensors", folder / "out"]
    done = subprocess.run(
        [sys.executable, str(script), *map(str, arguments)],
        env={**os.environ, "TORCHDYNAMO_DISABLE": "1", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return folder, head, *tokens_taps


def logits_of(head, tokens, taps):
    """Of our unroll fed with its own drafts: [steps, R, Vd]."""
    fed, feature, cache, logits = torch.tensor(tokens[1:]), head.fuse(taps), UnrollCache(), []
    with torch.no_grad():
        for _ in range(STEPS):
            feature = head.step(fed, feature, torch.arange(ROWS), cache, Documents.one(ROWS))
            logits.append(head.logits(feature))
            fed = head.targets(logits[-1].argmax(-1))
    return torch.stack(logits)


@pytest.mark.parametrize("which", ["read", "made"])
def test_both_models_compute_the_same_logits_and_drafts(exchanged, which):
    folder, ours, tokens, taps = exchanged
    head = ours if which == "read" else load_head(folder / "out" / "made")
    theirs = load_file(folder / "out" / "result.safetensors")
    mine = logits_of(head, tokens, taps)
    assert (mine - theirs[f"{which}.logits"]).abs().max() <= 2e-4 * theirs[f"{which}.logits"].abs().max()
    drafts = theirs[f"{which}.drafts"]
    assert drafts.unique().numel() > 10
    assert torch.equal(draft_chains(head, tokens, taps, STEPS).T, head.targets(drafts))


def test_its_own_checkpoint_is_accounted_for_tensor_by_tensor(exchanged):
    folder = exchanged[0]
    loaded = read_head(folder / "out" / "made")
    theirs = load_file(folder / "out" / "made" / "model.safetensors")
    assert loaded.form == "speculators" and loaded.declared_taps == (2, 5, 7) and loaded.head.config.norm_before_residual
    assert loaded.head.state_dict().keys() - theirs.keys() == set()
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in loaded.head.state_dict().items())


def test_drafting_and_formats_need_no_vllm():
    """jobs.draft runs where vLLM is not installed."""
    code = (
        "import sys; import jobs.draft.formats, jobs.draft.replay, jobs.draft.statistics, jobs.draft.vocabulary;"
        "print([m for m in sys.modules if m.split('.')[0] in ('vllm', 'compat') or m.startswith('jobs.verifier')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=200)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr
