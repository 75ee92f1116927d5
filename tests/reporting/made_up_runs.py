"""Run directories as the pipeline leaves them: finished, stopped early, failed. Figures are made up but consistent."""

import json
import math
from pathlib import Path

import pytest

from jobs.settings import Settings

HOSTILE = '<script>alert("x")</script>&<img src=x onerror=alert(1)>'


def length(mean: float) -> dict[str, float]:
    return {"mean": mean, "low": mean - 0.083, "high": mean + 0.079}


def head(name: str, mean: float, rates: list[float], drafts: int = 5000, **more) -> dict:
    steps = 5000
    accepted = [round(rate * drafts) for rate in rates]
    edges = [steps, *accepted, 0]
    return {
        "acceptance_length": length(mean),
        "name": name,
        "draft_tokens": 3,
        "samples": 64,
        "mean_acceptance_length": mean,
        "rates": rates,
        "conditional_rates": [rate / before for rate, before in zip(rates, [1.0, *rates], strict=False)],
        "histogram": [edges[i] - edges[i + 1] for i in range(4)],
        "walk": {"steps": steps, "tokens": steps + sum(accepted), "drafts": drafts, "draft_tokens": 3 * drafts, "accepted": accepted},
        "groups": {
            "domain": {
                "chat": {"mean_acceptance_length": mean + 0.1, "low": mean, "high": mean + 0.2},
                "code": {"mean_acceptance_length": mean - 0.1, "low": mean - 0.3, "high": mean + 0.1},
            },
            "position": {
                label: {"mean_acceptance_length": mean - place / 50}
                for place, label in enumerate(("0-255", "1024-4095", "16384+", "256-1023"))
            },
            "source": {f"set-{place:02d}": {"mean_acceptance_length": mean + place / 100} for place in range(30)},
            "thinking": {"inside": {"mean_acceptance_length": mean - 0.05}, "outside": {"mean_acceptance_length": mean + 0.2}},
        },
        "others": {
            "source": {
                "shown": ["set-07", "set-03", "set-29"],
                "labels": 27,
                "mean_acceptance_length": mean + 0.011,
                "steps": 40,
                "tokens": 99,
            }
        },
        "standard": {
            "gsm8k": {"acceptance_length": length(mean + 0.5), "prompts": 80},
            "mt-bench": {"acceptance_length": {"mean": mean - 0.2}, "prompts": 4},
        },
        **more,
    }


def settings() -> dict:
    return Settings(
        job={"name": "smoke", "seed": 3},
        verifier={"model": "moonshotai/Kimi-K2.5", "taps": [2, 5, 7]},
        train={"tokens_per_step": 512, "max_length": 256, "device": "cpu"},
        rental={"machine": "8 x RTX PRO 6000", "price_per_hour": 12.5, "currency": "EUR"},
    ).as_dict()


def stage(seconds: float, counts: dict, *, state: str = "done", **more) -> dict:
    return {
        "state": state,
        "started": "2026-05-01T10:00:00Z",
        "seconds": seconds,
        "counts": counts,
        "bytes": 1_234_567,
        "cost": round(seconds / 3600 * 12.5, 4),
        "inputs": {"prompts.jsonl": {"bytes": 4711, "sha256": "a" * 64}},
        "outputs": {
            "out/file.json": {"bytes": 1_234_567, "sha256": "b" * 64},
            "states/eval/shard-00000.safetensors": {"bytes": 99, "sha256": None},
        },
        **more,
    }


def live() -> dict:
    """Two ways at two concurrencies; the server of `none` died in its second measurement."""

    def run(rate: float, accepts: float | None = None) -> dict:
        measured = {
            "output_throughput": rate,
            "median_itl_ms": 1000 / rate,
            "p99_itl_ms": 4000 / rate,
            "median_tpot_ms": 900 / rate,
            "median_ttft_ms": 21.5,
        }
        return measured | ({"spec_decode_acceptance_length": accepts} if accepts else {})

    ways = {
        "none": {
            "runs": {"1": run(60.0)},
            "error": "The live server died with signal SIGKILL (none-server.log): run the same command again.",
        },
        "trained": {"runs": {"1": run(84.6, 2.59), "16": run(700.0, 2.61)}},
    }
    return {
        "winner": "trained",
        "replay": length(2.6132),
        "requests": 48,
        "sampling": {"temperature": 1.0, "top_p": 0.95},
        "ways": ways,
        "speedup": {"1": 1.41},
        "same_answers": {"winner_and_plain": {"1": 0.9583}},
        "first_divergences": {
            "winner_and_plain": {
                "1": {"answers": 48, "diverged": 2, "tokens": 5312.4, "per_1000_tokens": 0.37648, "more_than_chance": False},
                "16": {"answers": 48, "diverged": 11, "tokens": 4890.0, "per_1000_tokens": 2.2495, "more_than_chance": True},
            },
            "plain_and_plain": {"16": {"answers": 48, "diverged": 3, "tokens": 5260.8, "per_1000_tokens": 0.57026}},
        },
    }


def scaling() -> dict:
    rows = [
        {"share": share, "samples": int(900 * share), "tokens": int(180_000 * share), "acceptance_length": length(2.1 + share / 2)}
        for share in (0.1, 0.3, 1.0)
    ]
    return {"rows": rows}


def complete_ledger() -> dict:
    stages = {
        "preflight": stage(4.2, {"checks": 17}),
        "fetch": stage(0.6, {"repositories": 1, "bytes": 7_654_321}),
        "prompts": stage(2.5, {"eval": 64, "train": 900, "read": 981, "duplicate": 5, "too_long": 12, "in_eval_too": 0, "empty": 0}),
        "generate.eval": stage(
            31.0,
            {
                "prompts": 64,
                "turns": 70,
                "tokens": 12_800,
                "response_tokens": 8_000,
                "rows": 12_730,
                "dropped": {},
                "tokens_per_second": 400.0,
            },
        ),
        "baseline": stage(3.3, {"heads": 2, "sequences": 64, "best": "ngram"}),
        "generate.train": stage(
            120.0,
            {
                "prompts": 900,
                "turns": 1000,
                "tokens": 180_000,
                "response_tokens": 108_000,
                "rows": 179_000,
                "dropped": {"no answer": 2},
                "tokens_per_second": 900.0,
            },
        ),
        "vocab": stage(0.4, {"size": 768, "coverage": 0.98765}),
        "train": stage(61.5, {"steps": 700, "tokens": 358_400, "bad_steps": 0, "loss": 2.17, "dropped_rows": 31}),
        "evaluate": stage(2.8, {"acceptance_length": 2.6132, "sequences": 64}),
        "package": stage(0.9, {"files": 5, "bytes": 3_456_789}),
        "push": stage(0.2, {"files": 6, "bytes": 3_456_789, "uri": "s3://name:hidden-word@bucket/prefix"}),
    }
    seconds = sum(entry["seconds"] for entry in stages.values())
    return {
        "version": 1,
        "job": "smoke",
        "status": "done",
        "exit_code": 0,
        "error": None,
        "settings": settings(),
        "versions": {"python": "3.11.2", "vllm": "0.16.0", "torch": "2.10.0"},
        "machine": {"name": "8 x RTX PRO 6000", "host": "box", "cpus": 2},
        "stages": stages,
        "gate": {"verdict": "go", "why": "no threshold is set", "forced": False},
        "acceptance": {
            "none": {"mean": 1.0},
            "trained": length(2.6132),
            "untrained": length(1.02),
            "ngram": length(1.55),
            "baseline": length(1.55),
        },
        "verifier_loads": 1,
        "published": "file:///data/runs/smoke/published",
        "cost": {"amount": round(seconds / 3600 * 12.5, 4), "currency": "EUR"},
    }


def training_lines(count: int = 700) -> list[dict]:
    lines: list[dict] = [{"note": "training from scratch, 700 steps"}]
    for step in range(10, count + 1, 10):
        share = step / count
        line = {
            "step": step,
            "loss": 2.1 + 4.5 * math.exp(-5 * share) + 0.08 * math.sin(step),
            "accuracy_by_step": [0.62 * (1 - math.exp(-4 * share)), 0.47 * (1 - math.exp(-3 * share)), 0.36 * (1 - math.exp(-2.5 * share))],
            "learning_rate": 4e-3 * min(1.0, step / 40) * (1 + math.cos(math.pi * share)) / 2,
            "grad_norm": 0.7,
            "acceptance_estimate": 1.1 + 1.3 * (1 - math.exp(-3 * share)),
            "tokens_per_second": 8312.4,
            "data_wait": 0.01,
            "eta_seconds": 60 * (1 - share),
        }
        lines.append(line)
        if step % 140 == 0:
            lines.append(
                {
                    "step": step,
                    "steps": count,
                    "evaluation": {"acceptance": 1.0 + 1.6 * (1 - math.exp(-3 * share)), "rates": [0.5, 0.3, 0.2]},
                }
            )
    return lines


def write_lines(path: Path, lines: list[dict]) -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.fixture
def complete_run(tmp_path: Path) -> Path:
    """A finished run with every file the report reads."""
    run = tmp_path / "complete"
    run.mkdir()
    (run / "run.json").write_text(json.dumps(complete_ledger()))
    heads = {
        "ngram": head("ngram", 1.55, [0.31, 0.15, 0.09], drafts=900, live={"mean": 2.047, "drafts": 913, "replay": {"mean": 2.031}}),
        "untrained": head("untrained", 1.02, [0.015, 0.004, 0.001]),
    }
    (run / "baseline.json").write_text(json.dumps({"draft_tokens": 3, "heads": heads, "best": "ngram"}))
    trained = head("trained", 2.6132, [0.71, 0.52, 0.3832], taps=[2, 5, 7], readings={"2-5-7": 2.6132, "3-6-8": 1.81})
    gains = {"over_ngram": length(1.0632), "over_untrained": length(1.5932)}
    by_domain = {"chat": length(1.2), "code": length(0.9)}
    (run / "evaluation.json").write_text(
        json.dumps({"draft_tokens": 3, "heads": {"trained": trained}, "gains": gains, "gains_by_domain": by_domain})
    )
    (run / "live.json").write_text(json.dumps(live()))
    (run / "scaling.json").write_text(json.dumps(scaling()))
    write_lines(run / "train.jsonl", training_lines())
    write_lines(
        run / "events.jsonl",
        [
            {"time": "2026-05-01T10:00:00Z", "kind": "run started", "job": "smoke"},
            {"time": "2026-05-01T10:00:04Z", "kind": "stage ended", "stage": "preflight", "state": "done", "seconds": 4.2},
            {"time": "2026-05-01T10:00:09Z", "kind": "note", "text": "prompts: 12 were too long"},
        ],
    )
    return run


@pytest.fixture
def stopped_run(tmp_path: Path) -> Path:
    """Interrupted while generating: three stages done, a torn line at the end of a log, no judgement yet."""
    run = tmp_path / "stopped"
    run.mkdir()
    ledger = complete_ledger()
    done = ("preflight", "fetch", "prompts")
    ledger |= {"status": "interrupted", "exit_code": 75, "gate": None, "acceptance": {}, "published": None}
    ledger["error"] = {"message": "Stopped by SIGTERM", "where": None, "remedy": "run the same command again to continue"}
    ledger["stages"] = {name: entry if name in done else {"state": "pending"} for name, entry in ledger["stages"].items()}
    (run / "run.json").write_text(json.dumps(ledger))
    (run / "events.jsonl").write_text('{"time": "2026-05-01T10:00:00Z", "kind": "run started"}\n{"time": "2026-05-0')
    return run


@pytest.fixture
def failed_run(tmp_path: Path) -> Path:
    """Failed in training, with text from outside that would be markup if it were not escaped."""
    run = tmp_path / "failed"
    run.mkdir()
    ledger = complete_ledger()
    ledger |= {"status": "failed", "exit_code": 78, "published": None, "job": HOSTILE}
    ledger["error"] = {"message": HOSTILE, "where": HOSTILE, "remedy": HOSTILE}
    ledger["stages"]["train"] = stage(9.0, {HOSTILE: 3, "note": HOSTILE, "dropped": {HOSTILE: 7}}, state="failed", error=HOSTILE)
    ledger["stages"]["train"]["outputs"] = {HOSTILE: {"bytes": 1, "sha256": HOSTILE}}
    ledger["acceptance"] = {HOSTILE: length(1.4)}
    ledger["versions"] = {HOSTILE: HOSTILE}
    ledger["settings"]["job"]["name"] = HOSTILE
    ledger["gate"] = {"verdict": HOSTILE, "why": HOSTILE}
    (run / "run.json").write_text(json.dumps(ledger))
    bad = head(HOSTILE, 1.4, [0.2, 0.1, 0.05])
    bad["groups"] = {HOSTILE: {HOSTILE: {"mean_acceptance_length": 1.4}}}
    (run / "baseline.json").write_text(json.dumps({"draft_tokens": 3, "heads": {HOSTILE: bad}, "best": HOSTILE}))
    (run / "evaluation.json").write_text(json.dumps({"gains": {f"over_{HOSTILE}": length(0.3)}}))
    (run / "live.json").write_text(
        json.dumps({"winner": HOSTILE, "ways": {HOSTILE: {"runs": {HOSTILE: {"output_throughput": 2.0}}, "error": HOSTILE}}})
    )
    (run / "scaling.json").write_text(json.dumps({"rows": [HOSTILE, {"share": HOSTILE}]}))
    write_lines(run / "train.jsonl", [{"step": 10, "loss": 3.0}, {"step": 20, "loss": math.nan, HOSTILE: HOSTILE}])
    write_lines(run / "events.jsonl", [{"time": HOSTILE, "kind": HOSTILE, "text": HOSTILE}])
    return run
