"""The command `criticalkv`."""
