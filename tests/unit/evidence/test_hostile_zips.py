"""Zips that lie, burst, smuggle or are no zips: a finding and exit code 1, flat memory, nothing written anywhere, no traceback."""

from __future__ import annotations

import io
import json
import random
import resource
import struct
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from bundle_rig import HOLDER, SCRIPT, Members, judged, read, write

KEY = HOLDER.public_key_hex


def zipped(members: list[tuple[str, bytes]], compression: int = zipfile.ZIP_DEFLATED) -> bytes:
    target = io.BytesIO()
    with zipfile.ZipFile(target, "w", compression) as file:
        for name, data in members:
            file.writestr(name, data)
    return target.getvalue()


def directory_of(data: bytes) -> int:
    """Where the zip's own directory begins."""
    return int(struct.unpack("<I", data[-6:-2])[0])


def many_members(data: bytes) -> bytes:
    return zipped([(f"{number}", b"") for number in range(3000)])


def giant_directory(data: bytes) -> bytes:
    """The end of the zip claims a directory of two gigabytes."""
    return data[:-10] + struct.pack("<I", 2_000_000_000) + data[-6:]


def names_changed(old: bytes, new: bytes) -> Callable[[bytes], bytes]:
    assert len(old) == len(new)
    return lambda data: data.replace(old, new)


def doubled(data: bytes) -> bytes:
    members = list(zipfile_members(data).items())
    with pytest.warns(UserWarning, match="Duplicate name"):
        return zipped([*members, ("envelopes.jsonl", b"")])


def zipfile_members(data: bytes) -> Members:
    with zipfile.ZipFile(io.BytesIO(data)) as file:
        return {name: file.read(name) for name in file.namelist()}


def with_comment(data: bytes) -> bytes:
    target = io.BytesIO(data)
    with zipfile.ZipFile(target, "a") as file:
        file.comment = b"approved by the auditor"
    return target.getvalue()


def encrypted(data: bytes) -> bytes:
    place = directory_of(data)
    changed = bytearray(data)
    while changed[place : place + 4] == b"PK\x01\x02":
        changed[place + 8] |= 1
        name, extra, comment = struct.unpack("<HHH", changed[place + 28 : place + 34])
        place += 46 + name + extra + comment
    return bytes(changed)


def bomb(data: bytes) -> bytes:
    """100 MB of empty objects in 100 kB."""
    members = zipfile_members(data)
    return zipped([*({**members, "envelopes.jsonl": b"{}\n" * 33_000_000}).items()])


def lying_size(data: bytes) -> bytes:
    """The directory says that the envelopes are shorter than they are."""
    place = data.rindex(b"envelopes.jsonl") - 46
    assert data[place : place + 4] == b"PK\x01\x02"
    return data[: place + 24] + struct.pack("<I", 1000) + data[place + 28 :]


HOSTILE: dict[str, Callable[[bytes], bytes]] = {
    "nothing": lambda data: b"",
    "not a zip": lambda data: b"hello",
    "only the first bytes of a zip": lambda data: b"PK\x03\x04",
    "an empty zip": lambda data: zipped([]),
    "another zip": lambda data: zipped([("a.txt", b"a")]),
    "cut in half": lambda data: data[: len(data) // 2],
    "without its last byte": lambda data: data[:-1],
    "something before it": lambda data: b"#!/bin/sh\n" + data,
    "something after it": lambda data: data + b"x" * 100,
    "two zips in one file": lambda data: zipped([("a.txt", b"a")]) + data,
    "a comment": with_comment,
    "a member twice": doubled,
    "a member more": lambda data: zipped([*zipfile_members(data).items(), ("notes.txt", b"")]),
    "a folder": lambda data: zipped([*zipfile_members(data).items(), ("folder/", b"")]),
    "a path out of the folder": names_changed(b"schema.json", b"../../a.txt"),
    "an absolute path": names_changed(b"schema.json", b"/etc/passwd"),
    "a path of Windows": names_changed(b"schema.json", b"C:\\\\a\\b.txt"),
    "a name in capitals": names_changed(b"log.txt", b"LOG.TXT"),
    "a name of other letters": lambda data: zipped(
        [(name.replace("o", "о"), one) for name, one in zipfile_members(data).items()]
    ),
    "no manifest": lambda data: zipped([one for one in zipfile_members(data).items() if one[0] != "manifest.json"]),
    "no envelopes": lambda data: zipped([one for one in zipfile_members(data).items() if one[0] != "envelopes.jsonl"]),
    "thousands of members": many_members,
    "a giant directory": giant_directory,
    "encrypted members": encrypted,
    "a bomb": bomb,
    "a size that is a lie": lying_size,
    "packed in another way": lambda data: zipped(list(zipfile_members(data).items()), zipfile.ZIP_LZMA),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_zip_is_a_finding(name: str, whole: Members, path: Path) -> None:
    path.write_bytes(HOSTILE[name](write(path, whole).read_bytes()))
    report = judged(path, KEY)
    assert (report.verdict, report.dimensions["bundle"]) == ("failed", "failed"), name


MANIFESTS: dict[str, bytes] = {
    "empty": b"",
    "not JSON": b"hello",
    "a list": b"[]",
    "null": b"null",
    "nested without end": b"[" * 90_000,
    "another format": b'{"format": "zip"}',
    "no members": b'{"format": "phionyx-letta/evidence/v1"}',
    "members that are a list": b'{"format": "phionyx-letta/evidence/v1", "members": []}',
    "a key twice": b'{"format": "phionyx-letta/evidence/v1", "members": {}, "members": {}}',
    "giant": b'{"format": "phionyx-letta/evidence/v1", "x": "' + b"x" * 1_000_000 + b'"}',
}


@pytest.mark.parametrize("name", MANIFESTS)
def test_a_wrong_manifest(name: str, whole: Members, path: Path) -> None:
    path.write_bytes(zipped([*{**whole, "manifest.json": MANIFESTS[name]}.items()]))
    report = judged(path, KEY)
    assert (report.verdict, report.dimensions["bundle"]) == ("failed", "failed")


@pytest.mark.parametrize(
    "claim",
    [{"envelopes": 17}, {"envelopes": "18"}, {"log_size": 19}, {"log_size": None}, {"whole": False}, {"whole": 1}],
    ids=str,
)
def test_a_manifest_that_says_otherwise(claim: dict[str, object], whole: Members, path: Path) -> None:
    assert judged(write(path, whole, **claim), KEY).dimensions["bundle"] == "failed"


@pytest.mark.parametrize("name", ["README.md", "keys.txt", "checkpoints", "log.txt", "envelopes.jsonl", "key-history"])
def test_a_member_that_is_not_the_one_of_the_manifest(name: str, whole: Members, path: Path) -> None:
    path.write_bytes(zipped([*{**whole, name: whole[name] + b"\n"}.items()]))
    assert judged(path, KEY).dimensions["bundle"] == "failed"


@pytest.mark.slow
def test_every_flipped_byte_is_seen_or_harmless(whole: Members, path: Path) -> None:
    """Both verifiers say the same of every damaged zip; valid is only what still holds the same members."""
    good, chance = write(path, whole).read_bytes(), random.Random(7)
    whole_now = read(path)
    valid = 0
    for _ in range(150):
        data = bytearray(good)
        for _ in range(chance.choice((1, 1, 3))):
            data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
        path.write_bytes(bytes(data))
        if judged(path, KEY).verdict == "valid":
            valid += 1
            assert read(path) == whole_now
    assert valid < 50


@pytest.mark.slow
def test_random_nonsense_in_the_members(whole: Members, path: Path) -> None:
    """Whatever is put where: no exception, both verifiers agree."""
    chance = random.Random(11)
    for _ in range(150):
        name = chance.choice(["checkpoints", "log.txt", "key-history", "envelopes.jsonl", "envelopes.jsonl"])
        data = bytearray(whole[name] or b"\n")
        for _ in range(chance.choice((1, 2, 8))):
            start = chance.randrange(len(data) + 1)
            kind = chance.randrange(4)
            piece = data[chance.randrange(len(data) + 1) :][: chance.randrange(80)]
            if kind == 0:
                data[start:start] = piece
            elif kind == 1:
                del data[start : start + chance.randrange(1, 50)]
            elif kind == 2 and start < len(data):
                data[start] = chance.randrange(256)
            else:
                data[start : start + 1] = chance.choice(
                    [b"\n", b"\n\n", b"null", b"{}", b"0", b'"', b"\xe2\x80\x94 ", b"-1", b"[]"]
                )
            data = data or bytearray(b"\n")
        changed = {**whole, name: bytes(data)}
        if changed[name] != whole[name]:
            report = judged(write(path, changed), KEY)
            assert report.verdict != "valid" or name in ("key-history", "checkpoints", "log.txt")


def mutated(value: object, chance: random.Random) -> object:
    """Some part of a JSON value replaced by something else."""
    odd = [None, True, 0, -1, 1.5, "", "x", [], {}, ["x"], {"x": 1}, "sha256:" + "0" * 64, "unsigned", 10**30]
    if isinstance(value, dict) and value and chance.random() < 0.85:
        key = chance.choice(list(value))
        if chance.random() < 0.15:
            return {name: one for name, one in value.items() if name != key}
        return {**value, key: mutated(value[key], chance)}
    return chance.choice(odd)


@pytest.mark.slow
def test_random_values_in_the_envelopes(whole: Members, path: Path) -> None:
    """The shape is checked by two independent pieces of code; they never differ."""
    chance = random.Random(13)
    found = whole["envelopes.jsonl"].splitlines()
    for _ in range(150):
        changed = list(found)
        for _ in range(chance.choice((1, 1, 2, 5))):
            place = chance.randrange(len(changed))
            changed[place] = json.dumps(mutated(json.loads(changed[place]), chance), sort_keys=True).encode()
        report = judged(write(path, {**whole, "envelopes.jsonl": b"\n".join(changed) + b"\n"}), KEY)
        assert report.verdict == "failed"


@pytest.mark.slow
def test_a_bomb_costs_no_memory(whole: Members, path: Path) -> None:
    """Within the limit of what a bundle may inflate to, and far beyond what a process may have."""
    members = {
        **whole,
        "envelopes.jsonl": b"".join(b'{"x":"%d"}\n' % (number * 7919**3) for number in range(2_000_000)),
    }
    write(path, members)
    for command in ([str(SCRIPT)], ["-m", "phionyx_letta.cli", "verify"]):
        done = subprocess.run(
            [sys.executable, *command, str(path), "--key", KEY, "--json"],
            capture_output=True,
            text=True,
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (700_000_000, 700_000_000)),
        )
        assert done.returncode == 1, done.stderr
        assert done.stderr == ""
        assert json.loads(done.stdout)["verdict"] == "failed"
