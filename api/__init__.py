"""The HTTP room: unpack, call the store, answer. No queries, no torch."""
