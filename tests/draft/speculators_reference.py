"""Run speculators' own EAGLE-3 model, in a process of its own (its attention needs TORCHDYNAMO_DISABLE=1).

usage: speculators_reference.py VERIFIER OUR_HEAD INPUTS.safetensors OUT
VERIFIER is a folder with a Llama config and the three tensors; OUR_HEAD a head saved by us, which speculators
loads; OUT/made is a checkpoint speculators itself saves, and OUT/result.safetensors holds for both models
the drafts [steps, R] and the logits [steps, R, Vd] of one forward pass.
"""

import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig

verifier, ours, inputs, out = map(Path, sys.argv[1:])
given = load_file(inputs)
STEPS = 3


def forward(model) -> tuple[torch.Tensor, torch.Tensor]:
    logits = []
    handle = model.lm_head.register_forward_hook(lambda _module, _arguments, result: logits.append(result[0].detach().clone()))
    with torch.no_grad():
        drafts = model(hidden_states=given["taps"].flatten(1)[None], input_ids=given["tokens"][1:][None], ttt_steps=STEPS)
    handle.remove()
    return torch.stack([d[0] for d in drafts]), torch.stack(logits)


def configured(folder: Path) -> Eagle3SpeculatorConfig:
    config = Eagle3SpeculatorConfig.from_pretrained(str(folder))
    config.speculators_config.verifier.name_or_path = str(verifier)
    config.transformer_layer_config._attn_implementation = "simple_flex_attention"
    return config


saved = load_file(ours / "model.safetensors")
# Not from_pretrained: in 0.4.0.1 it passes `verifier` on to a constructor that has no such argument.
read = Eagle3DraftModel(configured(ours), t2d=saved["t2d"], d2t=saved["d2t"]).eval()
loaded = read.load_state_dict(saved, strict=False)
assert not loaded.unexpected_keys and set(loaded.missing_keys) == {"verifier_lm_head.weight", "verifier_norm.weight"}, loaded
result = dict(zip(("read.drafts", "read.logits"), forward(read), strict=True))

torch.manual_seed(7)
config = configured(ours)
config.norm_before_residual = True
made = Eagle3DraftModel(config, t2d=saved["t2d"], d2t=saved["d2t"]).eval()
with torch.no_grad():
    for name, parameter in made.named_parameters():
        if parameter.requires_grad and "norm" not in name:
            parameter.normal_(std=0.3)
result |= dict(zip(("made.drafts", "made.logits"), forward(made), strict=True))
made.save_pretrained(str(out / "made"))
save_file({name: tensor.contiguous() for name, tensor in result.items()}, out / "result.safetensors")
