"""What a user of the product writes for real_model.py: prompt files without a prompt in common, and a settings file a run."""

import argparse
import json
import random
from pathlib import Path
from typing import Any


class UserFiles:
    """Files under OUT, made from the options of real_model.py."""

    def __init__(self, options: argparse.Namespace):
        self.options, self.out = options, options.out.absolute()
        self.out.mkdir(parents=True, exist_ok=True)
        self.verifier = options.verifier.absolute()

    def prompts(self) -> dict[str, Path]:
        """Three files without a prompt in common: eval, and the train splits of the first run and of those with more data."""
        options, files = self.options, {name: self.out / f"prompts-{name}.jsonl" for name in ("eval", "first", "more")}
        rows = [json.loads(line) for line in options.prompts.read_text().splitlines() if line.strip()]
        random.Random(options.seed).shuffle(rows)
        sizes = {"eval": options.eval_samples, "first": options.train_samples, "more": options.more_samples}
        if sum(sizes.values()) > len(rows):
            raise SystemExit(f"{options.prompts} holds {len(rows)} prompts, {sum(sizes.values())} are needed")
        begin = 0
        for name, size in sizes.items():
            chosen = [{key: value for key, value in row.items() if key != "split"} for row in rows[begin : begin + size]]
            text = "".join(json.dumps(row) + "\n" for row in chosen)
            if not files[name].exists() or files[name].read_text() != text:  # a run beside this one may be reading it
                files[name].write_text(text)
            begin += size
        return files

    def settings(self, name: str, **changes: dict[str, Any]) -> Path:
        """The settings file of one run."""
        o, files, cuda = self.options, self.prompts(), self.options.device == "cuda"
        sampling = {"temperature": o.temperature, "top_p": 0.95}
        values: dict[str, dict[str, Any]] = {
            "job": {"name": name, "seed": o.seed},
            "verifier": {
                "model": str(self.verifier), "dtype": o.dtype, "taps": list(self.taps()), "max_model_len": o.max_prompt_tokens + o.max_new_tokens + 16,
                "max_num_seqs": o.max_num_seqs, "max_num_batched_tokens": max(2048, o.max_prompt_tokens), "enforce_eager": not cuda,
                "gpu_memory_utilization": 0.4, **({} if cuda else {"kv_cache_gib": 2.0}),
            },
            "prompts": {
                "source": str(files["first"]), "eval_source": str(files["eval"]), "train_samples": o.train_samples, "eval_samples": o.eval_samples,
                "thinking_share": 0.0, "max_prompt_tokens": o.max_prompt_tokens, "domains": dict(o.domain),
                "standard": [{"name": n, "source": str(Path(s).absolute()), "samples": o.standard_samples} for n, s in o.standard],
            },
            "generate": {"max_new_tokens": o.max_new_tokens, "thinking": sampling, "instant": sampling},
            "states": {"shard_mib": 256 if not cuda else 1024},
            "vocab": {"size": o.vocab, "min_coverage": 0.5},
            "heads": {"untrained": True, "ngram": True, "warm_start": "none"},
            "train": {
                "device": o.device, "epochs": float(o.epochs), "tokens_per_step": o.tokens_per_step, "max_length": o.tokens_per_step,
                "learning_rate": o.learning_rate, "warm_start_learning_rate": o.warm_learning_rate, "warmup_share": o.warmup_share, "ttt_steps": 3,
                "compile": cuda, "heads": self.shape()[0], "kv_heads": self.shape()[1], "head_dim": self.shape()[2], "checkpoint_every": 100,
                "evaluate_every": o.evaluate_every, "keep_best": False, "intermediate_size": self.shape()[3],
            },
            "evaluate": {"draft_tokens": 3, "scaling": o.scaling},
            "package": {"name": f"{self.verifier.name}-eagle3"},
        }  # fmt: skip
        for section, keys in changes.items():
            values.setdefault(section, {}).update(keys)
        path = self.out / f"{name}.toml"
        path.write_text(
            "".join(
                f"[{section}]\n" + "".join(f"{key} = {toml(value)}\n" for key, value in keys.items() if value is not None) + "\n"
                for section, keys in values.items()
            )
        )
        return path

    def config(self) -> dict[str, Any]:
        found = json.loads((self.verifier / "config.json").read_text())
        return found.get("text_config", found)

    def taps(self) -> tuple[int, int, int]:
        layers = self.config()["num_hidden_layers"]
        return 2, layers // 2, layers - 3

    def shape(self) -> tuple[int, int, int, int]:
        """(heads, KV heads, head_dim, FFN) of both heads: the verifier's, as speculators' recipe takes them."""
        c = self.config()
        heads = c["num_attention_heads"]
        return (
            heads,
            c.get("num_key_value_heads", heads),
            c.get("head_dim") or c["hidden_size"] // heads,
            self.options.intermediate_size or c["intermediate_size"],
        )


def toml(value: Any) -> str:
    """A value in TOML's notation; a table is written inline."""
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{json.dumps(key)} = {toml(inner)}" for key, inner in value.items()) + " }"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(toml, value)) + "]"
    return json.dumps(value)
