"""The display: live on a real terminal, plain lines elsewhere, and nothing it writes to can end the run."""

import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import threading
import time
from pathlib import Path

from jobs.reporting.display import SECONDS_BETWEEN_LINES, Display
from jobs.reporting.progress import OUTLOOK_SECONDS, Outlook, RateMeter

RUN = """
import sys, time
from jobs.reporting import progress
from jobs.reporting.display import Display
from jobs.reporting.forecast import forecast
from jobs.settings import Settings

progress.OUTLOOK_SECONDS = 0.2
settings = Settings(job={"name": "hero"}, verifier={"model": "moonshotai/Kimi-K2.5"}, rental={"price_per_hour": 36.0, "currency": "EUR"})
stages = {name: {"state": "done", "seconds": 900.0} for name in ("preflight", "fetch", "prompts", "generate.eval", "baseline")}
ledger = {"status": "running", "settings": settings.as_dict(), "stages": stages, "machine": {"name": "8 x B300"}, "verifier_loads": 1, "loads_before": 0,
          "cost": {"amount": 45.0, "currency": "EUR"}}

def outlook():
    stages["generate.train"] = {"state": "running", "seconds": 100.0, "progress": display.measured()}
    return forecast(ledger)["line"]

with Display.open("auto", outlook=outlook) as display:
    display.stage_started("generate.train")
    for done in range(0, 801, 100):
        display.progress(done, 800, "tokens", running=12)
        time.sleep(0.6 if done == 400 else 0.03)  # long enough for the screen to be drawn in mid-stage
    display.note("caf\\u00e9 \\x1b[31m two\\nlines")
    print("a library's log line", file=sys.stderr)
    display.metrics({"step": 10, "loss": 2.5, "accuracy_by_step": [0.5, 0.25]})
    display.metrics({"step": 20, "loss": 2.25, "accuracy_by_step": [0.5, 0.25]})
    display.progress(800, 800, "tokens")
    time.sleep(0.4)
    display.stage_finished("generate.train", "done", 2.0, {"tokens": 800, "dropped": {"too long": 3}})
    display.stage_finished("vocab", "pending", 1.5)  # as the ledger has one that a signal stopped
    display.summary_table({
        "stages": {"train": {"state": "done", "seconds": 4.0, "counts": {"steps": 700}}, "push": {"state": "pending"}},
        "acceptance": {"untrained": {"mean": 1.02, "low": 1.0, "high": 1.04}, "trained": {"mean": 2.6132, "low": 2.53, "high": 2.69}},
    })
print("the one object of --json")
"""


def environment(**changes: str) -> dict[str, str]:
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("LC_", "LANG", "PYTHON", "NO_COLOR", "FORCE_COLOR"))}
    return kept | {"PYTHONPATH": os.pathsep.join(sys.path)} | changes


def run_piped(code: str = RUN, **changes: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, env=environment(**changes), timeout=60)


def run_on_terminal(code: str, columns: int = 120) -> tuple[int, str, str]:
    """(exit code, what the terminal got, standard output): standard error is a real pty."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=slave,
        stderr=slave,
        stdout=subprocess.PIPE,
        env=environment(TERM="xterm", LC_ALL="C.UTF-8", COLUMNS=str(columns)),
    )
    os.close(slave)
    seen = b""
    while True:
        ready, _, _ = select.select([master], [], [], 60)
        assert ready, "the display hangs"
        try:
            part = os.read(master, 65536)
        except OSError:  # EIO: the other end is closed
            break
        if not part:
            break
        seen += part
    os.close(master)
    out = process.communicate(timeout=60)[0]
    return process.returncode, seen.decode(), out.decode()


def test_a_pipe_gets_plain_timed_lines_and_standard_output_stays_free():
    done = run_piped()
    text = done.stderr.decode()
    assert done.returncode == 0 and done.stdout == b"the one object of --json\n"
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f]", text), "control codes in plain lines"
    timed = [line for line in text.splitlines() if re.match(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ ", line)]
    assert re.search(r"generate\.train: started; run: elapsed 1:16:40, \d.* to .* more, cost 45\.00 of \d.* EUR$", timed[0])
    progress = [line for line in timed if "/800 tokens" in line]
    # The first line and the one that completes the stage; the seven between fall into the five seconds.
    assert [re.search(r"(\d+)/800", line)[1] for line in progress] == ["0", "800"]
    assert all(re.search(r"; run: elapsed 1:16:40, .* more, cost 45\.00 of [\d,.]+ to [\d,.]+ EUR$", line) for line in progress)
    assert progress[-1].split("; run:")[1] != progress[0].split("; run:")[1], "what the stage has measured of itself counts"
    assert any("café  [31m two lines" in line for line in timed)
    assert any("step=20 loss=2.25" in line for line in timed), "the last figures of a stage are shown"
    assert any("done in 2.0 s, 800 tokens, 3 dropped, 400 tokens/s" in line for line in timed)
    assert any(line.endswith("vocab: interrupted after 1.5 s") for line in timed)
    assert re.search(r"train +done +4\.0 s +700 steps +175 steps/s", text)
    assert re.search(r"trained +2\.61 +2\.53 to 2\.69", text) and "push" in text


def test_a_terminal_gets_a_live_line_with_rate_eta_and_cost():
    code, screen, out = run_on_terminal(RUN)
    assert code == 0 and out == "the one object of --json\n"
    assert "\x1b[?25l" in screen and screen.rindex("\x1b[?25h") > screen.rindex("\x1b[?25l"), "the cursor is not given back"
    plain = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", screen)
    assert re.search(r"generate\.train .*\d+/800 tokens \(\d+ %\), [\d,]+ tokens/s", plain)
    assert "ETA 0:00:0" in plain
    whole = re.findall(r"run: elapsed 1:16:40, (.*?) more, cost 45\.00 of (.*?) EUR", plain)
    assert len(set(whole)) > 1, "the line about the whole run is brought up to date while the stage goes on"
    assert "step=20 loss=2.25 accuracy_by_step=[0.5 0.25]" in plain
    assert "a library's log line" in plain and "\x1b[31m two" not in screen
    assert "generate.train: done in 2.0 s" in plain and re.search(r"trained +2\.61", plain)


def test_a_locale_without_unicode_gets_ascii():
    done = run_piped(LC_ALL="C", PYTHONUTF8="0", PYTHONCOERCECLOCALE="0")
    assert done.returncode == 0, done.stderr
    assert all(byte < 128 for byte in done.stderr), "the table or a note was not brought to ASCII"
    assert b"caf? " in done.stderr and b"trained" in done.stderr


def test_a_closed_pipe_does_not_end_the_run():
    reader, writer = os.pipe()
    process = subprocess.Popen([sys.executable, "-c", RUN], stderr=writer, stdout=subprocess.PIPE, env=environment())
    os.close(writer)
    os.close(reader)
    out, _ = process.communicate(timeout=60)
    assert (process.returncode, out) == (0, b"the one object of --json\n")


def test_a_terminal_that_hangs_up_does_not_end_the_run(tmp_path: Path):
    """The master side of the pty closes in mid-run, as when ssh is lost; the work goes on to its end."""
    mark = tmp_path / "finished"
    code = f"""
import signal; signal.signal(signal.SIGHUP, signal.SIG_IGN)
import time, pathlib
from jobs.reporting.display import Display
display = Display.open("auto")
display.stage_started("train")
for step in range(60):
    display.progress(step, 60, "steps"); display.metrics({{"step": step}}); time.sleep(0.02)
display.stage_finished("train", "done", 1.2, {{"steps": 60}})
display.summary_table({{"stages": {{}}}}); display.close(); display.close()
pathlib.Path({str(mark)!r}).write_text("yes" if display.stream.gone else "it never noticed")
"""
    master, slave = pty.openpty()
    process = subprocess.Popen([sys.executable, "-c", code], stderr=slave, stdout=subprocess.DEVNULL, env=environment(TERM="xterm"))
    os.close(slave)
    os.read(master, 1024)  # the live display has begun
    os.close(master)
    assert process.wait(timeout=60) == 0
    assert mark.read_text() == "yes"


def test_plain_mode_stays_plain_on_a_terminal_and_a_dumb_terminal_is_not_redrawn():
    forced = RUN.replace('open("auto"', 'open("plain"').replace("display.summary_table({", "dict({")
    code, screen, _ = run_on_terminal(forced)
    assert code == 0 and "\x1b" not in screen
    code, screen, _ = run_on_terminal(f"import os; os.environ['TERM'] = 'dumb'\n{RUN}")
    assert code == 0 and "\x1b" not in screen


def test_threads_do_not_tear_lines(tmp_path: Path):
    log = tmp_path / "log"
    with log.open("w") as stream:
        display = Display.open("auto", stream=stream)
        display.stage_started("train")

        def work(name: int) -> None:
            for count in range(200):
                display.note(f"worker {name} says {count:04d} end")
                display.progress(count, 200, "steps")
                display.metrics({"step": count})

        threads = [threading.Thread(target=work, args=(name,)) for name in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        display.close()
    notes = [line for line in log.read_text().splitlines() if "says" in line]
    assert len(notes) == 1600
    assert all(re.fullmatch(r"\S+Z worker \d says \d{4} end", line) for line in notes)


def test_at_most_one_progress_line_every_five_seconds(tmp_path: Path, monkeypatch):
    clock = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    log = tmp_path / "log"
    with log.open("w") as stream:
        display = Display.open("plain", stream=stream)
        display.stage_started("train")
        for step in range(241):  # 8 a second
            display.progress(step, 1000, "steps")
            clock[0] += 0.125
        display.close()
    lines = [line for line in log.read_text().splitlines() if "/1,000" in line]
    assert len(lines) == int(30 / SECONDS_BETWEEN_LINES) + 1
    assert "8.0 steps/s, ETA 0:01:3" in lines[-1]


def test_an_outlook_that_fails_leaves_the_time_and_the_run_goes_on(tmp_path: Path):
    asked = []

    def broken() -> str:
        asked.append(time.monotonic())
        raise ZeroDivisionError

    log = tmp_path / "log"
    with log.open("w") as stream:
        display = Display.open("plain", stream=stream, outlook=broken)
        display.stage_started("train")
        for step in range(2000):
            display.progress(step, 2000, "steps")
        display.close()
    assert "train: started; run: elapsed 0:00:00" in log.read_text() and "2,000 steps" in log.read_text()
    assert asked


def test_the_outlook_is_not_computed_every_time_it_is_drawn(monkeypatch):
    clock, asked = [1000.0], []
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    outlook = Outlook(lambda: asked.append(clock[0]) or f"asked {len(asked)} times")
    for _ in range(241):  # 8 a second
        shown = outlook.line()
        clock[0] += 0.125
    assert len(asked) == int(30 / OUTLOOK_SECONDS) + 1 and shown == f"asked {len(asked)} times"


def test_the_rate_over_this_start_and_that_of_the_last_minute_are_kept_for_the_forecast():
    now = [0.0]
    meter = RateMeter(clock=lambda: now[0])
    meter.add(5000)
    assert meter.measured(9000, "steps") == {"done": 5000, "total": 9000, "unit": "steps", "from": 5000, "seconds": 0.0, "per_second": None}
    for second in range(1, 201):  # 1 step a second, then 2
        now[0] = float(second)
        meter.add(5000 + second + max(0, second - 100))
    found = meter.measured(9000, "steps")
    assert (found["done"], found["from"], found["seconds"], found["per_second"]) == (5300, 5000, 200.0, 2.0)
    meter.add(10)  # another pass begins
    assert meter.measured(9000, "steps")["from"] == 10


def test_a_resumed_stage_shows_its_present_rate_not_the_average_since_zero():
    now = [0.0]
    meter = RateMeter(clock=lambda: now[0])
    meter.add(5000)  # an earlier run had come this far
    assert meter.rate() is None and meter.eta(6000) is None
    now[0] = 10.0
    meter.add(5100)
    assert meter.rate() == 10.0 and meter.eta(6000) == 90.0
