"""Keys, signatures, key files, and what is said when one of them is not what it should be."""

from __future__ import annotations

import logging
import os
import stat
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phionyx_letta import (
    GENESIS_HASH,
    Ed25519Signer,
    Ed25519Verifier,
    HmacSigner,
    HmacVerifier,
    SigningKeyError,
    TrustedKeys,
    UnsignedSigner,
    generate_key,
    get_signer,
    load_verifier,
    signature_algorithm,
)

SEED = "22" * 32
KEY = "PHIONYX_LETTA_SIGNING_KEY"
anything = st.none() | st.integers() | st.binary() | st.text() | st.lists(st.text())


@pytest.fixture
def ed25519() -> Ed25519Signer:
    return Ed25519Signer(SEED)


class TestEd25519:
    def test_a_signature_verifies_with_the_public_key_alone(self, ed25519):
        signature = ed25519.sign(GENESIS_HASH)
        assert signature.startswith("ed25519:")
        assert len(signature) == len("ed25519:") + 128
        verifier = Ed25519Verifier(ed25519.public_key_hex)
        assert verifier.verify(GENESIS_HASH, signature)
        assert not verifier.verify("sha256:" + "1" * 64, signature)
        assert not Ed25519Verifier(Ed25519Signer("33" * 32).public_key_hex).verify(GENESIS_HASH, signature)

    def test_the_key_id_is_derived_from_the_key_or_given(self, ed25519):
        assert ed25519.key_id.startswith("ed25519:")
        assert ed25519.key_id == Ed25519Verifier(ed25519.public_key_hex).key_id
        assert Ed25519Signer(SEED, key_id="mine").key_id == "mine"
        with pytest.raises(SigningKeyError):
            Ed25519Signer(SEED, key_id="")

    @pytest.mark.parametrize("seed", ["", "zz" * 32, "22" * 31, None, 5, b"\x22" * 32])
    def test_a_malformed_key_is_refused_without_being_shown(self, seed):
        with pytest.raises(SigningKeyError) as caught:
            Ed25519Signer(seed)
        assert not seed or str(seed) not in str(caught.value)

    def test_no_representation_shows_the_secret(self, ed25519):
        assert SEED not in repr(ed25519)
        assert "hunter2" not in repr(HmacSigner("hunter2"))


class TestHmac:
    def test_a_signature_verifies_with_the_secret_alone(self):
        signature = HmacSigner(secret="abc").sign("sha256:abc")
        assert signature == "hmac-sha256:39b8aa8c5b2f001d52f09cacb8af37e1"  # as the peer signs it
        assert HmacVerifier("abc").verify("sha256:abc", signature)
        assert not HmacVerifier("abd").verify("sha256:abc", signature)

    @pytest.mark.parametrize("secret", ["", None, b"x"])
    def test_an_empty_secret_is_refused(self, secret):
        with pytest.raises(SigningKeyError):
            HmacSigner(secret)
        with pytest.raises(SigningKeyError):
            HmacVerifier(secret)


class TestVerifiersNeverRaise:
    @given(
        signed=anything, signature=anything | st.text().map("ed25519:".__add__) | st.text().map("hmac-sha256:".__add__)
    )
    def test_on_garbage(self, signed, signature):
        ed25519 = Ed25519Signer(SEED)
        for verifier in (Ed25519Verifier(ed25519.public_key_hex), HmacVerifier("abc")):
            assert verifier.verify(signed, signature) is False
        assert TrustedKeys([HmacVerifier("abc")]).verify(signed, signature) is False

    @pytest.mark.parametrize("digits", ["00" * 64, "ff" * 64, "0" * 127, "0" * 129, "é" * 128, "0" * 127 + "\n"])
    def test_on_signatures_of_the_right_look(self, digits, ed25519):
        assert Ed25519Verifier(ed25519.public_key_hex).verify(GENESIS_HASH, "ed25519:" + digits) is False


class TestTrustedKeys:
    def test_any_of_them_will_do(self, ed25519):
        other = Ed25519Signer("33" * 32)
        trusted = TrustedKeys([Ed25519Verifier(other.public_key_hex), Ed25519Verifier(ed25519.public_key_hex)])
        for _ in range(2):
            assert trusted.verify(GENESIS_HASH, ed25519.sign(GENESIS_HASH))
            assert trusted.verify(GENESIS_HASH, other.sign(GENESIS_HASH))
        assert not trusted.verify(GENESIS_HASH, Ed25519Signer("44" * 32).sign(GENESIS_HASH))
        assert trusted.key_id == ",".join(sorted([ed25519.key_id, other.key_id]))
        assert trusted.algorithm == "ed25519"

    def test_trusting_nobody_is_a_mistake(self):
        with pytest.raises(SigningKeyError):
            TrustedKeys([])


class TestDerivedKeys:
    def test_each_purpose_and_each_key_has_its_own(self, ed25519):
        keys = {signer.derive_key(purpose) for signer in (ed25519, HmacSigner("a")) for purpose in ("outbox", "other")}
        assert len(keys) == 4
        assert {len(key) for key in keys} == {32}
        assert ed25519.derive_key("outbox") == Ed25519Signer(SEED).derive_key("outbox")

    def test_hkdf_is_that_of_the_standard(self, ed25519):
        from cryptography.hazmat.primitives.hashes import SHA256
        from cryptography.hazmat.primitives.kdf.hkdf import HKDF

        judge = HKDF(SHA256(), 32, salt=b"phionyx-letta/hkdf/v1", info=b"outbox")
        assert ed25519.derive_key("outbox") == judge.derive(bytes.fromhex(SEED))

    def test_without_a_key_there_is_nothing_to_derive_from(self):
        with pytest.raises(SigningKeyError, match=KEY):
            UnsignedSigner().derive_key("outbox")


class TestEnvironment:
    def test_nothing_set_means_unsigned(self):
        signer = get_signer({})
        assert signer.sign(GENESIS_HASH) == "unsigned"
        assert signer.key_id is None

    def test_the_demonstration_signs_with_hmac_unless_there_is_a_key(self):
        assert get_signer({"PHIONYX_LETTA_DEMO": "1"}).algorithm == "hmac-sha256"
        assert get_signer({"PHIONYX_LETTA_DEMO": "1", KEY: SEED}).algorithm == "ed25519"

    def test_a_key_is_given_as_digits_or_as_a_file(self, tmp_path: Path, ed25519):
        file = tmp_path / "key"
        file.write_text(f"# mine\n{SEED}\n   # the end\n")
        file.chmod(0o600)
        for given_key in (SEED, str(file)):
            assert get_signer({KEY: given_key}).key_id == ed25519.key_id
        assert get_signer({KEY: SEED, "PHIONYX_LETTA_KEY_ID": "mine"}).key_id == "mine"

    @pytest.mark.parametrize(
        "content", [None, b"", b"# only a comment\n", b"zz\n", b"\xff\xfe", f"{SEED}\nnonsense".encode()]
    )
    def test_a_missing_or_malformed_key_names_the_variable_and_the_remedy(self, content, tmp_path: Path):
        file = tmp_path / "key"
        if content is not None:
            file.write_bytes(content)
        with pytest.raises(SigningKeyError, match=KEY) as caught:
            get_signer({KEY: str(file)})
        assert "keygen" in str(caught.value)
        assert SEED not in str(caught.value)

    @pytest.mark.parametrize("typed", [SEED[:-1], SEED + "0", "nul\0"])
    def test_a_mistyped_key_is_not_echoed(self, typed):
        with pytest.raises(SigningKeyError) as caught:
            get_signer({KEY: typed})
        assert typed not in str(caught.value)

    def test_a_public_key_given_to_sign_with_is_named_as_such(self, tmp_path: Path):
        generate_key(tmp_path / "key")
        with pytest.raises(SigningKeyError, match="public key"):
            get_signer({KEY: str(tmp_path / "key.pub")})

    def test_a_key_others_can_read_is_warned_about(self, tmp_path: Path, caplog):
        generate_key(tmp_path / "key")
        with caplog.at_level(logging.WARNING):
            get_signer({KEY: str(tmp_path / "key")})
            assert not caplog.records
            (tmp_path / "key").chmod(0o644)
            get_signer({KEY: str(tmp_path / "key")})
        assert "chmod 600" in caplog.text


class TestKeyFiles:
    def test_a_new_key_is_private_and_its_public_half_is_readable(self, tmp_path: Path):
        path = tmp_path / "new" / "key"
        old_mask = os.umask(0o077)
        try:
            public = generate_key(path)
        finally:
            os.umask(old_mask)
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert stat.S_IMODE((path.parent / "key.pub").stat().st_mode) == 0o644
        signer = get_signer({KEY: str(path)})
        for key in (public, str(path) + ".pub", path.parent / "key.pub"):
            assert load_verifier(key).verify(GENESIS_HASH, signer.sign(GENESIS_HASH))
        assert signer.key_id in (path.parent / "key.pub").read_text()

    @pytest.mark.parametrize("name", ["key", "key.pub"])
    def test_no_key_is_ever_overwritten(self, name, tmp_path: Path):
        (tmp_path / name).write_text("precious")
        with pytest.raises(SigningKeyError, match="exists"):
            generate_key(tmp_path / "key")
        assert (tmp_path / name).read_text() == "precious"
        assert [path.name for path in tmp_path.iterdir()] == [name]

    def test_a_folder_that_cannot_be_made_is_named(self, tmp_path: Path):
        (tmp_path / "file").write_text("")
        with pytest.raises(SigningKeyError, match="file"):
            generate_key(tmp_path / "file" / "key")

    def test_a_private_key_is_refused_where_a_public_one_belongs(self, tmp_path: Path):
        generate_key(tmp_path / "key")
        with pytest.raises(SigningKeyError, match="private key"):
            load_verifier(tmp_path / "key")
        bare = tmp_path / "bare"
        bare.write_text(SEED)
        (tmp_path / "bare.pub").write_text(Ed25519Signer(SEED).public_key_hex)
        with pytest.raises(SigningKeyError, match="private key"):
            load_verifier(bare)

    @pytest.mark.parametrize("key", ["", "nowhere", "zz" * 32, None, 5, "nul\0", SEED[:-1]])
    def test_what_is_no_public_key_is_refused(self, key):
        with pytest.raises(SigningKeyError):
            load_verifier(key)


@pytest.mark.parametrize(
    ("signature", "algorithm"),
    [
        ("", "unsigned"),
        ("unsigned", "unsigned"),
        ("ed25519:ab", "ed25519"),
        ("hmac-sha256:ab", "hmac-sha256"),
        ("no colon", "unknown"),
        (":ab", "unknown"),
        (None, "unknown"),
    ],
)
def test_the_algorithm_is_read_from_the_signature(signature, algorithm):
    assert signature_algorithm(signature) == algorithm
