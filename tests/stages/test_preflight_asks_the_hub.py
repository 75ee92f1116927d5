"""Preflight and the hub: a fault of the network is no problem to mend, and a verifier is judged before it is downloaded."""

import json
import shutil

import huggingface_hub.constants
import huggingface_hub.file_download
import pytest
from hub_server import COMMIT, hub
from test_preflight_finds_what_would_fail import SMALL, context, looked

from jobs.errors import MustFix, TryAgain
from jobs.stages import hub as stage_hub
from jobs.stages import preflight
from jobs.stages.preflight import access, described
from jobs.verifier.facts import tensor_names
from jobs.verifier.tiny import CHECKPOINT

UNREACHABLE = ("push.uri=s3://heads/x", "push.endpoint_url=http://127.0.0.1:9", "push.path_style=true")
ON_THE_HUB = ("verifier.model=made/up", f"verifier.revision={COMMIT}")
INDEX = "model.safetensors.index.json"


@pytest.fixture
def served(tmp_path, monkeypatch):
    """A hub with the tiny verifier as made/up, and nothing of it on this machine."""
    shutil.copytree(CHECKPOINT, tmp_path / "repository")
    with hub({"made/up": tmp_path / "repository"}) as server:
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", server.url)
        monkeypatch.setattr(
            huggingface_hub.file_download, "HUGGINGFACE_CO_URL_TEMPLATE", server.url + "/{repo_id}/resolve/{revision}/{filename}"
        )
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        yield server


@pytest.fixture
def network(monkeypatch):
    """The checks that go over the network, the second look a moment after the first; nothing of this machine's own credentials."""
    monkeypatch.setattr(preflight, "CHECKS", {name: preflight.CHECKS[name] for name in ("prompts", "repositories", "fits", "destination")})
    monkeypatch.setattr(preflight, "IN_THE_MAIN_THREAD", ("fits",))
    monkeypatch.setattr(preflight, "PAUSE_SECONDS", 0.1)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "a")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "b")


def problems_of(made):
    checks = json.loads((made.path / "preflight.json").read_text())["checks"]
    return {name: check["problems"] for name, check in checks.items() if check["problems"]}


@pytest.mark.parametrize("where", ["hub", "bucket"])
def test_a_network_that_failed_since_an_earlier_start_is_75(tmp_path, served, network, where):
    """A managed job stops for good on 78, and is started again and again on 75: never for an address that may be wrong."""
    made = context(tmp_path, *(UNREACHABLE if where == "bucket" else ON_THE_HUB))
    served.status = 503
    with pytest.raises(MustFix, match="does not answer.*mend them"):
        preflight.run(made)
    made.run.stage("preflight")["counts"] = {}  # as a start that passed leaves it
    with pytest.raises(TryAgain, match="may pass.*does not answer.*start it again") as error:
        preflight.run(made)
    assert error.value.exit_code == 75 and set(problems_of(made)) == ({"destination"} if where == "bucket" else {"repositories", "fits"})
    assert "1 fault that" in str(error.value), "told once, whoever meets it"


def test_a_network_that_fails_beside_something_to_mend_is_78_and_both_are_named(tmp_path, served, network):
    made = context(tmp_path, *UNREACHABLE, "prompts.source=/nowhere/p.jsonl", *ON_THE_HUB)
    served.status = 503
    with pytest.raises(MustFix, match=r"3 problems.*/nowhere/p.jsonl.*The hub does not answer.*The endpoint does not answer") as error:
        preflight.run(made)
    assert error.value.exit_code == 78 and len(error.value.problems) == 3


def test_a_moment_without_the_hub_is_looked_at_once_more(tmp_path, served, network):
    made = context(tmp_path, *ON_THE_HUB, *SMALL)
    served.busy = 2  # the first questions of `repositories` and of `fits`
    assert preflight.run(made)["checks"] == len(preflight.CHECKS) and problems_of(made) == {}


# What is said of a repository ------------------------------------------------------------------------


def test_repositories_and_their_bytes(tmp_path, served):
    measured = {}
    made = context(tmp_path, *ON_THE_HUB)
    assert list(access.repositories(made, measured)) == []
    assert measured == {"made/up": sum(file.stat().st_size for file in CHECKPOINT.iterdir())}


def test_a_gated_repository_is_named(tmp_path, served):
    served.gated.add("made/up")
    (sentence,) = access.repositories(context(tmp_path, "verifier.model=made/up"), {})
    assert "made/up is gated for this account" in sentence and "HF_TOKEN" in sentence


@pytest.mark.parametrize(("status", "said"), [(401, "The hub refuses the token"), (403, "accept the licence")])
def test_a_token_the_hub_refuses_is_named_and_no_passing_fault(tmp_path, served, network, status, said):
    served.status = status
    with pytest.raises(MustFix, match=said) as error:
        preflight.run(context(tmp_path, *ON_THE_HUB))
    (sentence,) = error.value.problems
    assert "made/up" in sentence and "(HF_TOKEN)" in sentence


def test_a_revision_that_is_not_there(tmp_path, served, network):
    with pytest.raises(MustFix, match=f"made/up has no revision {'f' * 40}") as error:
        preflight.run(context(tmp_path, "verifier.model=made/up", f"verifier.revision={'f' * 40}"))
    assert len(error.value.problems) == 1


def test_every_missing_repository_is_named(tmp_path, served):
    made = context(
        tmp_path,
        "verifier.model=nobody/nothing",
        'heads.candidates=[{name="a", model="no/head"}, {name="b", model="made/up", revision="main"}]',
    )
    sentences = list(access.repositories(made, {}))
    assert len(sentences) == 3
    assert (
        "nobody/nothing is not on the hub" in sentences[0]
        and "no/head is not on the hub" in sentences[1]
        and "which is no commit" in sentences[2]
    )


# A verifier before its download ------------------------------------------------------------------------


def weights_read(served):
    """Bytes asked for of the weights' files, by their Range; -1 for a whole one."""
    return [
        int(wanted.rpartition("-")[2] or -2) + 1 if wanted else -1 for name, wanted in served.downloads if name.endswith(".safetensors")
    ]


def test_a_verifier_of_the_hub_is_judged_as_a_local_one_before_its_download(tmp_path, served):
    impossible = ("vocab.size=99999999", "verifier.taps=[1, 2, 99]", "verifier.max_model_len=1000000000", "verifier.load=runai_streamer")
    local = looked(context(tmp_path / "local", *impossible), "fits")
    sentences = looked(context(tmp_path, *ON_THE_HUB, *impossible), "fits")
    assert len(sentences) == 5 and [s.replace("made/up@01234567", str(CHECKPOINT)) for s in sentences] == local
    for expected in (
        "runai-model-streamer is not installed",
        "does not fit",
        "Tap 99",
        "vocab.size = 99999999",
        "max_model_len = 1000000000 exceeds",
    ):
        assert any(expected in sentence for sentence in sentences)
    assert weights_read(served) == [128 << 10], "the header alone"


def test_a_verifier_of_the_hub_that_fits_is_downloaded_into_the_same_folder(tmp_path, served):
    assert looked(context(tmp_path, *ON_THE_HUB), "fits") == []
    (folder,) = (tmp_path / "cache").glob(f"*/snapshots/{COMMIT}")
    assert {path.name for path in folder.iterdir()} == {path.name for path in CHECKPOINT.iterdir()} - {"model.safetensors"}
    assert stage_hub.cached("made/up", COMMIT) is None, "what was asked for is not the whole"
    asked = len(served.downloads)
    assert looked(context(tmp_path / "again", *ON_THE_HUB), "fits") == []
    assert {name for name, _ in served.downloads[asked:]} == {"model.safetensors"}, "its header; the rest is there"


def test_an_open_revision_is_the_newest_commit(tmp_path, served):
    (sentence,) = looked(context(tmp_path, "verifier.model=made/up", "vocab.size=99999999"), "fits")
    assert "vocab.size = 99999999" in sentence


def test_the_tokenizer_of_a_verifier_of_the_hub(tmp_path, served):
    (tmp_path / "repository" / "tiktoken.model").unlink()
    (sentence,) = looked(context(tmp_path, *ON_THE_HUB), "fits")
    assert "the tokenizer in made/up@01234567 does not load" in sentence and "restore its files" in sentence


@pytest.mark.parametrize(
    ("file", "content", "said"),
    [
        (INDEX, b'{"weight_map": {"a": "model.safetensors", "b": "model-2.safetensors"}}', "made/up lacks the weights model-2.safetensors"),
        (INDEX, b"[]", "names no weights"),
        ("model.safetensors", b"x" * 1000, "model.safetensors of made/up is no safetensors file"),
        ("model.safetensors", None, "made/up lacks the weights *.safetensors"),
        ("config.json", None, "config.json"),
    ],
)
def test_a_repository_that_is_not_whole(tmp_path, served, file, content, said):
    (tmp_path / "repository" / file).write_bytes(content) if content else (tmp_path / "repository" / file).unlink()
    (sentence,) = looked(context(tmp_path, *ON_THE_HUB), "fits")
    assert said in sentence and "made/up" in sentence and "/tmp" not in sentence


def test_terabytes_are_asked_for_by_their_size(tmp_path, served, monkeypatch):
    """A sparse file stands for it: what it would take is known, and neither disk nor network is spent."""
    names = tensor_names(CHECKPOINT)
    (tmp_path / "repository" / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(names, "model.safetensors")}))
    sizes = stage_hub.sizes
    monkeypatch.setattr(stage_hub, "sizes", lambda *which: sizes(*which) | {"model.safetensors": 5_400_000_000_000})
    (sentence,) = looked(context(tmp_path, *ON_THE_HUB), "fits")
    assert "The verifier does not fit: 5400" in sentence and "made/up@01234567, 5400.0 GB of weights" in sentence
    assert weights_read(served) == []


def test_replicas_share_the_experts_whose_bytes_the_headers_say(tmp_path, served):
    (tmp_path / "repository" / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(tensor_names(CHECKPOINT), "model.safetensors")}))
    asked = ("verifier.parallel=dp", "verifier.tensor_parallel_size=2", "verifier.max_model_len=1000000000")
    local = looked(context(tmp_path / "local", *asked), "fits")
    assert [s.replace("made/up@01234567", str(CHECKPOINT)) for s in looked(context(tmp_path, *ON_THE_HUB, *asked), "fits")] == local
    assert "does not fit" in local[0] and weights_read(served) == [128 << 10]


def test_a_hub_that_hangs_while_it_describes_is_a_passing_fault(tmp_path, served, monkeypatch):
    monkeypatch.setattr(described, "SECONDS", 0.5)
    served.hang_once.add("config.json")
    (problem,) = looked(context(tmp_path, *ON_THE_HUB), "fits")
    assert isinstance(problem, TryAgain) and "did not describe made/up within" in str(problem)


def test_heads_for_another_verifier(tmp_path, served):
    """A folder, and a repository of the hub of which nothing but config.json is read."""
    head = tmp_path / "head"
    head.mkdir()
    for folder in (head, tmp_path / "repository"):
        (folder / "config.json").write_text(json.dumps({"hidden_size": 7168, "vocab_size": 163840}))
    made = context(
        tmp_path / "local", f'heads.candidates=[{{name="aq", model="{head}"}}, {{name="hub", model="made/up", revision="{COMMIT}"}}]'
    )
    sentences = looked(made, "fits")
    assert [sentence.partition(" is for ")[0] for sentence in sentences] == ["head aq", "head aq", "head hub", "head hub"]
    assert "hidden size of 7168" in sentences[0] and "vocabulary of 163840" in sentences[1]
    assert {name for name, _ in served.downloads} == {"config.json"}
    shutil.copy(CHECKPOINT / "config.json", tmp_path / "repository")
    from_the_hub = context(tmp_path, *ON_THE_HUB, f'heads.candidates=[{{name="aq", model="{head}"}}]')
    assert looked(from_the_hub, "fits") == sentences[:2], "against a verifier that is still on the hub"
