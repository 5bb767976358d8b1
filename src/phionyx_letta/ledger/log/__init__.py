"""The log over the ledger, outside its database: where checkpoints go, and how they are read back."""
