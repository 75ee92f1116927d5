"""A real Ceph on loopback ports, for the tests of any folder: a monitor, an OSD in memory, and the S3 gateway before them.

Its gateway is what hosts that offer "S3" run: unlike the two other servers (s3_servers.py) it checks whatever AWS checks
(credentials, policies, Content-MD5, `If-None-Match`, the size of parts), and deviates from AWS in its own ways (NOTES.md).
Debian 12 ships it; no manager daemon is needed, and a start takes about a second.

    with ceph_server(tmp_path) as server:
        server.make_bucket("heads")
"""

import contextlib
import json
import os
import shutil
import subprocess
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from s3_servers import ACCESS_KEY, SECRET_KEY, S3Server, running

from jobs.ports import free_port

CONFIGURATION = "ceph.conf"
NEEDED = ("ceph-mon", "ceph-osd", "radosgw")
NOT_INSTALLED = "radosgw is not installed: apt-get install ceph-mon ceph-osd radosgw"

# - No keys between the daemons: everything listens on loopback. The gateway asks the monitor for an encrypted connection,
#   which there is none of without keys.
# - Without an admin socket and with every path set nothing is written outside the folder.
# - The monitor ends by itself on a disk that is 95 % full, which is none of its business here.
# - Placement groups: one a pool, because each costs a moment while the first bucket is made.
_SETTINGS = """
[global]
fsid = {fsid}
mon_host = v2:127.0.0.1:{monitor}/0
public_addr = 127.0.0.1
cluster_addr = 127.0.0.1
auth_cluster_required = none
auth_service_required = none
auth_client_required = none
ms_mon_client_mode = crc
keyring = /dev/null
admin_socket =
run_dir = {folder}
crash_dir = {folder}
log_file = {folder}/$name.log
mon_data = {folder}/mon
osd_data = {folder}/osd
rgw_data = {folder}/rgw
mon_data_avail_warn = 0
mon_data_avail_crit = 0
mon_allow_pool_size_one = true
paxos_propose_interval = 0.05
osd_pool_default_size = 1
osd_pool_default_min_size = 1
osd_pool_default_pg_num = 1
osd_pool_default_pgp_num = 1
osd_pool_default_pg_autoscale_mode = off
osd_crush_chooseleaf_type = 0
osd_objectstore = memstore
memstore_device_bytes = {bytes}
rgw_frontends = beast endpoint=127.0.0.1:{gateway}
rgw_thread_pool_size = 64
debug_rgw = 0
"""
_MOST_BYTES = 16 << 30  # what the OSD says it has room for; it takes what is stored


@dataclass(frozen=True)
class CephServer(S3Server):
    folder: Path

    def key_that_may(self, *actions: str) -> dict[str, str]:
        """As the base class says; the gateway knows IAM's policies, but not how IAM makes users."""
        user = json.loads(_tool(self.folder, f"radosgw-admin user create --uid limited-{uuid.uuid4().hex} --display-name limited"))
        self.allow(user["user_id"], actions)
        (key,) = user["keys"]
        return self.environment | {"AWS_ACCESS_KEY_ID": key["access_key"], "AWS_SECRET_ACCESS_KEY": key["secret_key"]}

    def limit(self, bucket: str, size: str) -> None:
        """Let the bucket hold `size` (such as 10M) at most."""
        for command in (f"set --max-size {size}", "enable"):
            _tool(self.folder, f"radosgw-admin quota {command} --quota-scope bucket --uid owner --bucket {bucket}")

    def suspend(self, key: dict[str, str]) -> None:
        """Lock out the user of a key that `key_that_may` gave."""
        user = json.loads(_tool(self.folder, f"radosgw-admin user info --access-key {key['AWS_ACCESS_KEY_ID']}"))["user_id"]
        _tool(self.folder, f"radosgw-admin user suspend --uid {user}")


@contextlib.contextmanager
def ceph_server(folder: Path) -> Iterator[CephServer]:
    """A cluster of its own in `folder`; its objects live in the OSD's memory. Where Ceph is not installed the test is skipped."""
    if not all(shutil.which(name) for name in NEEDED):
        pytest.skip(NOT_INSTALLED)
    for name in ("mon", "osd", "rgw"):
        (folder / name).mkdir(parents=True)
    cluster, osd = uuid.uuid4(), uuid.uuid4()
    monitor, gateway = free_port(), free_port()
    (folder / CONFIGURATION).write_text(_SETTINGS.format(fsid=cluster, folder=folder, monitor=monitor, gateway=gateway, bytes=_MOST_BYTES))
    with contextlib.ExitStack() as daemons:
        _tool(folder, f"monmaptool --create --fsid {cluster} --addv a [v2:127.0.0.1:{monitor}] monmap")
        _tool(folder, "ceph-mon --id a --mkfs --monmap monmap")
        daemons.enter_context(_daemon(folder, "ceph-mon --id a"))
        _tool(folder, f"ceph osd new {osd}")  # waits for the monitor
        _tool(folder, f"ceph-osd --id 0 --mkfs --osd-uuid {osd}")
        daemons.enter_context(_daemon(folder, "ceph-osd --id 0"))
        # An ordinary user, who may give policies to others: to a "system" user the gateway answers in JSON, which is no S3.
        owner = f"--uid owner --display-name owner --access-key {ACCESS_KEY} --secret-key {SECRET_KEY} --caps user-policy=*"
        _tool(folder, f"radosgw-admin user create {owner} --max-buckets 0")  # waits for the OSD
        command = f"radosgw --foreground --name client.gateway --conf {CONFIGURATION}"
        daemons.enter_context(running(command.split(), gateway, folder))
        yield CephServer("ceph", f"http://127.0.0.1:{gateway}", honours_if_none_match=True, checks_credentials=True, folder=folder)


@contextlib.contextmanager
def _daemon(folder: Path, command: str) -> Iterator[None]:
    with open(folder / f"{command.split()[0]}.txt", "wb") as log:
        process = subprocess.Popen(f"{command} --foreground --conf {CONFIGURATION}".split(), cwd=folder, stdout=log, stderr=log)
        try:
            yield
        finally:
            process.kill()  # asked to end, an OSD in memory would write all of it to the disk first
            process.wait()


def _tool(folder: Path, command: str) -> str:
    """What it prints."""
    environment = os.environ | {"CEPH_CONF": CONFIGURATION}
    done = subprocess.run(
        command.split(), env=environment, cwd=folder, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120
    )
    if done.returncode:
        raise RuntimeError(f"{command} ended with {done.returncode}: {(done.stdout + done.stderr)[-2000:]}")
    return done.stdout
