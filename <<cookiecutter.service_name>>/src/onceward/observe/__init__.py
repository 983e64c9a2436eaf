"""Traces, metrics, logs and health."""
