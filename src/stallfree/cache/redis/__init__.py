"""Redis or Valkey servers of several hosts behind the cache."""
