"""Letta Code: evidence for agents whose memory is a git repository (MemFS).

What was committed is read from the repository itself, so nothing depends on a hook having run. The repository is hostile input:
the agent can write anything into it, its configuration and its logs included. Nothing here imports or starts Letta Code.
"""
