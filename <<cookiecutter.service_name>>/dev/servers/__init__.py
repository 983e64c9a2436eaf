"""The development servers that `stack.py` brings up and takes down."""
