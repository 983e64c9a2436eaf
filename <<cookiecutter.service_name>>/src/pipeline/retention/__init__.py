"""Retention: creates partitions and generations ahead, and drops what has aged."""
