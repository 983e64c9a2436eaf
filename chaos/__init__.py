"""The chaos test: known scans in, everything broken on the way, and every message checked."""
