"""Every ``PHIONYX_LETTA_*`` setting of the plugin and the command line, in one place.

What it does not do: ``signing.get_signer()`` reads its three variables itself, so that the base library works without
pydantic; the names are the same.
"""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Literal

from pydantic import Field, SecretStr, ValidationInfo, field_validator, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from phionyx_letta.errors import SettingsError
from phionyx_letta.notes import is_name


class Settings(BaseSettings):
    """The plugin's settings, read from the environment."""

    model_config = SettingsConfigDict(env_prefix="PHIONYX_LETTA_", extra="ignore", env_ignore_empty=True)

    enable: bool = Field(default=False, description="Arm the plugin in this process.")
    on_error: Literal["open", "closed"] = Field(
        default="open",
        description="open: a write goes on without evidence and the gap is reported; closed: it is refused.",
    )
    guard: Literal["off", "report", "reject"] = Field(
        default="off",
        description="What a read of memory that is not what was recorded leads to. reject needs on_error=closed.",
    )
    include_diff_text: bool = Field(
        default=False, description="Keep the unified diff, and so the content, in envelopes."
    )
    commitments: Literal["plain", "salted"] = Field(
        default="plain",
        description="salted: hashes of content are keyed with a salt per block, which is destroyed when it is forgotten.",
    )
    signing_key: str | None = Field(default=None, description="Path of the Ed25519 key file, or its 64 hex digits.")
    signing_command: str | None = Field(
        default=None, repr=False, description="A program that signs in place of a key file: for a KMS or an HSM."
    )
    public_key: str | None = Field(
        default=None, description="The public key the signing command signs with: 64 hex digits or a .pub file."
    )
    key_id: str | None = Field(default=None, description="Name of the signing key; derived from the key by default.")
    demo: bool = Field(default=False, description="Sign with a published HMAC secret. For demonstrations only.")
    home: str | None = Field(default=None, description="Where a generated key is kept. Default: ~/.phionyx/letta.")
    ledger: str | None = Field(
        default=None, description="Database URL or folder the command line reads. Default: LETTA_PG_URI."
    )
    lock_timeout_ms: int = Field(
        default=250, ge=1, le=60_000, description="Longest wait of a write on a locked outbox, ms."
    )
    poll_ms: int = Field(default=100, ge=5, le=60_000, description="How often the sealer looks for new rows, ms.")
    batch: int = Field(default=1000, ge=1, le=1000, description="Most envelopes sealed in one transaction.")
    sealer: bool = Field(default=True, description="Run a sealer in this process.")
    sinks: str = Field(
        default="",
        description="Where checkpoints go, separated by spaces: folder:/path, git:/path, https://…, witness:https://…#key.",
    )
    sink_header: str | None = Field(
        default=None, repr=False, description="A header for webhooks and witnesses, as `Authorization: Bearer …`."
    )
    log_origin: str | None = Field(
        default=None, description="Name of the log in checkpoints. Default: phionyx-letta/<key id>."
    )
    checkpoint_every: int = Field(
        default=1, ge=1, description="Sign a checkpoint when the log grew by so many envelopes, at the end of a batch."
    )
    checkpoint_seconds: float | None = Field(
        default=None, gt=0, description="Sign one at the latest so long after the log grew, s."
    )
    baseline: Literal["auto", "off"] = Field(
        default="auto", description="Record blocks older than the plugin at start."
    )
    memory_paths: str | None = Field(
        default=None, description="Managed memory files and globs of `phionyx-letta memory`, separated like PATH."
    )
    memory_store: str | None = Field(
        default=None, description="Patch store of `phionyx-letta memory`: a JSONL file, or a database URL."
    )
    server_url: str = Field(
        default="http://localhost:8283", description="The Letta server in which `memory apply` writes blocks."
    )
    server_token: SecretStr | None = Field(default=None, description="Token of its API, where it wants one.")
    memory_secret: str | None = Field(
        default=None, description="Secret that signs memory patches (HMAC-SHA256) where no signing key is set."
    )

    proposer_model: str | None = Field(default=None, description="Model that proposes what to remember.")
    proposer_base_url: str | None = Field(
        default=None, description="OpenAI-compatible endpoint of the proposer. Default: OpenAI's own."
    )
    proposer_api_key: SecretStr | None = Field(default=None, description="Key of that endpoint.")
    proposer_timeout_s: float = Field(default=120, gt=0, le=3600, description="Longest wait for one answer, s.")
    proposer_attempts: int = Field(default=4, ge=1, le=20, description="Requests for one answer before giving up.")
    pii_regions: str = Field(
        default="US,GB,DE,FR,TR,IN,JP,BR",
        description="Countries whose national telephone formats are recognised, ISO 3166, separated by commas.",
    )

    sessions: Literal["off", "dry-run", "on"] = Field(
        default="off",
        description="Propose what to remember after each session: on queues patches, dry-run only says what it would propose.",
    )
    session_end: Literal["idle", "run", "hand"] = Field(
        default="idle",
        description="When a session ends: idle for PHIONYX_LETTA_SESSION_IDLE, each run, or by hand only.",
    )
    session_idle: float = Field(default=300, ge=0, description="So long without a run and a session has ended, s.")
    session_min_chars: int = Field(
        default=40, ge=0, description="Sessions in which the user said less are not proposed from, characters."
    )
    session_cooldown: float = Field(
        default=0, ge=0, description="Shortest time between proposals from two sessions of an agent, s."
    )
    session_tokens: int = Field(
        default=200_000, ge=0, description="Most tokens for proposals per agent and day (UTC); 0 for no limit."
    )
    session_price: float = Field(
        default=0,
        ge=0,
        description="Price of a million of the proposer's tokens, in any currency; 0 where none is known.",
    )
    session_cost: float = Field(
        default=0,
        ge=0,
        description="Most money for proposals per agent and day (UTC), in the currency of the price; 0 for no limit.",
    )
    session_concurrency: int = Field(default=2, ge=1, le=32, description="Sessions a worker proposes from at once.")
    session_attempts: int = Field(default=5, ge=1, le=50, description="Tries before a session is parked.")
    session_backoff: float = Field(
        default=30, gt=0, description="Wait before the second try, s; doubled for each further one, an hour at most."
    )
    session_threshold: int = Field(
        default=3, ge=1, description="Sessions of an agent a fact must be seen in before it is proposed."
    )
    session_opt_out_tag: str = Field(default="no-proposals", description="Agents with this tag are left alone.")
    session_proposer: Literal["agent", "openai"] = Field(
        default="agent", description="agent: the agent's own model, through Letta; openai: PHIONYX_LETTA_PROPOSER_*."
    )
    session_blocks: str = Field(
        default="user=human feedback=human",
        description="Which block a category of facts goes to, as category=label, separated by spaces.",
    )
    reviewers: str | None = Field(
        default=None,
        description="TOML file of who may have patches of blocks applied; without it, the trusted keys may.",
    )
    session_read_only: bool = Field(default=False, description="Propose for blocks that are read-only too.")
    propose_only: str = Field(
        default="",
        description="Whose memory tools queue patches instead of writing: ids of agents or blocks, labels, tag:NAME or *, "
        "separated by spaces; one with spaces in quotes.",
    )

    trusted_keys: str = Field(
        default="",
        description="Public keys of other hosts on this database, which guarded reads and checkpoints trust: files or 64 hex digits, "
        "separated by spaces.",
    )

    @field_validator("on_error", "guard", "commitments", "sessions", "session_end", "session_proposer", mode="before")
    @classmethod
    def _in_lower_case(cls, value: object) -> object:
        return value.strip().lower() if isinstance(value, str) else value

    @field_validator("commitments")
    @classmethod
    def _without_content(cls, value: str, info: ValidationInfo) -> str:
        if value == "salted" and info.data.get("include_diff_text"):
            raise ValueError("salted hashes hide what PHIONYX_LETTA_INCLUDE_DIFF_TEXT keeps: choose one of them")
        return value

    @model_validator(mode="after")
    def _guard_fits(self) -> Settings:
        if self.guard != "off" and self.commitments == "salted":
            raise ValueError(
                "guarded reads compare bare digests of prompts and checkpoints, which PHIONYX_LETTA_COMMITMENTS=salted forbids: "
                "set PHIONYX_LETTA_GUARD=off, or leave commitments plain"
            )
        if self.guard == "reject" and self.on_error != "closed":
            raise ValueError(
                "PHIONYX_LETTA_GUARD=reject needs PHIONYX_LETTA_ON_ERROR=closed: a write that went unrecorded would be refused "
                "when it is read"
            )
        return self

    @model_validator(mode="after")
    def _cost_has_a_price(self) -> Settings:
        if self.session_cost and not self.session_price:
            raise ValueError("PHIONYX_LETTA_SESSION_COST needs PHIONYX_LETTA_SESSION_PRICE: tokens have no price yet")
        return self

    @field_validator("session_blocks")
    @classmethod
    def _categories_and_labels(cls, value: str) -> str:
        if any(not all(pair.partition("=")[::2]) for pair in value.split()):
            raise ValueError("give category=label, separated by spaces, for example user=human project=project")
        return value

    @field_validator("propose_only")
    @classmethod
    def _names(cls, value: str) -> str:
        try:
            names = shlex.split(value)
        except ValueError as error:
            raise ValueError(
                f"{error}: quote a name with spaces, and one with an apostrophe in double quotes"
            ) from None
        if any(name != name.strip(",") or name in ("", "tag:") for name in names):
            raise ValueError('separate names by spaces, and quote one with spaces: "tag:asks first" policy')
        return value

    @field_validator("log_origin")
    @classmethod
    def _of_a_note(cls, value: str | None) -> str | None:
        if value is not None and not is_name(value):
            raise ValueError("it names the key in signed notes, so it has no spaces and no plus sign")
        return value

    def most_tokens(self) -> int | None:
        """Most tokens for proposals per agent and day, by their number or by what they cost; None for no limit."""
        limits = [self.session_tokens] if self.session_tokens else []
        if self.session_cost:
            limits.append(int(self.session_cost / self.session_price * 1_000_000))
        return min(limits, default=None)

    def cost(self, tokens: int) -> float | None:
        """What so many tokens cost; None where no price is set."""
        return round(tokens * self.session_price / 1_000_000, 6) if self.session_price else None

    def home_path(self) -> Path:
        """Folder of generated keys.

        Raises:
            SettingsError: no home directory is known and PHIONYX_LETTA_HOME is not set.
        """
        if self.home:
            return Path(self.home)
        try:
            return Path.home() / ".phionyx" / "letta"
        except RuntimeError as error:
            raise SettingsError(
                "no home directory is known for this user", remedy="set PHIONYX_LETTA_HOME to a folder of the operator"
            ) from error


def load_settings() -> Settings:
    """Read the environment.

    Raises:
        SettingsError: a variable has an unusable value; the message names it.
    """
    from pydantic import ValidationError

    try:
        return Settings()
    except ValidationError as error:
        first = error.errors()[0]
        if not first["loc"]:  # two settings that do not fit together
            said = str(first["msg"]).removeprefix("Value error, ")
            other = "PHIONYX_LETTA_GUARD=report" if "GUARD" in said else "neither"
            raise SettingsError(said, remedy=f"set both, or {other}") from error
        name = "PHIONYX_LETTA_" + "_".join(str(part) for part in first["loc"]).upper()
        raise SettingsError(
            f"{name} has an unusable value: {first['msg']}", remedy=f"correct or unset {name}"
        ) from error
