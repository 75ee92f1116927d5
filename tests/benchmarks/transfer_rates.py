"""Upload and download against boto3's own transfer and rclone, same server, same bytes, one run.

    python tests/benchmarks/transfer_rates.py [MiB]

Prints seconds, MB/s and CPU seconds of the client for each; the server is rclone's, on this machine, so the
figures compare clients and say nothing about a link. Best of two rounds, in turns.
"""

import hashlib
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from boto3.s3.transfer import TransferConfig  # noqa: E402
from s3_servers import ACCESS_KEY, SECRET_KEY, rclone_server  # noqa: E402

from jobs.settings import PushSettings  # noqa: E402
from jobs.storage.bucket import publish, pull  # noqa: E402


def cpu(who: int) -> float:
    used = resource.getrusage(who)
    return used.ru_utime + used.ru_stime


def main(mib: int) -> None:
    with tempfile.TemporaryDirectory() as name, rclone_server(Path(name) / "server") as server:
        folder = Path(name)
        (folder / "server" / "bench").mkdir(parents=True, exist_ok=True)
        os.environ.update(server.environment)
        head = folder / "head"
        head.mkdir()
        data = os.urandom(mib << 20)
        (head / "model").write_bytes(data)
        entry = {"sha256": hashlib.sha256(data).hexdigest(), "bytes": len(data)}
        (head / "manifest.json").write_text(json.dumps({"files": {"model": entry}}))
        settings = PushSettings(endpoint_url=server.endpoint_url, path_style=True)
        client, config = server.client(), TransferConfig(multipart_chunksize=64 << 20, max_concurrency=16)
        rclone = [str(Path(sys.executable).with_name("rclone")), "--config", "", "--s3-provider", "Rclone", "--s3-endpoint", server.endpoint_url,
                  "--s3-access-key-id", ACCESS_KEY, "--s3-secret-access-key", SECRET_KEY, "--s3-chunk-size", "64M", "--s3-upload-concurrency", "16"]  # fmt: skip
        best: dict[str, tuple[float, float]] = {}

        def measure(what: str, who: int, work) -> None:
            before, began = cpu(who), time.monotonic()
            work()
            seconds, used = time.monotonic() - began, cpu(who) - before
            best[what] = min(best.get(what, (seconds, used)), (seconds, used))

        for number in range(2):
            uri, back = f"s3://bench/ours{number}", folder / f"back{number}"
            measure("publish (sha256 before and MD5 a part)", resource.RUSAGE_SELF, lambda uri=uri: publish(head, uri, settings, state=None))
            measure("boto3 upload_file", resource.RUSAGE_SELF, lambda n=number: client.upload_file(str(head / "model"), "bench", f"boto{n}", Config=config))
            measure("rclone copyto, up", resource.RUSAGE_CHILDREN, lambda n=number: subprocess.run([*rclone, "copyto", str(head / "model"), f":s3:bench/rc{n}"], check=True))
            measure("pull (sha256 verified)", resource.RUSAGE_SELF, lambda uri=uri, back=back: pull(uri, back, settings))
            measure("boto3 download_file", resource.RUSAGE_SELF, lambda n=number: client.download_file("bench", f"boto{n}", str(folder / f"boto-back{n}"), Config=config))
            measure("rclone copyto, down", resource.RUSAGE_CHILDREN, lambda n=number: subprocess.run([*rclone, "copyto", f":s3:bench/rc{n}", str(folder / f"rc-back{n}")], check=True))
            for path in [back / "model", folder / f"boto-back{number}", folder / f"rc-back{number}"]:
                path.unlink()
        for what, (seconds, used) in best.items():
            print(f"{what:42} {seconds:6.2f} s {mib * 1.048576 / seconds:8.0f} MB/s {used:6.2f} s CPU")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 1024)
