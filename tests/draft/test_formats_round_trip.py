"""What is written is read back bit for bit, in both forms, with every convention spelt out."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from small_heads import V, random_sequence, small_head, small_verifier

from jobs.draft.drafting import draft_chains
from jobs.draft.formats import load_head, read_head, save_llama_eagle3, save_speculators, tap_readings
from jobs.draft.model import Eagle3Head

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096, "beta_fast": 32.0, "beta_slow": 1.0}
SHAPES = [
    dict(),
    dict(norm_before_residual=True, kv_heads=4),
    dict(draft_vocab_size=V, rope_theta=1e6),
    dict(rope_scaling=YARN, head_dim=16),
]
NAMES = dict(verifier_name="moonshotai/Kimi-K2.5", verifier_architecture="KimiK25ForConditionalGeneration")


def same(a: Eagle3Head, b: Eagle3Head) -> None:
    ours, theirs = a.state_dict(), b.state_dict()
    assert ours.keys() == theirs.keys()
    for name in ours:
        assert ours[name].dtype == theirs[name].dtype and torch.equal(ours[name], theirs[name]), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("form", ["speculators", "llama"])
@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: ",".join(s) or "default")
def test_round_trips_are_bit_identical(tmp_path, form, shape, dtype):
    if form == "llama":
        shape = {**shape, "norm_before_residual": False}
    head = small_head(1, small_verifier(dtype=torch.bfloat16), **shape).to(dtype)
    head.set_embedding(small_verifier(dtype=torch.bfloat16).embedding)
    save = (
        (lambda h, f: save_speculators(h, f, dtype=dtype, **NAMES))
        if form == "speculators"
        else (lambda h, f: save_llama_eagle3(h, f, dtype=dtype))
    )
    save(head, tmp_path / "a")
    loaded = read_head(tmp_path / "a")
    same(head, loaded.head)
    assert loaded.head.config == head.config and loaded.form == form and loaded.own_embedding and loaded.declared_taps == (2, 5, 7)
    save(loaded.head, tmp_path / "b")
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    assert sorted(p.name for p in (tmp_path / "a").iterdir()) == ["config.json", "model.safetensors"]
    tokens, taps = random_sequence(12)
    assert torch.equal(draft_chains(head, tokens, taps, 3), draft_chains(loaded.head, tokens, taps, 3))


def test_published_in_bf16_with_the_embedding_bit_equal_and_both_maps(tmp_path):
    verifier = small_verifier(dtype=torch.bfloat16)
    head = small_head(1, verifier)
    save_speculators(head, tmp_path, **NAMES)
    tensors = load_file(tmp_path / "model.safetensors")
    assert {n for n, t in tensors.items() if t.dtype != torch.bfloat16} == {"d2t", "t2d"}
    assert torch.equal(tensors["embed_tokens.weight"], verifier.embedding)
    assert tensors["d2t"].dtype == torch.int64 and tensors["t2d"].dtype == torch.bool
    assert torch.equal(tensors["lm_head.weight"], head.lm_head.weight.to(torch.bfloat16))
    assert head.fc.weight.dtype == torch.float32  # the head itself goes on in its own type


def test_the_config_says_what_vllm_would_guess(tmp_path):
    save_speculators(small_head(1, norm_before_residual=True, rope_theta=1e6), tmp_path, **NAMES)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["eagle_aux_hidden_state_layer_ids"] == [2, 5, 7] and config["norm_before_residual"] is True
    assert config["speculators_config"]["verifier"] == {
        "name_or_path": "moonshotai/Kimi-K2.5",
        "architectures": ["KimiK25ForConditionalGeneration"],
    }
    layer = config["transformer_layer_config"]
    assert layer["max_position_embeddings"] == 262_144 and layer["rope_theta"] == 1e6 and layer["head_dim"] == 8
    assert layer["rms_norm_eps"] == 1e-5 and layer["num_key_value_heads"] == 2 and layer["num_hidden_layers"] == 1


def test_speculators_own_class_reads_the_config(tmp_path):
    from speculators import SpeculatorModelConfig

    save_speculators(small_head(1), tmp_path, draft_tokens=4, **NAMES)
    config = SpeculatorModelConfig.from_pretrained(str(tmp_path))
    assert type(config).__name__ == "Eagle3SpeculatorConfig" and config.eagle_aux_hidden_state_layer_ids == [2, 5, 7]
    assert config.draft_vocab_size == 40 and config.norm_before_residual is False and config.target_vocab_size == V
    assert config.speculators_config.proposal_methods[0].speculative_tokens == 4


def test_the_llama_form_serves_right_in_both_engines(tmp_path):
    """vLLM reads the top level as it stands; SGLang reads eagle_config and adds 1: both tap the input of 2, 5, 7."""
    save_llama_eagle3(small_head(1), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLMEagle3"] and config["eagle_aux_hidden_state_layer_ids"] == [2, 5, 7]
    assert [i + 1 for i in config["eagle_config"]["eagle_aux_hidden_state_layer_ids"]] == [2, 5, 7]
    assert "midlayer.self_attn.q_proj.weight" in load_file(tmp_path / "model.safetensors")


def published(tmp_path, change=lambda config, tensors: None, **shape):
    """A head as the hub has them: Llama form, bf16, no embedding, taps in eagle_config only."""
    verifier = small_verifier(dtype=torch.bfloat16)
    head = small_head(1, verifier, **shape)
    save_llama_eagle3(head, tmp_path)
    config, tensors = json.loads((tmp_path / "config.json").read_text()), load_file(tmp_path / "model.safetensors")
    for key in ("norm_before_residual", "eagle_aux_hidden_state_layer_ids"):
        del config[key]
    config["max_position_embeddings"] = 4096
    config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] = [2, 5, 7]
    del tensors["embed_tokens.weight"]
    change(config, tensors)
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(tensors, tmp_path / "model.safetensors")
    return head, verifier


def test_a_published_head_gets_the_verifiers_embedding_and_either_reading_of_its_taps(tmp_path):
    head, verifier = published(tmp_path)
    loaded = read_head(tmp_path, verifier=verifier)
    assert not loaded.own_embedding and torch.equal(loaded.head.embed_tokens.weight, verifier.embedding)
    assert loaded.declared_taps == loaded.head.config.taps == (2, 5, 7) and loaded.head.config.norm_before_residual is False
    assert loaded.head.config.max_position_embeddings == 262_144
    assert load_head(tmp_path, verifier=verifier, taps=(3, 6, 8)).config.taps == (3, 6, 8)
    assert tap_readings((2, 5, 7), 10) == [(2, 5, 7), (3, 6, 8)] and tap_readings((2, 5, 9), 10) == [(2, 5, 9)]
    assert (
        loaded.head.fc.weight.dtype == torch.bfloat16
        and load_head(tmp_path, verifier=verifier, dtype=torch.float32).fc.weight.dtype == torch.float32
    )
    assert not loaded.head.embed_tokens.weight.requires_grad and all(
        p.requires_grad for n, p in loaded.head.named_parameters() if n != "embed_tokens.weight"
    )
    same(head.to(torch.bfloat16), loaded.head)


def test_a_full_vocabulary_needs_no_map(tmp_path):
    def change(config, tensors):
        del tensors["d2t"], tensors["t2d"], config["draft_vocab_size"]

    _, verifier = published(tmp_path, change, draft_vocab_size=V)
    head = load_head(tmp_path, verifier=verifier)
    assert head.config.draft_vocab_size == V and not head.d2t.any() and head.t2d.all()


def test_yarn_without_its_original_length_keeps_its_frequencies(tmp_path):
    """transformers takes max_position_embeddings then; exporting 262,144 must not stretch the head's positions."""

    def change(config, tensors):
        config["rope_scaling"] = {"type": "yarn", "factor": 4.0}
        config["max_position_embeddings"] = 2048

    _, verifier = published(tmp_path, change)
    head = load_head(tmp_path, verifier=verifier)
    assert head.config.rope_scaling == {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}
    save_speculators(head, tmp_path / "again", **NAMES)
    assert load_head(tmp_path / "again").config == head.config


def test_names_of_transformers_5_and_defaults_of_the_speculators_form(tmp_path):
    save_speculators(small_head(1, rope_theta=5e5), tmp_path, **NAMES)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    layer = config["transformer_layer_config"]
    layer["rope_parameters"] = {"rope_type": "default", "rope_theta": layer.pop("rope_theta")}
    layer["rms_norm_eps"] = 1e-5
    del config["norm_before_residual"]
    path.write_text(json.dumps(config))
    head = load_head(tmp_path)
    assert head.config.rope_theta == 5e5 and head.config.rope_scaling is None
    assert head.config.norm_before_residual is True  # vLLM 0.16.0's default for this form


def test_shards_and_pickled_checkpoints_load_too(tmp_path):
    head, verifier = published(tmp_path)
    whole = load_head(tmp_path, verifier=verifier)
    tensors = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    torch.save(tensors, tmp_path / "pytorch_model.bin")
    same(whole, load_head(tmp_path, verifier=verifier))
    (tmp_path / "pytorch_model.bin").unlink()
    names = sorted(tensors)
    for number, part in enumerate((names[:5], names[5:])):
        save_file({n: tensors[n] for n in part}, tmp_path / f"model-{number}.safetensors")
    weight_map = {n: f"model-{int(n in names[5:])}.safetensors" for n in names}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    same(whole, load_head(tmp_path, verifier=verifier))
