"""Living Memory: memory files and blocks that change by reviewed, signed, revertible patches."""
