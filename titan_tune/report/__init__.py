"""What a person reads: terminal views of estimates and searches."""
