"""Blocks as targets, the claims under which they are written, and who may make them; no server is needed for any of it."""

from __future__ import annotations

import asyncio
import base64
import json
import os
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from phionyx_letta.cli.examine_reviewers import examine_reviewers
from phionyx_letta.errors import SettingsError, TargetRefused, UntrustedPatch
from phionyx_letta.memory import LivingMemory, claims
from phionyx_letta.memory.blocks import BlockRouter, block_name, parse_block_name
from phionyx_letta.memory.claims import make_claim, read_claim
from phionyx_letta.memory.policy import Policy, PolicyFile
from phionyx_letta.memory.trimming import over_limit
from phionyx_letta.plugin.block_server import ServerBlocks
from phionyx_letta.signing import Ed25519Signer, generate_key, get_signer

CAUSE = {"event": "apply", "patch_id": "3f9c", "reviewer": "ada", "session": "s1"}
SIGNER, STRANGER = Ed25519Signer("11" * 32), Ed25519Signer("22" * 32)


def claim(signer: Ed25519Signer = SIGNER, **more: Any) -> str:
    return make_claim({**CAUSE, **more}, "block-1", "sha256:aa", "sha256:bb", signer)


class TestAName:
    def test_is_read_back_whatever_the_label(self) -> None:
        for label in ("human", "system/human", "a b: c"):
            assert parse_block_name(block_name("agent-1", "block-1", label)) == ("agent-1", "block-1", label)

    @pytest.mark.parametrize(
        "name", ["", "human", "letta:", "letta:agent-1/block-1", "letta:agent-1//human", "./letta:a/b/c"]
    )
    def test_that_is_none_is_refused(self, name: str) -> None:
        with pytest.raises(TargetRefused, match="does not name a block"):
            parse_block_name(name)


class TestARoute:
    def test_is_the_configured_label_then_one_that_begins_so_then_human_and_never_the_persona_by_itself(self) -> None:
        router = BlockRouter({"user": "about_ann"})
        assert router.resolve_target_path("user", ["about_ann", "human"]) == "about_ann"
        assert router.resolve_target_path("user", ["human", "user_notes"]) == "user_notes"
        assert router.resolve_target_path("project", ["human", "project_x"]) == "project_x"
        assert router.resolve_target_path("project", ["human", "persona"]) == "human"
        assert router.resolve_target_path("project", ["notes", "persona"]) == "notes"


class TestAClaim:
    def test_says_what_was_signed(self) -> None:
        said, reviewer = read_claim(claim(), SIGNER.verifier())
        assert reviewer is None
        assert {name: said[name] for name in CAUSE} == CAUSE
        assert (said["block_id"], said["expected"], said["wrote"]) == ("block-1", "sha256:aa", "sha256:bb")

    def test_of_another_key_or_changed_or_without_any_trusted_key_is_refused(self) -> None:
        header = claim()
        body, _, signature = header.partition(".")
        fields = json.loads(base64.urlsafe_b64decode(body + "=" * (-len(body) % 4)))
        plain = json.dumps({**fields, "reviewer": "bob"}, sort_keys=True, separators=(",", ":"))
        changed = base64.urlsafe_b64encode(plain.encode()).decode().rstrip("=")
        for given, verifier in (
            (claim(STRANGER), SIGNER.verifier()),
            (f"{changed}.{signature}", SIGNER.verifier()),
            (header, None),
        ):
            with pytest.raises(UntrustedPatch, match="no key this server trusts"):
                read_claim(given, verifier)

    @pytest.mark.parametrize("given", ["", ".", "e30.e30", "%%%.x", "W10.e30", "a" * 20_000, "ZQ.ZQ", "MQ.MQ"])
    def test_that_is_malformed_is_refused(self, given: str) -> None:
        with pytest.raises(UntrustedPatch, match="malformed"):
            read_claim(given, SIGNER.verifier())

    def test_is_good_for_five_minutes(self, monkeypatch: pytest.MonkeyPatch) -> None:
        header = claim()

        class Later(datetime):
            @classmethod
            def now(cls, tz: Any = None) -> datetime:
                return datetime.now(UTC) + timedelta(minutes=6)

        monkeypatch.setattr(claims, "datetime", Later)
        with pytest.raises(UntrustedPatch, match="too long ago"):
            read_claim(header, SIGNER.verifier())


@pytest.fixture
def policy(tmp_path: Path) -> Policy:
    generate_key(tmp_path / "ada")
    text = '[[reviewer]]\nname = "ada"\nkey = "ada.pub"\nblocks = ["human", "project*"]\n'
    text += f'[[reviewer]]\nname = "bob"\nkey = "{STRANGER.public_key_hex}"\n'
    (tmp_path / "reviewers.toml").write_text(text)
    return Policy.load(str(tmp_path / "reviewers.toml"))


class TestAPolicy:
    def test_lets_each_reviewer_sign_in_his_own_name_only_and_nobody_else(self, policy: Policy, tmp_path: Path) -> None:
        ada = get_signer({"PHIONYX_LETTA_SIGNING_KEY": str(tmp_path / "ada")})
        assert isinstance(ada, Ed25519Signer)
        _, reviewer = read_claim(claim(ada), SIGNER.verifier(), policy)
        assert reviewer is not None
        assert [reviewer.may_write(label) for label in ("human", "project_x", "persona")] == [True, True, False]
        _, reviewer = read_claim(claim(STRANGER, reviewer="bob"), None, policy)
        assert reviewer is not None
        assert reviewer.may_write("persona")
        for header in (claim(SIGNER), claim(ada, reviewer="bob"), claim(STRANGER)):
            with pytest.raises(UntrustedPatch, match="in his own name"):
                read_claim(header, SIGNER.verifier(), policy)

    @pytest.mark.parametrize(
        ("text", "said"),
        [
            ("", "has to hold"),
            ("reviewer = 1", "has to hold"),
            ("[[reviewer]]\nname = 'a'", "name and key"),
            ("[[reviewer]]\nname = 'a'\nkey = 'zz'", "cannot be used"),
            (f"[[reviewer]]\nname = 'a'\nkey = '{'11' * 32}'\nmay = 1", "nothing else"),
            (f"[[reviewer]]\nname = ''\nkey = '{'11' * 32}'", "have to be text"),
            (f"[[reviewer]]\nname = 'a'\nkey = '{SIGNER.public_key_hex}'\nblocks = 'human'", "list of labels"),
            (f"[[reviewer]]\nname = 'a'\nkey = '{SIGNER.public_key_hex}'\n" * 2, "twice"),
            (f"[[reviewer]]\nname = 'ada@lovelace.org'\nkey = '{SIGNER.public_key_hex}'", "personal data"),
            ("[[reviewer", "not TOML"),
        ],
    )
    def test_that_is_wrong_says_where(self, text: str, said: str, tmp_path: Path) -> None:
        path = tmp_path / "reviewers.toml"
        path.write_text(text)
        with pytest.raises(SettingsError, match=said):
            Policy.load(str(path))
        with pytest.raises(SettingsError, match="cannot be read"):
            Policy.load(str(tmp_path / "none.toml"))

    @pytest.mark.parametrize("other", ["Ada", "ada ", "\uff41da", " ADA"])
    def test_names_nobody_like_another(self, other: str, tmp_path: Path) -> None:
        path = tmp_path / "reviewers.toml"
        keys = zip(("ada", other), (SIGNER, STRANGER), strict=True)
        path.write_text("".join(f'[[reviewer]]\nname = "{n}"\nkey = "{k.public_key_hex}"\n' for n, k in keys))
        with pytest.raises(SettingsError, match="twice"):
            Policy.load(str(path))

    def test_gives_one_key_to_one_reviewer(self, tmp_path: Path) -> None:
        path = tmp_path / "reviewers.toml"
        key = SIGNER.public_key_hex
        path.write_text(f'[[reviewer]]\nname="ada"\nkey="{key}"\n[[reviewer]]\nname="bob"\nkey="{key.upper()}"\n')
        with pytest.raises(SettingsError, match="ada and bob have one key"):
            Policy.load(str(path))

    @pytest.mark.parametrize("place", ["mine", "handed-over"])
    def test_takes_64_digits_for_a_key_whatever_file_has_that_name(
        self, place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for name in ("mine", "handed-over"):
            (tmp_path / name).mkdir()
        path = tmp_path / "mine" / "reviewers.toml"
        path.write_text(f'[[reviewer]]\nname = "ada"\nkey = "{SIGNER.public_key_hex}"\n')
        (tmp_path / place / SIGNER.public_key_hex).write_text(STRANGER.public_key_hex + "\n")
        monkeypatch.chdir(tmp_path / "handed-over")
        [ada] = Policy.load(str(path)).reviewers
        assert ada.verifier.public_key_hex == SIGNER.public_key_hex

    def test_looks_for_a_keys_file_beside_itself_only(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "mine").mkdir()
        path = tmp_path / "mine" / "reviewers.toml"
        path.write_text('[[reviewer]]\nname = "ada"\nkey = "ada.pub"\n')
        (tmp_path / "ada.pub").write_text(STRANGER.public_key_hex + "\n")
        monkeypatch.chdir(tmp_path)
        with pytest.raises(SettingsError, match="the key of ada"):
            Policy.load(str(path))


class TestALimit:
    def test_that_is_kept_is_nothing_to_say(self) -> None:
        assert over_limit("a", "a\nb", None) is None
        assert over_limit("a", "a\nb", 3) is None

    def test_that_is_not_names_the_oldest_lines_that_would_make_room(self) -> None:
        before = "# About\n\nfirst\nsecond\nthird"
        after = before + "\nfourth"
        assert over_limit(before, after, len(after) - 1) == {
            "limit": len(after) - 1,
            "length": len(after),
            "trim": ["first"],
            "enough": True,
        }
        assert over_limit(before, after, len(after) - 7)["trim"] == ["first", "second"]  # type: ignore[index]
        assert over_limit("x", "y" * 100, 10) == {"limit": 10, "length": 100, "trim": [], "enough": False}


class TestAnId:
    """Two of 30 000 random ids that the filter took for an IBAN: changed, they would name no message and no session."""

    MESSAGE, SESSION = "message-edc21380-00ad-4fbc-be44-5b2ed30f954d", "session-ba9966d8-d6f3-47e6-9e78-14000e062033"

    async def _patch(self, message: str, session: str) -> Any:
        class Said:
            async def agenerate(self, prompt: str) -> str:
                one = {"fact_key": "uv", "content": "- Uses uv.", "evidence": ["I use uv"], "rationale": ""}
                return json.dumps([one])

        living = LivingMemory(
            ["./m.md"], Said(), sign=False, occurrence_path=None, occurrence_threshold=1, store_path="patches.jsonl"
        )
        records = [{"role": "user", "content": "I use uv", "id": message}]
        [patch] = await living.propose_from_session(session, session_records=records)
        return patch

    def test_of_a_message_or_session_is_kept_as_it_is_unless_it_is_a_persons(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)
        Path("m.md").write_text("")
        patch = asyncio.run(self._patch(self.MESSAGE, self.SESSION))
        assert patch.session_id == self.SESSION
        assert patch.metadata["evidence"][0]["message_id"] == self.MESSAGE
        Path("patches.jsonl").unlink()
        patch = asyncio.run(self._patch("ada@corp.com", "ada@corp.com"))
        assert "ada@corp" not in json.dumps(patch.to_dict())


class TestAPolicyOfARunningServer:
    @pytest.fixture
    def file(self, tmp_path: Path) -> Path:
        for name in ("ada", "bob"):
            generate_key(tmp_path / name)
        return self._says(tmp_path, "ada")

    @staticmethod
    def _says(folder: Path, *names: str) -> Path:
        path = folder / "reviewers.toml"
        path.write_text("".join(f'[[reviewer]]\nname = "{name}"\nkey = "{name}.pub"\n' for name in names))
        return path

    def test_is_read_again_when_it_changes_or_a_key_does(self, file: Path) -> None:
        policy = PolicyFile(str(file))
        assert [one.name for one in policy.current().reviewers] == ["ada"]
        assert policy.current() is policy.current()
        self._says(file.parent, "bob")
        assert [one.name for one in policy.current().reviewers] == ["bob"]
        was = policy.current().reviewers[0].verifier.public_key_hex
        os.replace(file.parent / "ada.pub", file.parent / "bob.pub")
        assert policy.current().reviewers[0].verifier.public_key_hex != was

    def test_that_breaks_lets_nobody_decide_until_it_is_mended_and_says_so_once(
        self, file: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        policy = PolicyFile(str(file))
        assert policy.current().reviewers
        for breaks in (lambda: file.write_text("[[reviewer"), file.unlink):
            breaks()
            caplog.clear()
            assert policy.current().reviewers == policy.current().reviewers == ()
            assert policy.fault
            assert [one.levelname for one in caplog.records] == ["ERROR"]
            assert "nobody may decide" in caplog.text
        ada = get_signer({"PHIONYX_LETTA_SIGNING_KEY": str(file.parent / "ada")})
        assert isinstance(ada, Ed25519Signer)
        with pytest.raises(UntrustedPatch):
            read_claim(claim(ada), ada.verifier(), policy.current())
        self._says(file.parent, "ada")
        assert read_claim(claim(ada), None, policy.current())[1] is not None
        assert policy.fault is None
        (file.parent / "ada.pub").unlink()
        assert policy.current().reviewers == ()

    def test_is_what_doctor_says(self) -> None:
        def worker(**policy: Any) -> dict[str, Any]:
            return {"alive": True, "armed": True, "reviewers": policy or None}

        ada, broken = worker(names=["ada"], fault=None), worker(names=[], fault="it is not TOML")
        for workers, said in (
            ([worker()], []),
            ([ada, ada], ["ok"]),
            ([ada, worker()], ["warn"]),
            ([ada, broken, broken], ["fail"]),
        ):
            assert [one.status for one in examine_reviewers(workers)] == said
        assert "it is not TOML" in examine_reviewers([broken])[0].message

    def test_counts_inside_the_servers_process_too(self, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        loop = asyncio.new_event_loop()
        ada = get_signer({"PHIONYX_LETTA_SIGNING_KEY": str(file.parent / "ada")})
        write = ("block-1", "sha256:aa", "sha256:bb")
        assert ServerBlocks(None, None, loop).decided(CAUSE, *write)[1] is None
        monkeypatch.setenv("PHIONYX_LETTA_REVIEWERS", str(file))
        said, reviewer = ServerBlocks(None, None, loop, signer=ada).decided(CAUSE, *write)
        assert reviewer is not None
        assert reviewer.name == "ada"
        assert said["signature"].startswith("ed25519:")
        for signer, cause in ((None, CAUSE), (SIGNER, CAUSE), (ada, {**CAUSE, "reviewer": "bob"})):
            with pytest.raises(UntrustedPatch, match="in his own name"):
                ServerBlocks(None, None, loop, signer=signer).decided(cause, *write)
        loop.close()
