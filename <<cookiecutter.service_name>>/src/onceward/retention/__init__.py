"""Retention: creates partitions and generations ahead, and drops those that have aged."""
