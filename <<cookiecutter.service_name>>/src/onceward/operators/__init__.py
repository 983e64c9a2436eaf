"""What people look up and change, by commands and on the page, and the test kit does.

No process of a service imports it.
"""
