"""Settings: later sources win, an unknown key anywhere is refused with the nearest known one."""

import json
import re
import tomllib

import pytest

from jobs.errors import MustFix
from jobs.pipeline import PIPELINE
from jobs.settings import JOBS, Settings, documented, job_file, load


def test_later_sources_win(tmp_path):
    job = tmp_path / "mine.toml"
    job.write_text("[train]\nepochs = 2\nclip = 3\nttt_steps = 2\n")
    environment = {"EAGLE3_TRAIN__EPOCHS": "3", "EAGLE3_TRAIN__CLIP": "4", "UNRELATED": "x", "EAGLE3_HOME": "/somewhere"}
    settings = load(job, overrides=["train.epochs=5"], environment=environment)
    assert (settings.train.epochs, settings.train.clip, settings.train.ttt_steps, settings.train.betas) == (5, 4, 2, (0.9, 0.95))


def test_a_continued_run_keeps_its_settings_and_takes_overrides():
    first = load("smoke", overrides=["train.epochs=7", "job.seed=3"], environment={})
    again = load("smoke", overrides=["job.seed=4"], environment={}, base=first.as_dict())
    assert (again.train.epochs, again.job.seed) == (7, 4)


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("train.learning_rat=1", "did you mean train.learning_rate?"),
        ("trian.epochs=1", "did you mean train?"),
        ("generate.thinking.temprature=1", "did you mean generate.thinking.temperature?"),
        ("epochs=1", "the sections are job, verifier"),
        ("train.epochs", "write --set section.key=value"),
        ("train.epochs=many", "train.epochs = 'many'"),
        ("train.epochs=0", "greater than 0"),
        ("verifier.dtype=float16", "verifier.dtype = 'float16'"),
        ("verifier.taps=[1,2]", "an EAGLE-3 head reads 3"),
        ("push.uri=gs://bucket", "neither s3:// nor file:///"),
        ("heads.warm_start=nobody", "neither `best`, `none` nor one of"),
        ("generate.backend=speculators", "name them in generate.responses"),
    ],
)
def test_one_sentence_names_the_key_and_the_remedy(override, expected):
    with pytest.raises(MustFix) as error:
        load("smoke", overrides=[override], environment={})
    assert expected in str(error.value)
    assert error.value.exit_code == 78
    assert "\n" not in str(error.value)


def test_an_unknown_key_in_a_file_and_in_the_environment_is_refused(tmp_path):
    job = tmp_path / "mine.toml"
    job.write_text("[train]\nepoch = 2\n")
    with pytest.raises(MustFix, match="did you mean train.epochs"):
        load(job, environment={})
    with pytest.raises(MustFix, match="did you mean train.clip"):
        load("smoke", environment={"EAGLE3_TRAIN__CLIPS": "1"})


def test_every_problem_is_named_at_once():
    with pytest.raises(MustFix) as error:
        load("smoke", overrides=["train.epochz=1", "prompts.sorce=x"], environment={})
    assert "train.epochs" in str(error.value) and "prompts.source" in str(error.value)


def test_a_broken_job_file_names_its_line(tmp_path):
    job = tmp_path / "mine.toml"
    job.write_text("[train]\nepochs = = 2\n")
    with pytest.raises(MustFix, match="line 2"):
        load(job, environment={})


@pytest.mark.parametrize("job", JOBS)
def test_shipped_jobs_are_valid_and_every_value_has_its_why(job):
    load(job, environment={})
    text = job_file(job).read_text()
    assert tomllib.loads(text)
    values = [line for line in text.splitlines() if re.match(r"[a-z_]+ = ", line)]
    assert [line for line in values if "#" not in line] == []


def test_every_setting_is_documented_in_one_line():
    rows = documented()
    assert len(rows) == len(dict(rows)) > 80
    assert [key for key, text in rows if not text or "\n" in text] == []
    assert Settings().value("train.epochs") == 1.0


@pytest.mark.parametrize("job", JOBS)
def test_what_every_stage_of_every_job_depends_on_can_be_written_into_the_ledger(job):
    """A list of tables (heads.candidates of hero) once could not: the run ended in its second stage."""
    settings = load(job, environment={})
    for stage in PIPELINE:
        for key in stage.SETTINGS:
            value = settings.value(key)
            assert json.loads(json.dumps(value)) == value, (stage.NAME, key)
