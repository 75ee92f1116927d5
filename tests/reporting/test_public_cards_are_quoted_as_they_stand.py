"""The public cards' figures, beside those of a run: in its report, and in the README of the head that it publishes."""

import json
import re
from types import SimpleNamespace

import pytest
from made_up_runs import complete_ledger, length
from report_pages import page_of

from jobs.draft.model import HeadConfig
from jobs.reporting import public_cards
from jobs.settings import Settings
from jobs.stages import card

# Acceptance length as the cards tell it: 3 drafted tokens, top-1, the bonus token included.
SETS = ("mt-bench", "humaneval", "gsm8k", "math500")
CARDS = {
    "AQ-MedAI/Kimi-K2-Instruct-eagle3": (None, 3.372, 3.165, 3.490),
    "AQ-MedAI/Kimi-K25-eagle3": (None, None, 3.07, None),
    "lightseekorg/kimi-k2.5-eagle3": (2.687, 3.285, 3.201, 3.342),
    "lightseekorg/kimi-k2.5-eagle3-mla": (2.940, 2.969, 3.017, 3.051),
}
REMARKS = {
    "AQ-MedAI/Kimi-K2-Instruct-eagle3": "made for Kimi-K2",
    "AQ-MedAI/Kimi-K25-eagle3": "about",
    "lightseekorg/kimi-k2.5-eagle3-mla": "MLA draft",
}
OURS = {name: {"acceptance_length": length(2.5 + place / 10), "prompts": 80 + place} for place, name in enumerate(SETS)}


def shown(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def settings(**changes) -> Settings:
    given = complete_ledger()["settings"]
    return Settings.model_validate(given | {section: given[section] | values for section, values in changes.items()})


def test_every_figure_of_every_card():
    quoted = {each.model: tuple(each.lengths.get(name) for name in SETS) for each in public_cards.CARDS}
    assert quoted == CARDS and public_cards.DRAFT_TOKENS == 3
    assert all(set(each.lengths) <= set(SETS) and REMARKS.get(each.model, "") in each.remark for each in public_cards.CARDS)


@pytest.mark.parametrize("changes", [{"verifier": {"model": "another/model"}}, {"evaluate": {"draft_tokens": 4}}])
def test_no_card_stands_beside_what_it_cannot_be_compared_with(changes):
    assert public_cards.cards_for(settings()) == public_cards.CARDS and public_cards.cards_for(settings(**changes)) == ()


def test_the_report_shows_each_of_them_beside_the_heads(complete_run):
    evaluation = json.loads((complete_run / "evaluation.json").read_text())
    evaluation["heads"]["trained"]["standard"] = OURS
    (complete_run / "evaluation.json").write_text(json.dumps(evaluation))
    baseline = json.loads((complete_run / "baseline.json").read_text())
    for head in baseline["heads"].values():
        head["standard"] = OURS
    (complete_run / "baseline.json").write_text(json.dumps(baseline))
    page = page_of(complete_run)
    words, traced = " ".join(page.text.split()), {figure.get("data-source"): text for figure, text in page.figures}
    assert f"head {' '.join(SETS)}" in words
    for model, figures in CARDS.items():
        assert re.search(rf"{re.escape(model)} by its card(, [\w ,-]+?)? {' '.join(map(shown, figures))} ", words), model
    for name, figure in OURS.items():
        place = f"evaluation.json#/heads/trained/standard/{name}/acceptance_length"
        for end, digits in (("mean", 3), ("low", 2), ("high", 2)):
            assert traced[f"{place}/{end}"] == f"{figure['acceptance_length'][end]:.{digits}f}"


def readme(tmp_path, known: Settings, standard: dict | None) -> str:
    """The model card that `package` writes, of made-up figures."""
    (tmp_path / "baseline.json").write_text(json.dumps({"heads": {}}))
    context = SimpleNamespace(
        settings=known,
        path=tmp_path,
        run=SimpleNamespace(ledger=complete_ledger()),
        fetched=lambda: {"verifier": {"model": "tiny", "revision": "r1"}},
    )
    config = HeadConfig(163_840, 32_000, 7168, 18_432, 64, 64, 128, 1e-5, 1e6, None, (2, 30, 58), False)
    head = {"acceptance_length": length(2.6132), "rates": [0.71, 0.52, None]} | ({"standard": standard} if standard else {})
    return card.model_card(context, config, {"draft_tokens": 3, "heads": {"trained": head}, "gains": {}})


def test_the_heads_own_readme_has_its_figures_and_every_cards_below_them_with_what_differs(tmp_path):
    text = readme(tmp_path, settings(), OURS)
    lines = text.splitlines()
    head = lines.index(f"| head | {' | '.join(SETS)} |")
    cells = [
        f"{f['acceptance_length']['mean']:.3f} ({f['acceptance_length']['low']:.3f} to {f['acceptance_length']['high']:.3f}), {f['prompts']} prompts"
        for f in OURS.values()
    ]
    assert lines[head + 2] == f"| trained | {' | '.join(cells)} |"
    for line, (model, figures) in zip(lines[head + 3 : head + 7], CARDS.items(), strict=True):
        name, *told = [cell.strip() for cell in line.strip("|").split("|")]
        assert name.startswith(f"{model}, by its card") and REMARKS.get(model, "") in name and told == list(map(shown, figures))
    assert "What differs from the cards:" in text and "- the wording around a question need not be the cards'" in lines
    assert "| trained | 2.613 | 2.530 to 2.692 | 0.710 0.520 - |" in lines, "the figure of the run's own prompts stands apart"
    assert not [line for line in lines if "{" in line and "num_speculative_tokens" not in line]


def test_a_readme_of_another_verifier_names_no_card_and_one_without_standard_sets_has_no_such_part(tmp_path):
    alone = readme(tmp_path, settings(verifier={"model": "another/model"}), OURS)
    assert "Standard prompts" in alone and not any(model in alone for model in CARDS) and "What differs" not in alone
    assert "Standard prompts" not in readme(tmp_path, settings(), None)
