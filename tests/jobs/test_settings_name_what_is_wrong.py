"""Settings: later sources win, an unknown key anywhere is refused with the nearest known one."""

import json
import re
import tomllib
from pathlib import Path

import pytest

from jobs.environment import OTHERS, unknown_in
from jobs.errors import MustFix
from jobs.job_file import JOBS, documented, job_file, load
from jobs.pipeline import PIPELINE
from jobs.settings import Settings


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
        ("verifier.taps=2", "verifier.taps = 2: Input should be a list"),
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
    with pytest.raises(MustFix, match="did you mean EAGLE3_TRAIN__CLIP"):
        load("smoke", environment={"EAGLE3_TRAIN__CLIPS": "1"})


def test_what_kubernetes_says_of_a_service_of_that_name_is_let_pass():
    said = {
        "EAGLE3_JOB_SERVICE_HOST": "10.0.0.1",
        "EAGLE3_JOB_SERVICE_PORT": "80",
        "EAGLE3_JOB_PORT": "tcp://10.0.0.1:80",
        "EAGLE3_JOB_PORT_80_TCP_ADDR": "10.0.0.1",
    }
    assert load("smoke", environment=said) == load("smoke", environment={})


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("EAGLE3_TRAIN_LEARNING_RATE", "EAGLE3_TRAIN__LEARNING_RATE"),
        ("EAGLE3_PUSH__URL", "EAGLE3_PUSH__URI"),
        ("EAGLE3_PUSH_URI", "EAGLE3_PUSH__URI"),
        ("EAGLE3_HEALTHY_MINUTE", "EAGLE3_HEALTHY_MINUTES"),
        ("EAGLE3_GENERATE__THINKING__TEMPRATURE", "EAGLE3_GENERATE__THINKING__TEMPERATURE"),
        ("EAGLE3__TRAIN__CLIP", "EAGLE3_TRAIN__CLIP"),
        ("EAGLE3_WEBHOOKS", "EAGLE3_WEBHOOK"),
        ("EAGLE3_QQQQ", None),
    ],
)
def test_a_variable_of_ours_that_nothing_reads_is_refused(name, nearest):
    with pytest.raises(MustFix) as error:
        load("smoke", environment={name: "1", "EAGLE3_HOME": "/somewhere"})
    asked = f" (did you mean {nearest}?)" if nearest else ""
    assert str(error.value) == f"{name} is no setting and nothing reads it{asked} (environment): correct the name, or unset the variable."
    assert error.value.exit_code == 78


def test_other_programs_variables_and_a_webhook_of_another_name_are_left_alone():
    environment = {
        "EAGLE3": "1",
        "EAGLE": "2",
        "MY_EAGLE3_TRAIN": "3",
        "eagle3_train": "4",
        "EAGLE3_MY_HOOK": "https://example",
        "EAGLE3_GENERATE__THINKING": "{temperature = 0.5}",
    }
    settings = load(
        "smoke", overrides=["rental.webhook_variable=EAGLE3_MY_HOOK"], environment=environment | {"EAGLE3_PROMPTS__DOMAINS__CHATTY": "chat"}
    )
    assert (settings.generate.thinking.temperature, settings.prompts.domains["chatty"]) == (0.5, "chat")
    with pytest.raises(MustFix, match="EAGLE3_MY_HOOK is no setting"):
        load("smoke", environment=environment)


def test_every_variable_that_a_file_here_names_is_known():
    clone = Path(__file__).parents[2]
    files = [
        clone / "Dockerfile",
        clone / "docker-compose.yml",
        *(
            path
            for folder in ("entrypoints", "jobs", "compat")
            for path in (clone / folder).rglob("*")
            if path.is_file() and path.suffix != ".pyc"
        ),
    ]
    files.remove(clone / "jobs/environment.py")
    named = {name for path in files for name in re.findall(r"EAGLE3_[A-Z0-9_]*[A-Z0-9]", path.read_text(errors="replace"))}
    assert unknown_in(dict.fromkeys(named, ""), [key for key, _ in documented()]) == []
    assert OTHERS.keys() <= named, "known, and nothing reads it"


@pytest.mark.parametrize(
    ("overrides", "environment", "told"),
    [
        (
            (),
            {"EAGLE3_TRAIN__EPOCHS": "many", "EAGLE3_TRAIN__CLIP": "2"},
            "train.epochs = 'many': Input should be a valid number, unable to parse string as a number (EAGLE3_TRAIN__EPOCHS): correct the values.",
        ),
        (("train.epochs=many",), {"EAGLE3_TRAIN__EPOCHS": "2", "EAGLE3_TRAIN__CLIP": "2"}, "(--set train.epochs): correct the values."),
        (("train.epochs=0",), {"EAGLE3_TRAIN__CLIP": "{}"}, "(--set train.epochs, EAGLE3_TRAIN__CLIP): correct the values."),
        (("trian.epochs=0",), {"EAGLE3_TRAIN__CLIP": "2"}, "(--set trian.epochs): correct the key."),
        (("train.epoch=2",), {"EAGLE3_TRAIN__EPOCHS": "2"}, "(--set train.epoch): correct the key."),
        (("train.max_length=9000",), {"EAGLE3_TRAIN__CLIP": "2"}, "(--set train.max_length): correct the values."),
    ],
)
def test_a_wrong_value_names_the_variable_or_the_set_that_said_it(overrides, environment, told):
    with pytest.raises(MustFix) as error:
        load("smoke", overrides=overrides, environment=environment)
    assert str(error.value).endswith(told), str(error.value)


def test_a_wrong_value_of_the_file_names_the_file(tmp_path):
    job = tmp_path / "mine.toml"
    job.write_text("[train]\nepochs = 0\n[verifier]\nmodel = 3\n")
    with pytest.raises(MustFix) as error:
        load(job, overrides=["train.clip=0", "verifier.dtype=float16"], environment={})
    assert set(error.value.where.split(", ")) == {str(job), "--set verifier.dtype", "--set train.clip"}


def test_every_problem_is_named_at_once():
    with pytest.raises(MustFix) as error:
        load("smoke", overrides=["train.epochz=1", "prompts.sorce=x"], environment={})
    assert "train.epochs" in str(error.value) and "prompts.source" in str(error.value)


def test_a_file_that_is_not_there_or_no_text_is_named_with_its_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(MustFix, match=re.escape(f"no job 'mine.toml' ({tmp_path}/mine.toml)")):
        load("mine.toml", environment={})
    (tmp_path / "mine.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(MustFix, match=r"not text in UTF-8 \(mine.toml\)"):
        load("mine.toml", environment={})


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
