"""Baseline on a small eval split: odd heads are one sentence each and left out, standard sets stand apart, twice is the same."""

import json
import shutil
import sys
from pathlib import Path

import briefly_trained_head
import pytest
import torch
import untrained_head
from safetensors.torch import load_file, save_file

from jobs.context import Context
from jobs.draft import replay
from jobs.draft.acceptance import Counts
from jobs.draft.formats import load_head, save_llama_eagle3
from jobs.draft.replay import Candidate
from jobs.draft.weights import VerifierWeights
from jobs.errors import MustFix
from jobs.job_file import load
from jobs.reporting.display import Display
from jobs.run import RunDirectory
from jobs.stages import baseline, fetch, gate, initial, judging, standard
from jobs.storage.states import Response, ResponseLog, StateLayout, StateStore, StateWriter
from jobs.verifier.chat import Chat
from jobs.verifier.facts import VerifierFacts
from jobs.verifier.tiny import CHECKPOINT

TAPS, PROMPTS = (2, 3, 5, 6, 7, 8), 8
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128, "attention_factor": 1.5}


def changed(head: Path, folder: Path, **config) -> Path:
    shutil.copytree(head, folder)
    written = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(written | config))
    return folder


def mla(head: Path, folder: Path) -> Path:
    """As the public MLA draft: its config names no other layer kind in every release, but its tensors do."""
    shutil.copytree(head, folder)
    weights = load_file(folder / "model.safetensors")
    save_file(weights | {"midlayer.self_attn.kv_a_proj_with_mqa.weight": torch.zeros(4, 4)}, folder / "model.safetensors")
    return folder


def thinks(i: int) -> bool:
    return i % 4 == 3


def answer(i: int) -> Response:
    """One in four thinks: three tokens inside, and with its end five outside, none of them twice, so that n-gram drafts nothing."""
    source = "own" if i % 2 else "gsm8k-like"
    if not thinks(i):
        return Response(f"p{i}#0", [5, 9, 11 + i], [3, 4, 3, 4, 3, 4, 20 + i, 3, 4], "stop", {}, source, False)
    chat = Chat.load(CHECKPOINT)
    return Response(
        f"p{i}#0", [5, 9, 11 + i, chat.think_id], [30, 31, 32, chat.end_of_thinking_id, 33, 34, 35, 36], "stop", {}, source, True
    )


def answers(prompts: int) -> list[Response]:
    found = [answer(i) for i in range(prompts)]
    return found + [Response(f"std.gsm8k.{i}#0", [5, 9], [1, 2, 1, 2, 1, 2, 1], "stop", {}, "gsm8k", False) for i in range(6)]


def eval_split(context: Context, prompts: int, gap: str | None = None) -> None:
    facts, folder = VerifierFacts.read(CHECKPOINT), context.states("eval")
    layout = StateLayout(TAPS, facts.hidden_size, "float32", "tiny", facts.revision, Chat.load(CHECKPOINT).tokenizer_sha256)
    generator, writer = torch.Generator().manual_seed(0), StateWriter(folder, layout)
    for answer in answers(prompts):
        rows = answer.tokens - 1 - (answer.id == gap)
        taps, final = (torch.randn(rows, *shape, facts.hidden_size, generator=generator) for shape in ((6,), ()))
        writer.append(answer.id, 0, taps, final, torch.zeros(rows))
        if answer.id != gap:
            writer.finish(answer.id, answer.tokens)
    writer.sync()
    writer.close()
    with ResponseLog(folder) as log:
        for answer in answers(prompts):
            log.append(answer)


def made(folder: Path, heads: dict[str, Path], prompts: int = PROMPTS, gap: str | None = None) -> Context:
    listed = ", ".join(f'{{name="{name}", model="{path}"}}' for name, path in heads.items())
    settings = load("smoke", overrides=[f"heads.candidates=[{listed}]", "heads.warm_start=best", "evaluate.bootstrap=100"], environment={})
    settings = settings.model_copy(
        update={"heads": settings.heads.model_copy(update={"untrained": False})}
    )  # it would need answers of the train split
    run = RunDirectory(folder / "run")
    run.begin(settings)
    context = Context(settings, run, Display.open("plain", stream=sys.stderr))
    fetch.run(context)
    eval_split(context, prompts, gap)
    return context


def notes(context: Context) -> list[str]:
    told = [json.loads(line) for line in (context.path / "events.jsonl").read_text().splitlines()]
    return [event["text"] for event in told if event["kind"] == "note"]


def starting_with(context: Context, name: str) -> Context:
    heads = context.settings.heads.model_copy(update={"warm_start": name})
    return Context(context.settings.model_copy(update={"heads": heads}), context.run, context.display)


@pytest.fixture(scope="module")
def heads(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("heads")
    good = untrained_head.saved(folder / "good", 1)
    return {
        "good": good,
        "wide": changed(good, folder / "wide", hidden_size=256),
        "foreign": changed(good, folder / "foreign", vocab_size=999),
        "mla-by-config": changed(good, folder / "mla-by-config", kv_lora_rank=64, model_type="deepseek_v3"),
        "mla-by-tensors": mla(good, folder / "mla-by-tensors"),
        "far": changed(good, folder / "far", eagle_aux_hidden_state_layer_ids=[1, 4, 9], rope_scaling=YARN),
    }


@pytest.fixture(scope="module")
def judged(heads, tmp_path_factory):
    context = made(tmp_path_factory.mktemp("judged"), heads)
    baseline.run(context)
    return context, json.loads((context.path / "baseline.json").read_text())


def test_a_head_that_does_not_fit_is_one_sentence_and_the_others_are_judged(judged):
    context, figures = judged
    assert set(figures["heads"]) == {"good", "ngram"}
    told = {
        name: text
        for text in notes(context)
        for name in ("wide", "foreign", "mla-by-config", "mla-by-tensors", "far")
        if f"baseline: {name} " in text
    }
    assert "hidden size 256, the verifier" in told["wide"]
    assert "vocabulary 999" in told["foreign"]
    assert "no MLA draft" in told["mla-by-config"] and "no MLA draft" in told["mla-by-tensors"]
    assert any("far scales its rope by a YaRN factor that vLLM 0.16.0 leaves out" in text for text in notes(context))
    assert "reads taps [1, 4, 9], the eval states hold [2, 3, 5, 6, 7, 8]" in told["far"]
    assert len(told) == 5 and not any("\n" in text for text in told.values())


def test_both_readings_are_judged_in_one_pass_and_every_group_stands_there(judged):
    _, figures = judged
    good = figures["heads"]["good"]
    assert set(good["readings"]) == {"2-5-7", "3-6-8"}
    assert set(good["groups"]) == {"domain", "position", "source", "thinking"}
    assert set(good["groups"]["domain"]) == {"chat", "math"} and set(good["groups"]["position"]) == {"0-255"}
    whole = good["groups"]["thinking"]["outside"]
    assert whole["low"] <= whole["mean_acceptance_length"] <= whole["high"]
    assert "low" not in good["groups"]["domain"]["math"], "four prompts of a domain are too few for an interval"


def test_steps_inside_and_outside_thinking_are_counted_apart(judged):
    context, figures = judged
    thinking = sum(map(thinks, range(PROMPTS)))
    groups = figures["heads"]["ngram"]["groups"]["thinking"]
    assert set(groups) == {"inside", "outside"}
    # The first token of an answer comes from prefill; of those that follow two are thinking, and nothing is drafted for them.
    assert (groups["inside"]["steps"], groups["inside"]["tokens"]) == (2 * thinking, 2 * thinking)
    plain = Counts.zero(3)
    for i, sample in judging.kept(context, "ngram").samples.items():
        assert set(sample.groups["thinking"]) == ({"inside", "outside"} if i in ("p3#0", "p7#0") else {"outside"})
        if i in ("p3#0", "p7#0"):
            assert sample.groups["thinking"]["outside"].steps == 5
        elif standard.set_of(i) is None:
            plain += sample.walk
    assert groups["outside"]["steps"] == plain.steps + 5 * thinking
    good = figures["heads"]["good"]
    assert set(good["groups"]["thinking"]) == {"inside", "outside"}
    assert sum(group["steps"] for group in good["groups"]["thinking"].values()) == good["walk"]["steps"]


def saved_of_a_trained_one(context: Context, folder: Path) -> Path:
    """A head that has seen the answers it will be judged on."""
    head = briefly_trained_head.trained(StateStore(context.states("eval")), VerifierWeights.read(CHECKPOINT), False, (2, 5, 7))
    save_llama_eagle3(head, folder, dtype=torch.float32)
    return folder


def test_of_several_heads_the_better_one_is_best_and_starts_the_training(judged, tmp_path):
    trained = saved_of_a_trained_one(judged[0], tmp_path / "trained")
    for order in (("a-weak", "z-strong"), ("a-strong", "z-weak")):
        folders = {name: trained if "strong" in name else untrained_head.saved(tmp_path / name, 1) for name in order}
        context = made(tmp_path / order[0], folders)
        said = baseline.run(context)
        strong, weak = sorted(order, key=lambda name: "weak" in name)
        figures = json.loads((context.path / "baseline.json").read_text())
        lengths = {name: figure["acceptance_length"]["mean"] for name, figure in figures["heads"].items()}
        assert lengths[strong] > lengths["ngram"] > lengths[weak], "or this test asks nothing"
        assert said["best"] == figures["best"] == strong
        assert context.run.ledger["acceptance"]["baseline"]["mean"] == lengths[strong]
        assert initial.chosen(context).name == initial.chosen(starting_with(context, strong)).name == strong
        worse = initial.chosen(starting_with(context, weak))
        assert worse.name == weak and worse.folder == Path(context.locations()["heads"][weak])


def test_n_gram_may_be_best_and_the_untrained_head_never_is():
    def best_of(**lengths: float) -> gate.Best | None:
        return baseline.best_head({name: {"acceptance_length": {"mean": length}} for name, length in lengths.items()})

    assert best_of(untrained=3.0, one=1.5, two=1.75, ngram=1.25) == best_of(two=1.75, ngram=1.25, one=1.5) == gate.Best("two", 1.75)
    assert best_of(untrained=3.0, one=1.5, ngram=2.25, two=1.75) == gate.Best("ngram", 2.25)
    assert best_of(untrained=3.0) is None


def test_the_best_head_in_its_better_reading_is_the_warm_start_unless_the_settings_say_otherwise(judged):
    context, figures = judged
    assert figures["best"] in ("good", "ngram"), "n-gram speculation may be better, and cannot be trained from"
    start = initial.chosen(context)
    better = max(figures["heads"]["good"]["readings"], key=figures["heads"]["good"]["readings"].get)
    assert (start.name, "-".join(map(str, start.taps))) == ("good", better)
    head = initial.warm(context, start, VerifierWeights.read(CHECKPOINT), {5: 3})
    assert torch.equal(head.fc.weight, load_head(start.folder).fc.weight) and head.config.taps == start.taps
    assert initial.chosen(starting_with(context, "none")) is None
    with pytest.raises(MustFix, match="'wide' could not be judged") as error:
        initial.chosen(starting_with(context, "wide"))
    assert error.value.where == "heads.warm_start"


def test_no_speculation_stands_beside_the_heads_and_is_never_chosen(judged, tmp_path):
    context, figures = judged
    assert context.run.ledger["acceptance"]["none"] == {"mean": 1.0}
    assert "none" not in figures["heads"] and figures["best"] != "none" and initial.chosen(context).name == "good"
    alone = made(tmp_path, {})
    heads = alone.settings.heads.model_copy(update={"ngram": False})
    alone = Context(alone.settings.model_copy(update={"heads": heads}), alone.run, alone.display)
    assert baseline.run(alone) == {"heads": 0, "sequences": PROMPTS, "best": None, "verdict": "go"}
    assert alone.run.ledger["acceptance"] == {"none": {"mean": 1.0}} and initial.chosen(alone) is None


def test_standard_sets_stand_apart_and_do_not_move_the_figure(judged):
    context, figures = judged
    ngram = figures["heads"]["ngram"]
    assert ngram["samples"] == PROMPTS
    gsm = ngram["standard"]["gsm8k"]
    assert gsm["prompts"] == 6 and gsm["walk"]["steps"] > 0
    assert gsm["acceptance_length"]["mean"] != ngram["acceptance_length"]["mean"]
    kept = judging.kept(context, "ngram")
    own = judging.own(kept)
    assert len(kept.samples) == PROMPTS + 6 and ngram["acceptance_length"]["mean"] == own.mean_acceptance_length


def test_a_judgement_made_again_is_the_same_to_the_last_byte(judged):
    context, _ = judged
    before = {path.name: path.read_bytes() for path in (context.path / "judgements").iterdir()} | {
        "figures": (context.path / "baseline.json").read_bytes()
    }
    baseline.run(context)
    after = {path.name: path.read_bytes() for path in (context.path / "judgements").iterdir()} | {
        "figures": (context.path / "baseline.json").read_bytes()
    }
    assert before == after


def test_a_head_is_judged_in_the_type_in_which_it_is_served(heads, tmp_path, monkeypatch):
    context, head = made(tmp_path, {"good": heads["good"]}), load_head(heads["good"])
    verifier = context.settings.verifier.model_copy(update={"dtype": "bfloat16"})
    served = Context(context.settings.model_copy(update={"verifier": verifier}), context.run, context.display)
    given = {}

    def judge_heads(candidates, *arguments, **options):
        given.update(candidates)
        return replay.judge_heads(candidates, *arguments, **options)

    monkeypatch.setattr(judging, "judge_heads", judge_heads)
    readings = {name: Candidate(head, taps) for name, taps in {"one": (2, 5, 7), "other": (3, 6, 8)}.items()}
    judging.judge_all(served, readings, StateStore(context.states("eval")))
    assert given["one"].head is given["other"].head, "two readings share the weights"
    wanted = load_head(heads["good"], dtype=torch.bfloat16).state_dict()
    for name, tensor in given["one"].head.state_dict().items():
        assert torch.equal(tensor, wanted[name]), name
    assert head.fc.weight.dtype == torch.float32, "what is given stays as it was: it may be in training"
    head.embed_tokens.to(torch.bfloat16)
    assert judging.as_served(served, head).embed_tokens.weight.data_ptr() == head.embed_tokens.weight.data_ptr(), (
        "nor is copied what needs no rounding"
    )


def test_too_few_prompts_for_an_interval_is_78(heads, tmp_path):
    context = made(tmp_path, {"good": heads["good"]}, prompts=4)
    with pytest.raises(MustFix, match="4 prompts with a step: too few for an interval") as error:
        baseline.run(context)
    assert error.value.exit_code == 78 and error.value.where == "prompts.eval_samples"


def test_an_answer_whose_last_state_is_missing_is_said_and_the_others_are_judged(heads, tmp_path):
    context = made(tmp_path, {"good": heads["good"]}, gap="p3#0")
    baseline.run(context)
    assert any("1 of 14 eval answers have no complete states" in text for text in notes(context))
    assert json.loads((context.path / "baseline.json").read_text())["heads"]["good"]["samples"] == PROMPTS - 1


def test_a_shard_without_final_states_is_one_sentence(heads, tmp_path):
    context = made(tmp_path, {"good": heads["good"]})
    shard = context.states("eval") / "shard-00000.safetensors"
    save_file({name: tensor for name, tensor in load_file(shard).items() if name != "final"}, shard)
    with pytest.raises(MustFix, match="final") as error:
        store = StateStore(context.states("eval"))
        judging.judge_all(context, {key: c for of in baseline._readings(context, store).values() for key, c in of.items()}, store)
    assert "\n" not in str(error.value)
