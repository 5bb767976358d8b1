"""What runs inside the process of a demo's Letta server: Letta's schema, then Letta itself.

Importing this module imports no Letta. Its functions do, and read Letta's settings from the environment, above all
``LETTA_PG_URI`` (:func:`phionyx_letta.demo.environment.letta_environment` makes a whole one).
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import importlib
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from phionyx_letta.demo.environment import ENABLE

MODULE = "phionyx_letta.demo.letta_server"


def create_schema() -> None:
    """Create Letta's tables in the database ``LETTA_PG_URI`` names; what exists already is left as it is.

    Letta's wheel ships no migrations, so this goes by its models, and adds what its migrations would: the extension
    ``vector``, the default of ``messages.sequence_id``, and an ``alembic_version`` table, which Letta reads when it
    exports an agent.
    """
    asyncio.run(_create_schema())


async def _create_schema() -> None:
    from sqlalchemy import text

    with _quick_import():
        import letta.orm  # noqa: F401  (registers every model)
        from letta.orm.base import Base
        from letta.server.db import engine

    async with engine.begin() as connection:
        for statement in (
            "create extension if not exists vector",
            "create sequence if not exists message_seq_id",
            "create table if not exists alembic_version (version_num varchar(32) primary key)",
        ):
            await connection.execute(text(statement))
        await connection.run_sync(Base.metadata.create_all)
        await connection.execute(
            text("alter table messages alter column sequence_id set default nextval('message_seq_id')")
        )
    await engine.dispose()  # its connections belong to this event loop; the server opens its own


def serve(port: int, workers: int = 1) -> None:
    """Serve Letta on 127.0.0.1 until a signal ends it."""
    import uvicorn

    # read by Letta on import: without it, it spends seconds on writing an openapi_letta.json
    sys.argv = ["letta", "server", "--no-generation"]
    if workers == 1:
        keep_nltk_offline()
        with _quick_import():
            import letta.server.rest_api.app  # noqa: F401  (uvicorn finds it imported)
    uvicorn.run("letta.server.rest_api.app:app", host="127.0.0.1", port=port, workers=workers, access_log=False)


@contextmanager
def _quick_import() -> Iterator[None]:
    """Import without the garbage collector, which finds nothing then and takes a fifth of the time (measured)."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def keep_nltk_offline() -> None:
    """Stop nltk from looking for its data on the network, name service included, as Letta has it do at every start.

    Letta goes on without that data, as it does whenever the download fails.
    """
    nltk: Any = importlib.import_module("nltk")  # it has no types
    nltk.download = lambda *_args, **_options: False


def main(arguments: list[str] | None = None) -> None:
    """Create Letta's tables, or serve Letta, or first the one and then the other."""
    parser = argparse.ArgumentParser(prog=f"python -m {MODULE}", description=main.__doc__)
    parser.add_argument("port", type=int, nargs="?", help="serve Letta on this port of 127.0.0.1")
    parser.add_argument(
        "--schema", action="store_true", help="create Letta's tables first (without PORT: and nothing else)"
    )
    parser.add_argument("--workers", type=int, default=1)
    options = parser.parse_args(arguments)
    if options.schema:
        # with several workers this process only waits for them: it need not hold a Letta of its own (430 MB)
        if options.workers > 1:
            _create_schema_apart()
        else:
            create_schema()
    if options.port is not None:
        serve(options.port, options.workers)


def _create_schema_apart() -> None:
    environment = {name: value for name, value in os.environ.items() if name != ENABLE}
    subprocess.run([sys.executable, "-m", MODULE, "--schema"], check=True, env=environment)
