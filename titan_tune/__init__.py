"""titan-tune: an autotuning advisor for torchtitan."""

__version__ = "0.1.0"
