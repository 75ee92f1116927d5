"""A run that is killed leaves no server behind: it would hold every GPU of the machine."""

import os
import signal
import subprocess
import sys
import time

import pytest

RUN = """
import sys, time
from jobs.verifier.serve import start_with_this_process
child = start_with_this_process(["-c", "import time; print('up', flush=True); time.sleep(60)"], stdout=None, start_new_session=True)
print(child.pid, flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_it_is_gone_when_its_run_was_killed(number):
    run = subprocess.Popen([sys.executable, "-c", RUN], stdout=subprocess.PIPE, text=True)
    said = {run.stdout.readline().strip(), run.stdout.readline().strip()}
    (server,) = said - {"up"}
    assert os.getsid(int(server)) == int(server), "it is in a session of its own, out of Ctrl-C's reach"
    run.send_signal(number)
    run.wait()
    deadline = time.monotonic() + 20
    while os.path.exists(f"/proc/{server}") and "Z" not in open(f"/proc/{server}/stat").read().split()[2]:  # noqa: SIM115
        assert time.monotonic() < deadline, "the server lives on"
        time.sleep(0.05)
    run.stdout.close()
