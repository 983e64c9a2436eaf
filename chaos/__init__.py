"""The ledger rig: known scans in, everything broken on the way, and a ledger that must hold."""
