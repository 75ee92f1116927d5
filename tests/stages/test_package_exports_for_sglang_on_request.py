"""`package.sglang`: the head once more in the form that SGLang reads, the same tensors bit for bit; without it, or where the form cannot say it, not."""

import pytest
import torch
import untrained_head
from run_with_states import answered, notes, run_with_states
from safetensors.torch import load_file

from jobs.context import Context
from jobs.draft.formats import read_head
from jobs.draft.vocabulary import DraftVocabulary
from jobs.draft.weights import VerifierWeights
from jobs.errors import MustFix
from jobs.job_file import load
from jobs.stages import evaluate, initial, package, train
from jobs.storage.files import read_json, sha256_file


def packaged(folder, *overrides, norm_before_residual: bool = False) -> Context:
    """A run that was trained and judged, its head of random weights, norms included, and packaged."""
    residual = f"train.norm_before_residual={str(norm_before_residual).lower()}"
    context = answered(run_with_states(folder / "run", "verifier.dtype=bfloat16", residual, *overrides))
    ids = DraftVocabulary.load(context.path / "vocab.safetensors").draft_ids
    head = initial.scratch(context, VerifierWeights.read(context.verifier_path), ids)
    for name, parameter in head.named_parameters():
        if "norm" in name:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    train.save_trained(context, head)
    evaluate.run(context)
    package.run(context)
    return context


def test_the_exported_form_holds_the_published_tensors(tmp_path):
    published = packaged(tmp_path, "package.sglang=true").path / "head"
    exported = read_head(published / "sglang")
    assert exported.form == "llama" and exported.own_embedding
    assert read_json(published / "sglang" / "config.json")["architectures"] == ["LlamaForCausalLMEagle3"]
    ours, theirs = load_file(published / "model.safetensors"), load_file(published / "sglang" / "model.safetensors")
    assert {name.replace("midlayer.", "layers.0."): (t.dtype, t.shape) for name, t in theirs.items()} == {
        name: (t.dtype, t.shape) for name, t in ours.items()
    }
    assert ours["fc.weight"].dtype == torch.bfloat16
    for name, tensor in theirs.items():
        assert torch.equal(tensor, ours[name.replace("midlayer.", "layers.0.")]), name
    assert exported.head.config == read_head(published).head.config
    listed = read_json(published / "manifest.json")["files"]
    for name in ("sglang/config.json", "sglang/model.safetensors"):
        assert listed[name]["sha256"] == sha256_file(published / name)


def test_nobody_asked_and_there_is_none(tmp_path):
    published = packaged(tmp_path).path / "head"
    assert not (published / "sglang").exists() and "model.safetensors" in read_json(published / "manifest.json")["files"]


def test_a_residual_that_the_form_cannot_say_is_refused_before_the_run():
    with pytest.raises(MustFix, match=r"package\.sglang needs train\.norm_before_residual = false") as error:
        load("smoke", overrides=["package.sglang=true", "train.norm_before_residual=true"], environment={})
    assert error.value.exit_code == 78


def test_a_residual_that_is_known_only_then_costs_the_export_and_not_the_head(tmp_path):
    """With a head to start from it is that head's; here it could not be judged, so training began from scratch."""
    listed = f'heads.candidates=[{{name="odd", model="{untrained_head.saved(tmp_path / "odd")}"}}]'
    context = packaged(tmp_path, listed, "heads.warm_start=best", "package.sglang=true", norm_before_residual=True)
    published = context.path / "head"
    (said,) = [text for text in notes(context) if "SGLang" in text]
    assert "no SGLang form" in said and "raw feature and this head was trained with the normed one" in said and "\n" not in said
    assert not (published / "sglang").exists() and not any("sglang" in name for name in read_json(published / "manifest.json")["files"])
    assert read_head(published).head.config.norm_before_residual is True
