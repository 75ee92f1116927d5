"""The miniature's architecture: its config, a form of it that trains fast, and the way to the checkpoint's names.

Decision: training does not use transformers' DeepseekV3 (its experts are a Python loop). Here all
routed experts of a layer are ONE wide gated MLP whose hidden columns are multiplied by the router's
weight of their expert, zero where it was not chosen. At eight small experts that costs less than
any gather, compiles into few kernels and gives exactly the same function. The tests compare the
exported checkpoint with transformers' code, so nothing here has to be believed.

Sources: DeepSeek-V3 report (arXiv 2412.19437) sections 2.1.1 (MLA), 2.1.2 (experts, bias that
balances without a loss); YaRN (arXiv 2309.00071); configuration values in the style of Kimi-K2.5.
"""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

# fmt: off
TEXT_CONFIG = dict(
    architectures=["DeepseekV3ForCausalLM"], model_type="kimi_k2",
    hidden_size=128, num_hidden_layers=10, first_k_dense_replace=1, moe_layer_freq=1,
    intermediate_size=384, moe_intermediate_size=64, n_routed_experts=8, num_experts_per_tok=2, n_shared_experts=1,
    n_group=1, topk_group=1, topk_method="noaux_tc", scoring_func="sigmoid", norm_topk_prob=True, routed_scaling_factor=2.827,
    num_attention_heads=4, num_key_value_heads=4, q_lora_rank=64, kv_lora_rank=64,
    # 16 + 16: vLLM's CPU attention needs a head of 32, 64, ..., and 32 is also a draft head's 128 / 4.
    qk_nope_head_dim=16, qk_rope_head_dim=16, v_head_dim=32,
    # K2.5 has 1e-5. transformers' MLA norms always take 1e-6 and vLLM's the config's: only here do both agree.
    rms_norm_eps=1e-6,
    rope_theta=50000.0, max_position_embeddings=4096,
    rope_scaling=dict(type="yarn", factor=4.0, original_max_position_embeddings=1024,
                      beta_fast=32.0, beta_slow=1.0, mscale=1.0, mscale_all_dim=1.0),
    hidden_act="silu", attention_bias=False, attention_dropout=0.0, tie_word_embeddings=False, use_cache=True,
    initializer_range=0.02, aux_loss_alpha=0.001, seq_aux=True, ep_size=1, pretraining_tp=1, num_nextn_predict_layers=0,
    torch_dtype="bfloat16",
)
VISION_CONFIG = dict(
    model_type="kimi_k25_vision", patch_size=14, hidden_size=32, intermediate_size=64, num_attention_heads=2, num_hidden_layers=2,
    init_pos_emb_height=8, init_pos_emb_width=8, init_pos_emb_time=4, pos_emb_type="divided_fixed",
    merge_kernel_size=[2, 2], merge_type="sd2_tpool", video_attn_type="spatial_temporal",
    mm_projector_type="patchmerger", mm_hidden_size=128, projector_hidden_act="gelu", projector_ln_eps=1e-5,
)
# fmt: on


def yarn_frequencies(config: dict) -> Tensor:
    """Return YaRN's angular frequencies [qk_rope_head_dim / 2]: long wavelengths divided by the factor."""
    scaling, width, base = config["rope_scaling"], config["qk_rope_head_dim"], config["rope_theta"]
    plain = base ** (-torch.arange(0, width, 2, dtype=torch.float32) / width)

    def dimension(rotations: float) -> float:
        return width * math.log(scaling["original_max_position_embeddings"] / (rotations * 2 * math.pi)) / (2 * math.log(base))

    low = max(math.floor(dimension(scaling["beta_fast"])), 0)
    high = min(math.ceil(dimension(scaling["beta_slow"])), width - 1)
    ramp = ((torch.arange(width // 2, dtype=torch.float32) - low) / max(high - low, 1e-3)).clamp(0, 1)
    return plain / scaling["factor"] * ramp + plain * (1 - ramp)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate neighbouring pairs (DeepSeek's interleaved layout). x [..., T, R]; cos, sin [T, R / 2]."""
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2)


class Norm(nn.Module):
    def __init__(self, width: int, eps: float):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(width)), eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), (x.shape[-1],), self.weight, self.eps).to(x.dtype)


class Attention(nn.Module):
    """Multi-head latent attention. Input and output [B, T, H]."""

    def __init__(self, c: dict):
        super().__init__()
        self.heads, self.nope, self.rope, self.v = (c["num_attention_heads"], c["qk_nope_head_dim"], c["qk_rope_head_dim"], c["v_head_dim"])
        width, rank, eps = c["hidden_size"], c["kv_lora_rank"], c["rms_norm_eps"]
        self.q_a_proj = nn.Linear(width, c["q_lora_rank"], bias=False)
        self.q_a_layernorm = Norm(c["q_lora_rank"], eps)
        self.q_b_proj = nn.Linear(c["q_lora_rank"], self.heads * (self.nope + self.rope), bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(width, rank + self.rope, bias=False)
        self.kv_a_layernorm = Norm(rank, eps)
        self.kv_b_proj = nn.Linear(rank, self.heads * (self.nope + self.v), bias=False)
        self.o_proj = nn.Linear(self.heads * self.v, width, bias=False)
        mscale = 0.1 * c["rope_scaling"]["mscale_all_dim"] * math.log(c["rope_scaling"]["factor"]) + 1.0
        self.scale = (self.nope + self.rope) ** -0.5 * mscale * mscale

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x)))
        q = q.view(batch, length, self.heads, self.nope + self.rope).transpose(1, 2)  # [B, N, T, nope + rope]
        q_nope, q_rope = q.split((self.nope, self.rope), dim=-1)
        latent, k_rope = self.kv_a_proj_with_mqa(x).split((self.kv_a_layernorm.weight.numel(), self.rope), dim=-1)
        kv = self.kv_b_proj(self.kv_a_layernorm(latent))
        kv = kv.view(batch, length, self.heads, self.nope + self.v).transpose(1, 2)
        k_nope, v = kv.split((self.nope, self.v), dim=-1)  # [B, N, T, nope], [B, N, T, v]
        k_rope = rotate(k_rope[:, None], cos, sin).expand(-1, self.heads, -1, -1)  # one rotary key for all heads
        q = torch.cat((q_nope, rotate(q_rope, cos, sin)), dim=-1).to(v.dtype)
        k = torch.cat((k_nope, k_rope), dim=-1).to(v.dtype)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=self.scale)
        return self.o_proj(out.transpose(1, 2).reshape(batch, length, -1))


class Mlp(nn.Module):
    def __init__(self, width: int, inner: int):
        super().__init__()
        self.gate_proj = nn.Linear(width, inner, bias=False)
        self.up_proj = nn.Linear(width, inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Experts(nn.Module):
    """Sigmoid-routed experts with a shared one; see the module's docstring for the form."""

    def __init__(self, c: dict):
        super().__init__()
        self.count, self.chosen, self.scaling = c["n_routed_experts"], c["num_experts_per_tok"], c["routed_scaling_factor"]
        width, inner = c["hidden_size"], c["moe_intermediate_size"]
        self.gate = nn.Parameter(torch.empty(self.count, width))
        self.register_buffer("e_score_correction_bias", torch.zeros(self.count))
        self.gate_proj = nn.Parameter(torch.empty(self.count, inner, width))
        self.up_proj = nn.Parameter(torch.empty(self.count, inner, width))
        self.down_proj = nn.Parameter(torch.empty(self.count, inner, width))  # stored transposed: [E, I, H]
        self.shared_experts = Mlp(width, inner * c["n_shared_experts"])

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [B, T, H] -> the layer's output [B, T, H] and how many tokens chose each expert [E]."""
        with torch.autocast(x.device.type, enabled=False):
            scores = F.linear(x.float(), self.gate.float()).sigmoid()  # [B, T, E]
        picked = (scores + self.e_score_correction_bias).topk(self.chosen, dim=-1).indices  # [B, T, k]
        mask = F.one_hot(picked, self.count).sum(dim=-2).to(scores.dtype)  # [B, T, E] of 0 and 1
        weights = scores * mask
        weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20) * self.scaling
        inner = F.silu(F.linear(x, self.gate_proj.flatten(0, 1))) * F.linear(x, self.up_proj.flatten(0, 1))  # [B, T, E * I]
        inner = (inner.unflatten(-1, (self.count, -1)) * weights[..., None].to(inner.dtype)).flatten(-2)
        out = F.linear(inner, self.down_proj.flatten(0, 1).T)
        return out + self.shared_experts(x), mask.sum(dim=(0, 1))


class Layer(nn.Module):
    def __init__(self, c: dict, dense: bool):
        super().__init__()
        self.input_layernorm = Norm(c["hidden_size"], c["rms_norm_eps"])
        self.self_attn = Attention(c)
        self.post_attention_layernorm = Norm(c["hidden_size"], c["rms_norm_eps"])
        self.mlp = Mlp(c["hidden_size"], c["intermediate_size"]) if dense else Experts(c)


class TinyKimi(nn.Module):
    """The text model in its training form."""

    def __init__(self, c: dict, seed: int):
        super().__init__()
        self.config = c
        self.embed_tokens = nn.Embedding(c["vocab_size"], c["hidden_size"])
        self.layers = nn.ModuleList(Layer(c, dense=i < c["first_k_dense_replace"]) for i in range(c["num_hidden_layers"]))
        self.norm = Norm(c["hidden_size"], c["rms_norm_eps"])
        self.lm_head = nn.Linear(c["hidden_size"], c["vocab_size"], bias=False)
        angles = torch.outer(torch.arange(1024, dtype=torch.float32), yarn_frequencies(c))  # [1024, rope / 2]
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
        self.initialise(seed)

    @torch.no_grad()
    def initialise(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in self.named_parameters():
            if parameter.dim() < 2:
                continue
            std = 0.02 if "embed" in name else 0.5 / math.sqrt(parameter.shape[-1])
            if name.endswith(("o_proj.weight", "down_proj.weight", "down_proj")):
                std /= math.sqrt(2 * len(self.layers))  # the residual stream keeps its size at any depth
            parameter.normal_(std=std, generator=generator)

    def forward(self, tokens: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """tokens [B, T <= 1024], mask [B, 1, T, T] bool -> logits [B, T, V], expert loads [layers - 1, E]."""
        x, loads = self.embed_tokens(tokens), []
        cos, sin = self.cos[: tokens.shape[1]], self.sin[: tokens.shape[1]]
        for layer in self.layers:
            x = x + layer.self_attn(layer.input_layernorm(x), cos, sin, mask)
            out = layer.mlp(layer.post_attention_layernorm(x))
            if isinstance(out, tuple):
                out, load = out
                loads.append(load)
            x = x + out
        return self.lm_head(self.norm(x)), torch.stack(loads)


def checkpoint_tensors(model: TinyKimi) -> dict[str, Tensor]:
    """Return the text model's tensors under the names of the real checkpoint, one expert a tensor, bf16 (bias fp32)."""
    tensors = {}
    for name, value in model.state_dict().items():
        value = value.detach().float().cpu()
        prefix, _, last = name.rpartition(".")
        full = f"language_model.{name}" if name.startswith("lm_head") else f"language_model.model.{name}"
        if last == "gate":
            tensors[full + ".weight"] = value.bfloat16()
        elif last == "e_score_correction_bias":
            tensors[f"language_model.model.{prefix}.gate.{last}"] = value
        elif value.dim() == 3:
            for index, expert in enumerate(value):
                matrix = expert.T if last == "down_proj" else expert
                tensors[f"language_model.model.{prefix}.experts.{index}.{last}.weight"] = matrix.bfloat16().contiguous()
        else:
            tensors[full] = value.bfloat16().contiguous()
    return tensors


def vision_tensors(seed: int) -> dict[str, Tensor]:
    """Return random weights of the MoonViT tower and the projector, so that every name of the real checkpoint's parts is there."""
    v, generator, tensors = VISION_CONFIG, torch.Generator().manual_seed(seed), {}
    width, inner, merged = v["hidden_size"], v["intermediate_size"], v["hidden_size"] * math.prod(v["merge_kernel_size"])

    def matrix(name: str, *shape: int) -> None:
        tensors[name] = (torch.randn(*shape, generator=generator) / math.sqrt(math.prod(shape[1:]))).bfloat16()

    def linear(name: str, rows: int, *columns: int) -> None:
        matrix(f"{name}.weight", rows, *columns)
        tensors[f"{name}.bias"] = torch.zeros(rows, dtype=torch.bfloat16)

    def norm(name: str) -> None:
        tensors[f"{name}.weight"] = torch.ones(width, dtype=torch.bfloat16)
        tensors[f"{name}.bias"] = torch.zeros(width, dtype=torch.bfloat16)

    linear("vision_tower.patch_embed.proj", width, 3, v["patch_size"], v["patch_size"])
    matrix("vision_tower.patch_embed.pos_emb.weight", v["init_pos_emb_height"], v["init_pos_emb_width"], width)
    for index in range(v["num_hidden_layers"]):
        block = f"vision_tower.encoder.blocks.{index}"
        norm(f"{block}.norm0")
        norm(f"{block}.norm1")
        linear(f"{block}.wqkv", 3 * width, width)
        linear(f"{block}.wo", width, width)
        linear(f"{block}.mlp.fc0", inner, width)
        linear(f"{block}.mlp.fc1", width, inner)
    norm("vision_tower.encoder.final_layernorm")
    norm("mm_projector.pre_norm")
    linear("mm_projector.proj.0", merged, merged)
    linear("mm_projector.proj.2", v["mm_hidden_size"], merged)
    return tensors
