"""speculators 0.4.0.1's own model and training step, on random weights of the same head."""

import time

import torch

from jobs.draft.model import HeadConfig


class Speculators:
    """`Eagle3DraftModel` in bf16 with AdamW and clipping, as its Trainer makes them, without its logging."""

    def __init__(self, config: HeadConfig, device: torch.device, longest: int):
        import speculators.models.eagle3.core as core
        from speculators.config import SpeculatorsConfig, VerifierConfig
        from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
        from speculators.proposals.greedy import GreedyTokenProposalConfig
        from transformers import LlamaConfig

        c = config
        llama = LlamaConfig(
            hidden_size=c.hidden_size, intermediate_size=c.intermediate_size, num_attention_heads=c.heads, num_key_value_heads=c.kv_heads,
            head_dim=c.head_dim, vocab_size=c.vocab_size, num_hidden_layers=1, max_position_embeddings=longest, rms_norm_eps=c.rms_norm_eps,
            rope_theta=c.rope_theta, pad_token_id=None,
        )  # fmt: skip
        llama._attn_implementation = "simple_flex_attention"
        shape = (c.vocab_size, c.hidden_size)
        core.AutoConfig.from_pretrained = staticmethod(
            lambda *_, **__: llama
        )  # no checkpoint of 4.7 GB has to be written for random weights
        core.load_model_layers = lambda *_: {
            "embed_tokens.weight": torch.randn(shape) * 0.02, "lm_head.weight": torch.randn(shape) * 0.02, "model.norm.weight": torch.ones(shape[1])
        }  # fmt: skip
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.bfloat16)
        try:
            with torch.device(device):
                t2d = torch.zeros(c.vocab_size, dtype=torch.bool)
                t2d[: c.draft_vocab_size] = True
                speculator = SpeculatorsConfig(
                    algorithm="eagle3", proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=3)], default_proposal_method="greedy",
                    verifier=VerifierConfig(name_or_path="random", architectures=["LlamaForCausalLM"]),
                )  # fmt: skip
                made = Eagle3SpeculatorConfig(
                    transformer_layer_config=llama, draft_vocab_size=c.draft_vocab_size, norm_before_residual=c.norm_before_residual,
                    speculators_config=speculator,
                )  # fmt: skip
                self.model = Eagle3DraftModel(made, t2d, torch.zeros(c.draft_vocab_size, dtype=torch.long)).to(device, torch.bfloat16)
        finally:
            torch.set_default_dtype(before)
        self.config, self.device = config, device
        self.optimizer = torch.optim.AdamW([p for p in self.model.parameters() if p.requires_grad], lr=1e-5)

    def batch(self, rows: int, lengths: tuple[int, ...]) -> dict:
        h, device = self.config.hidden_size, self.device
        draw = lambda width: torch.randn(1, rows, width, device=device).bfloat16()  # noqa: E731
        places = torch.cat([torch.arange(1, n + 1) for n in lengths] + [torch.zeros(rows - sum(lengths), dtype=torch.long)])
        return dict(
            hidden_states=draw(3 * h), input_ids=torch.randint(self.config.vocab_size, (1, rows), device=device),
            lengths=torch.tensor(lengths, device=device), loss_mask=(torch.arange(rows)[None] < sum(lengths)).long().to(device),
            position_ids=places[None].to(device), verifier_last_hidden_states=draw(h),
        )  # fmt: skip

    def step(self, batch: dict) -> torch.Tensor:
        """One step of `Trainer.train_epoch`; its `.item()` of every metric is left out, in its favour."""
        _, loss, _ = self.model(**batch, ttt_steps=3)
        self.optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        return loss.detach()

    def measure(self, rows: int, lengths: tuple[int, ...], seconds: float, warm_up: int = 3) -> float:
        """Seconds a step."""
        batch = self.batch(rows, lengths)
        for _ in range(warm_up):
            self.step(batch)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        began, number = time.perf_counter(), 0
        while number < 4 or time.perf_counter() - began < seconds:
            self.step(batch)
            number += 1
            if number % 4 == 0:
                torch.cuda.synchronize()
        torch.cuda.synchronize()
        return (time.perf_counter() - began) / number
