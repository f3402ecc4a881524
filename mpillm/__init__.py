"""mpillm: batch inference of large language models on CPU clusters, over MPI."""

__version__ = "0.1.0"
