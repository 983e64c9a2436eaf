"""The development servers that `stack.py` starts and stops."""
