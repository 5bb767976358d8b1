"""The real thing with nothing installed: embedded PostgreSQL, a scripted model, a Letta server that leaves no trace.

For the command ``phionyx-letta demo``, for tests and for trying things out; not for data worth keeping.
"""
