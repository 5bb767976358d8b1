"""Say over REST what caused a memory change: the header of an upstream envelope, and a reason to forget.

Needs an armed Letta server:

    python examples/caused_by.py http://localhost:8283 BLOCK_ID
"""

from __future__ import annotations

import json
import sys
import urllib.request

UPSTREAM = "envelope://sha256:" + "0f" * 32  # integrity.current of the envelope of whatever decided this


def main(base_url: str, block_id: str) -> None:
    request = urllib.request.Request(
        f"{base_url}/v1/blocks/{block_id}",
        method="PATCH",
        data=json.dumps({"value": ""}).encode(),
        headers={
            "Content-Type": "application/json",
            "X-Phionyx-Parent-Envelope": UPSTREAM,
            "X-Phionyx-Forgetting-Reason": "explicit_user_request",
        },
    )
    with urllib.request.urlopen(request) as answer:
        print(json.load(answer)["id"], "is cleared; `phionyx-letta log --block", block_id + "` shows why")


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    main(*sys.argv[1:])
