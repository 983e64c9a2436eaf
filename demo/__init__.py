"""The demo: real traffic, two kills, and a ledger that is checked from outside."""
