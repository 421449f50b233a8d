"""Benchmarks: us and a peer, or the limit, in turn in one run. `make bench-train`."""
