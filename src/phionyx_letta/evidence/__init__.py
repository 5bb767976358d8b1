"""Portable evidence: one zip that proves what it holds to somebody who has nothing but a public key (docs/evidence.md)."""
