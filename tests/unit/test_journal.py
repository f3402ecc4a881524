"""Journals: whole records whatever happens to the file, the disk or the process."""

from __future__ import annotations

import errno
import logging
import os
import random
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpillm.errors import OutputError
from mpillm.formats import journal
from mpillm.formats.journal import Journal, OpenFiles, Reader, repair

ROOT = Path(__file__).parents[2]
RECORDS = st.lists(st.tuples(st.integers(0, 9), st.integers(-3, 2**40), st.binary(max_size=200)), max_size=8)


def content(path) -> list[tuple[int, int, bytes]]:
    return [(record.kind, record.number, bytes(record.payload)) for record in Reader(str(path))]


def written(path, records) -> bytes:
    with Journal(str(path), 1e9) as made:
        for kind, number, payload in records:
            made.append(kind, number, payload[:7], np.frombuffer(payload[7:], np.uint8))
    return Path(path).read_bytes()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("journals")


def fresh(folder: Path) -> Path:
    for path in folder.iterdir():
        path.unlink()
    return folder / "x.journal"


@settings(max_examples=60, deadline=None)
@given(RECORDS, st.integers(1, 300))
def test_records_come_back(folder, records, chunk):
    path = fresh(folder)
    data = written(path, records)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(journal, "CHUNK", chunk)
        reader = Reader(str(path))
        assert [(r.kind, r.number, bytes(r.payload)) for r in reader] == records
        assert [data[r.at:r.at + len(r.payload)] for r in Reader(str(path))] == [payload for _, _, payload in records]
    assert reader.whole == reader.size == len(data) and repair(reader) is None


@settings(max_examples=150, deadline=None)
@given(RECORDS, st.data())
def test_a_cut_or_a_flipped_bit_leaves_the_records_before(folder, records, data):
    path = fresh(folder)
    whole = bytearray(written(path, records))
    ends = np.cumsum([journal.HEAD_BYTES + len(payload) for _, _, payload in records])
    place = data.draw(st.integers(0, len(whole)))
    if data.draw(st.booleans()) and place < len(whole):
        whole[place] ^= 1 << data.draw(st.integers(0, 7))
    else:
        del whole[place:]
    path.write_bytes(whole)
    expected = records[:int(np.searchsorted(ends, place, "right"))]

    reader = Reader(str(path))
    assert [(r.kind, r.number, bytes(r.payload)) for r in reader] == expected
    said = repair(reader)
    damaged = folder / "x.journal.damaged"
    kept = int(ends[len(expected) - 1]) if expected else 0
    if kept == len(whole):
        assert said is None and not damaged.exists()
    elif not expected:
        assert "set aside" in said and damaged.read_bytes() == whole and not path.exists()
        return
    else:
        assert str(path) in said
        # What is more than a torn tail is copied before it is cut
        assert damaged.exists() == (place < len(whole) and len(expected) + 1 < len(records))
        assert not damaged.exists() or damaged.read_bytes() == whole
    assert path.read_bytes() == whole[:kept] and content(path) == expected
    assert repair(Reader(str(path))) is None


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=3000))
def test_any_bytes_are_read_without_another_error(folder, data):
    path = fresh(folder)
    path.write_bytes(data)
    assert content(path) == []


def test_lengths_that_are_a_lie_take_no_memory(tmp_path):
    path = tmp_path / "x"
    head = journal.HEADER.pack(journal.MAGIC, 1, 0, 5, 1 << 60, 0)
    path.write_bytes(head + journal.SUM.pack(journal.zlib.crc32(head)) + b"x" * 1000)
    assert content(path) == []


def test_damaged_copies_do_not_replace_one_another(tmp_path):
    path = tmp_path / "x"
    for count in range(3):
        path.write_bytes(b"%d" % count * 50)
        reader = Reader(str(path))
        assert list(reader) == [] and "set aside" in repair(reader)
    assert [(tmp_path / f"x.damaged{end}").read_bytes()[:1] for end in ("", ".1", ".2")] == [b"0", b"1", b"2"]


def test_a_repair_that_fails_changes_nothing(tmp_path, monkeypatch):
    path = tmp_path / "x"
    data = bytearray(written(path, [(1, number, b"abc") for number in range(3)]))
    data[journal.HEAD_BYTES + 3 + 5] ^= 1            # in the second record: the third is whole
    path.write_bytes(data)
    reader = Reader(str(path))
    assert len(list(reader)) == 1

    def full(source, target):
        Path(target).write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(journal.shutil, "copyfile", full)
    with pytest.raises(OutputError, match="cannot repair .*No space left on device"):
        repair(reader)
    assert os.listdir(tmp_path) == ["x"] and path.read_bytes() == data


def test_files_that_cannot_be_read_or_made(tmp_path):
    with pytest.raises(OutputError, match="cannot read .*No such file"):
        list(Reader(str(tmp_path / "none")))
    with pytest.raises(OutputError, match="cannot create .*No such file"):
        Journal(str(tmp_path / "none" / "x"), 1.0)
    Journal(str(tmp_path / "x"), 1.0).close()
    with pytest.raises(OutputError, match="cannot create .*File exists"):
        Journal(str(tmp_path / "x"), 1.0)


def test_records_wait_for_the_time_or_for_their_number(tmp_path, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(journal.time, "monotonic", lambda: now[0])
    made = Journal(str(tmp_path / "x"), 5.0)
    made.append(1, 1, b"a")
    now[0] = 4.9
    made.flush_if_due()
    assert content(tmp_path / "x") == []
    now[0] = 5.0
    made.flush_if_due()
    assert len(content(tmp_path / "x")) == 1
    made.append(1, 2, b"b" * journal.BUFFER)
    assert len(content(tmp_path / "x")) == 2
    made.append(1, 3, b"c")
    made.close()
    made.close()
    assert len(content(tmp_path / "x")) == 3
    with pytest.raises(AssertionError, match="after its close"):
        made.append(1, 4, b"d")


def test_a_slow_disk_does_not_hold_up_a_flush(tmp_path, monkeypatch):
    begun, go, calls = threading.Event(), threading.Event(), []
    monkeypatch.setattr(os, "fdatasync", lambda file: (calls.append(file), begun.set(), go.wait(10)))
    made = Journal(str(tmp_path / "x"), 0.0)
    # Without memory for a new thread, its start would wait for ever
    monkeypatch.setattr(threading, "Thread", None)
    for number in range(20):
        made.append(1, number, b"x")
        made.flush_if_due()
    assert begun.wait(10) and len(content(tmp_path / "x")) == 20 and len(calls) == 1, "one sync at a time"
    go.set()
    made.close()
    assert len(calls) in (2, 3), "what was flushed last is synced by the close, perhaps by the thread too"


def test_a_disk_that_lost_what_it_was_given_is_an_error(tmp_path, monkeypatch):
    made = Journal(str(tmp_path / "x"), 0.0)

    def broken(file):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "fdatasync", broken)
    made.append(1, 1, b"x")
    with pytest.raises(OutputError, match="cannot write .*Input/output error"):
        made.flush(sync=True)
    with pytest.raises(OutputError, match="Input/output error"):
        made.close()
    assert not made.is_open


# Full disks


class Disk:
    """Stands for ``os.write``: takes ``room`` bytes, at most 100 at a time, then fails."""

    def __init__(self, monkeypatch, room: int, error: int = errno.ENOSPC) -> None:
        self.room, self.error, self._write = room, error, os.write
        monkeypatch.setattr(os, "write", self)

    def __call__(self, file: int, data) -> int:
        count = min(len(data), 100, self.room)
        if len(data) and not count:
            raise OSError(self.error, os.strerror(self.error))
        self.room -= count
        return self._write(file, data[:count])


@pytest.mark.parametrize("room", range(0, 200, 13))
def test_a_disk_that_is_full_for_a_while_loses_nothing(tmp_path, monkeypatch, caplog, room):
    monkeypatch.setattr(logging.getLogger("mpillm"), "propagate", True)
    made = Journal(str(tmp_path / "x"), 0.0)
    monkeypatch.setattr(journal, "RETRY", 0.0)
    disk = Disk(monkeypatch, room)
    for number in range(10):
        made.append(1, number, bytes([number]) * number)
        made.flush_if_due()
        assert content(tmp_path / "x") == [(1, i, bytes([i]) * i) for i in range(len(content(tmp_path / "x")))]
        reader = Reader(str(tmp_path / "x"))
        assert list(reader) is not None and reader.whole == reader.size, "a partial write is cut back"
    assert 0 <= len(content(tmp_path / "x")) <= 6
    assert [r.getMessage().split(": ")[1] for r in caplog.records] == ["No space left on device"], "said once"
    disk.room = 10**6
    made.close()
    assert [number for _, number, _ in content(tmp_path / "x")] == list(range(10))
    assert "room again" in caplog.records[-1].getMessage()


def test_a_disk_that_stays_full_is_an_error_after_the_patience(tmp_path, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(journal.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(journal.time, "sleep", lambda seconds: now.__setitem__(0, now[0] + seconds))
    made = Journal(str(tmp_path / "x"), 5.0, patience=30.0)
    Disk(monkeypatch, 40)
    made.append(1, 0, b"12345678")
    made.append(1, 1, b"x")
    for now[0] in (5.0, 10.0, 34.9):
        made.flush_if_due()
    with pytest.raises(OutputError, match="No space left on device for 30 s: make room, then go on with --resume"):
        now[0] = 35.9
        made.flush_if_due()
    with pytest.raises(OutputError, match="No space left"):
        made.close()
    assert not made.is_open and content(tmp_path / "x") == [(1, 0, b"12345678")]

    late = Journal(str(tmp_path / "y"), 5.0, patience=30.0)
    late.append(1, 0, b"x")
    begin = now[0]
    with pytest.raises(OutputError, match="No space left"):
        late.close()
    assert 30 <= now[0] - begin <= 31, "a close waits that long and no longer"


def test_what_waits_for_a_full_disk_has_a_limit(tmp_path, monkeypatch):
    monkeypatch.setattr(journal, "PENDING", 3 * journal.BUFFER)
    made = Journal(str(tmp_path / "x"), 5.0, patience=0.0)
    Disk(monkeypatch, 0)
    made.patience = 100.0
    for number in range(2):
        made.append(1, number, bytes(journal.BUFFER))
    with pytest.raises(OutputError, match="disk is full, and 3 MiB wait for it"):
        made.append(1, 2, bytes(journal.BUFFER))
    made.patience = 0.0
    with pytest.raises(OutputError):
        made.close()


@pytest.mark.parametrize("error", [errno.EIO, errno.EFBIG, errno.ESTALE])
def test_another_failure_is_an_error_at_once(tmp_path, monkeypatch, error):
    made = Journal(str(tmp_path / "x"), 0.0)
    disk = Disk(monkeypatch, 50, error)
    made.append(1, 0, b"x")
    made.append(1, 1, b"y" * 20)
    with pytest.raises(OutputError, match=f"cannot write {made.path}: {os.strerror(error)}"):
        made.flush()
    assert [number for _, number, _ in content(tmp_path / "x")] == [0]
    disk.room = 1000
    made.close()
    assert [number for _, number, _ in content(tmp_path / "x")] == [0, 1]


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 256 KiB."""
    place = tmp_path / "disk"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(place)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("mounting a small file system needs root")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


def test_a_disk_that_is_really_full(small_disk, monkeypatch):
    monkeypatch.setattr(journal, "RETRY", 0.01)
    (small_disk / "other").write_bytes(bytes(150_000))
    made = Journal(str(small_disk / "x"), 0.0, patience=20.0)
    for number in range(100):
        made.append(1, number, bytes([number]) * 1500)
        made.flush_if_due()
    kept = content(small_disk / "x")
    assert 10 < len(kept) < 90 and (small_disk / "x").stat().st_size < 120_000
    threading.Timer(0.2, os.unlink, [small_disk / "other"]).start()
    made.close()
    assert content(small_disk / "x") == [(1, number, bytes([number]) * 1500) for number in range(100)]


# Kills


WRITER = """
    import sys
    from mpillm.formats.journal import Journal
    made = Journal(sys.argv[1], float(sys.argv[2]))
    number = 0
    while True:
        made.append(1, number, number.to_bytes(4, "little") * (number * 37 % 4000 + 1))
        if number % 5 == 4:
            made.flush_if_due()
            # Whoever reads this line may rely on what it says
            if not made._waiting:
                sys.stdout.write(f"{number}\\n")
                sys.stdout.flush()
        number += 1
"""


def test_kill_9_at_random_moments(tmp_path):
    chance = random.Random(5)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    for round_ in range(10):        # two writers at a time, since starting takes the longest
        writers = []
        for flush_every in (0.0, 0.01):
            path = tmp_path / f"{round_}-{flush_every}.journal"
            writers.append((path, subprocess.Popen([sys.executable, "-c", textwrap.dedent(WRITER), str(path),
                                                    str(flush_every)], env=environment, stdout=subprocess.PIPE)))
        for path, writer in writers:
            said = [int(writer.stdout.readline())]
            time.sleep(chance.random() * 0.03)
            writer.kill()
            said += [int(line) for line in writer.stdout.read().split(b"\n")[:-1]]
            writer.stdout.close()
            assert writer.wait() == -signal.SIGKILL
            reader = Reader(str(path))
            found = [(r.number, bytes(r.payload)) for r in reader]
            assert [number for number, _ in found] == list(range(len(found))) and len(found) > said[-1]
            assert all(data == n.to_bytes(4, "little") * (n * 37 % 4000 + 1) for n, data in found)
            repair(reader)
            assert content(path) == [(1, number, data) for number, data in found]
            path.unlink()


def test_more_files_than_may_be_open(tmp_path):
    for number in range(5):
        (tmp_path / f"{number}").write_bytes(bytes([number]) * 10)
    files = OpenFiles(limit=2)
    out = np.empty((2, 2), "<u2")
    before = len(os.listdir("/proc/self/fd"))
    for number in (0, 1, 2, 3, 4, 0, 2):
        files.read(str(tmp_path / f"{number}"), 1, out)
        assert (out == number * 257).all() and len(os.listdir("/proc/self/fd")) <= before + 2
    with pytest.raises(OutputError, match="became shorter"):
        files.read(str(tmp_path / "0"), 5, out)
    with pytest.raises(OutputError, match="cannot read .*No such file"):
        files.read(str(tmp_path / "7"), 5, out)
    files.close()
    assert len(os.listdir("/proc/self/fd")) == before
