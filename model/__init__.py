"""The protocol as models for Spin, and what runs them."""
