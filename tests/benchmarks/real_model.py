"""A real model through the whole pipeline as a user runs it, its head beside speculators 0.4.0.1's on the same states.

    python tests/benchmarks/real_model.py --verifier smollm2-135m --prompts prompts.jsonl --out runs/real

The verifier is any checkpoint folder that vLLM and a Llama-form head serve; the prompts are JSONL lines with
`messages`. Every size is an argument, the defaults are for two CPU cores; on a GPU the same script takes
`--device cuda --dtype bfloat16` and larger numbers. What it does, each part by `eagle3-job run FILE` with a
settings file that it writes (and that can be run again by hand):

  first        generate, capture, judge untrained and n-gram, train from scratch, replay, live once; with `--trial` the gate trains on a
               share of the train split first, beside the loaded verifier, and the run goes on whatever it finds
  speculators  speculators trains its own model on the train states of `first`: the same samples, epochs, packed
               length, draft vocabulary, head shape, peak and shape of the learning rate
  judge        ours and theirs by replay on the eval states of `first`, paired over the same prompts
  again        training of `first` again on the same states with other settings, each of `--again NAME KEY=VALUE …`
  live-greedy  the live measurement of `first` once more at temperature 0: is speculation lossless?
  fp8-states   the answers of `first` again (their states by prefill) into a store in FP8, trained on as `first` was
  warm-own     other prompts, a warm start from our own first head, which also drafts while they are answered
  warm-theirs  the same answers again (their states by prefill), a warm start from speculators' head, ours beside it in the baseline

Every figure is a line of OUT/figures.jsonl. A part that is done is not repeated: the product continues its own runs.
"""

import argparse
import json
import os
import re
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]

from real_model_files import UserFiles  # noqa: E402

PARTS = ("first", "speculators", "again", "fp8-states", "judge", "live-greedy", "warm-own", "warm-theirs")


class Bench(UserFiles):
    def say(self, what: str, **figures: Any) -> None:
        line = json.dumps({"what": what, **{key: short(value) for key, value in figures.items()}})
        print(line, flush=True)
        with (self.out / "figures.jsonl").open("a") as file:
            file.write(line + "\n")

    def process(self, command: list[str], log: Path, environment: dict[str, str] | None = None) -> tuple[str, float, float]:
        """(its standard output, wall seconds, CPU seconds of it and all it started); an error ends the benchmark."""
        before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
        with log.open("a") as errors:
            path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
            done = subprocess.run(
                command, stdout=subprocess.PIPE, stderr=errors, text=True, env=os.environ | {"PYTHONPATH": path} | (environment or {})
            )
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        if done.returncode:
            raise SystemExit(f"{' '.join(command)} ended with {done.returncode}, see {log}: {done.stdout[-600:]}")
        return done.stdout, time.perf_counter() - began, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    def job(self, settings: Path, *arguments: str) -> dict[str, Any]:
        """`eagle3-job run FILE`; its figures are said and its result returned."""
        name = settings.stem
        command = [sys.executable, "-m", "entrypoints.cli", "run", str(settings), "--run-dir", str(self.out / name), "--json", *arguments]
        output, wall, cpu = self.process(command, self.out / f"{name}.log")
        result = json.loads(output.splitlines()[-1])
        stages = {stage: round(entry.get("seconds") or 0.0, 1) for stage, entry in result["stages"].items()}
        self.say(f"{name}.run", wall_seconds=wall, cpu_seconds=cpu, stages=stages)
        counts = {stage: entry.get("counts") or {} for stage, entry in result["stages"].items()}
        self.say(
            f"{name}.counts",
            **{stage: counts.get(stage) for stage in ("prompts", "generate.eval", "generate.train", "vocab", "train", "evaluate")},
        )
        baseline, evaluation = (json.loads((self.out / name / file).read_text()) for file in ("baseline.json", "evaluation.json"))
        for head, figure in (baseline["heads"] | evaluation["heads"]).items():
            self.say(
                f"{name}.{head}",
                **figure["acceptance_length"],
                rates=figure["rates"],
                domains={d: f["mean_acceptance_length"] for d, f in figure["groups"]["domain"].items()},
            )
            if "live" in figure:  # what vLLM counted while this head drafted for the eval split, and the replay over the same answers
                self.say(f"{name}.{head}.counted", **figure["live"])
        self.say(f"{name}.gains", **evaluation["gains"])
        return result

    # ------------------------------------------------------------------ the parts

    def first(self) -> None:
        o, changes, arguments = self.options, {}, ()
        if o.live:
            changes["evaluate"] = {"live": {"concurrencies": o.live, "requests": o.live_requests}}
        if o.trial:
            changes["gate"], arguments = {"min_gain": 0.0, "trial_fraction": o.trial}, ("--force",)
        self.job(self.settings("first", **changes), *arguments)
        if o.trial:
            self.say("first.gate", **json.loads((self.out / "first" / "run.json").read_text())["gate"])
        if o.live:
            self._live("live")

    def live_greedy(self) -> None:
        """As a user asks for it afterwards; the run's other stages are done."""
        o = self.options
        live = {"concurrencies": list(o.live), "requests": o.live_requests, "temperature": 0, "max_new_tokens": o.max_new_tokens // 2}
        self.job(self.settings("first"), *(part for key, value in live.items() for part in ("--set", f"evaluate.live.{key}={value}")))
        self._live("live-greedy")

    def _live(self, name: str) -> None:
        found = json.loads((self.out / "first" / "live.json").read_text())
        for way, entry in found["ways"].items():
            for concurrency, run in entry["runs"].items():
                self.say(
                    name, way=way, concurrency=int(concurrency), tokens_per_second=run["output_throughput"], median_itl_ms=run.get("median_itl_ms"),
                    median_tpot_ms=run.get("median_tpot_ms"), acceptance=run.get("spec_decode_acceptance_length"),
                )  # fmt: skip
        self.say(f"{name}.speedup", **found["speedup"], same_answers=found.get("same_answers"))

    def speculators(self) -> None:
        self._trainer_of_theirs(self.options.speculators[0], "--only-files")  # for all of them, before several run at once
        self.each(self._speculators, self.options.speculators)

    def each(self, train: Callable[[Any], None], of: Sequence[Any]) -> None:
        """Trainings on the states of `first`, so many at once."""
        with ThreadPoolExecutor(self.options.at_once) as pool:
            for done in [pool.submit(train, one) for one in of]:
                done.result()

    def _speculators(self, name: str) -> None:
        trained = self.out / f"speculators-{name}" / "trained.json"
        if not trained.exists():
            self._trainer_of_theirs(name)
        self.say(f"speculators.{name}", **json.loads(trained.read_text()))

    def _trainer_of_theirs(self, name: str, *arguments: str) -> None:
        o, out = self.options, self.out / f"speculators-{name}"
        form, _, rate = name.partition("@")
        command = [
            sys.executable, str(Path(__file__).with_name("real_model_speculators.py")), str(self.out / "first"), str(self.verifier),
            str(self.out / "speculators-files"), str(out), *arguments, "--taps", *map(str, self.taps()),
            "--epochs", str(o.epochs), "--tokens-per-step", str(o.tokens_per_step),
            "--learning-rate", rate or str(o.learning_rate), "--warmup-share", str(o.warmup_share),
            "--device", o.device, "--seed", str(o.seed), *(["--intermediate-size", str(o.intermediate_size)] if o.intermediate_size else []),
            *(["--true-tokens"] if form.startswith("true-tokens") else []), *(["--dtype", "bfloat16"] if form.endswith("-bf16") else []),
        ]  # fmt: skip
        # Its attention is compiled; where there is no GPU it runs uncompiled.
        self.process(command, self.out / f"speculators-{name}.log", {} if o.device == "cuda" else {"TORCHDYNAMO_DISABLE": "1"})

    def theirs(self, name: str) -> Path:
        return self.out / f"speculators-{name}" / "checkpoints" / str(self.options.epochs - 1)

    def again(self) -> None:
        self.each(self._again, self.options.again)

    def _again(self, asked: list[str]) -> None:
        """The run directory of `first` once more, its shards shared, from training on."""

        def copied(source: str, target: str) -> None:
            (os.link if Path(source).name.startswith("shard-") else shutil.copy2)(source, target)

        name, *changes = asked
        if not (self.out / name).exists():
            shutil.copytree(self.out / "first", self.out / name, copy_function=copied, ignore=shutil.ignore_patterns("published"))
        # A continued run takes its settings from its ledger; what is to be different is said on the command line.
        told = [part for change in (*changes, "evaluate.live.concurrencies=[]") for part in ("--set", change)]
        self.job(self.settings(name, job={"name": "first"}), "--redo", "train", *told)

    def judge(self) -> None:
        """All heads trained on the states of `first` in one pass over its eval states, as trained and as served: in the verifier's type."""
        import torch

        from jobs.draft.formats import load_head
        from jobs.draft.replay import Candidate, judge_heads
        from jobs.draft.statistics import mean_interval, paired_gain_interval
        from jobs.draft.weights import VerifierWeights
        from jobs.stages.judging import own_ids
        from jobs.storage.files import write_json_atomically
        from jobs.storage.states import StateStore

        verifier, run = VerifierWeights.read(self.verifier), self.out / "first"
        store = StateStore(run / "states" / "eval")
        folders = {
            "ours": run / "trained",
            **{name: self.out / name / "trained" for name in [*(name for name, *_ in self.options.again), "fp8-states"]},
            **{f"speculators-{name}": self.theirs(name) for name in self.options.speculators},
        }
        folders = {name: folder for name, folder in folders.items() if folder.exists()}
        forms = {"": None} | ({".served": torch.bfloat16} if self.options.dtype == "bfloat16" else {})
        heads = {
            name + form: load_head(folder, verifier=verifier, default_taps=self.taps(), dtype=dtype).to(torch.device(self.options.device))
            for form, dtype in forms.items() for name, folder in folders.items()
        }  # fmt: skip
        began = time.perf_counter()
        judged = judge_heads({name: Candidate(head, self.taps()) for name, head in heads.items()}, store, own_ids(store), 3)
        seconds, tokens = time.perf_counter() - began, judged["ours"].walk.tokens
        live = run / "live.json"
        decoding = json.loads(live.read_text())["ways"]["none"]["runs"] if live.exists() else {}
        self.say(
            "judge.time", seconds=seconds, heads=len(heads), positions_per_second=len(heads) * judged["ours"].every.steps / seconds, tokens=tokens,
            # What the same answers would take to decode, over what judging one head takes.
            times_faster_than_live={c: tokens / entry["output_throughput"] * len(heads) / seconds for c, entry in decoding.items()},
        )  # fmt: skip
        for name, judgement in judged.items():
            write_json_atomically(self.out / f"judged-{name}.json", judgement.as_dict())
            self.say(
                f"judge.{name}",
                **mean_interval(judgement)._asdict(),
                rates=[round(r, 4) for r in judgement.walk.rates],
                steps=judgement.walk.steps,
            )
        for form in forms:
            for name in list(folders)[1:]:
                self.say(f"judge.ours_over_{name}{form}", **paired_gain_interval(judged["ours" + form], judged[name + form])._asdict())

    def fp8_states(self) -> None:
        self.job(self.settings("fp8-states", states={"dtype": "fp8"}, generate={"responses": str(self.out / "first" / "states")}))

    def _warm(self, name: str, start: str, candidates: dict[str, Path], **generate: Any) -> None:
        o, listed = self.options, [{"name": each, "model": str(folder)} for each, folder in candidates.items()]
        path = self.settings(
            name, heads={"candidates": listed, "untrained": False, "warm_start": start}, generate=generate,
            prompts={"source": str(self.out / "prompts-more.jsonl"), "train_samples": o.more_samples, "standard": []}, evaluate={"scaling": []},
        )  # fmt: skip
        self.job(path)

    def warm_own(self) -> None:
        # On a CPU drafts of sampled answers cannot be verified.
        drafts = self.options.device == "cuda" or self.options.temperature == 0
        self._warm("warm-own", "ours", {"ours": self.out / "first" / "head"}, **({"speculate": "ours"} if drafts else {}))

    def warm_theirs(self) -> None:
        heads = {"ours": self.out / "first" / "head", "speculators": self.theirs(self.options.speculators[0])}
        self._warm("warm-theirs", "speculators", heads, responses=str(self.out / "warm-own" / "states"))


def short(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: short(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [short(inner) for inner in value]
    return float(f"{value:.5g}") if isinstance(value, float) else value


def pair(text: str) -> tuple[str, str]:
    name, _, value = text.partition("=")
    return name, value


def speculators_name(text: str) -> str:
    if not re.fullmatch(r"(true|own)-tokens(-bf16)?(@[0-9.e-]+)?", text):
        raise argparse.ArgumentTypeError(f"{text} is not true-tokens or own-tokens, then -bf16 or not, then @RATE or not")
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--verifier", type=Path, required=True, help="checkpoint folder")
    parser.add_argument("--prompts", type=Path, required=True, help="JSONL with messages")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--train-samples", type=int, default=600)
    parser.add_argument("--more-samples", type=int, default=300, help="other prompts, for the warm starts")
    parser.add_argument("--eval-samples", type=int, default=120)
    parser.add_argument("--max-prompt-tokens", type=int, default=128)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--max-num-seqs", type=int, default=64)
    parser.add_argument("--temperature", type=float, default=0.7)
    parser.add_argument("--vocab", type=int, default=4096)
    parser.add_argument("--intermediate-size", type=int, help="FFN of both heads; the verifier's if left out")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--tokens-per-step", type=int, default=1024)
    parser.add_argument("--learning-rate", type=float, default=1e-3, help="peak, of ours and of theirs")
    parser.add_argument("--warm-learning-rate", type=float, default=3e-4)
    parser.add_argument("--warmup-share", type=float, default=0.03)
    parser.add_argument("--evaluate-every", type=int, help="optimizer steps between replays in training")
    parser.add_argument("--speculators", nargs="+", type=speculators_name, default=["true-tokens", "own-tokens"], metavar="TOKENS[-bf16][@RATE]",
                        help="what its TTT steps are fed: true-tokens, the verifier's (its --use-off-policy-tokens), or own-tokens, the draft's (its default); in fp32, or all of it in bf16; at another peak of the learning rate")  # fmt: skip
    parser.add_argument(
        "--again",
        nargs="+",
        action="append",
        default=[],
        metavar=("NAME", "KEY=VALUE"),
        help="e.g. fp8 train.fp8=true; may be given several times",
    )
    parser.add_argument(
        "--at-once", type=int, default=1, help="trainings of `speculators` and `again` side by side; their seconds then say little"
    )
    parser.add_argument("--trial", type=float, help="share of the train split for a trial by the gate, before the rest is generated")
    parser.add_argument("--scaling", type=float, nargs="*", default=[])
    parser.add_argument("--live", type=int, nargs="*", default=[1, 4], help="concurrencies; none measures nothing live")
    parser.add_argument("--live-requests", type=int, default=16)
    parser.add_argument("--domain", type=pair, nargs="*", default=[], metavar="SOURCE=DOMAIN")
    parser.add_argument("--standard", type=pair, nargs="*", default=[], metavar="NAME=FILE", help="standard prompts from files")
    parser.add_argument("--standard-samples", type=int, default=16)
    parser.add_argument("--seed", type=int, default=17)
    bench = Bench(parser.parse_args())
    bench.say(
        "what",
        options={key: str(value) if isinstance(value, Path) else value for key, value in vars(bench.options).items()},
        cores=os.cpu_count(),
    )
    for part in bench.options.parts:
        getattr(bench, part.replace("-", "_"))()


if __name__ == "__main__":
    main()
