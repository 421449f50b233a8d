"""One file a migration, in one line."""
