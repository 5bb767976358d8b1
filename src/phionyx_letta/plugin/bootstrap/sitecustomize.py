"""Arms the plugin at interpreter start; `phionyx-letta run` puts this folder on PYTHONPATH.

Python imports one `sitecustomize`, so the one this file hides is imported from here: nothing is shadowed.
"""

from __future__ import annotations

import os
import sys

_HERE = os.path.dirname(os.path.abspath(__file__))
_ROOT = os.path.dirname(os.path.dirname(os.path.dirname(_HERE)))
_VERSION = "PHIONYX_LETTA_RUN_PYTHON"


def _import_the_hidden_one() -> None:
    sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry or os.curdir) != _HERE]
    this = sys.modules.pop("sitecustomize", None)
    try:
        __import__("sitecustomize")
    except ImportError as error:
        if error.name != "sitecustomize":
            raise
        if this is not None:
            sys.modules["sitecustomize"] = this


def _arm() -> None:
    try:
        try:
            __import__("phionyx_letta")
        except ModuleNotFoundError:
            if os.environ.get(_VERSION) != f"{sys.implementation.cache_tag}":
                raise
            sys.path.append(_ROOT)  # last, so that nothing of this environment is replaced by ours
        __import__("phionyx_letta.plugin.activation")
    except ImportError as error:
        print(
            f"phionyx-letta run: nothing is recorded, {sys.executable} cannot import the plugin ({error}); "
            "install phionyx-letta there",
            file=sys.stderr,
        )
        if os.environ.get("PHIONYX_LETTA_ON_ERROR", "").strip().lower() == "closed":
            sys.stderr.flush()
            os._exit(2)  # no evidence, no write; an exception here would only be printed


try:
    _import_the_hidden_one()
finally:
    _arm()
