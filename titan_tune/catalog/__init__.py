"""Models and GPUs as data files with their sources, and the loader."""
