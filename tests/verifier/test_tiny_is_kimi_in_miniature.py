"""Architecture, names and size of the shipped checkpoint, and the contract of the shipped prompts."""

import json
import re

import pytest
import torch
from safetensors import safe_open

from jobs.verifier.chat import Chat
from jobs.verifier.tiny import CHECKPOINT, HELD_OUT, PROMPTS

MIB = 1 << 20


def tensors() -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    with safe_open(CHECKPOINT / "model.safetensors", "pt") as file:
        return {name: (file.get_tensor(name).dtype, tuple(file.get_tensor(name).shape)) for name in file.keys()}  # noqa: SIM118


def prompts() -> list[dict]:
    return [json.loads(line) for line in PROMPTS.read_text().splitlines()]


def test_one_to_four_million_parameters_and_eight_megabytes_in_all():
    count = sum(torch.Size(shape).numel() for _, shape in tensors().values())
    assert 1e6 <= count <= 4e6
    shipped = [path for path in PROMPTS.parent.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    assert sum(path.stat().st_size for path in shipped) <= 8e6
    assert PROMPTS.stat().st_size < 600_000
    assert any("PYTHON SOFTWARE FOUNDATION LICENSE VERSION 2" in path.read_text() for path in shipped if path.name == "PYTHON-LICENSE.txt")


def test_architecture_is_that_of_kimi_k25():
    config = json.loads((CHECKPOINT / "config.json").read_text())
    text = config["text_config"]
    assert (config["architectures"], config["model_type"], text["model_type"]) == (
        ["KimiK25ForConditionalGeneration"],
        "kimi_k25",
        "kimi_k2",
    )
    assert (text["num_hidden_layers"], text["first_k_dense_replace"], text["hidden_size"], text["num_attention_heads"]) == (10, 1, 128, 4)
    assert (text["scoring_func"], text["topk_method"], text["n_shared_experts"]) == ("sigmoid", "noaux_tc", 1)
    assert text["q_lora_rank"] and text["kv_lora_rank"] and text["rope_scaling"]["type"] == "yarn"
    assert text["vocab_size"] == Chat.load(CHECKPOINT).tokenizer.vocab_size and 1024 <= text["vocab_size"] <= 2048


def test_weight_names_and_types_are_those_of_the_real_checkpoint():
    found = tensors()
    layer = "language_model.model.layers.{}."
    for name in ("self_attn.q_a_proj", "self_attn.kv_a_proj_with_mqa", "self_attn.kv_b_proj", "self_attn.q_a_layernorm", "input_layernorm"):
        assert all(layer.format(i) + name + ".weight" in found for i in range(10))
    assert layer.format(0) + "mlp.gate_proj.weight" in found and layer.format(0) + "mlp.gate.weight" not in found
    for i in range(1, 10):
        assert found[layer.format(i) + "mlp.gate.e_score_correction_bias"] == (torch.float32, (8,))
        assert layer.format(i) + "mlp.experts.7.down_proj.weight" in found
        assert layer.format(i) + "mlp.shared_experts.up_proj.weight" in found
    assert {"language_model.model.embed_tokens.weight", "language_model.model.norm.weight", "language_model.lm_head.weight"} <= found.keys()
    assert any(name.startswith("vision_tower.encoder.blocks.1.") for name in found) and "mm_projector.proj.2.weight" in found
    others = {name for name, (dtype, _) in found.items() if dtype != torch.bfloat16}
    assert all(name.endswith("e_score_correction_bias") for name in others)
    assert all(re.match(r"(language_model|vision_tower|mm_projector)\.", name) for name in found)


def test_an_answer_ends_with_im_end():
    generation = json.loads((CHECKPOINT / "generation_config.json").read_text())
    assert generation["eos_token_id"] == Chat.load(CHECKPOINT).tokenizer.convert_tokens_to_ids("<|im_end|>")


def test_shipped_prompts_keep_the_contract():
    rows = prompts()
    assert [sum(row["split"] == split for row in rows) for split in ("train", "eval")] == [1200, 96]
    assert len({row["id"] for row in rows}) == len(rows)
    for row in rows:
        assert row.keys() == {"id", "messages", "source", "split"}
        assert {message["role"] for message in row["messages"]} <= {"system", "user"}
    users = [sum(message["role"] == "user" for message in row["messages"]) for row in rows]
    assert set(users) == {1, 2}, "single and two-turn conversations"


@pytest.mark.parametrize("part", ["file", "code"])
def test_the_two_splits_share_neither_a_file_nor_a_text(part):
    def key(row: dict) -> str:
        first = next(message["content"] for message in row["messages"] if message["role"] == "user")
        return row["source"] if part == "file" else first.split("\n", 1)[-1]

    of = {split: {key(row) for row in prompts() if row["split"] == split} for split in ("train", "eval")}
    assert of["train"] and of["eval"] and not of["train"] & of["eval"]


def test_every_prompt_leaves_room_for_an_answer():
    chat = Chat.load(CHECKPOINT)
    lengths = [len(chat.render(row["messages"][:1], True)) for row in prompts()[::20]]
    assert max(lengths) < 300


def test_held_out_text_and_prompts_come_from_files_that_were_never_trained_on():
    # The rule of the cut, restated: a file's part is drawn from the sha256 of its name.
    import hashlib

    def draw(source: str) -> float:
        name = source.split("/Lib/", 1)[1]
        return int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big") / 2**32

    held_out = [json.loads(line)["source"] for line in HELD_OUT.read_text().splitlines()]
    evaluated = [row["source"] for row in prompts() if row["split"] == "eval"]
    asked = [row["source"] for row in prompts() if row["split"] == "train"]
    assert max(map(draw, held_out + evaluated)) < 0.04 <= min(map(draw, asked)) and max(map(draw, asked)) < 0.12
