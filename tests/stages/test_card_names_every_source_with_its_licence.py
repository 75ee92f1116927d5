"""The model card names every source of the train split with its licence, as hero mixes them."""

from jobs.job_file import load
from jobs.stages import card


def test_every_source_of_heros_mix_stands_on_the_card_with_its_licence():
    prompts = load("hero", environment={}).prompts
    assert prompts.mix
    said = card._sources(prompts)
    for part in (prompts, *prompts.mix):
        assert f"`{part.source}`" in said
    assert all(part.licence and part.licence in said for part in prompts.mix)
    assert f"{prompts.mix[0].samples:,} at most, {prompts.mix[0].licence}" in said


def test_one_source_without_a_licence_stands_alone():
    prompts = load("smoke", overrides=("prompts.source=mine.jsonl", "prompts.licence=MIT"), environment={}).prompts
    assert card._sources(prompts) == "`mine.jsonl` (MIT)"
    assert card._sources(prompts.model_copy(update={"licence": None})) == "`mine.jsonl`"
