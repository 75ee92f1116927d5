"""Preflight: each line fails for real where that can be arranged, all problems stand in one sentence, nothing hangs."""

import contextlib
import email.utils
import json
import os
import resource
import subprocess
import tempfile
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import s3_servers
from ceph_server import ceph_server

from jobs.backup import backup_uri
from jobs.context import Context
from jobs.errors import MustFix, TryAgain
from jobs.job_file import load
from jobs.reporting.display import Display
from jobs.run import RunDirectory
from jobs.stages import preflight
from jobs.stages.preflight import machine
from jobs.stages.preflight.problem import sentence_of
from jobs.storage.saved_run import RunSaver
from jobs.verifier.tiny import CHECKPOINT

# Of a verifier that is not here yet the disk's check assumes Kimi's size: samples that any machine has room for.
SMALL = ("prompts.train_samples=20", "prompts.eval_samples=20")


def context(folder, *overrides):
    run = RunDirectory(folder / "run")
    settings = load("smoke", overrides=overrides, environment={})
    run.begin(settings)
    return Context(settings, run, Display.open("plain"))


def looked(made, name):
    return list(preflight.CHECKS[name](made, {}))


@contextlib.contextmanager
def small_disk(folder: Path, mib: int):
    folder.mkdir(exist_ok=True)
    if (
        os.geteuid() != 0
        or subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={mib}m", "tmpfs", str(folder)], capture_output=True).returncode
    ):
        pytest.skip("only root with the right to mount can make a small disk")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


@contextlib.contextmanager
def http_server(answer):
    """A server whose every answer `answer(handler)` writes."""

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_):
            pass

        def do_HEAD(self):
            answer(self)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def exit_code_as(user, work) -> int:
    """What `work` returns in a process of another user, because root may do everything."""
    if os.geteuid() != 0:
        pytest.skip("only root can become another user for this test")
    child = os.fork()
    if child == 0:
        try:
            os.setuid(user)
            os._exit(work())
        finally:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.fixture(scope="module")
def healthy(tmp_path_factory):
    """One preflight of the smoke job on this machine, with a bucket."""
    folder = tmp_path_factory.mktemp("healthy")
    with s3_servers.moto_server() as server, pytest.MonkeyPatch.context() as patch:
        for name, value in server.environment.items():
            patch.setenv(name, value)
        server.make_bucket("heads")
        # The shims are looked at by every test that runs a job; here it would cost the imports of vLLM.
        patch.setattr(preflight, "CHECKS", {name: check for name, check in preflight.CHECKS.items() if name != "shims"})
        patch.setattr(preflight, "IN_THE_MAIN_THREAD", ("versions", "fits"))
        made = context(folder, "push.uri=s3://heads/x", f"push.endpoint_url={server.endpoint_url}", "push.path_style=true")
        counts = preflight.run(made)
        yield counts, json.loads((made.path / "preflight.json").read_text()), server.keys("heads")


def test_a_healthy_machine_passes_and_says_what_it_measured(healthy):
    counts, report, keys = healthy
    assert counts["checks"] == len(preflight.CHECKS)
    assert all(check["problems"] == [] for check in report["checks"].values())
    assert report["measured"]["disk"]["written"] > 1e6 and report["measured"]["disk"]["read"] > 1e6
    bucket = report["measured"]["destination"]
    assert bucket["sent_per_second"] > 1e5 and bucket["read_per_second"] > 1e5 and bucket["conditional_put"] is True
    assert keys == set(), "the probe leaves nothing behind"


def test_it_ends_within_two_minutes(healthy):
    assert max(check["seconds"] for check in healthy[1]["checks"].values()) < 120


def test_all_problems_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr(preflight, "IN_THE_MAIN_THREAD", ("fits",))
    monkeypatch.setattr(preflight, "CHECKS", {name: check for name, check in preflight.CHECKS.items() if name not in ("shims",)})
    made = context(
        tmp_path,
        "prompts.source=/nowhere/p.jsonl",
        "vocab.size=99999999",
        "push.uri=file:///proc/none/head",
        "verifier.tensor_parallel_size=512",
        "train.device=cuda",
    )
    with pytest.raises(MustFix) as error:
        preflight.run(made)
    text = str(error.value)
    expected = ["/nowhere/p.jsonl", "vocab.size = 99999999", "/proc/none"]
    expected += [] if preflight.visible_gpus() else ["train.device = cuda but no GPU", "tensor_parallel_size = 512"]
    assert [part for part in expected if part not in text] == []
    assert f"{len(expected)} problems" in text and error.value.exit_code == 78 and "\n" not in text


def test_a_check_that_hangs_is_a_problem_of_its_own(tmp_path, monkeypatch):
    monkeypatch.setattr(preflight, "LIMIT_SECONDS", 0.5)
    monkeypatch.setattr(preflight, "IN_THE_MAIN_THREAD", ())
    with http_server(lambda handler: time.sleep(5)) as url:
        hangs = {"clock": lambda c, m: machine.clock([url]), "prompts": preflight.CHECKS["prompts"]}
        monkeypatch.setattr(preflight, "CHECKS", hangs)
        made = context(tmp_path / "network")
        made.run.stage("preflight")["counts"] = {}  # as a start that passed leaves it
        with pytest.raises(TryAgain, match="the check clock did not end within"):  # what is silent over the network may answer later
            preflight.run(made)
        monkeypatch.setattr(preflight, "CHECKS", hangs | {"disk": lambda c, m: time.sleep(5) or []})
        with pytest.raises(MustFix, match="the check clock did not end within.*the check disk did not end within"):
            preflight.run(context(tmp_path / "disk"))


def test_another_vllm_and_none(tmp_path, monkeypatch):
    """By what the packages on the path say of themselves."""
    made = context(tmp_path)
    assert looked(made, "versions") == []
    (tmp_path / "site" / "vllm-0.17.1.dist-info").mkdir(parents=True)
    (tmp_path / "site" / "vllm-0.17.1.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.17.1\n")
    monkeypatch.setattr("sys.path", [str(tmp_path / "site")])
    assert "vllm is 0.17.1, this bundle is made for 0.16.0" in looked(made, "versions")[0]
    monkeypatch.setattr("sys.path", [str(tmp_path)])
    assert "vLLM is not installed: use the image" in looked(made, "versions")[0]


# The machine ----------------------------------------------------------------------------------------


def test_a_disk_slower_than_the_states_come(tmp_path):
    assert "put the run directory on local NVMe" in machine.disk_rate(tmp_path, 1e15, {})[0][0]
    assert machine.disk_rate(tmp_path, 1.0, {})[0] == []


def test_the_disk_is_measured_against_the_plan():
    small, large = (
        preflight.expected_bytes(load("hero", overrides=[f"generate.train_token_budget={n}"], environment={}))
        for n in (10_000_000, 100_000_000)
    )
    assert large - small == pytest.approx(90e6 * 28_692)  # FP8: 4 x (7,168 + 4) + 4 B a token
    assert preflight.expected_bytes(load("hero", overrides=["verifier.model=somebody/else"], environment={})) > small


def test_a_folder_this_user_cannot_write(tmp_path, monkeypatch):
    made = context(tmp_path)
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o755)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(closed))
    assert looked(made, "writable") == []
    assert (
        exit_code_as(
            65534,
            lambda: (
                78
                if any(
                    f"TRITON_CACHE_DIR {closed} cannot be written by user 65534 (Permission denied)" in s for s in looked(made, "writable")
                )
                else 3
            ),
        )
        == 78
    )


def test_a_volume_that_is_mounted_read_only(tmp_path, monkeypatch):
    """For root too, whom no permission stops."""
    with small_disk(tmp_path / "volume", 4) as folder:
        subprocess.run(["mount", "-o", "remount,ro", str(folder)], check=True)
        monkeypatch.setenv("VLLM_CACHE_ROOT", str(folder))
        (sentence,) = looked(context(tmp_path), "writable")
        assert f"VLLM_CACHE_ROOT {folder} cannot be written by user 0 (Read-only file system): mount it writable" in sentence
        with pytest.raises(MustFix, match="Read-only file system|read-only"):
            context(folder)


@pytest.fixture
def open_folder():
    """Where another user comes in; pytest's own folders are closed to others."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


def test_a_cache_of_the_hub_this_user_cannot_write(open_folder, monkeypatch):
    """One sentence with a remedy; the check of the disk, which would measure it, leaves it alone."""
    made, cache = context(open_folder, "verifier.model=made/up", f"verifier.revision={'a' * 40}", *SMALL), open_folder / "cache"
    made.path.chmod(0o777)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache))
    assert looked(made, "writable") == looked(made, "disk") == []
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache / "hub"))

    def seen():
        told = [sentence for sentence in looked(made, "writable") if "HF_HUB_CACHE" in sentence]
        return 78 if len(told) == 1 and f"{cache / 'hub'} cannot be written by user 65534" in told[0] and looked(made, "disk") == [] else 3

    assert exit_code_as(65534, seen) == 78


def test_little_shared_memory(tmp_path):
    with small_disk(tmp_path / "shm", 64) as folder:
        assert "--shm-size 32g" in next(machine.memory_limits(8, folder))
    assert list(machine.memory_limits(0)) == [], "without a GPU nothing needs it"


def test_a_small_memlock():
    def limited():
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (65536, 65536))
        return 78 if any("--ulimit memlock=-1" in sentence for sentence in machine.memory_limits(1)) else 3

    assert exit_code_as(65534, limited) == 78


@pytest.mark.parametrize(("seconds", "expected"), [(7200, "behind"), (-7200, "ahead of"), (30, None)])
def test_a_wrong_clock_by_a_real_servers_date(tmp_path, monkeypatch, seconds, expected):
    def answer(handler):
        handler.send_response_only(403)  # as S3 answers an unsigned request
        handler.send_header("Date", email.utils.formatdate(time.time() + seconds, usegmt=True))
        handler.end_headers()

    with http_server(answer) as url:
        sentences = looked(context(tmp_path, "push.uri=s3://b/x", f"push.endpoint_url={url}"), "clock")
    assert [expected in sentence for sentence in sentences] == ([True] if expected else [])


# What the run reaches for ---------------------------------------------------------------------------


def test_a_bucket_that_may_be_read_only(tmp_path, monkeypatch):
    (tmp_path / "store" / "heads").mkdir(parents=True)
    with s3_servers.rclone_server(tmp_path / "store", "--read-only") as server:
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        made = context(tmp_path, "push.uri=s3://heads/x", f"push.endpoint_url={server.endpoint_url}", "push.path_style=true")
        (problem,) = looked(made, "destination")
    assert "s3://heads/x" in sentence_of(problem)


@pytest.mark.parametrize("serve", [lambda folder: s3_servers.moto_server(), ceph_server], ids=["moto", "ceph"])
@pytest.mark.parametrize("allowed", [(), ("ListBucket", "GetObject"), ("ListBucket", "GetObject", "PutObject")])
def test_a_key_without_permission(tmp_path, monkeypatch, allowed, serve):
    """Both enforce IAM's policies: nothing is allowed, or reading alone, or all but to delete."""
    with serve(tmp_path / "store") as server:
        server.make_bucket("heads")
        for name, value in server.key_that_may(*allowed).items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(preflight, "CHECKS", {"destination": preflight.CHECKS["destination"]})
        made = context(tmp_path, "push.uri=s3://heads/x", f"push.endpoint_url={server.endpoint_url}", "push.path_style=true")
        with pytest.raises(MustFix) as error:
            preflight.run(made)
    (sentence,) = error.value.problems
    assert error.value.exit_code == 78
    assert "The credentials have no permission: AccessDenied (s3://heads/x): the key needs s3:ListBucket, GetObject, PutObject" in sentence


@pytest.mark.parametrize("serve", [s3_servers.rclone_server, ceph_server])
def test_a_wrong_key(tmp_path, monkeypatch, serve):
    (tmp_path / "store").mkdir()
    with serve(tmp_path / "store") as server:
        server.make_bucket("heads")
        for name, value in (server.environment | {"AWS_SECRET_ACCESS_KEY": "wrong"}).items():
            monkeypatch.setenv(name, value)
        made = context(tmp_path, "push.uri=s3://heads/x", f"push.endpoint_url={server.endpoint_url}", "push.path_style=true")
        assert "refuses the credentials" in looked(made, "destination")[0]


def test_another_runs_saved_work(tmp_path):
    """Found before money is spent, not when this run is saved over it."""
    uri = f"file://{tmp_path}/heads/one"
    theirs, ours = (context(tmp_path / name, f"push.uri={uri}", f"push.backup_uri={uri}.run") for name in ("theirs", "ours"))
    theirs.run.stage("generate.train")["started"] = "2026-01-01T00:00:00Z"
    theirs.run.save()
    RunSaver(theirs.path, f"{uri}.run", theirs.settings.push, run_id=theirs.run.ledger["run_id"]).save()
    assert looked(theirs, "destination") == []
    (sentence,) = looked(ours, "destination")
    assert "An unfinished run of 'smoke' is saved there" in sentence and f"--resume-from {uri}.run" in sentence


def test_a_copy_of_the_run_on_its_own_disk_is_made_only_where_it_is_asked_for(tmp_path):
    settings = load("smoke", overrides=[f"push.uri=file://{tmp_path}/heads/one"], environment={})
    assert backup_uri(settings, tmp_path / "run") is None, "lost with the machine, and terabytes twice"
    asked = load("smoke", overrides=[f"push.backup_uri=file://{tmp_path}/copy"], environment={})
    assert backup_uri(asked, tmp_path / "run") == f"file://{tmp_path}/copy"
    assert backup_uri(load("smoke", overrides=["push.uri=s3://b/x"], environment={}), tmp_path) == "s3://b/x.run"
    with small_disk(tmp_path / "other", 10) as folder:
        elsewhere = context(tmp_path, f"push.uri=file://{folder}/head")
        assert backup_uri(elsewhere.settings, elsewhere.path) == f"file://{folder}/head.run"


def copied(tmp_path, **changes):
    """The tiny verifier, its files linked, with another config.json."""
    folder = tmp_path / "verifier"
    folder.mkdir()
    for path in CHECKPOINT.iterdir():
        (folder / path.name).symlink_to(path)
    config = json.loads((CHECKPOINT / "config.json").read_text())
    (config.get("text_config") or config).update(changes)
    (folder / "config.json").unlink()
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_a_tokenizer_of_another_model(tmp_path):
    folder = copied(tmp_path, vocab_size=700)
    sentences = looked(context(tmp_path, f"verifier.model={folder}", "vocab.size=512"), "fits")
    assert len(sentences) == 1 and "the verifier 700: they are not of one model" in sentences[0]


def test_a_tokenizer_that_does_not_load(tmp_path):
    folder = copied(tmp_path)
    for path in folder.glob("tokenizer*"):
        path.unlink()
    (sentence,) = looked(context(tmp_path, f"verifier.model={folder}"), "fits")
    assert "does not load" in sentence and "restore its files" in sentence


def test_a_verifier_that_does_not_fit(tmp_path):
    """With a cache for one sequence of so many tokens; by how much it does not fit is said before anything is loaded."""
    memory, positions = looked(context(tmp_path, "verifier.max_model_len=1000000000"), "fits")
    assert "The verifier does not fit" in memory and "GB too little" in memory and "max_model_len" in memory
    assert "exceeds the verifier's 4096 positions" in positions
