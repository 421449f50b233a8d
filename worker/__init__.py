"""The worker of a host: it starts, watches and ends attempts. It never imports torch."""
