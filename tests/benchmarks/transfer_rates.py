"""Upload and download against boto3's own transfer and rclone, same server, same bytes, one run.

    python tests/benchmarks/transfer_rates.py [MiB] [--server rclone|moto] [--rounds N]
    python tests/benchmarks/transfer_rates.py 2048 --killed     bytes sent twice by an upload that was killed half-way

rclone's server (1.75.2) writes parts in their order while they come in, and answers InvalidPart to a completion while
it still does so for a client that died: all is sent again. `--server rclone-in-memory` keeps them apart instead.

Prints seconds, MB/s, CPU seconds of the client and of the server for each, and both as ratios to boto3's; the
server is on this machine, so the figures compare clients and say nothing about a link. Best of the rounds, in turns;
the CPU seconds stand still where a busy machine makes the others jump.
"""

import argparse
import hashlib
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "storage")]

from boto3.s3.transfer import TransferConfig  # noqa: E402
from publications import bodies_sent, killed_at, sent_bodies_counted  # noqa: E402
from s3_servers import ACCESS_KEY, SECRET_KEY, S3Server, moto_server, rclone_server  # noqa: E402

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


def rates(server: S3Server, folder: Path, mib: int, rounds: int) -> None:
    head = make_head(folder / "head", mib)
    settings = PushSettings(endpoint_url=server.endpoint_url, path_style=True)
    newer = settings.model_copy(update={"checksums": "when_supported"})
    client, config = server.client(), TransferConfig(multipart_chunksize=64 * MIB, max_concurrency=16)
    rclone = [str(Path(sys.executable).with_name("rclone")), "--config", "", "--s3-provider", "Rclone", "--s3-endpoint", server.endpoint_url,
              "--s3-access-key-id", ACCESS_KEY, "--s3-secret-access-key", SECRET_KEY, "--s3-chunk-size", "64M", "--s3-upload-concurrency", "16"]  # fmt: skip
    best: dict[str, list[float]] = {}

    def measure(what: str, who: int, work) -> None:
        before, began, server_before = cpu(who), time.monotonic(), server_cpu()
        work()
        now = [time.monotonic() - began, cpu(who) - before, server_cpu() - server_before]
        best[what] = [min(pair) for pair in zip(best.get(what, now), now, strict=True)]

    def back(what: str) -> str:
        (folder / what).unlink(missing_ok=True)
        return str(folder / what)

    for number in range(rounds):
        uri = f"s3://bench/ours{number}"
        measure("up: publish", resource.RUSAGE_SELF, lambda uri=uri: publish(head, uri, settings, state=None))
        measure("up: publish, when_supported", resource.RUSAGE_SELF, lambda uri=uri: publish(head, uri + "-crc", newer, state=None))
        measure("up: boto3 upload_file", resource.RUSAGE_SELF, lambda n=number: client.upload_file(str(head / "model"), "bench", f"boto{n}", Config=config))
        measure("up: rclone copyto", resource.RUSAGE_CHILDREN, lambda n=number: subprocess.run([*rclone, "copyto", str(head / "model"), f":s3:bench/rc{n}"], check=True))
        measure("down: pull", resource.RUSAGE_SELF, lambda uri=uri, n=number: pull(uri, folder / f"back{n}", settings))
        measure("down: boto3 download_file", resource.RUSAGE_SELF, lambda n=number: client.download_file("bench", f"boto{n}", back("boto-back"), Config=config))
        measure("down: rclone copyto", resource.RUSAGE_CHILDREN, lambda n=number: subprocess.run([*rclone, "copyto", f":s3:bench/rc{n}", back("rc-back")], check=True))
        (folder / f"back{number}" / "model").unlink()
    for what, (seconds, used, served) in best.items():
        base = best[what.split(":")[0] + (": boto3 upload_file" if what.startswith("up") else ": boto3 download_file")]
        print(f"{what:30} {seconds:6.2f} s {mib * 1.048576 / seconds:7.0f} MB/s  CPU {used:5.2f} s, server's {served:5.2f} s"
              f"   to boto3's: time {seconds / base[0]:4.2f}, CPU {used / base[1]:4.2f}")  # fmt: skip


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
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "server").mkdir()
        options = ["--disable-multipart-streaming"] if given.server == "rclone-in-memory" else []
        with moto_server() if given.server == "moto" else rclone_server(folder / "server", *options) as server:
            os.environ.update(server.environment)
            server.make_bucket("bench")
            killed(server, folder, given.mib) if given.killed else rates(server, folder, given.mib, given.rounds)


if __name__ == "__main__":
    main()
