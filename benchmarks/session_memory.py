"""Whether a long queue of sessions is emptied in bounded memory: one process that proposes, and a model that answers at once.

The queue is written as the tests write it (``tests/letta/queue_rig.py``).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from measuring import NotMeasured

from phionyx_letta.demo.errors import DemoError
from phionyx_letta.demo.letta_server import create_schema_in, require_letta
from phionyx_letta.demo.model import ScriptedModel

if TYPE_CHECKING:
    from catalogue import Bench

_RIG = Path(__file__).parents[1] / "tests" / "letta"
_FACT = {"fact_key": "stone", "content": "- Favourite stone amber.", "evidence": ["My favourite stone is amber."]}
_SAID = f"My favourite stone is amber.\nREMEMBER {json.dumps(_FACT)}"


def growth(bench: Bench) -> tuple[float, dict[str, Any]]:
    """Megabytes that the process grew by after the first quarter of the queue."""
    try:
        require_letta()
    except DemoError as error:
        raise NotMeasured(str(error)) from None
    sys.path.insert(0, str(_RIG))
    from queue_rig import drain, queue

    uri = bench.postgres.new_database("bench_queue")
    create_schema_in(uri)
    home, sessions = bench.folder / "queue", bench.rounds(1000)
    home.mkdir()
    with ScriptedModel() as model, queue(uri, model.base_url, home) as rig:
        drained = drain(rig, rig.agent(), _SAID, sessions)
    details = {"sessions": sessions, "per_s": sessions / drained.seconds, "peak_mb": drained.peak_kb / 1000}
    return (drained.peak_kb - drained.early_kb) / 1000, details
