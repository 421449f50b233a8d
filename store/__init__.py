"""What api and worker share: tables, states, placement, artifact storage, queue names."""
