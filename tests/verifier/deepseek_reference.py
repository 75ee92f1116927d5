"""The verifier computed by somebody else: transformers' DeepSeek-V3 in fp32, states by forward hooks.

Shares nothing with vLLM or with this project but the weights. Hooks are allowed here and only
here: they see what a layer is given, whatever the capture claims.
"""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

PREFIX = "language_model."


class Reference:
    def __init__(self, folder: Path, device: str = "cpu"):
        text = dict(json.loads((folder / "config.json").read_text())["text_config"])
        for key in ("model_type", "architectures", "torch_dtype"):
            text.pop(key, None)
        config = DeepseekV3Config(**text)
        config._attn_implementation = "eager"
        self.model = DeepseekV3ForCausalLM(config).float().eval()
        weights = {}
        for file in sorted(folder.glob("*.safetensors")):
            weights |= {k.removeprefix(PREFIX): v.float() for k, v in load_file(file).items() if k.startswith(PREFIX)}
        result = self.model.load_state_dict(weights, strict=False)
        assert not result.missing_keys and not result.unexpected_keys, result
        self.lm_head = self.model.lm_head.weight.detach().clone()  # [V, H]
        self.model.to(device)

    @torch.no_grad()
    def states(self, ids: list[int], taps: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
        """taps [n, T, H], the INPUT of each tapped layer; final [n, H], after the last norm."""
        seen: dict[int, torch.Tensor] = {}

        def remember(layer: int):
            return lambda module, args, kwargs: seen.__setitem__(layer, (args[0] if args else kwargs["hidden_states"])[0].clone())

        hooks = [self.model.model.layers[i].register_forward_pre_hook(remember(i), with_kwargs=True) for i in taps]
        final = self.model.model(input_ids=torch.tensor([ids], device=self.model.device)).last_hidden_state[0]  # [n, H]
        for hook in hooks:
            hook.remove()
        return torch.stack([seen[i] for i in taps], dim=1).cpu(), final.cpu()


def largest_error(got: torch.Tensor, want: torch.Tensor) -> float:
    """Largest relative error of a row: |got - want| / |want|, norms over the last dimension."""
    assert got.shape == want.shape, (got.shape, want.shape)
    return ((got - want).norm(dim=-1) / want.norm(dim=-1)).max().item()
