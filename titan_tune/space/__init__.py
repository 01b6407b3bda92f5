"""From a search-space file to candidates."""
