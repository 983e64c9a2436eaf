"""Tests of the codec for Confluent's wire format."""
