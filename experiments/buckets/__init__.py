"""Which token buckets pad a load least."""
