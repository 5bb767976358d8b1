"""`reconcile`: what was done to the blocks past the plugin, and what a person decides about it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated

import typer

from phionyx_letta.cli.failures import FAILED, NOT_MEASURED, OK, CommandError
from phionyx_letta.cli.keys import trusted_keys
from phionyx_letta.cli.ledgers import ledger_name, open_database, shown_url
from phionyx_letta.cli.options import Json, Keys, Ledger
from phionyx_letta.cli.output import answer, safe, short
from phionyx_letta.cli.seal import check_key_fits, require_letta, sealed, signing_key

if TYPE_CHECKING:
    from rich.console import Console

    from phionyx_letta.checkpoint import Checkpoint
    from phionyx_letta.keys import Keyring
    from phionyx_letta.ledger.rollback import AcceptedRollback
    from phionyx_letta.ledger.sql import SqlLedger
    from phionyx_letta.plugin.adoption import Operator, Outcome
    from phionyx_letta.plugin.reconcile import Difference
    from phionyx_letta.plugin.runtime import PluginKey

__all__ = ["reconcile"]

_LONGEST = 500


def reconcile(
    block: Annotated[str | None, typer.Argument(metavar="BLOCK", help="Only the block with this id.")] = None,
    adopt: Annotated[
        bool, typer.Option("--adopt", help="Record what is there as a change by letta.unattributed.")
    ] = False,
    restore: Annotated[
        bool, typer.Option("--restore", help="Write the last recorded content back, where envelopes kept it.")
    ] = False,
    accept: Annotated[
        bool,
        typer.Option("--accept-rollback", help="The database was restored from a backup on purpose: record that."),
    ] = False,
    name: Annotated[str | None, typer.Option("--name", metavar="NAME", help="Who you are; it is recorded.")] = None,
    reason: Annotated[str | None, typer.Option("--reason", metavar="TEXT", help="Why; it is recorded.")] = None,
    checkpoint: Annotated[
        list[str] | None,
        typer.Option(
            "--checkpoint",
            metavar="PATH",
            help="With --accept-rollback: checkpoints from outside, a file, a folder or a git repository. "
            "Default: the folders and repositories of PHIONYX_LETTA_SINKS.",
        ),
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Do it without asking.")] = False,
    key: Keys = None,
    ledger: Ledger = None,
    as_json: Json = False,
) -> int:
    """Compare Letta's blocks with what was recorded of them, and take up or undo what was done past the plugin.

    Lists each block that was changed, created, deleted, attached or detached with psql, by another program, while the plugin was
    off or in an `open` gap; nothing is changed without --adopt, --restore or --accept-rollback. Needs the server's signing key.

    Exit 0 nothing was done outside (any more), 1 something was, 2 used wrongly or not measured.
    """
    if adopt + restore + accept > 1:
        raise CommandError("more than one of --adopt, --restore and --accept-rollback was given", "give one of them")
    acting = adopt or restore or accept
    operator = _operator(name, reason) if acting else None
    if acting and as_json and not yes:
        raise CommandError("--json cannot ask", "add --yes")
    ours, keys = signing_key(), trusted_keys(key)
    with open_database(ledger_name(ledger)) as database:
        require_letta(database)
        check_key_fits(database, ours)
        if accept:
            assert operator is not None
            return _accept(database, ours, operator, checkpoint, yes=yes, as_json=as_json)
        found = _differences(database, ours, keys, block)
        outcomes: list[Outcome] = []
        listed = found
        if acting and found:
            assert operator is not None
            if not as_json:
                _show_all(found)
            _confirm(f"{'Adopt' if adopt else 'Restore'} {_count(len(found), 'block')}?", yes=yes)
            outcomes = [_act(database, ours, one, operator, keys, adopting=adopt) for one in found]
            done = sealed(database, ours)
            found = _differences(database, ours, keys, block)
            if done["refused"]:
                raise CommandError(done["refusals"][0], "`phionyx-letta doctor` says more", FAILED)
        result = {
            "ledger": shown_url(database),
            "outside": [one.to_dict() for one in listed],
            "outcomes": [vars(one) for one in outcomes],
            "left": sum(map(_counts, found)),
        }
    answer(result, as_json=as_json, show=lambda console: _show(console, listed, outcomes))
    undone = any(one.done == "not done" for one in outcomes)
    return FAILED if undone or any(map(_counts, found)) else OK


def _operator(name: str | None, reason: str | None) -> Operator:
    from phionyx_letta.plugin.adoption import Operator

    for option, given in (("--name", name), ("--reason", reason)):
        if given is None or not given.strip() or len(given) > _LONGEST or not given.isprintable():
            raise CommandError(
                f"{option} is missing, or is not 1 to {_LONGEST} printable characters",
                "say who you are and why: both are recorded",
            )
    return Operator(str(name).strip(), str(reason).strip())


def _confirm(question: str, *, yes: bool) -> None:
    if yes:
        return
    if not typer.confirm(question, err=True):
        raise CommandError("nothing was done", "answer y, or add --yes", NOT_MEASURED)


def _differences(database: SqlLedger, key: PluginKey, keys: Keyring | None, block: str | None) -> list[Difference]:
    from phionyx_letta.plugin.reconcile import differences, is_known

    with database.engine.connect().execution_options(isolation_level="REPEATABLE READ") as connection:
        if block is not None and not is_known(connection, block):
            raise CommandError(f"there is no block {block!r}, and none was recorded", "give the id of a block")
        return differences(connection, key, keys, block)


def _counts(one: Difference) -> bool:
    """Whether it was done outside; a forgotten block that somebody has again merely cannot be compared."""
    from phionyx_letta.plugin.reconcile import FORGOTTEN

    return one.what != FORGOTTEN


def _act(
    database: SqlLedger,
    key: PluginKey,
    one: Difference,
    operator: Operator,
    keys: Keyring | None,
    *,
    adopting: bool,
) -> Outcome:
    from phionyx_letta.plugin.adoption import adopt, restore
    from phionyx_letta.settings import load_settings

    act: Callable[..., Outcome] = adopt if adopting else restore
    return act(database, key, one, operator, verifier=keys, keep_text=load_settings().include_diff_text)


# -- rollback -----------------------------------------------------------------------------------------------------


def _accept(
    database: SqlLedger, key: PluginKey, operator: Operator, sources: list[str] | None, *, yes: bool, as_json: bool
) -> int:
    from phionyx_letta.plugin.checkpointing import checkpoint_policy
    from phionyx_letta.plugin.rollback import accept_rollback, given_up
    from phionyx_letta.settings import load_settings

    settings = load_settings()
    policy = checkpoint_policy(key, settings)
    if policy is None:
        raise CommandError("this key signs no checkpoints", "set PHIONYX_LETTA_SIGNING_KEY to an Ed25519 key")
    outside = _outside(sources or _readable(settings.sinks), key)
    with database.engine.connect().execution_options(isolation_level="REPEATABLE READ") as connection:
        rollback = given_up(connection, key, policy.origin, outside)
    if rollback is None:
        nothing = {"ledger": shown_url(database), "accepted": None, "checkpoints": len(outside)}
        line = f"the log leads on from every checkpoint outside ({len(outside)}): nothing was set back"
        answer(nothing, as_json=as_json, show=lambda console: console.print(line, soft_wrap=True))
        return OK
    if not as_json:
        _show_rollback(rollback)
    _confirm("Accept that?", yes=yes)
    accept_rollback(database, key, rollback, operator)
    done = sealed(database, key)
    result = {"ledger": shown_url(database), "accepted": rollback.to_dict(), "sealed": done["sealed"]}
    line = f"recorded; the log goes on as {rollback.origin}"
    answer(result, as_json=as_json, show=lambda console: console.print(safe(line), soft_wrap=True))
    return OK if not done["waiting"] and not done["refused"] else FAILED


def _readable(sinks: str) -> list[str]:
    found = [one.partition(":")[2] for one in sinks.split() if one.startswith(("folder:", "git:"))]
    if not found:
        raise CommandError(
            "no checkpoint from outside was given, so nothing shows what is given up",
            "give --checkpoint PATH: a file, a folder or a git repository of checkpoints",
        )
    return found


def _outside(sources: list[str], key: PluginKey) -> list[Checkpoint]:
    from phionyx_letta.ledger.audit_log import read_outside

    public = [key.signer.public_key_hex]  # type: ignore[attr-defined]
    return [point for point, _ in read_outside(sources, public).checkpoints]


# -- pages --------------------------------------------------------------------------------------------------------


def _show_all(found: list[Difference]) -> None:
    from phionyx_letta.cli.output import stdout

    for one in found:
        _show_one(stdout(), one)


def _show(console: Console, found: list[Difference], outcomes: list[Outcome]) -> None:
    if not found:
        console.print("every block is as it was recorded", soft_wrap=True)
        return
    if not outcomes:
        for one in found:
            _show_one(console, one)
        console.print("`--adopt` records what is there, `--restore` writes back what was recorded", soft_wrap=True)
    for outcome in outcomes:
        why = f": {outcome.why}" if outcome.why else ""
        console.print(safe(f"{outcome.block_id} {outcome.done}{why}"), soft_wrap=True)


def _show_one(console: Console, one: Difference) -> None:
    console.print(safe(f"{one.block_id} ({one.label}) {_said(one)}"), style="bold", soft_wrap=True)
    recorded = one.recorded
    if recorded is not None and not recorded.damaged:
        by = f"{recorded.producer}{f', actor {recorded.actor_id}' if recorded.actor_id else ''}"
        where = f"envelope {short(recorded.envelope)}" if recorded.envelope else "waits in the outbox"
        line = f"  recorded  {recorded.after_hash[:19]}…  {recorded.size} bytes  {recorded.at[:19]} by {by}  {where}"
        console.print(safe(line), soft_wrap=True)
    if one.agents is not None:
        found = f"{one.found_hash[:19]}…" if one.found_hash else "no hash to compare"
        console.print(safe(f"  found     {found}  {one.found_size} bytes"), soft_wrap=True)
    if recorded is not None and recorded.agents is not None and one.agents is not None:
        came, went = set(one.agents) - set(recorded.agents), set(recorded.agents) - set(one.agents)
        for word, agents in (("attached to", came), ("detached from", went)):
            if agents:
                console.print(safe(f"  {word} {', '.join(sorted(agents))} outside"), soft_wrap=True)


def _said(one: Difference) -> str:
    names = {
        "value": "its value",
        "label": "its label",
        "other": "its description, limit or read-only",
        "checkpoints": "Letta's checkpoints of it",
    }
    columns = ", ".join(names[name] for name in one.columns)
    return {
        "created": "was created outside, or is older than the plugin (then: `phionyx-letta baseline`)",
        "deleted": "was deleted outside",
        "changed": f"was changed outside: {columns}",
        "attachments": "was attached or detached outside",
        "salt lost": "cannot be compared: its salt is gone, and no forgetting was recorded",
        "forgotten": "cannot be compared: it was forgotten, and attached again without being written",
        "record damaged": f"cannot be compared: {one.recorded.damaged if one.recorded else ''}",
    }[one.what]


def _show_rollback(rollback: AcceptedRollback) -> None:
    from phionyx_letta.cli.output import stdout

    for end in rollback.given_up:
        stdout().print(
            f"outside, the log {safe(end.origin)} had {_count(end.size, 'envelope')}; this ledger leads on from "
            f"{end.agreed_size} of them and not from the rest, which is given up",
            soft_wrap=True,
        )
    stdout().print(f"the log goes on as {safe(rollback.origin)}", soft_wrap=True)


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
