"""Paths of the API, one file a kind of thing."""
