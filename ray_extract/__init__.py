"""Extract the hidden states of large language models at scale."""

__version__ = "0.1.0"
