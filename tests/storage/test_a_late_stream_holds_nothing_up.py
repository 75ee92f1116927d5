"""Streams of one file that are not equally fast: every byte is fetched once, in order as far as may be, and hashed right."""

import random
import threading
import time
from pathlib import Path

import pytest
from faulty_network import faulty_network
from publications import MIB, contents, killed_at, make_head

from jobs.storage import pieces as pieces_module
from jobs.storage.bucket import publish, pull
from jobs.storage.pieces import LEAST_PIECE, Piece, Pieces


class Clock:
    def __init__(self, monkeypatch):
        self.now = 0.0
        monkeypatch.setattr(pieces_module.time, "monotonic", lambda: self.now)


def transfer(clock: Clock, rates: list[float], gaps: list[tuple[int, int]], size: int) -> tuple[list[Piece], list[int]]:
    """One stream at each of `rates` [bytes a second], a block at a time, in the order in which their blocks come in.

    Returns the pieces as they ended, and how much lay behind the first gap at each of those moments.
    """
    pieces, block, ended, behind = Pieces(gaps, size, len(rates), 16 * MIB), 1 << 18, [], []
    have = {(start, end) for start, end in zip([0, *(end for _, end in gaps)], [*(start for start, _ in gaps), size], strict=True)}
    written = sum(end - start for start, end in have)
    streams = {n: pieces.take(0.0) for n in range(len(rates))}
    next_block = {n: block / rates[n] for n in streams if streams[n]}
    while next_block:
        n = min(next_block, key=next_block.get)
        piece, clock.now = streams[n], next_block[n]
        count = pieces.hold(piece, block)
        pieces.written(piece)
        written += count
        assert pieces._reached() <= written
        next_block[n] += block / rates[n]
        if piece.position == piece.end:
            rate = piece.rate(clock.now)
            pieces.end(piece)
            ended.append(piece)
            behind.append(written - pieces._reached())
            streams[n] = pieces.take(rate)
            if not streams[n]:
                del next_block[n]
    assert pieces.wait_beyond(size - 1) == size
    return ended, behind


@pytest.mark.parametrize("seed", range(20))
def test_every_missing_byte_belongs_to_one_piece(monkeypatch, seed):
    drawn = random.Random(seed)
    size = drawn.randrange(1, 300 * MIB)
    cuts = sorted(drawn.sample(range(size + 1), 2 * drawn.randrange(0, 4))) if size > 10 else []
    gaps = list(zip(cuts[::2], cuts[1::2], strict=True)) or [(0, size)]
    rates = [MIB * 2 ** drawn.uniform(-5, 5) for _ in range(drawn.randrange(1, 17))]
    ended, _ = transfer(Clock(monkeypatch), rates, gaps, size)
    position = iter(sorted((piece.start, piece.end) for piece in ended if piece.start < piece.end))
    for start, end in gaps:
        while start < end:
            first, start_of_next = next(position)
            assert first == start
            start = start_of_next
        assert start == end
    assert next(position, None) is None


def test_little_is_left_to_hash_at_the_end_whatever_the_streams_do(monkeypatch):
    """Rates as measured on one link: with equal pieces of 16 MiB, 700 of 768 MiB lay behind the first gap at the end."""
    rates = [1.2 * MIB] * 6 + [5 * MIB] * 6 + [19 * MIB] * 4
    ended, behind = transfer(Clock(monkeypatch), rates, [(0, 768 * MIB)], 768 * MIB)
    assert max(behind[-len(rates) :]) < 40 * MIB
    assert len(ended) < 350  # each is a request


@pytest.mark.parametrize(("rate", "size"), [(40.0 * MIB, 16 * MIB), (0.0, MIB)], ids=["after a fast piece", "from the beginning"])
def test_a_stream_that_stands_still_gives_its_piece_away(monkeypatch, rate, size):
    """As large as it was fast; then it brings nothing any more, and all that it had not in hand goes to others."""
    clock = Clock(monkeypatch)
    pieces = Pieces([(0, 100 * MIB)], 100 * MIB, 2, 16 * MIB)
    stuck = pieces.take(rate)
    assert (stuck.start, stuck.end) == (0, size)
    assert pieces.hold(stuck, 1 << 18) == 1 << 18
    other = pieces.take(8.0 * MIB)
    assert other.start == size
    clock.now = 600.0
    pieces.hold(other, other.end - other.start)
    pieces.written(other)
    pieces.end(other)
    rest = pieces.take(8.0 * MIB)
    assert rest.end == size and rest.start == stuck.end and 1 << 18 <= stuck.end < MIB
    taken = 0
    while rest and taken < 100:
        taken += 1
        pieces.hold(rest, rest.end - rest.start)
        pieces.written(rest)
        pieces.end(rest)
        clock.now += 1.0
        rest = pieces.take(8.0 * MIB)
    assert taken < 50 and stuck.end - stuck.held < 1 << 16  # each is a request
    pieces.written(stuck)
    assert pieces.hold(stuck, 4 * MIB) == stuck.end - stuck.position  # of a block that was on its way, no more is written


def test_the_hash_does_not_wait_for_a_whole_piece():
    pieces, told = Pieces([(0, 64 * MIB)], 64 * MIB, 1, 64 * MIB), []
    piece = pieces.take(1e9)
    waiting = threading.Thread(target=lambda: told.append(pieces.wait_beyond(0)))
    waiting.start()
    for _ in range(LEAST_PIECE // (1 << 18)):
        assert not told
        pieces.hold(piece, 1 << 18)
        pieces.written(piece)
    waiting.join(10)
    assert told == [LEAST_PIECE] and piece.end > LEAST_PIECE


@pytest.mark.parametrize("server", ["rclone", "ceph"], indirect=True)  # moto closes a connection after each answer
def test_one_starved_connection_delays_nothing_and_spoils_nothing(bucket, server, settings, tmp_path):
    """A connection that was fast brings a hundredth from its second MiB on: 8 MiB would take it 50 seconds."""
    uri, head = f"s3://{bucket}/head", make_head(tmp_path / "head", 1, 96 * MIB)
    publish(head, uri, settings, state=None)
    with faulty_network(server.endpoint_url, starved=1, answers_per_second=16 * MIB) as network:
        began = time.monotonic()
        slow = settings.model_copy(update={"endpoint_url": network.endpoint_url, "threads": 4, "part_mib": 16})
        pull(uri, tmp_path / "back", slow)
        assert network.starved == 0
    assert contents(tmp_path / "back") == contents(head)
    assert time.monotonic() - began < 30  # 8 to 9 on an idle machine


@pytest.mark.parametrize("killed", [9, 20])
def test_a_killed_download_fetches_only_what_is_missing(bucket, server, settings, tmp_path, killed):
    """Bytes counted on the wire; what had arrived by its record, were it behind a gap, is not asked for again."""
    uri, head = f"s3://{bucket}/head", make_head(tmp_path / "head", 1, 24 * MIB)
    publish(head, uri, settings, state=None)
    killed_at(killed * MIB, lambda progress: pull(uri, tmp_path / "back", settings, progress=progress))
    record = tmp_path / ".back.partial" / "model.safetensors.partial.partial"
    there = sum(int(end) - int(start) for start, end in map(str.split, record.read_text().splitlines()))
    assert there >= killed * MIB - 1000
    with faulty_network(server.endpoint_url) as network:
        pull(uri, tmp_path / "back", settings.model_copy(update={"endpoint_url": network.endpoint_url}))
        assert 24 * MIB - there <= network.answered < 24 * MIB - there + MIB
    assert contents(tmp_path / "back") == contents(head)


def test_a_kill_between_a_file_and_its_record_leaves_no_record_behind(place, tmp_path):
    """The file has its name already, the record of its pieces is still there: it must not be part of what appears."""
    uri, settings = place
    head = make_head(tmp_path / "head", 1)
    publish(head, uri, settings, state=None)

    def work(progress):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Path, "unlink", lambda path, **_: progress(1, 1) if path.match("*.partial.partial") and path.exists() else None)
            pull(uri, tmp_path / "back", settings)

    killed_at(1, work)
    assert list((tmp_path / ".back.partial").rglob("*.partial.partial"))
    pull(uri, tmp_path / "back", settings)
    assert contents(tmp_path / "back") == contents(head)
