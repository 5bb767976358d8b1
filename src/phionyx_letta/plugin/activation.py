"""Arms the plugin in a process: hooks on the import of Letta's modules, nothing of Letta is imported here.

The file ``phionyx_letta.pth`` imports this module at interpreter start when ``PHIONYX_LETTA_ENABLE`` is set; importing it
arms. ``phionyx_letta.plugin.install()`` does the same in code. Everything heavy waits until Letta's models are imported.
"""

from __future__ import annotations

import importlib.metadata
import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import wrapt

if TYPE_CHECKING:
    from phionyx_letta.plugin.worker import Worker

#: The versions of Letta's server this release was tested on, whole.
SUPPORTED = ("0.16.8",)
_FALSE = {"", "0", "false", "no", "off"}

_armed = False
_hooked: set[str] = set()
_worker: Worker | None = None


def worker() -> Worker | None:
    """What is armed in this process; None before Letta's models are imported, or when it is disarmed."""
    return _worker


def is_armed() -> bool:
    """Whether this process captures, or will as soon as Letta's models are imported."""
    return _armed


def enabled_by_environment() -> bool:
    """PHIONYX_LETTA_ENABLE is set to something true and this is not a schema migration."""
    return os.environ.get("PHIONYX_LETTA_ENABLE", "").strip().lower() not in _FALSE and not under_alembic()


def under_alembic() -> bool:
    """Migrations rewrite tables, they are no memory writes; and the ledger's tables may not exist yet."""
    arguments = sys.orig_argv[1:4]
    named = {Path(argument).name for argument in arguments[:1]} | {
        Path(sys.argv[0] if hasattr(sys, "argv") else "").name
    }
    return "alembic" in named or arguments[:2] == ["-m", "alembic"]


def arm() -> None:
    """Arm once; arming again changes nothing."""
    global _armed
    if _armed:
        return
    _armed = True
    _once("letta.orm", _start)
    for module, action in _actions().items():
        _once(module, action)


def _actions() -> dict[str, Callable[[ModuleType], None]]:
    """What to do when a module of Letta's is imported, once its models are."""
    from phionyx_letta.plugin.targets import MODULES

    return {
        "letta.server.db": _serve,
        "letta.server.rest_api.app": _watch_requests,
        **dict.fromkeys(MODULES, _wrap),
    }


def disarm() -> None:
    """Restore every original, stop the sealer; a later ``arm`` starts anew."""
    global _armed, _worker
    _armed = False
    if _worker is not None:
        _worker.stop()
        _worker = None


def _once(module: str, action: Callable[[ModuleType], None]) -> None:
    """Hooks cannot be taken back, so each is registered once and asks whether the plugin is armed."""
    if module in _hooked:
        if module in sys.modules:
            _attempt(action, sys.modules[module])
        return
    _hooked.add(module)

    def hook(imported: ModuleType) -> None:
        if _armed:
            _attempt(action, imported)

    wrapt.register_post_import_hook(hook, module)


def _attempt(action: Callable[[ModuleType], None], module: ModuleType) -> None:
    """Nothing of ours may keep Letta from being imported, unless the operator said so."""
    try:
        action(module)
    except Exception as error:
        names = ("ON_ERROR", "GUARD", "PROPOSE_ONLY")
        settings = {name: os.environ.get(f"PHIONYX_LETTA_{name}", "").strip().lower() for name in names}
        if settings["ON_ERROR"] == "closed" or settings["GUARD"] == "reject" or settings["PROPOSE_ONLY"]:
            raise
        logging.getLogger("phionyx_letta").error("phionyx-letta records nothing in this process: %s", error)


def _start(orm: ModuleType) -> None:
    """Letta's models are there: capture can begin."""
    global _worker
    if _worker is None:
        from phionyx_letta.plugin.worker import Worker

        _worker = Worker.start(orm, letta_version())
        for module, action in _actions().items():  # what was imported before the models were complete
            imported = sys.modules.get(module)
            if imported is not None and not getattr(imported.__spec__, "_initializing", False):
                action(imported)


def _serve(database: ModuleType) -> None:
    if _worker is not None:
        _worker.connect(database)


def _watch_requests(app: ModuleType) -> None:
    if _worker is not None:
        _worker.watch_requests(app.app)


def _wrap(module: ModuleType) -> None:
    if _worker is not None:
        _worker.wrap(module)


def letta_version() -> str | None:
    """The installed distribution ``letta``; None if there is none."""
    try:
        return importlib.metadata.version("letta")
    except importlib.metadata.PackageNotFoundError:
        return None


if enabled_by_environment():
    arm()
