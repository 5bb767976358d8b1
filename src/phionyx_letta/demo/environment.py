"""The environment in which a Letta server touches this machine's loopback interface and one folder, and nothing else.

Of the caller's variables only a few are passed on: a provider's key or a ``LETTA_*`` setting that happens to be
exported would change what the server does. Variables named ``PHIONYX_LETTA_*`` are passed on, except the one that
arms the plugin, which the caller says explicitly.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

ENABLE = "PHIONYX_LETTA_ENABLE"
_PASSED = {"PATH", "PYTHONPATH", "VIRTUAL_ENV", "LD_LIBRARY_PATH", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "SYSTEMROOT"}
_PREFIX = "PHIONYX_LETTA_"
# A port nobody listens on: whatever tries to reach the outside fails at once.
_NOWHERE = "http://127.0.0.1:9"
_LOCAL = "127.0.0.1,localhost"
_QUIET = {
    "LETTA_DISABLE_TRACING": "true",
    "LETTA_TELEMETRY_ENABLE_DATADOG": "false",
    "LETTA_LLM_API_LOGGING": "false",
    "LETTA_ENABLE_BATCH_JOB_POLLING": "false",
    "LETTA_ENABLE_DB_POOL_MONITORING": "false",
    "DD_TRACE_ENABLED": "false",
    "DD_INSTRUMENTATION_TELEMETRY_ENABLED": "false",
    "ORT_DISABLE_TELEMETRY": "1",
    # Letta's default opens a connection for every database session; requests then stalled for a minute (measured)
    "LETTA_DISABLE_SQLALCHEMY_POOLING": "false",
    "PYTHONUNBUFFERED": "1",
}


def letta_environment(
    database_uri: str,
    folder: Path,
    *,
    model_base_url: str,
    plugin: bool = False,
    extra: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """The whole environment of a process that imports Letta.

    Args:
        database_uri: ``postgresql://…``; append ``?sslmode=disable`` for a server without TLS, else Letta insists on
            it.
        folder: an existing folder of its own, which becomes HOME and holds whatever Letta, tiktoken and nltk write.
        model_base_url: the OpenAI-compatible endpoint, up to and including ``/v1``.
        plugin: whether the plugin is armed.
        extra: variables that go over everything else.
    """
    passed = {name: value for name, value in os.environ.items() if name in _PASSED or name.startswith(_PREFIX)}
    passed.pop(ENABLE, None)
    places = {
        "HOME": str(folder),
        "TMPDIR": str(folder),
        "LETTA_DIR": str(folder / ".letta"),
        "TIKTOKEN_CACHE_DIR": str(folder / "tiktoken"),
        "NLTK_DATA": str(folder / "nltk"),
    }
    endpoint = {"OPENAI_API_KEY": "none", "OPENAI_API_BASE": model_base_url, "OPENAI_BASE_URL": model_base_url}
    proxies = {"http_proxy": _NOWHERE, "https_proxy": _NOWHERE, "no_proxy": _LOCAL}
    armed = {ENABLE: "1"} if plugin else {}
    return {**passed, **_QUIET, **places, **endpoint, **proxies, **armed, "LETTA_PG_URI": database_uri, **(extra or {})}
