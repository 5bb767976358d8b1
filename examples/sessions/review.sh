#!/bin/sh
# Review from a terminal: what waits, one patch in detail, the decision, and the proof. Needs LETTA_PG_URI and a reviewer's key:
#   phionyx-letta keygen ada
#   export PHIONYX_LETTA_SIGNING_KEY=ada PHIONYX_LETTA_VERIFY_KEY=server.pub PHIONYX_LETTA_SERVER_URL=http://localhost:8283
set -eu
export PHIONYX_LETTA_MEMORY_STORE="$LETTA_PG_URI"

phionyx-letta session list --limit 5
phionyx-letta memory review
printf 'patch (its first digits): ' && read -r patch
phionyx-letta memory review --patch-id "$patch"
printf 'apply it? [y/N] ' && read -r answer
[ "$answer" = y ] || exit 0
phionyx-letta memory apply "$patch" --by ada --reason "reviewed at the terminal"
phionyx-letta memory review --patch-id "$patch"   # names the envelope
phionyx-letta verify
