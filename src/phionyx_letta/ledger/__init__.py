"""Where envelopes live: the store protocol, a folder in the peers' layout, SQLite and PostgreSQL."""
