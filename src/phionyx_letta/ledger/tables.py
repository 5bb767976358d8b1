"""The tables of the SQL ledger, and the connection URL they live behind.

They are kept out of Letta's own metadata, so that neither Letta's migrations nor its ``create_all`` ever touch them.
"""

from __future__ import annotations

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Identity,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    Text,
    false,
    func,
    text,
)
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError
from sqlalchemy.types import DateTime

from phionyx_letta.errors import StoreError

metadata = MetaData()

#: SQLite only counts an INTEGER PRIMARY KEY up by itself.
_BigId = BigInteger().with_variant(Integer, "sqlite")

envelope = Table(
    "phionyx_envelope",
    metadata,
    Column("seq", _BigId, primary_key=True, autoincrement=False, comment="place in the sealing order, from 0"),
    Column("trace_id", String, nullable=False),
    Column("position", BigInteger, nullable=False, comment="place in the chain, from 0"),
    Column("current_hash", String, nullable=False, unique=True),
    Column("outbox_id", BigInteger, unique=True, comment="row of the outbox it was sealed from; null for the library"),
    Column("nonce", String, unique=True, comment="of that row: a copied row cannot be sealed twice"),
    Column("turn_index", BigInteger, nullable=False),
    Column("at", String, nullable=False, comment="subject.timestamp_utc"),
    Column("block_id", String, nullable=False),
    Column("block_label", String, nullable=False),
    Column("kind", String, nullable=False),
    Column("event", String),
    Column("agent_id", String),
    Column("run_id", String),
    Column(
        "body", Text, nullable=False, comment="the envelope, canonical JSON; every other column can be rebuilt from it"
    ),
    Column("leaf", LargeBinary, nullable=False, comment="hash of the body as a leaf of the log"),
    Index("phionyx_envelope_chain", "trace_id", "position", unique=True),
    Index("phionyx_envelope_block", "block_id", "seq"),
    Index("phionyx_envelope_run", "trace_id", "run_id"),
    Index("phionyx_envelope_agent", "agent_id", "seq"),
)

chain = Table(
    "phionyx_chain",
    metadata,
    Column("trace_id", String, primary_key=True),
    Column("head", String, nullable=False),
    Column("length", BigInteger, nullable=False),
    Column("turns", BigInteger, nullable=False, comment="runs seen so far; the next run gets this turn_index"),
)

block = Table(
    "phionyx_block",
    metadata,
    Column("block_id", String, primary_key=True),
    Column("after_hash", String, comment="content hash after the last sealed mutation; null: its content is not known"),
    Column("after_size", BigInteger, nullable=False, comment="bytes"),
    Column("chars", BigInteger, nullable=False, comment="code points"),
    Column("label", String, nullable=False),
    Column(
        "agents", Text, nullable=False, comment="JSON list of the agents the block is attached to; null if not known"
    ),
    Column("seq", BigInteger, nullable=False, comment="the last envelope about this block"),
    Column("salt", String, comment="name of the salt its hash was made with; null: a bare hash"),
    Column(
        "forgotten", Boolean, nullable=False, comment="that salt was destroyed: nothing can be compared with the hash"
    ),
    Column(
        "mac", String, comment="HMAC-SHA256 over the other columns, keyed from the signing key; null from the library"
    ),
)

salt = Table(
    "phionyx_salt",
    metadata,
    Column("id", _BigId, Identity(always=True), primary_key=True),
    Column("name", String, nullable=False, unique=True, comment="as the envelopes call it"),
    Column("block_id", String, nullable=False, index=True),
    Column("wrapped", LargeBinary, comment="encrypted under a key derived from the signing key; null once destroyed"),
    Column("ended", Boolean, nullable=False, server_default=false(), comment="the next write takes a new one"),
)

log = Table(
    "phionyx_log",
    metadata,
    Column("id", Integer, primary_key=True, autoincrement=False, comment="1: there is one row"),
    Column("size", BigInteger, nullable=False, comment="how many leaves the log has"),
    Column("frontier", Text, nullable=False, comment="hashes of its complete subtrees from the left, hex"),
    Column("key_id", String, comment="the key the MAC is derived from"),
    Column("mac", String, comment="HMAC-SHA256 over the other columns; null from a library without a key"),
)

log_node = Table(
    "phionyx_log_node",
    metadata,
    Column("level", Integer, primary_key=True, autoincrement=False, comment="of a complete subtree of 2**level leaves"),
    Column("place", BigInteger, primary_key=True, autoincrement=False, comment="its number in its level, from 0"),
    Column("hash", LargeBinary, nullable=False),
)

checkpoint = Table(
    "phionyx_checkpoint",
    metadata,
    Column("origin", String, primary_key=True, comment="name of the log"),
    Column("size", BigInteger, nullable=False),
    Column("note", Text, nullable=False, comment="the newest signed checkpoint (C2SP)"),
    Column("at", String, nullable=False, comment="when it was signed, by the sealer's clock"),
)

key_statement = Table(
    "phionyx_key_statement",
    metadata,
    Column("id", _BigId, primary_key=True, autoincrement=True),
    Column("kind", String, nullable=False, comment="key-rotation/v1 or key-revocation/v1"),
    Column("signer", String, nullable=False, comment="public key: of a rotation the old one"),
    Column("subject", String, nullable=False, comment="public key: of a rotation the new one, else the revoked one"),
    Column("note", Text, nullable=False, comment="the signed statement, which says all of this; see docs/keys.md"),
    Column("at", String, nullable=False, comment="when it was recorded, by the clock of who did"),
)

sink = Table(
    "phionyx_sink",
    metadata,
    Column("name", String, primary_key=True, comment="key id and sink"),
    Column("seen_at", String, nullable=False),
    Column("info", Text, nullable=False, comment="JSON: what `doctor` shows; written by the sealer, not authenticated"),
)

outbox = Table(
    "phionyx_outbox",
    metadata,
    Column("id", _BigId, Identity(always=True), primary_key=True),
    Column("payload", Text, nullable=False, comment="canonical JSON of the captured mutation"),
    Column("mac", String, nullable=False, comment="HMAC-SHA256 over the payload, keyed from the signing key"),
    Column("refused", Text, comment="why the sealer will not seal this row; null while it waits"),
    Column("created_at", DateTime(timezone=True), server_default=func.now(), nullable=False),
)

finding = Table(
    "phionyx_finding",
    metadata,
    Column("id", _BigId, Identity(always=True), primary_key=True),
    Column("at", String, nullable=False, comment="UTC, ISO 8601, by the worker's clock"),
    Column("info", Text, nullable=False, comment="JSON: a guarded read that did not agree; not authenticated"),
)

#: The block of an outbox row, from its payload, whose MAC covers it: a column of its own could be changed to hide the row.
#: No backslash escapes the quote before the name: it is a key of the payload.
OUTBOX_BLOCK = """substring(payload from '"block_id":"([^"]*)"')"""
OUTBOX_BLOCK_INDEX = f"create index if not exists phionyx_outbox_block on phionyx_outbox (({OUTBOX_BLOCK}))"

worker = Table(
    "phionyx_worker",
    metadata,
    Column("worker_id", String, primary_key=True),
    Column("seen_at", DateTime(timezone=True), nullable=False),
    Column("armed", Boolean, nullable=False),
    Column("key_id", String, comment="the key it can seal with; null where it runs no sealer"),
    Column("info", Text, nullable=False, comment="JSON: what `doctor` shows; written by the worker, not authenticated"),
)

patch = Table(
    "phionyx_patch",
    metadata,
    Column("seq", _BigId, Identity(always=True), primary_key=True, comment="order of the states of all patches"),
    Column("patch_id", String, nullable=False),
    Column("newest", Boolean, nullable=False, comment="whether this is the patch's state now"),
    Column("status", String, nullable=False),
    Column("created_at", String, nullable=False),
    Column("file_path", String, nullable=False),
    Column("category", String, nullable=False),
    Column("session_id", String),
    Column("author", String, nullable=False),
    Column("rationale", Text, nullable=False),
    Column("body", Text, nullable=False, comment="the patch in this state, JSON; every other column repeats it"),
    Index("phionyx_patch_states", "patch_id", "seq"),
    Index(
        "phionyx_patch_newest", "patch_id", unique=True, postgresql_where=text("newest"), sqlite_where=text("newest")
    ),
)

occurrence = Table(
    "phionyx_occurrence",
    metadata,
    Column("fact_key", String, primary_key=True),
    Column("body", Text, nullable=False, comment="JSON: sessions, evidence, what the fact says, its newest patch"),
)

run_end = Table(
    "phionyx_run",
    metadata,
    Column("run_id", String, primary_key=True, comment="of a run of Letta's that ended; how it ended is read there"),
    Column("ended_at", DateTime(timezone=True), server_default=func.now(), nullable=False),
    Column("session_id", String, comment="the session it was put into; '' for none; null while it is open"),
    Index(
        "phionyx_run_open",
        "ended_at",
        postgresql_where=text("session_id is null"),
        sqlite_where=text("session_id is null"),
    ),
    Index("phionyx_run_session", "session_id"),
)

session = Table(
    "phionyx_session",
    metadata,
    Column("session_id", String, primary_key=True),
    Column("agent_id", String, nullable=False),
    Column("conversation_id", String),
    Column("ended_by", String, nullable=False, comment="idle, run or hand"),
    Column("ended_at", DateTime(timezone=True), server_default=func.now(), nullable=False),
    Column("state", String, nullable=False, comment="waiting, done, skipped or parked"),
    Column("due_at", DateTime(timezone=True), server_default=func.now(), nullable=False),
    Column("attempts", Integer, nullable=False, server_default=text("0")),
    Column("claimed_by", String, comment="the worker's process that is at it"),
    Column("claimed_until", DateTime(timezone=True), comment="then somebody else may take it"),
    Column("finished_at", DateTime(timezone=True)),
    Column("model", String, comment="that was asked"),
    Column("tokens", BigInteger, nullable=False, server_default=text("0")),
    Column("patches", Integer, nullable=False, server_default=text("0")),
    Column("detail", Text, comment="why it was skipped, postponed or parked, or the last error; no content"),
    Index("phionyx_session_due", "state", "due_at"),
    Index("phionyx_session_agent", "agent_id", "finished_at"),
)


def ledger_url(url: str) -> URL:
    """The SQLAlchemy URL of a ledger, from any spelling Letta or an operator may use.

    Args:
        url: ``postgresql://…`` with or without a driver (Letta's own setting), ``sqlite:///file``.

    Raises:
        StoreError: the text is not a database URL of PostgreSQL or SQLite.
    """
    try:
        parsed = make_url(url)
    except (ArgumentError, ValueError):
        raise StoreError(
            "the ledger's database URL cannot be read", remedy="give postgresql://user@host:port/db or sqlite:///file"
        ) from None  # the cause quotes the URL, which may hold a password
    backend = parsed.get_backend_name()
    if backend in ("postgresql", "postgres"):
        query = dict(parsed.query)
        if "ssl" in query:  # asyncpg's spelling of libpq's sslmode
            query.setdefault("sslmode", query.pop("ssl"))
        query.setdefault("connect_timeout", "5")
        return parsed.set(drivername="postgresql+psycopg", query=query)
    if backend == "sqlite":
        return parsed.set(drivername="sqlite")
    raise StoreError(
        f"no ledger can live in {backend}", remedy="use PostgreSQL (Letta's database) or SQLite (sqlite:///file)"
    )
