"""Somebody changes a bundle and makes the manifest fit: what the verifiers say, ours and the one that travels in the bundle."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from bundle_rig import FOREIGN, HOLDER, History, Members, edited, judged, lines, read, with_lines, write

from phionyx_letta.checkpoint import Checkpoint, issue_checkpoint
from phionyx_letta.envelope import envelope_hash
from phionyx_letta.notes import parse_note

KEY, OTHER = HOLDER.public_key_hex, FOREIGN.public_key_hex
Attack = Callable[[Members], Members]
Change = Callable[[dict[str, Any]], None]


def on_line(number: int, change: Callable[[bytes], bytes]) -> Attack:
    def attack(members: Members) -> Members:
        changed = lines(members)
        changed[number] = change(changed[number])
        return with_lines(members, changed)

    return attack


def change(number: int, change: Change) -> Attack:
    """The JSON of an envelope is changed, its hash is left."""
    return on_line(number, lambda line: edited(line, change))


def rehash(number: int, change: Change, signer: Any = None) -> Attack:
    """The JSON of an envelope is changed and hashed anew; signed anew too, where the attacker has a key."""

    def redo(envelope: dict[str, Any]) -> None:
        change(envelope)
        integrity = envelope["integrity"]
        integrity["current"] = envelope_hash(envelope, integrity["previous"])
        if signer is not None:
            integrity["signature"] = signer.sign(integrity["current"])

    return on_line(number, lambda line: edited(line, redo))


def at(path: str, value: Any) -> Change:
    def put(envelope: dict[str, Any]) -> None:
        *parts, last = path.split(".")
        for part in parts:
            envelope = envelope[part]
        envelope[last] = value

    return put


def rearranged(order: Callable[[list[bytes]], list[bytes]]) -> Attack:
    return lambda members: with_lines(members, order(lines(members)))


def replaced(name: str, change: Callable[[bytes], bytes]) -> Attack:
    return lambda members: {**members, name: change(members[name])}


def renoted(signer: Any, **values: Any) -> Callable[[bytes], bytes]:
    """The last checkpoint says something else, signed by somebody."""

    def redo(data: bytes) -> bytes:
        last = data.decode().rstrip("\n").split("\n\n")[-2]
        point = Checkpoint.parse(last + "\n")
        changed = Checkpoint(
            values.get("origin", point.origin), values.get("size", point.size), values.get("root", point.root)
        )
        return issue_checkpoint(changed, signer).encode() + b"\n"

    return redo


def move(source: int, target: int) -> Attack:
    def order(found: list[bytes]) -> list[bytes]:
        found.insert(target, found.pop(source))
        return found

    return rearranged(order)


def under_another_agent(line: bytes) -> bytes:
    return line.replace(b'"trace_id":"agent-a"', b'"trace_id":"agent-b"')


def all_signed_by(signer: Any) -> Attack:
    """Everything is hashed and signed anew, key ids and checkpoint too: a perfect forgery by somebody else."""

    def attack(members: Members) -> Members:
        heads: dict[str, str] = {}

        def redo(envelope: dict[str, Any]) -> None:
            envelope["subject"]["key_id"] = signer.key_id
            trace, integrity = envelope["subject"]["trace_id"], envelope["integrity"]
            integrity["previous"] = heads.get(trace, "sha256:" + "0" * 64)
            integrity["current"] = heads[trace] = envelope_hash(envelope, integrity["previous"])
            integrity["signature"] = signer.sign(integrity["current"])

        return with_lines({**members, "checkpoints": b""}, [edited(line, redo) for line in lines(members)])

    return attack


def twice(line: bytes, name: bytes) -> bytes:
    """A key of the JSON stands twice, with another value first."""
    return line.replace(b'"%b":' % name, b'"%b":"x","%b":' % (name, name), 1)


def cleared(envelope: dict[str, Any]) -> None:
    envelope["mutation"]["mutation_kind"], envelope["subject"]["event_type"] = "clear", "memory_clear"


def unsigned(envelope: dict[str, Any]) -> None:
    del envelope["subject"]["key_id"]
    envelope["integrity"]["signature"] = ""


def with_a_neighbours_signature(found: list[bytes]) -> list[bytes]:
    mine, other = (json.loads(one)["integrity"]["signature"].encode() for one in found[3:5])
    return [*found[:3], found[3].replace(mine, other), *found[4:]]


LETTA = "subject.metadata.letta"
FAILS: dict[str, Attack] = {
    "edit a tool, hash left": change(3, at(f"{LETTA}.tool", "human_operator")),
    "edit a hash of the content": change(3, at("mutation.diff.after_hash", "sha256:" + "0" * 64)),
    "edit and hash anew": rehash(3, at(f"{LETTA}.tool", "human_operator")),
    "edit and sign with another key": rehash(3, at(f"{LETTA}.tool", "human_operator"), FOREIGN),
    "edit the newest and sign with another key": rehash(-1, at(f"{LETTA}.tool", "human_operator"), FOREIGN),
    "edit the newest and sign with the stolen key": rehash(-1, at(f"{LETTA}.tool", "human_operator"), HOLDER),
    "forge everything with another key": all_signed_by(FOREIGN),
    "relabel the agent": on_line(0, under_another_agent),
    "relabel the block": change(2, at("mutation.block_label", "persona")),
    "relabel the time": change(2, at("subject.timestamp_utc", "2020-01-01T00:00:00+00:00")),
    "relabel the organization": change(2, at("subject.organization_id", "org-2")),
    "relabel the kind": change(2, at("mutation.mutation_kind", "clear")),
    "relabel the kind and the event": rehash(2, cleared),
    "another position": rehash(-1, at("subject.position", 0), HOLDER),
    "a turn that skips": rehash(-1, at("subject.turn_index", 99), HOLDER),
    "a reason put in": change(4, at("mutation.forgetting_reason", "gdpr")),
    "reorder two of different agents": move(1, 2),
    "reorder two of one agent": move(0, 6),
    "the newest first": move(-1, 0),
    "reverse": rearranged(lambda found: found[::-1]),
    "copy one to the end": rearranged(lambda found: [*found, found[2]]),
    "copy one beside itself": rearranged(lambda found: [*found[:3], *found[2:]]),
    "replay one agent's in another's chain": rearranged(lambda found: [*found, under_another_agent(found[0])]),
    "insert an invented one": rearranged(
        lambda found: [*found[:5], edited(found[5], at(f"{LETTA}.nonce", "0" * 32)), *found[5:]]
    ),
    "leave out one agent": rearranged(lambda found: [line for line in found if b'"trace_id":"agent-b"' not in line]),
    "leave out everything": rearranged(lambda found: []),
    "strip one signature": change(3, at("integrity.signature", "unsigned")),
    "strip all signatures": rearranged(
        lambda found: [edited(line, at("integrity.signature", "unsigned")) for line in found]
    ),
    "strip all signatures and the keys' names": rearranged(lambda found: [edited(line, unsigned) for line in found]),
    "a signature of another algorithm": change(3, at("integrity.signature", "hmac-sha256:" + "ab" * 16)),
    "another envelope's signature": rearranged(with_a_neighbours_signature),
    "a signature in capitals": on_line(
        3, lambda line: re.sub(rb"ed25519:[0-9a-f]+", lambda m: b"ed25519:" + m[0][8:].upper(), line)
    ),
    "something added that no hash covers": change(3, at("integrity.approved_by", "the auditor")),
    "a key twice in the subject": on_line(3, lambda line: twice(line, b"producer")),
    "a key twice in the integrity": on_line(3, lambda line: twice(line, b"current")),
    "a key twice, by an escape": on_line(
        3, lambda line: line.replace(b'"producer":', b'"\\u0070roducer":"x","producer":', 1)
    ),
    "the same content in other bytes": on_line(3, lambda line: line.replace(b'"producer"', b'"\\u0070roducer"', 1)),
    "spaces in the JSON": on_line(3, lambda line: line.replace(b'","', b'", "', 1)),
    "a letter that looks like another": on_line(
        3, lambda line: line.replace(b"memory_insert", "memory_іnsert".encode(), 1)
    ),
    "a letter that looks like another, escaped": on_line(
        3, lambda line: line.replace(b"memory_insert", b"memory_\\u0456nsert", 1)
    ),
    "bytes that are not UTF-8": on_line(3, lambda line: line.replace(b"memory_insert", b"memory_\xff\xfe", 1)),
    "a byte order mark": on_line(0, lambda line: b"\xef\xbb\xbf" + line),
    "UTF-16": on_line(3, lambda line: line.rstrip().decode().encode("utf-16-le").replace(b"\n", b"") + b"\n"),
    "half a surrogate pair": change(3, at(f"{LETTA}.tool", "\ud800")),
    "a zero byte": on_line(3, lambda line: line.replace(b"memory_insert", b"memory\\u0000insert", 1)),
    "a number that is none": on_line(3, lambda line: line.replace(b'"turn_index":', b'"turn_index":NaN,"x":', 1)),
    "an infinite number": change(3, lambda e: e["subject"]["metadata"].update(x=float("inf"))),
    "a count as a float": change(3, at("mutation.diff.added_chars", 1.0)),
    "a count as true": change(3, at("mutation.diff.added_chars", True)),
    "a negative count": change(3, at("mutation.diff.added_chars", -1)),
    "a giant number": on_line(3, lambda line: line.replace(b'"turn_index":', b'"turn_index":' + b"9" * 5000, 1)),
    "nesting without end": on_line(3, lambda line: b"[" * 100_000 + b"]" * 100_000 + b"\n"),
    "a list in place of an envelope": on_line(3, lambda line: b"[]\n"),
    "null in place of an envelope": on_line(3, lambda line: b"null\n"),
    "an empty object": on_line(3, lambda line: b"{}\n"),
    "another schema": change(3, at("schema", "phionyx.memory_mutation_envelope.v2")),
    "a part is missing": change(3, lambda e: e.pop("mutation")),
    "a part is of another kind": change(3, at("subject", [])),
    "the diff is null": change(3, at("mutation.diff", None)),
    "the audit is a text": change(3, at("memory_consolidation_audit", "x")),
    "an audit without its fields": change(3, at("memory_consolidation_audit", {})),
    "a blank line": rearranged(lambda found: [*found[:3], b"\n", *found[3:]]),
    "lines that end as on Windows": rearranged(lambda found: [line[:-1] + b"\r\n" for line in found]),
    "the last line has no end": on_line(-1, lambda line: line[:-1]),
    "half of the last line": on_line(-1, lambda line: line[: len(line) // 2]),
    "two envelopes in a line": rearranged(lambda found: [found[0][:-1] + found[1], *found[2:]]),
    "checkpoints of another key": replaced("checkpoints", renoted(FOREIGN)),
    "a checkpoint of another root, by another key": replaced("checkpoints", renoted(FOREIGN, root=b"0" * 32)),
    "a checkpoint with its root changed": replaced(
        "checkpoints", lambda data: re.sub(rb"(?<=\n18\n)[A-Za-z0-9+/]{4}", b"AAAA", data)
    ),
    "a checkpoint of a longer log": replaced("checkpoints", renoted(HOLDER, size=19)),
    "a checkpoint of the same size that contradicts": replaced(
        "checkpoints", lambda data: data + renoted(HOLDER, root=b"0" * 32)(data)
    ),
    "a checkpoint under another name": replaced(
        "checkpoints", lambda data: data.replace(b"test/log\n18", b"best/log\n18")
    ),
    "a checkpoint cut in half": replaced("checkpoints", lambda data: data[:-40]),
    "a checkpoint without its signature": replaced("checkpoints", lambda data: data.rpartition("—".encode())[0]),
    "something else as checkpoints": replaced("checkpoints", lambda data: b"hello\n\nworld\n"),
    "a wrong signature beside the right one": replaced(
        "checkpoints", lambda data: data.rstrip(b"\n") + b"\n" + wrong_signature(data)
    ),
    "a layout of more envelopes": replaced("log.txt", lambda data: b"envelopes 19\n"),
    "a layout of fewer envelopes": replaced("log.txt", lambda data: b"envelopes 17\n"),
    "a layout that is none": replaced("log.txt", lambda data: b"everything\n"),
    "a layout of nothing": replaced("log.txt", lambda data: b""),
    "a layout without its end": replaced("log.txt", lambda data: data[:-1]),
    "a layout as on Windows": replaced("log.txt", lambda data: data.replace(b"\n", b"\r\n")),
    "a layout with a subtree out of place": replaced(
        "log.txt", lambda data: b"envelopes 1\nsubtree 3 " + b"0" * 64 + b"\nenvelopes 17\n"
    ),
    "a layout with a giant subtree": replaced("log.txt", lambda data: b"subtree 62 " + b"0" * 64 + b"\n" + data),
    "a layout with an impossible subtree": replaced("log.txt", lambda data: b"subtree 99 " + b"0" * 64 + b"\n" + data),
    "a layout of more leaves than there are numbers": replaced(
        "log.txt", lambda data: b"envelopes 9999999999999999999\n"
    ),
    "the layout left out": lambda members: {name: data for name, data in members.items() if name != "log.txt"},
}


def wrong_signature(data: bytes) -> bytes:
    note = parse_note(b"\n\n".join(data.rstrip(b"\n").split(b"\n\n")[-2:]) + b"\n")
    (good,) = note.signatures
    return f"{type(good)(good.name, good.key_id, bytes(64)).line()}".encode()


@pytest.mark.parametrize("name", FAILS)
def test_it_fails(name: str, whole: Members, path: Path) -> None:
    report = judged(write(path, FAILS[name](whole)), KEY)
    assert report.verdict == "failed"
    assert report.findings[0].status == "failed"


def test_there_are_attacks_enough() -> None:
    assert len(FAILS) >= 60


@pytest.mark.parametrize("name", FAILS)
def test_without_a_key_nothing_is_valid(name: str, whole: Members, path: Path) -> None:
    assert judged(write(path, FAILS[name](whole))).verdict in ("failed", "not_measured")


@pytest.mark.parametrize("place", range(18))
def test_one_removed_anywhere_is_seen(place: int, whole: Members, path: Path) -> None:
    found = lines(whole)
    del found[place]
    report = judged(write(path, with_lines(whole, found)), KEY)
    assert report.verdict == "failed"
    assert report.dimensions["checkpoint"] == "failed"


@pytest.mark.parametrize("kept", range(18))
def test_a_cut_is_seen_as_far_as_checkpoints_reach(kept: int, whole: Members, history: History, path: Path) -> None:
    cut = with_lines(whole, lines(whole)[:kept])
    assert judged(write(path, cut), KEY).verdict == "failed"
    older = {**cut, "checkpoints": "\n".join(history.notes[:kept]).encode()}  # the attacker keeps only those that fit
    report = judged(write(path, older), KEY)
    assert report.verdict == ("valid" if kept else "not_measured")
    assert report.covered == (kept or None)
    report = judged(write(path, older), KEY, outside=[history.outside])
    assert report.verdict == "failed"
    assert "the end is missing" in str(report.reason)


def test_a_bundle_of_another_log_of_the_same_key(whole: Members, tmp_path: Path, path: Path) -> None:
    other = read(History(tmp_path).live(range(3)).bundle(tmp_path / "other.zip"))
    assert judged(write(path, other), KEY).verdict == "valid"
    for name in ("checkpoints", "envelopes.jsonl"):
        report = judged(write(path, {**whole, name: other[name]}), KEY)
        assert (report.verdict, report.dimensions["inclusion"]) == ("failed", "failed")


def test_what_is_no_evidence_may_be_changed(whole: Members, path: Path) -> None:
    """The limits of the page: the manifest fits, so nothing shows it. Keys, text and script are not believed from a bundle."""
    for name in ("README.md", "keys.txt", "schema.json", "verify_evidence.py"):
        assert judged(write(path, {**whole, name: b"changed"}), KEY).verdict == "valid"


def test_another_key_or_none(whole: Members, path: Path) -> None:
    write(path, whole)
    report = judged(path, OTHER)
    assert (report.verdict, report.dimensions["key_trust"]) == ("failed", "failed")
    report = judged(path)
    assert (report.verdict, report.dimensions["checkpoint"]) == ("not_measured", "not_measured")
    assert judged(path, OTHER, KEY).verdict == "valid"


def test_a_log_said_to_go_on_is_a_part(whole: Members, path: Path) -> None:
    """What is there is proved by its checkpoint; that nothing comes after it, no longer."""
    longer = {**whole, "log.txt": whole["log.txt"] + b"subtree 0 " + b"0" * 64 + b"\n"}
    report = judged(write(path, longer), KEY)
    assert (report.verdict, report.dimensions["checkpoint"]) == ("valid", "not_measured")


class TestInPart:
    """A bundle of one agent's chain: what is there is proved, that nothing more is there is not."""

    def test_a_valid_part(self, part: Members, history: History, path: Path) -> None:
        report = judged(write(path, part), KEY, outside=[history.outside])
        assert (report.verdict, report.envelopes, report.covered) == ("valid", 6, 18)
        assert (report.dimensions["inclusion"], report.dimensions["checkpoint"]) == ("ok", "not_measured")

    def test_a_part_tells_nothing_of_the_others(self, part: Members) -> None:
        assert b"agent-a" not in b"".join(part.values()).replace(part["README.md"], b"")

    @pytest.mark.parametrize("place", range(6))
    def test_what_is_changed_is_not_in_the_log(self, place: int, part: Members, path: Path) -> None:
        found = lines(part)
        found[place] = edited(found[place], at(f"{LETTA}.tool", "human_operator"))
        report = judged(write(path, {**part, "envelopes.jsonl": b"".join(found)}), KEY)
        assert (report.verdict, report.dimensions["inclusion"]) == ("failed", "failed")

    @pytest.mark.parametrize("place", range(10))
    def test_a_subtree_that_is_not_in_the_log(self, place: int, part: Members, path: Path) -> None:
        found = part["log.txt"].splitlines(keepends=True)
        found[place] = found[place].replace(b"subtree 0 ", b"subtree 0 f").replace(b"subtree 1 ", b"subtree 1 f")
        found[place] = b" ".join(
            found[place].split(b" ")[:2] + [one[:64] + b"\n" for one in found[place].split(b" ")[2:]]
        )
        if found[place].startswith(b"subtree"):
            assert judged(write(path, {**part, "log.txt": b"".join(found)}), KEY).verdict == "failed"

    def test_moved_to_other_places(self, part: Members, path: Path) -> None:
        found = part["log.txt"].splitlines(keepends=True)
        moved = b"".join([*found[1:2], found[0], *found[2:]])
        assert judged(write(path, {**part, "log.txt": moved}), KEY).verdict == "failed"

    def test_another_agents_envelope_slipped_in(self, part: Members, whole: Members, path: Path) -> None:
        found = lines(part)
        found[0] = next(line for line in lines(whole) if b'"trace_id":"agent-a"' in line)
        assert judged(write(path, {**part, "envelopes.jsonl": b"".join(found)}), KEY).verdict == "failed"

    def test_the_chains_end_left_out_is_the_limit(self, part: Members, path: Path) -> None:
        """The last envelope becomes a subtree: what is left is in the log, and that is all a part can show."""
        from phionyx_letta.merkle import leaf_hash

        found = lines(part)
        layout = part["log.txt"].decode().splitlines(keepends=True)
        place = max(number for number, line in enumerate(layout) if line.startswith("envelopes"))
        count = int(layout[place].split()[1])
        assert count == 2
        hidden = leaf_hash(found[-1][:-1]).hex()
        layout[place] = f"envelopes {count - 1}\nsubtree 0 {hidden}\n"
        cut = {**part, "envelopes.jsonl": b"".join(found[:-1]), "log.txt": "".join(layout).encode()}
        report = judged(write(path, cut), KEY)
        assert (report.verdict, report.dimensions["checkpoint"]) == ("valid", "not_measured")

    def test_hidden_in_the_middle_of_a_chain(self, part: Members, path: Path) -> None:
        from phionyx_letta.merkle import leaf_hash

        found = lines(part)
        layout = (
            part["log.txt"]
            .decode()
            .replace("envelopes 2\n", f"subtree 0 {leaf_hash(found[0][:-1]).hex()}\nenvelopes 1\n", 1)
        )
        report = judged(write(path, {**part, "envelopes.jsonl": b"".join(found[1:]), "log.txt": layout.encode()}), KEY)
        assert (report.verdict, report.dimensions["continuity"]) == ("failed", "failed")
