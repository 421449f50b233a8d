"""The training engine. It runs alone and knows no HTTP, database or queue."""
