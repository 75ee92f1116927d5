"""A checkpoint that is not a whole head of this kind is refused in one sentence, never loaded in part."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from small_heads import H, V, small_head, small_verifier

from jobs.draft.formats import load_head, save_llama_eagle3, save_speculators
from jobs.draft.weights import VerifierWeights
from jobs.errors import MustFix


def edited(folder, change):
    """A Llama-form checkpoint of a small head, changed."""
    save_llama_eagle3(small_head(1), folder)
    config, tensors = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
    change(config, tensors)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return folder


def drop(*names):
    def change(config, tensors):
        for name in names:
            (tensors if name in tensors else config).pop(name)

    return change


def put(where, **values):
    return lambda config, tensors: (config if where == "config" else tensors).update(values)


def mla(config, tensors):
    config["architectures"] = ["Eagle3DeepseekV2ForCausalLM"]
    config.update(model_type="deepseek_v3", kv_lora_rank=512, q_lora_rank=1536)


def mla_tensors_behind_a_llama_config(config, tensors):
    tensors["midlayer.self_attn.kv_a_proj_with_mqa.weight"] = torch.zeros(8, H)


def wrong_prefix(config, tensors):
    for name in [n for n in tensors if n.startswith("midlayer.")]:
        tensors["model." + name] = tensors.pop(name)


def no_taps(config, tensors):
    del config["eagle_aux_hidden_state_layer_ids"], config["eagle_config"]


def absolute_map(config, tensors):
    tensors["d2t"] = tensors["d2t"] + torch.arange(40)


CASES = {
    "an MLA draft": (mla, "only Llama-form EAGLE-3 heads are supported, no MLA draft"),
    "MLA tensors": (
        mla_tensors_behind_a_llama_config,
        "1 unknown tensor, the first is layers.0.self_attn.kv_a_proj_with_mqa.weight; only Llama-form",
    ),
    "another prefix": (wrong_prefix, "unknown tensors, the first is model.midlayer"),
    "a tensor too many": (
        put("tensors", **{"midlayer.extra.weight": torch.zeros(1)}),
        "the first is layers.0.extra.weight; no EAGLE-3 head",
    ),
    "a tensor missing": (drop("midlayer.hidden_norm.weight"), "lacks 1 tensor, the first is layers.0.hidden_norm.weight"),
    "no embedding and no verifier": (
        drop("embed_tokens.weight"),
        "lacks 1 tensor, the first is embed_tokens.weight.*or give the verifier",
    ),
    "no map": (drop("d2t", "t2d"), "drafts 40 of 97 ids and has no d2t"),
    "ids where offsets belong": (absolute_map, "outside the verifier's 97.*offsets"),
    "a shape": (put("config", intermediate_size=47), r"mlp.gate_proj.weight has shape \(48, 32\) and its config.json asks for \(47, 32\)"),
    "a map of another size": (put("config", draft_vocab_size=39), "do not fit 39 draft ids"),
    "two layers": (put("config", num_hidden_layers=2), "2 layers, which is not supported"),
    "biases": (put("config", attention_bias=True), "biases in its layer"),
    "an activation": (put("config", hidden_act="gelu"), "the activation gelu"),
    "another target width": (put("config", target_hidden_size=64), "width 32 for a verifier of width 64"),
    "EAGLE-1": (put("config", eagle_config={"use_aux_hidden_state": False}), "no auxiliary hidden states"),
    "no taps": (no_taps, "does not say which layers it taps"),
    "two taps": (put("config", eagle_aux_hidden_state_layer_ids=[2, 5]), "taps 2 layers"),
    "the same tap twice": (put("config", eagle_aux_hidden_state_layer_ids=[2, 5, 5]), "three different taps"),
    "a rope nobody knows": (
        put("config", rope_scaling={"rope_type": "dynamic", "factor": 2.0}),
        "rope_scaling of type 'dynamic' is not supported",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_it_is_refused(tmp_path, case):
    change, words = CASES[case]
    with pytest.raises(MustFix, match=words) as caught:
        load_head(edited(tmp_path, change))
    assert caught.value.sentence().count("\n") == 0


def test_a_head_of_another_verifier_is_refused(tmp_path):
    folder = edited(tmp_path, lambda config, tensors: None)
    wide = VerifierWeights(torch.zeros(V, 2 * H), torch.zeros(2 * H), torch.zeros(V, 2 * H))
    with pytest.raises(MustFix, match="vocabulary 97 and hidden size 32, the verifier 97 and 64"):
        load_head(folder, verifier=wide)
    many = VerifierWeights(torch.zeros(V + 1, H), torch.zeros(H), torch.zeros(V + 1, H))
    with pytest.raises(MustFix, match="vocabulary 97 and hidden size 32, the verifier 98 and 32"):
        load_head(folder, verifier=many)
    assert load_head(folder, verifier=small_verifier()).config.hidden_size == H


def test_files_that_are_missing_or_torn_are_refused(tmp_path):
    with pytest.raises(MustFix, match="config.json does not exist"):
        load_head(tmp_path)
    folder = edited(tmp_path, lambda config, tensors: None)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(MustFix, match="model.safetensors cannot be read"):
        load_head(folder)
    weights.unlink()
    with pytest.raises(MustFix, match="no model.safetensors and no pytorch_model.bin"):
        load_head(folder)
    (folder / "pytorch_model.bin").write_bytes(b"PK\x03\x04 torn")
    with pytest.raises(MustFix, match="pytorch_model.bin cannot be read"):
        load_head(folder)


def test_a_pickle_that_would_run_code_is_refused(tmp_path):
    folder = edited(tmp_path, lambda config, tensors: None)
    (folder / "model.safetensors").unlink()
    torch.save({"fc.weight": print}, folder / "pytorch_model.bin")
    with pytest.raises(MustFix, match="pytorch_model.bin cannot be read"):
        load_head(folder)


def test_sglang_is_refused_what_it_would_serve_wrongly(tmp_path):
    with pytest.raises(MustFix, match="raw feature and this head was trained with the normed one"):
        save_llama_eagle3(small_head(1, norm_before_residual=True), tmp_path)
    with pytest.raises(MustFix, match="cannot tap the input of layer 0"):
        save_llama_eagle3(small_head(1, taps=(0, 5, 7)), tmp_path)


def test_a_folder_that_cannot_be_written_is_a_sentence(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(MustFix, match="cannot be written"):
        save_speculators(small_head(1), tmp_path / "file" / "head", verifier_name="m", verifier_architecture="a")
