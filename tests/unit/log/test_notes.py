"""Signed notes and checkpoints: the published examples, and everything that is nearly one."""

from __future__ import annotations

import base64
import hashlib
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given
from hypothesis import strategies as st

from phionyx_letta import Ed25519Signer, HmacSigner, SigningKeyError, UnsignedSigner
from phionyx_letta.checkpoint import Checkpoint, issue_checkpoint, open_checkpoint
from phionyx_letta.errors import NoteError, PhionyxError, UntrustedNote
from phionyx_letta.merkle import EMPTY_ROOT
from phionyx_letta.notes import (
    COSIGNATURE,
    MAX_BYTES,
    NoteKey,
    NoteSignature,
    SignedNote,
    cosign_note,
    parse_note,
    sign_note,
)

# golang.org/x/mod/sumdb/note: two keys, one of them with its private half, and what they sign
PETER = "PeterNeumann+c74f20a3+ARpc2QcUPDhMQegwxbzhKqiBfsVkmqq/LDE4izWy10TW"
PETER_SEED = base64.b64decode("AYEKFALVFGyNhPJEMzD1QIDr+Y7hfZx09iUvxdXHKDFz")[1:].hex()
ENOCH = "EnochRoot+af0cfe78+ATtqJ7zOtqQtYqOo0CpvDXNlMhV3HeJDpjrASKGLWdop"
TEXT = "If you think cryptography is the answer to your problem,\nthen you don't know what your problem is.\n"
PETER_LINE = (
    "— PeterNeumann x08go/ZJkuBS9UG/SffcvIAQxVBtiFupLLr8pAcElZInNIuGUgYN1FFYC2pZSNXgKvqfqdngotpRZb6KE6RyyBwJnAM=\n"
)
ENOCH_LINE = (
    "— EnochRoot rwz+eBzmZa0SO3NbfRGzPCpDckykFXSdeX+MNtCOXm2/5n2tiOHp+vAF1aGrQ5ovTG01oOTGwnWLox33WWd1RvMc+QQ=\n"
)
# c2sp.org/signed-note
C2SP_KEY = "example.com/foo+530d903a+AekyeRrm56hApGFkyQR4ZCbV54Id2LKaANYcrnKv3U2k"
C2SP_NOTE = (
    "This is an example message.\n\n— example.com/foo "
    "Uw2QOkn8srV1yJGh2VYRlL1Tnagv1YEq6TfXppzi2ONncAlTgK7Ztg1ERYNZXsYjOBH3mFXmRKuwHjG1Yu72IneyaQM=\n"
)
# a checkpoint of Go's checksum database, as served; c2sp.org/tlog-checkpoint shows it under another name
SUMDB_KEY = "sum.golang.org+033de0ae+Ac4zctda0e5eza+HJyk9SxEdh+s3Ux18htTTAD8OuAn8"
SUMDB_NOTE = (
    "go.sum database tree\n20852163\nCsUYapGGPo4dkMgIAUqom/Xajj7h2fB2MPA3j2jxq2I=\n\n— sum.golang.org "
    "Az3grlgtzPICa5OS8npVmf1Myq/5IZniMp+ZJurmRDeOoRDe4URYN7u5/Zhcyv2q1gGzGku9nTo+zyWE+xeMcTOAYQ8=\n"
)
# a public witness
WITNESS_KEY = "remora.n621.de+da77ade7+BOvN63jn/bLvkieywe8R6UYAtVtNbZpXh34x7onlmtw2"

ROOT = hashlib.sha256(b"root").digest()
POINT = Checkpoint("phionyx.example/log", 42, ROOT)


@pytest.fixture(scope="module")
def witness() -> Ed25519Signer:
    return Ed25519Signer("22" * 32)


class TestPublishedExamples:
    @pytest.mark.parametrize("vkey", [PETER, ENOCH, C2SP_KEY, SUMDB_KEY, WITNESS_KEY])
    def test_published_keys_are_read_and_written(self, vkey: str):
        assert str(NoteKey.parse(vkey)) == vkey

    @pytest.mark.parametrize(
        ("vkey", "note"), [(PETER, f"{TEXT}\n{PETER_LINE}"), (C2SP_KEY, C2SP_NOTE), (SUMDB_KEY, SUMDB_NOTE)]
    )
    def test_published_notes_verify(self, vkey: str, note: str):
        opened = parse_note(note.encode())
        assert len(opened.verified([NoteKey.parse(vkey)])) == 1
        assert str(opened) == note

    def test_signing_gives_the_published_bytes(self):
        assert sign_note(TEXT, "PeterNeumann", Ed25519Signer(PETER_SEED)) == f"{TEXT}\n{PETER_LINE}"

    def test_a_checkpoint_of_gos_checksum_database(self):
        point = Checkpoint.parse(parse_note(SUMDB_NOTE).text)
        assert (point.origin, point.size, point.extensions) == ("go.sum database tree", 20852163, ())
        assert base64.b64encode(point.root) == b"CsUYapGGPo4dkMgIAUqom/Xajj7h2fB2MPA3j2jxq2I="

    def test_the_time_of_a_published_cosignature(self):
        line = (
            "— witness.example/w ZGhGuQAAAABm/qTPeyKXD+R2rzyQsxPiP8mXum7qq/iF0u4vanlqJyocWODBt97w9uL+8qT7S5gxEHWWOworDcFiEBYJXOR"
            "mnFBOBA==\n"
        )
        (signature,) = parse_note(f"{POINT.text}\n{line}").signatures
        assert signature.time() == 1727964367


class TestTrust:
    def test_lines_of_unknown_keys_are_ignored(self):
        note = parse_note(f"{TEXT}\n{PETER_LINE}{ENOCH_LINE}")
        assert [one.name for one in note.verified([NoteKey.parse(PETER)])] == ["PeterNeumann"]
        assert len(note.verified([NoteKey.parse(PETER), NoteKey.parse(ENOCH)])) == 2

    @pytest.mark.parametrize("keys", [[], [ENOCH]])
    def test_without_a_trusted_signature_it_is_not_trusted(self, keys: list[str]):
        with pytest.raises(UntrustedNote, match="no trusted key"):
            parse_note(f"{TEXT}\n{PETER_LINE}").verified([NoteKey.parse(key) for key in keys])

    def test_a_wrong_signature_of_a_known_key_condemns_the_note(self):
        other = parse_note(f"Another text.\n\n{PETER_LINE}{ENOCH_LINE}")
        with pytest.raises(UntrustedNote, match="PeterNeumann"):
            other.verified([NoteKey.parse(PETER)])
        spoiled = parse_note(f"{TEXT}\n{PETER_LINE}{ENOCH_LINE.replace('BzmZa0', 'BzmZa1')}")
        with pytest.raises(UntrustedNote, match="EnochRoot"):
            spoiled.verified([NoteKey.parse(PETER), NoteKey.parse(ENOCH)])

    def test_a_line_given_twice_counts_once(self):
        note = parse_note(f"{TEXT}\n{PETER_LINE}{PETER_LINE}")
        assert len(note.verified([NoteKey.parse(PETER), NoteKey.parse(PETER)])) == 1

    def test_one_name_or_one_id_alone_is_another_key(self):
        note = parse_note(f"{TEXT}\n{PETER_LINE}{PETER_LINE.replace('PeterNeumann', 'Carmen')}")
        assert len(note.verified([NoteKey.parse(PETER)])) == 1
        same_name = NoteKey("PeterNeumann", Ed25519Signer("33" * 32).public_key_hex)
        with pytest.raises(UntrustedNote):
            note.verified([same_name])

    def test_two_keys_that_cannot_be_told_apart(self):
        one, other = NoteKey.parse(PETER), NoteKey("PeterNeumann", Ed25519Signer("33" * 32).public_key_hex)
        other.key_id = one.key_id  # 2**32 tries away
        with pytest.raises(NoteError, match="PeterNeumann"):
            parse_note(f"{TEXT}\n{PETER_LINE}").verified([one, other])

    def test_every_flipped_bit_is_noticed(self):
        whole = f"{TEXT}\n{PETER_LINE}".encode()
        key = NoteKey.parse(PETER)
        for place in range(len(whole) * 8):
            bent = bytearray(whole)
            bent[place // 8] ^= 1 << place % 8
            with pytest.raises(NoteError):
                parse_note(bytes(bent)).verified([key])

    def test_every_truncation_is_noticed(self):
        whole = f"{TEXT}\n{PETER_LINE}".encode()
        for end in range(len(whole)):
            with pytest.raises(NoteError):
                parse_note(whole[:end]).verified([NoteKey.parse(PETER)])
        for start in range(1, len(whole)):
            with pytest.raises(NoteError):
                parse_note(whole[start:]).verified([NoteKey.parse(PETER)])


class TestMalformed:
    @pytest.mark.parametrize(
        "note",
        [
            b"",
            b"\n",
            b"\n\n",
            TEXT,
            TEXT + "\n",
            f"{TEXT}\n{PETER_LINE}"[:-1],
            f"{TEXT}{PETER_LINE}",
            f"{TEXT}\n\n{PETER_LINE}\n",
            f"{TEXT}\n{PETER_LINE}more\n",
            f"{TEXT}\n{PETER_LINE}\n",
            f"\1{TEXT}\n{PETER_LINE}",
            f"{TEXT}\r\n{PETER_LINE}",
            f"{TEXT}\t\n\n{PETER_LINE}",
            b"\xff" + f"{TEXT}\n{PETER_LINE}".encode(),
            f"{TEXT}\ud800\n\n{PETER_LINE}",
            f"{TEXT}\n- PeterNeumann {'x' * 96}\n",
            f"{TEXT}\n—PeterNeumann x08go/ZJ\n",
            f"{TEXT}\n—  x08go/ZJkuA=\n",
            f"{TEXT}\n— a+b x08go/ZJkuA=\n",
            f"{TEXT}\n— a\u00a0b x08go/ZJkuA=\n",
            f"{TEXT}\n— a\u2028b x08go/ZJkuA=\n",
            f"{TEXT}\n— a b x08go/ZJkuA=\n",
            f"{TEXT}\n— a x08go/ZJkuA= \n",
            f"{TEXT}\n— a x08go_ZJkuA=\n",
            f"{TEXT}\n— a x08go/ZJkuA\n",
            f"{TEXT}\n— a x08go/ZJkuB=\n",
            f"{TEXT}\n— a x08goA==\n",
            f"{TEXT}\n— a \n",
            f"{TEXT}\n— a\n",
            f"{TEXT}\n{PETER_LINE * 101}",
            TEXT * (MAX_BYTES // len(TEXT) + 1) + f"\n{PETER_LINE}",
        ],
    )
    def test_what_is_not_a_note(self, note: Any):
        with pytest.raises(NoteError):
            parse_note(note)

    def test_a_hundred_signatures_are_read_and_an_empty_line_may_be_in_the_text(self):
        note = parse_note(f"a\n\nb\n\n{PETER_LINE * 100}")
        assert note.text == "a\n\nb\n"
        assert len(note.signatures) == 100

    def test_every_part_of_a_published_key_and_every_changed_character_is_refused(self):
        for start in range(len(PETER)):
            for end in range(start, len(PETER) + 1):
                if end - start < len(PETER):
                    with pytest.raises(NoteError):
                        NoteKey.parse(PETER[start:end])
        for place, char in enumerate(PETER):
            with pytest.raises(NoteError):
                NoteKey.parse(PETER[:place] + chr(ord(char) + 1) + PETER[place + 1 :])

    @pytest.mark.parametrize(
        "vkey",
        [
            "",
            "+",
            "++",
            None,
            b"x",
            "PeterNeumann+cc469956+ARpc2QcUPDhMQegwxbzhKqiBfsVkmqq/LDE4izWy10TWBADKEY==",  # too long, id adjusted
            "PeterNeumann+173116ae+ZRpc2QcUPDhMQegwxbzhKqiBfsVkmqq/LDE4izWy10TW",  # unknown type, id adjusted
            PETER.replace("c74f20a3", "C74F20A3"),
            PETER + "+",
            PETER + "\n",
        ],
    )
    def test_other_keys_are_refused(self, vkey: Any):
        with pytest.raises(NoteError):
            NoteKey.parse(vkey)

    @pytest.mark.parametrize("name", ["", "a b", "a+b", "a\nb", "a\u3000b", "\ud800", None, 5])
    def test_names_that_cannot_stand_in_a_note(self, name: Any):
        with pytest.raises(NoteError):
            NoteKey(name, Ed25519Signer("33" * 32).public_key_hex)

    @pytest.mark.slow
    @given(st.one_of(st.binary(max_size=300), st.text(max_size=200)))
    def test_no_input_crashes_it(self, data: Any):
        for function in (parse_note, NoteKey.parse, Checkpoint.parse):
            try:
                function(data if function is parse_note or isinstance(data, str) else data.decode("latin-1"))
            except NoteError:
                continue

    @given(st.text(alphabet=st.characters(exclude_categories=["Cs", "Cc"]), max_size=30), st.integers(1, 4))
    def test_what_is_signed_is_read_back(self, line: str, lines: int):
        signer = Ed25519Signer("44" * 32)
        text = f"{line}\n" * lines
        note = parse_note(sign_note(text, "k", signer))
        assert note.text == text
        assert note.verified([NoteKey("k", signer.public_key_hex)])


class TestSigning:
    @pytest.mark.parametrize("text", ["", "abc", "abc\r\n", "a\0\n", "\ud800\n"])
    def test_a_text_that_cannot_be_a_note(self, signer: Ed25519Signer, text: str):
        with pytest.raises(NoteError):
            sign_note(text, "k", signer)

    @pytest.mark.parametrize("other", [HmacSigner("secret"), UnsignedSigner()])
    def test_only_an_ed25519_key_signs(self, other: Any):
        with pytest.raises(SigningKeyError, match="Ed25519"):
            sign_note(TEXT, "k", other)

    @pytest.mark.parametrize("answer", ["", "unsigned", "ed25519:", "ed25519:" + "00" * 64, "hmac-sha256:" + "0" * 32])
    def test_a_signer_that_gives_something_else_is_caught(self, signer: Ed25519Signer, answer: str):
        class Broken(Ed25519Signer):
            def sign(self, message: str, /) -> str:
                return answer

        with pytest.raises(SigningKeyError, match="not one by its public key"):
            sign_note(TEXT, "k", Broken("33" * 32))


class TestCheckpoints:
    def test_the_text_is_origin_size_and_root(self):
        assert POINT.text == f"phionyx.example/log\n42\n{base64.b64encode(ROOT).decode()}\n"
        assert Checkpoint.parse(POINT.text) == POINT

    def test_what_the_log_signs_is_opened_with_its_key(self, signer: Ed25519Signer):
        opened = open_checkpoint(issue_checkpoint(POINT, signer), [signer.public_key_hex], origin=POINT.origin)
        assert (opened.checkpoint, opened.cosignatures) == (POINT, ())

    def test_its_signature_is_plain_ed25519_over_the_text(self, signer: Ed25519Signer):
        (line,) = parse_note(issue_checkpoint(POINT, signer)).signatures
        key = Ed25519PrivateKey.from_private_bytes(bytes.fromhex("11" * 32))
        assert line.data == key.sign(POINT.text.encode())
        material = POINT.origin.encode() + b"\n\x01" + key.public_key().public_bytes_raw()
        assert line.key_id == hashlib.sha256(material).digest()[:4]

    def test_another_key_another_log_and_another_text_are_refused(self, signer: Ed25519Signer, witness: Ed25519Signer):
        note = issue_checkpoint(POINT, signer)
        with pytest.raises(UntrustedNote, match="no trusted key"):
            open_checkpoint(note, [witness.public_key_hex])
        with pytest.raises(UntrustedNote, match="no trusted key"):
            open_checkpoint(note, [])
        with pytest.raises(UntrustedNote, match=r"not of 'phionyx\.example/other'"):
            open_checkpoint(note, [signer.public_key_hex], origin="phionyx.example/other")
        with pytest.raises(UntrustedNote):
            open_checkpoint(note.replace("\n42\n", "\n43\n"), [signer.public_key_hex])
        renamed = note.replace(POINT.origin, "phionyx.example/other")
        with pytest.raises(UntrustedNote):
            open_checkpoint(renamed, [signer.public_key_hex])

    def test_a_signature_over_an_envelope_is_never_a_checkpoint(self, signer: Ed25519Signer):
        """One key signs both: what it signs of an envelope, a hash, has no newline; a note always ends in one."""
        value = signer.sign("sha256:" + "0" * 64)
        key = NoteKey(POINT.origin, signer.public_key_hex)
        forged = NoteSignature(key.name, key.key_id, bytes.fromhex(value.removeprefix("ed25519:")))
        assert not key.verify("sha256:" + "0" * 64 + "\n", forged)
        assert signer.sign(POINT.text) != value

    @pytest.mark.parametrize(
        "size", ["", "-1", "+1", "01", "00", " 1", "1 ", "1.0", "1e3", "٣", "0x1", str(2**63), "9" * 30]
    )
    def test_sizes_that_are_none(self, size: str):
        with pytest.raises(NoteError, match="line 2"):
            Checkpoint.parse(f"o\n{size}\n{base64.b64encode(ROOT).decode()}\n")

    @pytest.mark.parametrize("size", [0, 1, 2**63 - 1])
    def test_sizes_that_are(self, size: int):
        assert Checkpoint.parse(f"o\n{size}\n{base64.b64encode(ROOT).decode()}\n").size == size

    @pytest.mark.parametrize(
        "root",
        ["", "AAAA", ROOT.hex(), base64.b64encode(ROOT).decode()[:-1], base64.b64encode(ROOT).decode() + "=", "Ä"],
    )
    def test_roots_that_are_none(self, root: str):
        with pytest.raises(NoteError, match=r"line 3|empty"):
            Checkpoint.parse(f"o\n1\n{root}\n")

    @pytest.mark.parametrize("text", ["", "\n", "o\n1\n", "o\n1", f"\n1\n{base64.b64encode(ROOT).decode()}\n"])
    def test_texts_that_are_none(self, text: str):
        with pytest.raises(NoteError):
            Checkpoint.parse(text)

    def test_extension_lines_are_kept_and_not_empty(self):
        text = POINT.text + "one\ntwo\n"
        assert Checkpoint.parse(text).extensions == ("one", "two")
        assert Checkpoint.parse(text).text == text
        with pytest.raises(NoteError):
            Checkpoint.parse(POINT.text + "\none\n")

    @pytest.mark.parametrize(
        "fields",
        [
            {"origin": ""},
            {"origin": "a\nb"},
            {"size": -1},
            {"size": True},
            {"size": 2**63},
            {"root": b""},
            {"root": "x" * 32},
            {"extensions": ("",)},
        ],
    )
    def test_what_cannot_be_written_is_not_made(self, fields: dict[str, Any]):
        with pytest.raises(NoteError):
            Checkpoint(**{"origin": "o", "size": 1, "root": ROOT, **fields})

    def test_an_origin_no_key_can_be_named_after_is_not_signed(self, signer: Ed25519Signer):
        with pytest.raises(NoteError, match=r"go\.sum database tree"):
            issue_checkpoint(Checkpoint("go.sum database tree", 1, ROOT), signer)

    @given(st.text(max_size=60), st.integers(), st.binary(max_size=40))
    def test_no_origin_size_or_root_crashes_it(self, origin: str, size: int, root: bytes):
        signer = Ed25519Signer("44" * 32)
        try:
            note = issue_checkpoint(Checkpoint(origin, size, root), signer)
        except NoteError:
            return
        assert open_checkpoint(note, [signer.public_key_hex]).checkpoint == Checkpoint(origin, size, root)


class TestCosignatures:
    def cosigned(self, signer: Ed25519Signer, witness: Ed25519Signer, time: int = 1679315147) -> str:
        note = parse_note(issue_checkpoint(POINT, signer))
        return str(SignedNote(note.text, (*note.signatures, cosign_note(note, "w.example/1", witness, time))))

    def key(self, witness: Ed25519Signer) -> NoteKey:
        return NoteKey("w.example/1", witness.public_key_hex, COSIGNATURE)

    def test_a_witness_is_checked_over_time_and_text(self, signer: Ed25519Signer, witness: Ed25519Signer):
        note = self.cosigned(signer, witness)
        opened = open_checkpoint(note, [signer.public_key_hex], witnesses=[self.key(witness)])
        assert [(one.name, one.time()) for one in opened.cosignatures] == [("w.example/1", 1679315147)]

    def test_the_message_is_the_one_of_the_specification(self, signer: Ed25519Signer, witness: Ed25519Signer):
        data = parse_note(self.cosigned(signer, witness)).signatures[1].data
        key = Ed25519PrivateKey.from_private_bytes(bytes.fromhex("22" * 32))
        message = b"cosignature/v1\ntime 1679315147\n" + POINT.text.encode()
        assert data == (1679315147).to_bytes(8, "big") + key.sign(message)

    def test_the_lines_of_witnesses_nobody_trusts_are_ignored(self, signer: Ed25519Signer, witness: Ed25519Signer):
        assert open_checkpoint(self.cosigned(signer, witness), [signer.public_key_hex]).cosignatures == ()

    def test_a_witness_does_not_stand_in_for_the_log(self, signer: Ed25519Signer, witness: Ed25519Signer):
        note = parse_note(self.cosigned(signer, witness))
        alone = str(SignedNote(note.text, note.signatures[1:]))
        with pytest.raises(UntrustedNote, match="no trusted key of the log"):
            open_checkpoint(alone, [signer.public_key_hex], witnesses=[self.key(witness)])

    def test_another_time_and_a_bare_signature_are_wrong(self, signer: Ed25519Signer, witness: Ed25519Signer):
        note = parse_note(self.cosigned(signer, witness))
        good, key = note.signatures[1], self.key(witness)
        assert key.verify(POINT.text, good)
        for data in [
            (1679315148).to_bytes(8, "big") + good.data[8:],
            bytes(8) + good.data[8:],
            (2**63).to_bytes(8, "big") + good.data[8:],
            good.data[8:],
            good.data + b"x",
            good.data[:-1],
            b"",
        ]:
            assert not key.verify(POINT.text, NoteSignature(good.name, good.key_id, data))
        plain = NoteKey("w.example/1", witness.public_key_hex)
        assert plain.key_id != key.key_id
        assert not plain.verify(POINT.text, good)

    @pytest.mark.parametrize("time", [0, -1, 2**63, 1.5, None, True])
    def test_times_no_cosignature_carries(self, signer: Ed25519Signer, witness: Ed25519Signer, time: Any):
        with pytest.raises(NoteError, match="time"):
            cosign_note(parse_note(issue_checkpoint(POINT, signer)), "w", witness, time)

    def test_a_clock_that_steps_back_changes_nothing(self, signer: Ed25519Signer, witness: Ed25519Signer):
        for time in (1679315147, 1679315146, 1):
            opened = open_checkpoint(
                self.cosigned(signer, witness, time), [signer.public_key_hex], witnesses=[self.key(witness)]
            )
            assert opened.cosignatures[0].time() == time

    def test_errors_are_of_the_one_tree(self):
        assert issubclass(NoteError, PhionyxError)
        assert issubclass(UntrustedNote, NoteError)
        assert Checkpoint("o", 0, EMPTY_ROOT).text.startswith("o\n0\n47DEQpj8HBSa")
