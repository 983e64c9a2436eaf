"""The command line for operators: status, doctor, dead letters, offsets, retention."""
