"""Deadline, spending limit, stall, webhook and on_finish: the machine goes back in time, whatever the ending."""

import datetime
import os
import signal
import sys
import threading
import time

import pytest
from webhook_server import webhook

from jobs import rental
from jobs.context import Context
from jobs.errors import Interrupted, MustFix, TryAgain
from jobs.job_file import load
from jobs.rental import RentalWatch, ended
from jobs.reporting.display import Display
from jobs.run import RunDirectory

DELIVERS = "push.uri=s3://heads/one"  # on_finish is for a machine that nothing is left on


def context(tmp_path, *overrides, spent=0.0):
    settings = load("smoke", overrides=overrides, environment={})
    run = RunDirectory(tmp_path / "run")
    run.begin(settings)
    run.ledger["cost"]["amount"] = spent
    made = Context(settings, run, Display.open("plain"))
    made.should_stop.install()
    return made


@pytest.fixture(autouse=True)
def handlers_are_put_back():
    previous = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in previous.items():
        signal.signal(number, handler)


def in_seconds(seconds):
    return (datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=seconds)).isoformat()


def stopped_within(made, seconds=5):
    began = time.monotonic()
    while not made.should_stop() and time.monotonic() - began < seconds:
        time.sleep(0.02)
    return made.should_stop()


def test_a_deadline_stops_the_run_while_there_is_time_to_save(tmp_path):
    made = context(tmp_path, f"rental.deadline={in_seconds(63)}", "rental.reserve_minutes=1")
    with RentalWatch(made):
        assert stopped_within(made)
    reason = made.should_stop.reason
    assert isinstance(reason, Interrupted) and reason.exit_code == 75 and reason.ends_rental
    assert "deadline" in str(reason) and "--resume-from" in reason.remedy


def test_a_deadline_breaks_off_what_has_nothing_to_save(tmp_path):
    """A load of twenty minutes does not ask whether to stop."""
    made = context(tmp_path, f"rental.deadline={in_seconds(62)}", "rental.reserve_minutes=1")
    with RentalWatch(made), pytest.raises(Interrupted), made.should_stop.breakable():
        time.sleep(30)


def test_a_spending_limit_is_78_and_counts_earlier_starts(tmp_path):
    made = context(tmp_path, "rental.price_per_hour=3600", "rental.spending_limit=12", "rental.reserve_minutes=0", spent=10.5)
    with RentalWatch(made):
        assert stopped_within(made)
    reason = made.should_stop.reason
    assert isinstance(reason, MustFix) and reason.ends_rental and "of at most 12.00 USD" in str(reason)


@pytest.mark.parametrize("overrides", [("rental.deadline=2020-01-01T00:00:00Z",), ("rental.price_per_hour=1", "rental.spending_limit=5")])
def test_no_start_without_time_or_money(tmp_path, overrides):
    made = context(tmp_path, *overrides, spent=5.0)
    with pytest.raises(MustFix, match="this start would pass it"), RentalWatch(made):
        pass


def test_settings_of_the_rental_that_cannot_be_meant():
    with pytest.raises(MustFix, match="spending_limit needs rental.price_per_hour"):
        load("smoke", overrides=["rental.spending_limit=5"], environment={})
    with pytest.raises(MustFix, match="rental.deadline"):
        load("smoke", overrides=["rental.deadline=tomorrow"], environment={})
    with pytest.raises(MustFix, match="timezone"):
        load("smoke", overrides=["rental.deadline=2030-01-01T00:00:00"], environment={})
    with pytest.raises(MustFix, match="the only head on it"):
        load("smoke", overrides=["rental.on_finish=shutdown"], environment={})
    with pytest.raises(MustFix, match="the only head on it"):
        load("smoke", overrides=["rental.on_finish=shutdown", "push.backup_uri=s3://heads/runs", "push.backup=off"], environment={})
    load("smoke", overrides=["rental.on_finish=shutdown", "push.backup_uri=s3://heads/runs"], environment={})
    kept = load("smoke", overrides=["rental.deadline=2030-01-01T00:00:00Z"], environment={}).as_dict()
    assert load("smoke", base=kept, environment={}).rental.deadline.year == 2030


def test_a_stall_is_told_once(tmp_path, monkeypatch):
    with webhook() as hook:
        monkeypatch.setenv("EAGLE3_WEBHOOK", hook.url)
        monkeypatch.setattr(rental, "TICK_SECONDS", 0.02)
        made = context(tmp_path, "rental.stall_minutes=0.01")
        with RentalWatch(made):
            time.sleep(0.3)
            made.progress(1)  # something moves: no stall yet
            time.sleep(0.3)
            assert hook.messages == []
            time.sleep(1.5)
        assert hook.events() == ["stalled"] and hook.messages[0]["stage"] == "no stage"


def result(status, code):
    return {"status": status, "exit_code": code, "error": None, "published": None}


ENDINGS = {
    "done": (None, True),
    "a fault that passes": (TryAgain("dead worker"), True),
    "something to fix": (MustFix("the disk is full"), True),
    "a signal": (Interrupted("Stopped by SIGTERM"), False),
}


@pytest.mark.parametrize("name", ENDINGS)
def test_on_finish_runs_after_the_ending_it_is_for(tmp_path, name):
    error, expected = ENDINGS[name]
    settings = load(
        "smoke",
        overrides=[DELIVERS, f"rental.on_finish=echo $EAGLE3_STATUS > {tmp_path}/ended; exit 3", "rental.hold_minutes=0.005"],
        environment={},
    )
    (tmp_path / "run").mkdir()
    began = time.monotonic()
    ended(settings, tmp_path / "run", result(name, 0), error)
    assert (tmp_path / "ended").exists() == expected
    assert (time.monotonic() - began > 0.3) == (name in ("a fault that passes", "something to fix")), (
        "a failed run's machine is kept for a while"
    )


def test_on_finish_runs_although_nobody_reads_any_more(tmp_path, monkeypatch):
    """A lost connection or a closed pipe must not leave the machine running."""
    read, write = os.pipe()
    os.close(read)
    settings = load("smoke", overrides=[DELIVERS, f"rental.on_finish=touch {tmp_path}/ended"], environment={})
    with open(write, "w") as gone:
        monkeypatch.setattr(sys, "stderr", gone)
        ended(settings, tmp_path, result("done", 0), None)
        monkeypatch.undo()
        assert (tmp_path / "ended").exists()
        os.dup2(os.open(os.devnull, os.O_WRONLY), write)  # what is still buffered has to go somewhere


def test_a_deadlines_end_is_not_held(tmp_path):
    error = Interrupted("The deadline is near")
    error.ends_rental = True
    settings = load("smoke", overrides=[DELIVERS, f"rental.on_finish=touch {tmp_path}/ended"], environment={})
    ended(settings, tmp_path, result("interrupted", 75), error)
    assert (tmp_path / "ended").exists()


def test_somebody_who_stops_the_hold_keeps_the_machine(tmp_path):
    settings = load("smoke", overrides=[DELIVERS, f"rental.on_finish=touch {tmp_path}/ended"], environment={})
    threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGTERM)).start()
    ended(settings, tmp_path, result("failed", 78), MustFix("the disk is full"))
    assert not (tmp_path / "ended").exists()


def test_a_run_started_again_meanwhile_keeps_the_machine(tmp_path, monkeypatch):
    monkeypatch.setattr("jobs.storage.files.LOCK_WAIT_SECONDS", 0.2)
    settings = load("smoke", overrides=[DELIVERS, f"rental.on_finish=touch {tmp_path}/ended", "rental.hold_minutes=0.001"], environment={})
    again = RunDirectory(tmp_path / "run")
    ended(settings, tmp_path / "run", result("failed", 78), MustFix("the disk is full"))
    assert not (tmp_path / "ended").exists()
    again.close()


def test_a_webhook_that_fails_changes_nothing_and_its_url_is_not_shown(tmp_path, monkeypatch, capfd):
    settings = load("smoke", environment={})
    monkeypatch.setattr(rental, "POST_ATTEMPTS", 2)
    monkeypatch.setenv("EAGLE3_WEBHOOK", "http://127.0.0.1:9/secret-part")
    ended(settings, tmp_path, result("done", 0), None)
    monkeypatch.setenv("EAGLE3_WEBHOOK", "no url, secret-part")
    ended(settings, tmp_path, result("done", 0), None)
    shown = capfd.readouterr().err
    assert shown.count("did not take the message") == 2 and "secret-part" not in shown
    with webhook() as hook:
        hook.refusals = 1
        monkeypatch.setenv("EAGLE3_WEBHOOK", hook.url)
        ended(settings, tmp_path, result("done", 0), None)
        assert hook.events() == ["done"]
