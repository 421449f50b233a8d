"""The `burnish` command: `up` starts everything on one machine; the rest is a client of the API."""
